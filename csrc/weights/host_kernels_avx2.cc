// Compiles the host kernels with AVX2, for x86-64 processors that have it (2013 and later). Pure; any thread.
//
// pd_vectorise() in cmake/PipedreamTargets.cmake adds -mavx2 on x86-64 if the compiler knows it. Then this
// file may include nothing but host_kernels_impl.h.
#if defined(__AVX2__)
#include "weights/host_kernels_impl.h"

namespace pipedream {

HostKernelSet avx2_kernels() {
  return {"avx2", &kHostKernels<float>, &kHostKernels<double>, &kHostKernels<BFloat16>};
}

}  // namespace pipedream
#else
#include "weights/host_kernels.h"

namespace pipedream {

HostKernelSet avx2_kernels() { return {"avx2", nullptr, nullptr, nullptr}; }

}  // namespace pipedream
#endif
