#include "device/cuda/cuda_calls.h"

#include <cstdio>

#include "device/device.h"

namespace pipedream {

std::string device_label(int device_index) { return "cuda:" + std::to_string(device_index); }

void throw_if_failed(cudaError_t status, const char* call, int device_index) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // the next call must not report this one again
  throw DeviceError(device_label(device_index) + ": " + call + " failed: " + cudaGetErrorString(status) +
                    " (" + cudaGetErrorName(status) +
                    "); it may come from earlier work on this device, CUDA_LAUNCH_BLOCKING=1 finds it");
}

void log_if_failed(cudaError_t status, const char* call, int device_index) noexcept {
  if (status == cudaSuccess || status == cudaErrorCudartUnloading) return;
  (void)cudaGetLastError();
  std::fprintf(stderr, "pipedream: cuda:%d: %s failed: %s\n", device_index, call, cudaGetErrorString(status));
}

}  // namespace pipedream
