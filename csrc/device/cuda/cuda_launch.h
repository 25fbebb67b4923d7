// Loads and launches kernels by a function and a macro. So the tests can compile a file with kernels as plain
// C++, with a CUDA runtime of their own.
#pragma once

#include <cuda_runtime_api.h>

#if !defined(PD_LAUNCH)  // the tests' stand-in for the runtime has its own
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
