// The CUDA backend of stream_codec.h. Internal to csrc/wire. Throws UserError in a build without CUDA.
#pragma once

#include <cstddef>
#include <memory>

#include "device/device.h"
#include "wire/stream_codec.h"

namespace pipedream {

[[nodiscard]] std::unique_ptr<StreamCodec> make_cuda_stream_codec(Device& device,
                                                                  std::size_t num_elements_max);

}  // namespace pipedream
