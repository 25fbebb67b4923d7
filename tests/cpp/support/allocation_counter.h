// Counts calls of the allocator: malloc and its relatives, and so operator new, by every thread and library
// of the executable that links this. Not under AddressSanitizer or ThreadSanitizer, which have the allocator
// to themselves. Any thread may allocate; make, read and destroy counters one at a time, on one thread.
#pragma once

#include <cstdint>
#include <string>

namespace pipedream {

class AllocationCounter {
 public:
  AllocationCounter();  // counts from here
  AllocationCounter(const AllocationCounter&) = delete;
  AllocationCounter& operator=(const AllocationCounter&) = delete;
  ~AllocationCounter();

  // False under a sanitizer: every count is 0.
  [[nodiscard]] static bool counts();

  [[nodiscard]] std::uint64_t num_in_all() const;          // on all threads
  [[nodiscard]] std::uint64_t num_on_this_thread() const;  // on the thread that made the counter
  // The size and the stack of the first one, for the message of a test that fails. The stack's addresses are
  // those of the executable: addr2line -e names them.
  [[nodiscard]] std::string first() const;

 private:
  std::uint64_t num_in_all_before_ = 0;
  std::uint64_t num_on_this_thread_before_ = 0;
};

}  // namespace pipedream
