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

// Remembers the process in which it was made. A child of fork() lacks the threads, sockets and streams of its
// parent, so their holders ask is_this() first. It is a load, because getpid() would be a system call,
// several per frame.
class HomeProcess {
 public:
  HomeProcess();
  [[nodiscard]] bool is_this() const { return num_forks_ == num_forks_here.load(std::memory_order_relaxed); }

 private:
  static std::atomic<int> num_forks_here;  // fork()s between the first process and this one

  const int num_forks_;
};

}  // namespace pipedream
