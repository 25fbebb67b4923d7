// Changes settings of the whole process, and recognises a process that fork() has made.
#pragma once

#include <atomic>

namespace pipedream {

// Makes this process get SIGKILL when the thread that started it dies. Processes call it at start-up, so that
// none outlives its parent. If parent_pid is no longer the parent, the parent has died already, and the
// kernel will send no signal. Then the process exits at once.
void die_with_parent(int parent_pid);

// Makes freed memory stay with the process. A worker calls it at the start of a run. With malloc's default
// thresholds every large tensor is mapped and unmapped. The first touch of each fresh page then costs 10 to
// 100 us on virtual machines.
void keep_freed_memory();

// A HomeProcess remembers the process in which it was made. A child of fork() lacks the threads, sockets and
// streams of its parent, so objects that use these call is_this() first. They call it several times per frame
// on the wire. So is_this() only reads memory; getpid() would be a system call.
class HomeProcess {
 public:
  HomeProcess();
  [[nodiscard]] bool is_this() const { return num_forks_ == num_forks_here.load(std::memory_order_relaxed); }

 private:
  static std::atomic<int> num_forks_here;  // how many fork()s lie between the first process and this one

  const int num_forks_;
};

}  // namespace pipedream
