#include "device/cuda/cuda_calls.h"

#include <cuda.h>

#include <atomic>
#include <cstdio>

#include "device/device.h"

namespace pipedream {
namespace {

// Finds a function of the driver at run time, because the driver is not linked. Null if the driver does not
// have it.
decltype(&cuDevicePrimaryCtxGetState) find_context_state() noexcept {
  void* found = nullptr;
  const char* const name = "cuDevicePrimaryCtxGetState";
#if CUDART_VERSION >= 12050
  constexpr unsigned kSinceVersion = 7000;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &found, kSinceVersion, cudaEnableDefault, nullptr);
#else
  const cudaError_t status = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault);
#endif
  if (status != cudaSuccess) (void)cudaGetLastError();
  return reinterpret_cast<decltype(&cuDevicePrimaryCtxGetState)>(found);
}

// Returns whether this process has a context on the device, so that cudaSetDevice() makes no new one. True if
// the driver cannot tell.
bool has_context(int device_index) noexcept {
  static const auto context_state = find_context_state();
  unsigned flags = 0;
  int is_active = 0;
  if (context_state == nullptr || context_state(device_index, &flags, &is_active) != CUDA_SUCCESS)
    return true;
  return is_active != 0;
}

}  // namespace

std::string device_label(int device_index) { return "cuda:" + std::to_string(device_index); }

void throw_if_failed(cudaError_t status, const char* call, int device_index) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // the next call must not report this one again
  throw DeviceError(device_label(device_index) + ": " + call + " failed: " + cudaGetErrorString(status) +
                    " (" + cudaGetErrorName(status) +
                    "); it may come from earlier work on this device, CUDA_LAUNCH_BLOCKING=1 finds it");
}

void log_if_failed(cudaError_t status, const char* call, int device_index) noexcept {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  if (status == cudaErrorCudartUnloading || status == cudaErrorInitializationError) return;
  static std::atomic<int> last_logged{cudaSuccess};
  if (last_logged.exchange(status) == status) return;
  std::fprintf(stderr, "pipedream: cuda:%d: %s failed: %s\n", device_index, call, cudaGetErrorString(status));
}

DeviceScope::DeviceScope(int device_index) : device_index_(device_index) { PD_CUDA(enter(), device_index_); }

DeviceScope::DeviceScope(int device_index, std::nothrow_t /*tag*/) noexcept : device_index_(device_index) {
  PD_CUDA_LOG(enter(), device_index_);
}

cudaError_t DeviceScope::enter() noexcept {
  if (const cudaError_t status = cudaGetDevice(&previous_index_); status != cudaSuccess) return status;
  if (previous_index_ != device_index_) {
    if (const cudaError_t status = cudaSetDevice(device_index_); status != cudaSuccess) return status;
    has_changed_device_ = true;
  }
  const cudaError_t status = cudaThreadExchangeStreamCaptureMode(&capture_mode_);
  has_changed_mode_ = status == cudaSuccess;
  return status;
}

DeviceScope::~DeviceScope() {
  if (has_changed_mode_) PD_CUDA_LOG(cudaThreadExchangeStreamCaptureMode(&capture_mode_), device_index_);
  if (has_changed_device_ && has_context(previous_index_)) {
    PD_CUDA_LOG(cudaSetDevice(previous_index_), previous_index_);
  }
}

}  // namespace pipedream
