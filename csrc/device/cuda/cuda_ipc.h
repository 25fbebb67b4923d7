// Device memory that processes of one host share by CUDA IPC: for cuda_device.cc alone. Any thread.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "device/device.h"

namespace pipedream {

// Implements Device::export_memory(), which owns the words; memory: made by cudaMalloc, of whole granules.
[[nodiscard]] std::unique_ptr<ExportedMemory> export_cuda_memory(int device_index,
                                                                 std::unique_ptr<Memory> memory,
                                                                 std::size_t num_bytes, std::string* why);

// Implements Device::import_memory().
[[nodiscard]] std::unique_ptr<Memory> import_cuda_memory(int device_index, const std::string& handle,
                                                         std::size_t num_bytes, std::string* why);

// Whether the device can export memory at all; why not, if not.
[[nodiscard]] bool has_cuda_ipc(int device_index, std::string* why);

// IPC maps whole granules of the driver's: with allocations of whole ones nobody sees a neighbour's bytes.
inline constexpr std::size_t kCudaIpcGranuleBytes = std::size_t{2} << 20;

}  // namespace pipedream
