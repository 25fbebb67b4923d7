// A bell wakes another process of the same host. It is a pipe: its owner watches one end (watch.h), and a
// process that rings opens the other end as /proc/<pid>/fd/<fd>. The kernel lets processes of the same user
// in the same pid namespace open it.
#pragma once

#include <cstdint>
#include <memory>

namespace pipedream {

// The address by which another process opens a bell. It consists of plain bytes, because it lies in memory
// that processes share.
struct BellAddress {
  std::uint64_t pid = 0;
  std::uint64_t fd = 0;
  // The pipe's inode, which shows whether the number of the process or descriptor was reused.
  std::uint64_t inode = 0;

  friend bool operator==(const BellAddress&, const BellAddress&) = default;
};

// A bell in the process that it wakes. Any thread.
class Bell {
 public:
  Bell();  // throws UserError
  ~Bell();
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;

  [[nodiscard]] int fd() const { return read_fd_; }  // readable once the bell was rung
  void clear();
  [[nodiscard]] BellAddress address() const;

 private:
  int read_fd_ = -1;
  int write_fd_ = -1;
};

// The end of the pipe with which one process rings another process's bell. Any thread.
class BellRope {
 public:
  // Null when the bell cannot be opened. Then its process has ended, or belongs to another host, user or
  // namespace.
  [[nodiscard]] static std::unique_ptr<BellRope> open(const BellAddress& address);
  ~BellRope();
  BellRope(const BellRope&) = delete;
  BellRope& operator=(const BellRope&) = delete;

  // Rings the bell. Never blocks. Does nothing when the other process has ended.
  void ring();

 private:
  explicit BellRope(int fd) : fd_(fd) {}
  const int fd_;
};

}  // namespace pipedream
