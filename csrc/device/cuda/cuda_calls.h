// What the files of this folder share: every return of the CUDA runtime is checked, and every entry makes
// the device current for the calling thread and restores what was.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace pipedream {

[[nodiscard]] std::string device_label(int device_index);  // "cuda:0"

// Throws DeviceError.
void throw_if_failed(cudaError_t status, const char* call, int device_index);

// For destructors: logs, never throws. At process exit the driver may be gone already: that is no news.
void log_if_failed(cudaError_t status, const char* call, int device_index) noexcept;

#define PD_CUDA(call, device_index) ::pipedream::throw_if_failed((call), #call, (device_index))
#define PD_CUDA_LOG(call, device_index) ::pipedream::log_if_failed((call), #call, (device_index))

// The device is current on this thread while this lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device_index) : device_index_(device_index) {
    PD_CUDA(cudaGetDevice(&previous_index_), device_index_);
    if (previous_index_ != device_index_) PD_CUDA(cudaSetDevice(device_index_), device_index_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    if (previous_index_ != device_index_) PD_CUDA_LOG(cudaSetDevice(previous_index_), previous_index_);
  }

 private:
  const int device_index_;
  int previous_index_ = 0;
};

}  // namespace pipedream
