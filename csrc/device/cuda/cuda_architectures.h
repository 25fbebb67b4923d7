// Tells for which GPU architectures this build has kernels. C++17, because nvcc compiles it. Any thread.
#pragma once

#include <string>

namespace pipedream {

struct ComputeCapability {
  int major = 0;
  int minor = 0;
};

// Returns whether a device with this capability runs the kernels. Machine code runs on devices of the same
// major version that are not older. The PTX of the newest architecture runs on all later ones.
[[nodiscard]] bool has_kernels_for(ComputeCapability capability);

// "7.5, 8.0, 9.0", ascending.
[[nodiscard]] std::string built_capabilities();

}  // namespace pipedream
