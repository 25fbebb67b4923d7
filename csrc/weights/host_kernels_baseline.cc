// Compiles the host kernels with the instructions that every processor of the architecture has. Pure; any
// thread.
#include "weights/host_kernels_impl.h"

namespace pipedream {

HostKernelSet baseline_kernels() {
  return {"baseline", &kHostKernels<float>, &kHostKernels<double>, &kHostKernels<BFloat16>};
}

}  // namespace pipedream
