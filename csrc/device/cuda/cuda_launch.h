// How a kernel is loaded and launched, so that a source with kernels is also C++ where the tests bring the
// runtime.
#pragma once

#include <cuda_runtime_api.h>

#if !defined(PD_LAUNCH)  // the tests' stand-in for the runtime has its own
#define PD_LAUNCH(kernel, num_blocks, block_threads, stream, ...) \
  kernel<<<(num_blocks), (block_threads), 0, (stream)>>>(__VA_ARGS__)
#endif

namespace pipedream {

// Loads the kernels on the device that is current, and gives the first error. Otherwise the driver loads each
// at its first launch (CUDA's lazy loading): it holds the context's lock until the device has done what is
// enqueued, and meanwhile no thread can enqueue a copy.
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
