// A device whose memory is its own, as far as it says: the host's streams and memory, which other processes
// can map as those of CUDA do. What the core does on such a device then runs on every machine, and its bytes
// can be looked at. Any thread.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/failure.h"
#include "device/device.h"

namespace pipedream {

class ApartDevice final : public Device {
 public:
  // What goes wrong; set before it is used.
  std::string why_not_exported;  // empty: nothing
  std::string why_not_imported;
  std::string why_no_memory;         // thrown
  std::string why_not_copied;        // thrown
  bool maps_another_memory = false;  // as a driver might, that reuses numbers

  [[nodiscard]] int num_exported() const { return num_exported_; }  // and not freed
  [[nodiscard]] int num_imported() const { return num_imported_; }
  [[nodiscard]] int num_registered() const { return num_registered_; }  // ever

  [[nodiscard]] DeviceType type() const override { return DeviceType::kCuda; }
  [[nodiscard]] int index() const override { return 0; }
  [[nodiscard]] std::string name() const override { return "apart:0"; }
  [[nodiscard]] std::unique_ptr<Stream> make_stream() override {
    if (!why_not_copied.empty()) return std::make_unique<FailingStream>(why_not_copied);
    return host_->make_stream();
  }
  [[nodiscard]] std::unique_ptr<Event> make_event() override { return host_->make_event(); }
  [[nodiscard]] std::unique_ptr<Stream> wrap_stream(std::uintptr_t /*native_handle*/) override {
    return host_->make_stream();
  }
  [[nodiscard]] std::unique_ptr<Memory> allocate(std::size_t num_bytes, MemoryKind kind) override {
    return host_->allocate(num_bytes, kind);
  }
  [[nodiscard]] std::unique_ptr<HostRegistration> register_host_memory(std::byte* data,
                                                                       std::size_t num_bytes) override {
    ++num_registered_;
    return host_->register_host_memory(data, num_bytes);
  }
  [[nodiscard]] bool device_memory_is_host_memory() const override { return false; }

  [[nodiscard]] std::unique_ptr<ExportedMemory> export_memory(std::size_t num_bytes,
                                                              std::string* why) override {
    if (!why_no_memory.empty()) throw UserError(why_no_memory);
    if (!why_not_exported.empty()) return refuse(why, why_not_exported);
    const int fd = ::memfd_create("apart", MFD_CLOEXEC);
    PD_CHECK(fd >= 0 && ::ftruncate(fd, static_cast<off_t>(num_bytes)) == 0, std::strerror(errno));
    return std::make_unique<Exported>(*this, fd, num_bytes);
  }
  [[nodiscard]] std::unique_ptr<Memory> import_memory(const std::string& handle, std::size_t num_bytes,
                                                      std::string* why) override {
    if (!why_not_imported.empty()) return refuse(why, why_not_imported);
    if (maps_another_memory) return host_->allocate(num_bytes, MemoryKind::kDevice);
    const int fd = ::open(handle.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return refuse(why, handle + ": " + std::strerror(errno));
    auto imported = std::make_unique<Mapped>(num_imported_, fd, num_bytes);
    ::close(fd);
    return imported;
  }

 private:
  class Mapped final : public Memory {
   public:
    Mapped(std::atomic<int>& count, int fd, std::size_t num_bytes)
        : count_(count),
          data_(
              static_cast<std::byte*>(::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0))),
          num_bytes_(num_bytes) {
      PD_CHECK(data_ != MAP_FAILED, std::strerror(errno));
      ++count_;
    }
    ~Mapped() override {
      ::munmap(data_, num_bytes_);
      --count_;
    }
    [[nodiscard]] std::byte* data() const override { return data_; }
    [[nodiscard]] std::size_t size_bytes() const override { return num_bytes_; }

   private:
    std::atomic<int>& count_;
    std::byte* const data_;
    const std::size_t num_bytes_;
  };

  class FailingStream final : public Stream {
   public:
    explicit FailingStream(std::string why) : why_(std::move(why)) {}
    void copy(void* /*to*/, const void* /*from*/, std::size_t /*num_bytes*/) override {
      throw DeviceError(why_);
    }
    void record(Event& /*event*/) override {}
    void wait(const Event& /*event*/) override {}
    void call(std::function<void()> /*function*/) override {}
    void synchronize() override {}

   private:
    const std::string why_;
  };

  class Exported final : public ExportedMemory {
   public:
    Exported(ApartDevice& device, int fd, std::size_t num_bytes)
        : fd_(fd),
          mapped_(device.num_exported_, fd, num_bytes),
          handle_("/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(fd)) {}
    ~Exported() override { ::close(fd_); }
    [[nodiscard]] std::byte* data() const override { return mapped_.data(); }
    [[nodiscard]] std::size_t size_bytes() const override { return mapped_.size_bytes(); }
    [[nodiscard]] const std::string& handle() const override { return handle_; }

   private:
    const int fd_;
    const Mapped mapped_;
    const std::string handle_;
  };

  static std::nullptr_t refuse(std::string* why, const std::string& reason) {
    if (why != nullptr) *why = reason;
    return nullptr;
  }

  const std::unique_ptr<Device> host_ = make_host_device();
  std::atomic<int> num_exported_{0};
  std::atomic<int> num_imported_{0};
  std::atomic<int> num_registered_{0};
};

}  // namespace pipedream
