// Declares the CUDA backend of stream_codec.h. Internal to csrc/codec. Throws UserError in a build without
// CUDA.
#pragma once

#include <cstddef>
#include <memory>

#include "codec/stream_codec.h"
#include "device/device.h"

namespace pipedream {

[[nodiscard]] std::unique_ptr<StreamCodec> make_cuda_stream_codec(Device& device,
                                                                  std::size_t num_elements_max);

}  // namespace pipedream
