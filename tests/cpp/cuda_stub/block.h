// Runs the CUDA threads of one block. A thread that waits for others gets its own fiber. Only one block runs
// at a time in the process.
#pragma once

#include <functional>

#include "cuda_stub/kernel_launch.h"

namespace cuda_stub {

// Runs all blocks of a grid, one after the other, on this thread.
void run_grid(const dim3& grid, unsigned block_threads, const std::function<void()>& kernel);

}  // namespace cuda_stub
