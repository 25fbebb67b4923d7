// Allocates anonymous host memory. The constructor maps it, advises huge pages and touches every page. Both
// backends use this class; CUDA then pins the memory. Any thread.
#pragma once

#include <cstddef>
#include <string>

#include "device/device.h"

namespace pipedream {

class HostMemory final : public Memory {
 public:
  // Allocates zeroed memory. what: its name in errors, e.g. "staging memory of cuda:0". Throws a UserError
  // with the size and the reason if there is not enough.
  HostMemory(std::size_t num_bytes, const std::string& what);
  ~HostMemory() override;

  [[nodiscard]] std::byte* data() const override { return data_; }
  [[nodiscard]] std::size_t size_bytes() const override { return size_bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_bytes_ = 0;    // the size that the caller asked for
  std::size_t mapped_bytes_ = 0;  // the size rounded up to whole pages
};

// Returns the system's page size: 4 KiB on most machines, 16 or 64 KiB on some machines with ARM processors.
[[nodiscard]] std::size_t page_bytes();

// Makes the kernel map every page of [data, data + num_bytes), as huge pages if it can. No byte changes, even
// if another process writes there at the same time. Returns false if the kernel has no memory left.
[[nodiscard]] bool touch_pages(std::byte* data, std::size_t num_bytes);

// Throws UserError "cannot allocate 2.00 GiB (2147483648 bytes) of staging memory on host: <why>; <remedy>".
[[noreturn]] void throw_not_enough_memory(std::size_t num_bytes, const std::string& what,
                                          const std::string& why);

// Returns how many bytes can be allocated without swapping: MemAvailable of /proc/meminfo, or less if control
// groups allow less.
[[nodiscard]] std::size_t host_memory_available_bytes();

}  // namespace pipedream
