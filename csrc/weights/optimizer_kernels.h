// Loads the kernels of sgd.h and adam.h on a CUDA device. Any thread.
#pragma once

namespace pipedream {

// Loads the kernels, so that the first step of a run does not wait for the loading
// (device/cuda/cuda_launch.h). Throws DeviceError. Does nothing without CUDA.
void load_optimizer_kernels(int device_index);

}  // namespace pipedream
