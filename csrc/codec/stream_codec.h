// Encodes and decodes in the order of a stream: by CUDA kernels on a CUDA stream, by calls of the host
// functions on a host stream. Each channel has its own StreamCodec, and uses it from one thread at a time
// with one stream. The StreamCodec outlives the work that it enqueues.
#pragma once

#include <memory>

#include "codec/codec.h"
#include "device/device.h"

namespace pipedream {

class StreamCodec {
 public:
  StreamCodec() = default;
  StreamCodec(const StreamCodec&) = delete;
  StreamCodec& operator=(const StreamCodec&) = delete;
  virtual ~StreamCodec() = default;

  // values, residual and encoded are in device memory. On a CUDA device encoded may also be in pinned host
  // memory, which is slow.
  virtual void encode(Stream& stream, const CodecWork& work) = 0;
  virtual void decode(Stream& stream, const CodecWork& work) = 0;
};

// num_elements_max: the most elements of one tensor. Scratch memory is allocated here.
[[nodiscard]] std::unique_ptr<StreamCodec> make_stream_codec(Device& device, std::size_t num_elements_max);

}  // namespace pipedream
