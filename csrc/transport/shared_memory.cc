// Makes and maps shared memory by memfd and mmap, and checks that another process's memory is the expected
// memory.
#include "transport/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "base/check.h"
#include "base/clock.h"
#include "base/handed_over.h"
#include "base/random_text.h"
#include "device/host/host_memory.h"

namespace pipedream {
namespace {

constexpr std::size_t kPageBytesMin = 4096;
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
constexpr const char* kMemfdName = "pipedream";
// The target of the link /proc/<pid>/fd/<fd> begins with this.
constexpr std::string_view kLinkPrefix = "/memfd:pipedream";
constexpr std::uint64_t kMagic = 0x354D454D53445250;  // "PRDSMEM5" in memory
constexpr std::size_t kNumClaimsMax = 512;            // the most channels that can claim one memory
constexpr auto kOpenerPollPeriod = std::chrono::milliseconds(1);

using Secret = std::array<char, 32>;  // hexadecimal digits

enum class Kind : std::uint64_t {
  kHost = 1,    // the memory follows the first page
  kDevice = 2,  // a DeviceNote follows, which says where the memory is
};

// The content of the first page.
struct FirstPage {
  std::uint64_t magic;
  Kind kind;
  std::uint64_t num_bytes;  // of the memory behind this page
  Secret secret;
  SharedMemoryUse use;
  std::atomic<std::uint32_t> claimed;
  std::array<std::atomic<std::uint32_t>, kNumClaimsMax> claims;  // channel_id + 1; 0: unused
};
static_assert(sizeof(FirstPage) <= kPageBytesMin);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

struct DeviceNote {
  std::uint64_t num_bytes;
  std::uint64_t handle_bytes;
  std::array<char, kMemoryHandleBytesMax> handle;  // what ExportedMemory::handle() returned
};

struct Address {
  std::uint64_t pid = 0;
  std::uint64_t fd = 0;
  std::size_t num_bytes = 0;
  Secret secret{};
};

// The reason why memory cannot be shared. This is no error, because the network connection can be used
// instead.
struct Refusal {
  std::string why;
};

std::string text_of_error() { return std::strerror(errno); }

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&&) = delete;
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) close_memory_file(fd_);
  }
  [[nodiscard]] int get() const { return fd_; }

 private:
  int fd_;
};

// ---- Addresses ----

// Reads the text as one number. False if anything else is in it.
template <class Number>
bool read_number(std::string_view text, Number& number) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end;
}

std::optional<Address> parse_address(std::string_view text) {
  std::array<std::string_view, 4> parts;
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const std::size_t end = part + 1 < parts.size() ? text.find(':') : text.size();
    if (end == std::string_view::npos) return std::nullopt;
    parts[part] = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  Address address;
  const bool good = read_number(parts[0], address.pid) && read_number(parts[1], address.fd) &&
                    read_number(parts[2], address.num_bytes) && parts[3].size() == address.secret.size() &&
                    parts[3].find_first_not_of("0123456789abcdef") == std::string_view::npos;
  const bool sized = address.num_bytes > 0 &&
                     address.num_bytes <= std::numeric_limits<std::size_t>::max() / 2 - kHugePageBytes;
  if (!good || !sized) return std::nullopt;
  std::ranges::copy(parts[3], address.secret.begin());
  return address;
}

// ---- Mappings ----

std::size_t mapped_bytes_of(std::size_t num_bytes) {
  const std::size_t page = page_bytes();
  return page + (num_bytes + page - 1) / page * page;
}

