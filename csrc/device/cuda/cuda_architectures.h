// The GPUs that the kernels of this build are for. C++17, as nvcc compiles it. Any thread.
#pragma once

#include <string>

namespace pipedream {

struct ComputeCapability {
  int major = 0;
  int minor = 0;
};

// Whether the device runs the kernels: machine code runs on later devices of its generation, and the newest
// architecture's PTX on all later ones.
[[nodiscard]] bool has_kernels_for(ComputeCapability capability);

// "7.5, 8.0, 9.0", ascending.
[[nodiscard]] std::string built_capabilities();

}  // namespace pipedream
