// Provides helpers for all code that calls the CUDA runtime. Such code checks the return values, except of
// calls that only clear or describe an error. A call that depends on the current device stands inside a
// DeviceScope, unless the caller has made the device current.
#pragma once

#include <cuda_runtime_api.h>

#include <new>
#include <string>

namespace pipedream {

[[nodiscard]] std::string device_label(int device_index);  // "cuda:0"

// Throws DeviceError.
void throw_if_failed(cudaError_t status, const char* call, int device_index);

// Logs a failed call and never throws, for use in destructors. After an error of the context every call fails
// with the same error, so an error like the one logged last is not logged again. Nothing is logged at process
// exit or in a child of fork(), where the driver is gone.
void log_if_failed(cudaError_t status, const char* call, int device_index) noexcept;

#define PD_CUDA(call, device_index) ::pipedream::throw_if_failed((call), #call, (device_index))
#define PD_CUDA_LOG(call, device_index) ::pipedream::log_if_failed((call), #call, (device_index))

// While a DeviceScope lives, its device is current on this thread, and calls of this thread do not disturb
// the capture of a CUDA graph. Without it, if torch captures in the global mode, even a query of an event
// would end the capture.
//
// Its destructor makes the earlier device current again, unless that device has no context. From CUDA 12 on,
// cudaSetDevice() would make a context, which takes about 0.5 GB. This matters on threads that never chose a
// device, because they count as on device 0.
class DeviceScope {
 public:
  explicit DeviceScope(int device_index);                  // throws DeviceError
  DeviceScope(int device_index, std::nothrow_t) noexcept;  // logs failed calls; for destructors
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  ~DeviceScope();

 private:
  [[nodiscard]] cudaError_t enter() noexcept;

  const int device_index_;
  int previous_index_ = 0;
  bool has_changed_device_ = false;
  bool has_changed_mode_ = false;
  // The mode to set, and after that the thread's earlier mode.
  cudaStreamCaptureMode capture_mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace pipedream
