// Replaces the CUDA part of stream_codec.h in a build without CUDA, by an error that says how to get CUDA.
#include "base/failure.h"
#include "codec/cuda/cuda_stream_codec.h"

namespace pipedream {

std::unique_ptr<StreamCodec> make_cuda_stream_codec(Device& device, std::size_t /*num_elements_max*/) {
  throw UserError("a codec on " + device.name() +
                  " was asked for, but pipedream was built without CUDA; install the CUDA toolkit and "
                  "reinstall with PIPEDREAM_CUDA=on, or use the host device");
}

}  // namespace pipedream
