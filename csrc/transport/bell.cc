#include "transport/bell.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>

#include "base/check.h"
#include "base/failure.h"

namespace pipedream {
namespace {

std::uint64_t inode_of(int fd) {
  struct stat status {};
  PD_CHECK(::fstat(fd, &status) == 0, std::strerror(errno));
  return S_ISFIFO(status.st_mode) ? status.st_ino : 0;
}

}  // namespace

Bell::Bell() {
  std::array<int, 2> fds{};
  if (::pipe2(fds.data(), O_CLOEXEC | O_NONBLOCK) != 0) {
    throw UserError(std::string("cannot create a pipe: ") + std::strerror(errno));
  }
  read_fd_ = fds[0];
  write_fd_ = fds[1];
}

Bell::~Bell() {
  ::close(read_fd_);
  ::close(write_fd_);
}

void Bell::clear() {
  std::array<std::byte, 256> rung;
  while (::read(read_fd_, rung.data(), rung.size()) == static_cast<ssize_t>(rung.size())) {
  }
}

BellAddress Bell::address() const {
  return {static_cast<std::uint64_t>(::getpid()), static_cast<std::uint64_t>(write_fd_), inode_of(write_fd_)};
}

std::unique_ptr<BellRope> BellRope::open(const BellAddress& address) {
  const std::string path = "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  // Opens the path only if it is the expected pipe. The pipe is opened for reading and writing, because
  // writing to a pipe without a reader raises a signal.
  std::array<char, 64> target{};
  const ssize_t length = ::readlink(path.c_str(), target.data(), target.size());
  const std::string pipe = "pipe:[" + std::to_string(address.inode) + "]";
  if (length < 0 || std::string(target.data(), static_cast<std::size_t>(length)) != pipe) return nullptr;
  const int fd = ::open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return nullptr;
  std::unique_ptr<BellRope> rope(new BellRope(fd));
  return inode_of(fd) == address.inode ? std::move(rope) : nullptr;
}

BellRope::~BellRope() { ::close(fd_); }

void BellRope::ring() {
  const std::byte rung{1};
  // A write fails only when the pipe is full, and then the bell has been rung already.
  [[maybe_unused]] const ssize_t written = ::write(fd_, &rung, 1);
}

}  // namespace pipedream
