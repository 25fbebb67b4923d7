// Tells which architectures this build has kernels for. nvcc defines their list as a macro, in which 750
// stands for compute capability 7.5. See the header.
#include "device/cuda/cuda_architectures.h"

#include <cuda_runtime_api.h>

namespace pipedream {
namespace {

constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};  // ascending

}  // namespace

bool has_kernels_for(ComputeCapability capability) {
  const int wanted = capability.major * 100 + capability.minor * 10;
  int newest = 0;
  for (const int built : kArchitectures) {
    if (built / 100 == capability.major && built <= wanted) return true;
    newest = built;
  }
  return wanted > newest;
}

std::string built_capabilities() {
  std::string text;
  for (const int built : kArchitectures) {
    text += (text.empty() ? "" : ", ") + std::to_string(built / 100) + "." + std::to_string(built / 10 % 10);
  }
  return text;
}

}  // namespace pipedream
