// Runs the CUDA threads of one block, each on a fiber once it waits for others. One block at a time in the
// process.
#pragma once

#include <functional>

#include "cuda_stub/kernel_launch.h"

namespace cuda_stub {

// Runs all blocks of a grid, one after the other, on this thread.
void run_grid(const dim3& grid, unsigned block_threads, const std::function<void()>& kernel);

}  // namespace cuda_stub
