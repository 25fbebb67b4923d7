// A bell wakes a process of the same host: a pipe, one end watched (watch.h), the other opened by whoever may
// ring, as /proc/<pid>/fd/<fd>, which the kernel allows to processes of the same user in the same pid
// namespace.
#pragma once

#include <cstdint>
#include <memory>

namespace pipedream {

// Plain bytes: it lies in memory that processes share.
struct BellAddress {
  std::uint64_t pid = 0;
  std::uint64_t fd = 0;
  std::uint64_t inode = 0;  // of the pipe: the numbers before it may be used again

  friend bool operator==(const BellAddress&, const BellAddress&) = default;
};

// The one that is rung. Any thread.
class Bell {
 public:
  Bell();  // throws UserError
  ~Bell();
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;

  [[nodiscard]] int fd() const { return read_fd_; }  // readable when it was rung
  void clear();
  [[nodiscard]] BellAddress address() const;

 private:
  int read_fd_ = -1;
  int write_fd_ = -1;
};

// The way to another's. Any thread.
class BellRope {
 public:
  // Null where it cannot be opened: another host, user or namespace, or its process has ended.
  [[nodiscard]] static std::unique_ptr<BellRope> open(const BellAddress& address);
  ~BellRope();
  BellRope(const BellRope&) = delete;
  BellRope& operator=(const BellRope&) = delete;

  // Never blocks. Nothing happens where the other has ended.
  void ring();

 private:
  explicit BellRope(int fd) : fd_(fd) {}
  const int fd_;
};

}  // namespace pipedream
