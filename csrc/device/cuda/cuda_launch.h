// How a kernel is launched, so that a source with kernels is also C++ where the tests bring the runtime.
#pragma once

#include <cuda_runtime_api.h>

#if !defined(PD_LAUNCH)  // the tests' stand-in for the runtime has its own
#define PD_LAUNCH(kernel, num_blocks, block_threads, stream, ...) \
  kernel<<<(num_blocks), (block_threads), 0, (stream)>>>(__VA_ARGS__)
#endif