// Maps the whole file. A file of at least one huge page is mapped at a huge page's boundary, so that the
// kernel can use huge pages. Null when there is no room.
std::byte* map_aligned(int fd, std::size_t mapped_bytes) {
  if (mapped_bytes < kHugePageBytes) {
    void* const mapping = ::mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return mapping == MAP_FAILED ? nullptr : static_cast<std::byte*>(mapping);
  }
  const std::size_t reserved_bytes = mapped_bytes + kHugePageBytes;
  void* const reserved = ::mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(reserved);
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::size_t head_bytes = (kHugePageBytes - address % kHugePageBytes) % kHugePageBytes;
  std::byte* const aligned = begin + head_bytes;
  const void* const mapping =
      ::mmap(aligned, mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  if (mapping == MAP_FAILED) {
    ::munmap(begin, reserved_bytes);
    return nullptr;
  }
  if (head_bytes > 0) ::munmap(begin, head_bytes);
  ::munmap(aligned + mapped_bytes, reserved_bytes - head_bytes - mapped_bytes);
  return aligned;
}

class MappedFile final : public SharedMemory {
 public:
  // mapping: mapped_bytes_of(num_bytes) long; this object takes it over.
  MappedFile(FileDescriptor fd, std::byte* mapping, std::size_t num_bytes)
      : fd_(std::move(fd)), mapping_(mapping), data_(mapping + page_bytes()), num_bytes_(num_bytes) {}
  ~MappedFile() override {
    if (::munmap(mapping_, mapped_bytes_of(num_bytes_)) != 0) {
      std::fprintf(stderr, "pipedream: munmap of %zu shared bytes failed: %s\n", num_bytes_,
                   text_of_error().c_str());
    }
  }

  [[nodiscard]] std::byte* data() const override { return data_; }
  [[nodiscard]] std::size_t size_bytes() const override { return num_bytes_; }
  [[nodiscard]] bool on_device() const override { return false; }
  [[nodiscard]] std::string address() const override {
    PD_CHECK(fd_.get() >= 0, "the address of memory that was opened");
    return std::to_string(::getpid()) + ":" + std::to_string(fd_.get()) + ":" + std::to_string(num_bytes_) +
           ":" + std::string(first_page().secret.data(), first_page().secret.size());
  }
  void claim() override { first_page().claimed.store(1); }
  [[nodiscard]] bool is_claimed() const override { return first_page().claimed.load() != 0; }
  [[nodiscard]] bool claim_for(std::uint32_t channel_id) override {
    return std::ranges::any_of(first_page().claims, [&](std::atomic<std::uint32_t>& claim) {
      std::uint32_t nobody = 0;
      return claim.compare_exchange_strong(nobody, channel_id + 1) || nobody == channel_id + 1;
    });
  }
  [[nodiscard]] bool is_claimed_for(std::uint32_t channel_id) const override {
    return std::ranges::any_of(first_page().claims, [&](const std::atomic<std::uint32_t>& claim) {
      return claim.load() == channel_id + 1;
    });
  }
  [[nodiscard]] FirstPage& first_page() const { return *reinterpret_cast<FirstPage*>(mapping_); }
  [[nodiscard]] DeviceNote& note() const { return *reinterpret_cast<DeviceNote*>(data()); }
  [[nodiscard]] int fd() const { return fd_.get(); }

 private:
  const FileDescriptor fd_;  // the descriptor that others open; -1 in a process that opened the memory
  std::byte* const mapping_;
  std::byte* const data_;  // behind the first page
  const std::size_t num_bytes_;
};

// ---- Opening ----

// Opens the path only if it looks like one of our files. A process number may be reused, and then its
// descriptors are other files.
std::variant<FileDescriptor, Refusal> open_file(const Address& address) {
  const std::string path = "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  std::array<char, 64> link{};
  const ssize_t link_length = ::readlink(path.c_str(), link.data(), link.size());
  if (link_length < 0) return Refusal{path + ": " + text_of_error()};
  const std::string_view target(link.data(), static_cast<std::size_t>(link_length));
  if (!target.starts_with(kLinkPrefix)) return Refusal{path + " is not memory of pipedream"};

  FileDescriptor fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (fd.get() < 0) return Refusal{path + ": " + text_of_error()};
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return Refusal{path + ": " + text_of_error()};
  if (status.st_size < 0 || static_cast<std::size_t>(status.st_size) != mapped_bytes_of(address.num_bytes)) {
    return Refusal{path + " has " + std::to_string(status.st_size) + " bytes, not what the address says"};
  }
  // The file must be sealed against shrinking: access to a mapping beyond its end would kill this process.
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) return Refusal{path + " is not sealed"};
  return fd;
}

std::string text_of(const SharedMemoryUse& use) {
  const LinkIdentity& identity = use.identity;
  return "channel " + std::to_string(identity.channel_id) + " of run " + std::to_string(identity.run_id) +
         ", incarnation " + std::to_string(identity.incarnation) + ", with slots of " +
         std::to_string(use.slot_bytes) + " bytes";
}

std::optional<Refusal> refusal_of(const FirstPage& page, Kind kind, const Address& address,
                                  const SharedMemoryUse& use) {
  if (page.magic != kMagic || page.num_bytes != address.num_bytes || page.secret != address.secret) {
    return Refusal{"its secret is another: it belongs to another run or host"};
  }
  if (page.use != use) return Refusal{"it is for " + text_of(page.use) + ", not for " + text_of(use)};
  if (page.kind != kind) {
    return Refusal{kind == Kind::kHost ? "it is memory of a device" : "it is memory of the host"};
  }
  return std::nullopt;
}

struct OpenedFile {
  FileDescriptor fd;
  std::unique_ptr<MappedFile> mapped;
};

