// Settings of the process as a whole.
#pragma once

#include <atomic>

namespace pipedream {

// A worker calls this once, at start-up. The process gets SIGKILL when the thread that started it dies, so
// that no worker outlives its launcher. It ends at once where parent_pid is no longer its parent: the kernel
// sends nothing for what has happened before.
void die_with_parent(int parent_pid);

// Likewise. Freed memory stays with the process: with the default thresholds malloc maps and unmaps every
// large tensor, and the first touch of each fresh page costs 10 to 100 us on virtual machines.
void keep_freed_memory();

// The process in which this was made. Threads, sockets and streams are not there in a child of fork(), so
// their holders ask first. A load: getpid() is a system call, several per frame where each holder made one.
class HomeProcess {
 public:
  HomeProcess();
  [[nodiscard]] bool is_this() const { return num_forks_ == num_forks_here.load(std::memory_order_relaxed); }

 private:
  static std::atomic<int> num_forks_here;  // fork()s between the first process and this one

  const int num_forks_;
};

}  // namespace pipedream
