// Loads and launches kernels. The tests define PD_LAUNCH in another way, so that they can compile a file with
// kernels as plain C++ for a CUDA runtime on the host.
#pragma once

#include <cuda_runtime_api.h>

#if !defined(PD_LAUNCH)  // unless the tests have defined it
#define PD_LAUNCH(kernel, num_blocks, block_threads, stream, ...) \
  kernel<<<(num_blocks), (block_threads), 0, (stream)>>>(__VA_ARGS__)
#endif

namespace pipedream {

// Loads the kernels on the current device, and returns the first error. Without this call the driver loads
// each kernel at its first launch (CUDA's lazy loading). It then holds the context's lock until the device
// has done all enqueued work, and meanwhile no thread can enqueue a copy.
template <class... Kernels>
cudaError_t load_kernels(Kernels*... kernels) {
  cudaError_t status = cudaSuccess;
  cudaFuncAttributes attributes;
  const auto load = [&](const void* kernel) {
    if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, kernel);
  };
  (load(reinterpret_cast<const void*>(kernels)), ...);
  return status;
}

}  // namespace pipedream
