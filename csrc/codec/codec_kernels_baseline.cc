// Compiles the codecs' loops with the instructions that every processor of the architecture has. Pure; any
// thread.
#include "codec/codec_kernels_impl.h"

namespace pipedream {

CodecKernelSet baseline_codec_kernels() { return codec_kernel_set("baseline"); }

}  // namespace pipedream
