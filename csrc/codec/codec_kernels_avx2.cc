// Compiles the codecs' loops with AVX2, for x86-64 processors that have it (2013 and later). Pure; any
// thread.
//
// CMakeLists.txt adds -mavx2 if the compiler knows it. This file may include only headers of csrc/codec that
// have no shared inline functions, because base/element.h says how such functions would spread AVX2 to other
// files.
#if defined(__AVX2__)
#include "codec/codec_kernels_impl.h"

namespace pipedream {

CodecKernelSet avx2_codec_kernels() { return codec_kernel_set("avx2"); }

}  // namespace pipedream
#else
#include "codec/codec_kernels.h"

namespace pipedream {

CodecKernelSet avx2_codec_kernels() { return {"avx2", nullptr, nullptr, nullptr, nullptr}; }

}  // namespace pipedream
#endif