std::variant<OpenedFile, Refusal> open_mapped(const std::string& text, Kind kind,
                                              const SharedMemoryUse& use) {
  const std::optional<Address> address = parse_address(text);
  if (!address) return Refusal{"'" + text + "' is not an address of shared memory"};
  auto opened = open_file(*address);
  if (const auto* refusal = std::get_if<Refusal>(&opened)) return *refusal;
  FileDescriptor fd = std::move(std::get<FileDescriptor>(opened));
  const std::size_t mapped_bytes = mapped_bytes_of(address->num_bytes);
  std::byte* const mapping = map_aligned(fd.get(), mapped_bytes);
  if (mapping == nullptr) return Refusal{"it cannot be mapped: " + text_of_error()};
  auto memory = std::make_unique<MappedFile>(FileDescriptor(-1), mapping, address->num_bytes);
  if (auto refusal = refusal_of(memory->first_page(), kind, *address, use)) return *refusal;
  if (!touch_pages(mapping, mapped_bytes)) return Refusal{"there is no memory left to map it"};
  return OpenedFile{std::move(fd), std::move(memory)};
}

std::unique_ptr<MappedFile> make_mapped(std::size_t num_bytes, Kind kind, const SharedMemoryUse& use) {
  PD_CHECK(num_bytes > 0, "0 bytes of shared memory");
  const std::string what = "memory to share with other workers of this host";
  // Checked first: an overcommitting kernel would grant the memory now and kill the process when it touches
  // the pages.
  if (num_bytes > host_memory_available_bytes()) {
    throw_not_enough_memory(num_bytes, what, "there is less available");
  }
  const std::size_t mapped_bytes = mapped_bytes_of(num_bytes);
  FileDescriptor fd(::memfd_create(kMemfdName, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0 || ::ftruncate(fd.get(), static_cast<off_t>(mapped_bytes)) != 0 ||
      ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw_not_enough_memory(num_bytes, what, text_of_error());
  }
  std::byte* const mapping = map_aligned(fd.get(), mapped_bytes);
  if (mapping == nullptr) throw_not_enough_memory(num_bytes, what, text_of_error());
  auto memory = std::make_unique<MappedFile>(std::move(fd), mapping, num_bytes);
  if (!touch_pages(mapping, mapped_bytes)) {
    throw_not_enough_memory(num_bytes, what, "the kernel ran out of pages");
  }
  FirstPage& page = memory->first_page();
  page.magic = kMagic;
  page.kind = kind;
  page.num_bytes = num_bytes;
  std::ranges::copy(random_hex(page.secret.size()), page.secret.begin());
  page.use = use;
  return memory;
}

// ---- Device memory ----

// An opener holds a shared lock on the file. The lock belongs to its process, and the kernel drops it when
// the process ends in any way. A process does not see its own locks, and need not wait for itself.
struct flock lock_of(short type) {
  struct flock whole {};
  whole.l_type = type;
  whole.l_whence = SEEK_SET;
  return whole;
}
bool lock(const FileDescriptor& fd) {
  struct flock whole = lock_of(F_RDLCK);
  return ::fcntl(fd.get(), F_SETLK, &whole) == 0;
}
bool is_locked_by_another(int fd) {
  struct flock whole = lock_of(F_WRLCK);
  return ::fcntl(fd, F_GETLK, &whole) == 0 && whole.l_type != F_UNLCK;
}

class DeviceSharedMemory : public SharedMemory {
 public:
  explicit DeviceSharedMemory(std::unique_ptr<MappedFile> file) : file_(std::move(file)) {}

  [[nodiscard]] std::size_t size_bytes() const override { return file_->note().num_bytes; }
  [[nodiscard]] bool on_device() const override { return true; }
  [[nodiscard]] std::string address() const override { return file_->address(); }
  void claim() override { file_->claim(); }
  [[nodiscard]] bool is_claimed() const override { return file_->is_claimed(); }
  [[nodiscard]] bool claim_for(std::uint32_t channel_id) override { return file_->claim_for(channel_id); }
  [[nodiscard]] bool is_claimed_for(std::uint32_t channel_id) const override {
    return file_->is_claimed_for(channel_id);
  }

 protected:
  [[nodiscard]] const MappedFile& file() const { return *file_; }

 private:
  const std::unique_ptr<MappedFile> file_;
};

// Keeps the memory until the process ends, on purpose: another process still maps it, and freeing it then is
// undefined.
void leave_to_the_end_of_the_process(std::unique_ptr<ExportedMemory> memory) {
  static std::mutex mutex;
  static auto* const left = new std::vector<std::unique_ptr<ExportedMemory>>;  // NOLINT(*-owning-memory)
  const std::lock_guard lock(mutex);
  left->push_back(std::move(memory));
}

class MadeDeviceMemory final : public DeviceSharedMemory {
 public:
  MadeDeviceMemory(std::unique_ptr<MappedFile> file, std::unique_ptr<ExportedMemory> memory)
      : DeviceSharedMemory(std::move(file)), memory_(std::move(memory)) {
    DeviceNote& note = this->file().note();
    const std::string& handle = memory_->handle();
    PD_CHECK(handle.size() <= note.handle.size(), "a handle of " << handle.size() << " bytes");
    note.num_bytes = memory_->size_bytes();
    note.handle_bytes = handle.size();
    std::copy(handle.begin(), handle.end(), note.handle.begin());
  }
  ~MadeDeviceMemory() override {
    const Deadline deadline = deadline_.value_or(Clock::now() + kOpenerPatience);
    while (is_locked_by_another(file().fd())) {
      if (Clock::now() >= deadline) {
        std::fprintf(stderr, "pipedream: %zu bytes of device memory are still mapped by another process\n",
                     size_bytes());
        leave_to_the_end_of_the_process(std::move(memory_));
        return;
      }
      std::this_thread::sleep_for(kOpenerPollPeriod);
    }
  }

  [[nodiscard]] std::byte* data() const override { return memory_->data(); }
  void wait_until_at_most(Deadline deadline) override { deadline_ = deadline; }

 private:
  std::unique_ptr<ExportedMemory> memory_;
  std::optional<Deadline> deadline_;
};

class OpenedDeviceMemory final : public DeviceSharedMemory {
 public:
  OpenedDeviceMemory(OpenedFile opened, std::unique_ptr<Memory> memory)
      : DeviceSharedMemory(std::move(opened.mapped)),
        locked_(std::move(opened.fd)),
        memory_(std::move(memory)) {}

  [[nodiscard]] std::byte* data() const override { return memory_->data(); }

 private:
  // Declared first, so destroyed last: the file stays locked until the memory is unmapped.
  const FileDescriptor locked_;
  const std::unique_ptr<Memory> memory_;
};

std::variant<std::unique_ptr<SharedMemory>, Refusal> open_device_memory(Device& device,
                                                                        const std::string& address,
                                                                        const SharedMemoryUse& use) {
  auto opened = open_mapped(address, Kind::kDevice, use);
  if (const auto* refusal = std::get_if<Refusal>(&opened)) return *refusal;
  auto& file = std::get<OpenedFile>(opened);
  const DeviceNote& note = file.mapped->note();
  if (file.mapped->size_bytes() != sizeof(note) || note.handle_bytes > note.handle.size()) {
    return Refusal{"it was made by another build of pipedream"};
  }
  if (!lock(file.fd)) return Refusal{"it cannot be locked: " + text_of_error()};
  std::string why;
  auto memory = device.import_memory({note.handle.data(), note.handle_bytes}, note.num_bytes, &why);
  if (!memory) return Refusal{why};
  return std::make_unique<OpenedDeviceMemory>(std::move(file), std::move(memory));
}

std::unique_ptr<SharedMemory> given(std::variant<std::unique_ptr<SharedMemory>, Refusal> opened,
                                    std::string* why) {
  if (auto* memory = std::get_if<std::unique_ptr<SharedMemory>>(&opened)) return std::move(*memory);
  if (why != nullptr) *why = std::get<Refusal>(opened).why;
  return nullptr;
}

}  // namespace

std::unique_ptr<SharedMemory> SharedMemory::make(std::size_t num_bytes, const SharedMemoryUse& use) {
  return make_mapped(num_bytes, Kind::kHost, use);
}

std::unique_ptr<SharedMemory> SharedMemory::open(const std::string& address, const SharedMemoryUse& use,
                                                 std::string* why) {
  auto opened = open_mapped(address, Kind::kHost, use);
  if (const auto* refusal = std::get_if<Refusal>(&opened)) return given(*refusal, why);
  return std::move(std::get<OpenedFile>(opened).mapped);
}

std::unique_ptr<SharedMemory> SharedMemory::make_on(Device& device, std::size_t num_bytes,
                                                    const SharedMemoryUse& use, std::string* why) {
  auto memory = device.export_memory(num_bytes, why);
  if (!memory) return nullptr;
  return std::make_unique<MadeDeviceMemory>(make_mapped(sizeof(DeviceNote), Kind::kDevice, use),
                                            std::move(memory));
}

std::unique_ptr<SharedMemory> SharedMemory::open_on(Device& device, const std::string& address,
                                                    const SharedMemoryUse& use, std::string* why) {
  return given(open_device_memory(device, address, use), why);
}

}  // namespace pipedream
