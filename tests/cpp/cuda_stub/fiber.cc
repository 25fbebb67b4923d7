#include "cuda_stub/fiber.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#define PD_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PD_ASAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define PD_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define PD_TSAN 1
#endif
#endif

#if defined(PD_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(PD_TSAN)
#include <sanitizer/tsan_interface.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__x86_64__)
// Saves the stack pointer and the registers that a function must keep, and restores those of the other fiber.
// It jumps instead of returning. A CPU predicts that ret returns to the last call's place, but that call was
// on another stack.
extern "C" void pd_switch_stacks(void** from, void* to);
asm(R"(
.text
.globl pd_switch_stacks
.type pd_switch_stacks, @function
pd_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
.size pd_switch_stacks, .-pd_switch_stacks
)");
#endif

namespace cuda_stub {

namespace {

#if defined(PD_ASAN) || defined(PD_TSAN)
constexpr std::size_t kStackBytes = std::size_t{256} << 10;
#else
constexpr std::size_t kStackBytes = std::size_t{128} << 10;
#endif
// Every stack begins at a page. Cache lines at the same offset in their pages compete for a few places of a
// cache. So neighbouring stacks begin at different offsets.
constexpr unsigned kNumPlaces = 128;
constexpr std::size_t kPlaceBytes = 320;
static_assert(kNumPlaces * kPlaceBytes < kStackBytes / 2);

std::size_t next_place_bytes() {
  static std::atomic<unsigned> next_place{0};
  return next_place++ % kNumPlaces * kPlaceBytes;
}

}  // namespace

struct Fiber::State {
  Body body = nullptr;
  void* argument = nullptr;
  void* stack = nullptr;  // null for the thread's own stack
#if defined(__x86_64__)
  void* top = nullptr;
#else
  ucontext_t context{};
#endif
  State* came_from = nullptr;  // set by the fiber that switches to this one
#if defined(PD_ASAN)
  const void* stack_bottom = nullptr;
  std::size_t stack_bytes = 0;
  void* fake_stack = nullptr;
#endif
#if defined(PD_TSAN)
  void* tsan_fiber = nullptr;
  bool owns_tsan_fiber = false;
#endif
};

namespace {

// The fiber whose first switch is running. One is enough, because one block runs at a time.
void* starting = nullptr;

}  // namespace

void Fiber::enter(State* state) {
#if defined(PD_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, &state->came_from->stack_bottom, &state->came_from->stack_bytes);
#endif
  state->body(state->argument);
  std::fprintf(stderr, "cuda_stub: a fiber has ended\n");
  std::abort();
}

void enter_fiber() { Fiber::enter(static_cast<Fiber::State*>(starting)); }

Fiber::Fiber() : state_(std::make_unique<State>()) {}

Fiber::Fiber(Body body, void* argument) : state_(std::make_unique<State>()) {
  state_->body = body;
  state_->argument = argument;
  state_->stack = ::mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (state_->stack == MAP_FAILED) {
    std::perror("cuda_stub: a fiber's stack");
    std::abort();
  }
#if defined(__x86_64__)
  char* const first_used = static_cast<char*>(state_->stack) + kStackBytes - next_place_bytes();
  auto* top = reinterpret_cast<std::uint64_t*>(first_used);
  *--top = 0;                                              // the entry's caller: none
  *--top = reinterpret_cast<std::uint64_t>(&enter_fiber);  // the address to which the first switch returns
  for (int saved = 0; saved < 6; ++saved) *--top = 0;
  state_->top = top;
#else
  ::getcontext(&state_->context);
  state_->context.uc_stack.ss_sp = state_->stack;
  state_->context.uc_stack.ss_size = kStackBytes;
  ::makecontext(&state_->context, enter_fiber, 0);
#endif
#if defined(PD_ASAN)
  state_->stack_bottom = state_->stack;
  state_->stack_bytes = kStackBytes;
#endif
#if defined(PD_TSAN)
  state_->tsan_fiber = __tsan_create_fiber(0);
  state_->owns_tsan_fiber = true;
#endif
}

Fiber::~Fiber() {
#if defined(PD_TSAN)
  if (state_->owns_tsan_fiber) __tsan_destroy_fiber(state_->tsan_fiber);
#endif
  if (state_->stack != nullptr) ::munmap(state_->stack, kStackBytes);
}

void Fiber::switch_to(Fiber& other) {
  State& from = *state_;
  State& to = *other.state_;
  to.came_from = &from;
  starting = &to;
#if defined(PD_TSAN)
  if (!from.owns_tsan_fiber) from.tsan_fiber = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(to.tsan_fiber, 0);
#endif
#if defined(PD_ASAN)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack_bottom, to.stack_bytes);
#endif
#if defined(__x86_64__)
  pd_switch_stacks(&from.top, to.top);
#else
  ::swapcontext(&from.context, &to.context);
#endif
#if defined(PD_ASAN)
  __sanitizer_finish_switch_fiber(from.fake_stack, &from.came_from->stack_bottom,
                                  &from.came_from->stack_bytes);
#endif
}

}  // namespace cuda_stub
