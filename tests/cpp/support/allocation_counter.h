// Counts calls of malloc and its relatives, and so of operator new, by every thread and library of the
// executable that links this. It does not count under AddressSanitizer or ThreadSanitizer, which replace the
// allocator. Any thread may allocate. Make, read and destroy one counter at a time, on one thread.
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

  // Returns false under a sanitizer. Then every count is 0.
  [[nodiscard]] static bool counts();

  [[nodiscard]] std::uint64_t num_in_all() const;          // on all threads
  [[nodiscard]] std::uint64_t num_on_this_thread() const;  // on the thread that made the counter
  // Returns the size and the stack of the first allocation, for a failing test's message. addr2line -e turns
  // the addresses into lines of the executable.
  [[nodiscard]] std::string first() const;

 private:
  std::uint64_t num_in_all_before_ = 0;
  std::uint64_t num_on_this_thread_before_ = 0;
};

}  // namespace pipedream
