// Shares device memory between processes of one host by CUDA IPC. Only cuda_device.cc uses it. Any thread.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "device/device.h"

namespace pipedream {

// Implements Device::export_memory() for `memory`, which cudaMalloc has made. The size of `memory` is a
// multiple of kCudaIpcGranuleBytes.
[[nodiscard]] std::unique_ptr<ExportedMemory> export_cuda_memory(int device_index,
                                                                 std::unique_ptr<Memory> memory,
                                                                 std::size_t num_bytes, std::string* why);

// Implements Device::import_memory().
[[nodiscard]] std::unique_ptr<Memory> import_cuda_memory(int device_index, const std::string& handle,
                                                         std::size_t num_bytes, std::string* why);

// Returns whether the device can export memory at all. If not, *why gets the reason.
[[nodiscard]] bool has_cuda_ipc(int device_index, std::string* why);

// CUDA IPC maps memory in whole granules of the driver. Exported allocations have whole granules, so that
// another process never sees the bytes of a neighbouring allocation.
inline constexpr std::size_t kCudaIpcGranuleBytes = std::size_t{2} << 20;

}  // namespace pipedream
