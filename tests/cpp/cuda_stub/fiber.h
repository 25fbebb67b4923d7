// Implements fibers, which switch stacks on one thread, for the CUDA threads of a block. Use them for nothing
// else, because a fiber ends only with the process. AddressSanitizer and ThreadSanitizer are told of every
// switch.
#pragma once

#include <cstddef>
#include <memory>

namespace cuda_stub {

class Fiber {
 public:
  using Body = void (*)(void*);

  Fiber();  // the thread's own stack, to switch back to
  Fiber(Body body, void* argument);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Switches to the other fiber. Returns when a fiber switches back to this one.
  void switch_to(Fiber& other);

  struct State;

 private:
  const std::unique_ptr<State> state_;
  static void enter(State* state);
  friend void enter_fiber();
};

}  // namespace cuda_stub
