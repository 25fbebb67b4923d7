// Runs the host's codec on a stream, and chooses the backend. One thread enqueues the work; the stream's
// thread encodes and decodes.
#include "codec/stream_codec.h"

#include <array>
#include <cstddef>

#include "base/check.h"
#include "codec/cuda/cuda_stream_codec.h"

namespace pipedream {
namespace {

class HostStreamCodec final : public StreamCodec {
 public:
  explicit HostStreamCodec(std::size_t num_elements_max) : num_elements_max_(num_elements_max) {}

  void encode(Stream& stream, const CodecWork& work) override {
    stream.call([enqueued = keep(work)] { encode_host(*enqueued); });
  }
  void decode(Stream& stream, const CodecWork& work) override {
    stream.call([enqueued = keep(work)] { decode_host(*enqueued); });
  }

 private:
  // A call that captures more than 16 bytes would allocate memory, so calls capture a place in this ring.
  // When a place is used again, the call that used it last has returned: at most kStreamDepth calls are
  // pending, one runs, and one is about to be enqueued.
  static constexpr std::size_t kNumPlaces = kStreamDepth + 2;

  const CodecWork* keep(const CodecWork& work) {
    PD_CHECK(work.num_elements <= num_elements_max_,
             work.num_elements << " elements, at most " << num_elements_max_);
    CodecWork& place = places_[next_place_];
    next_place_ = (next_place_ + 1) % kNumPlaces;
    place = work;
    return &place;
  }

  const std::size_t num_elements_max_;
  std::array<CodecWork, kNumPlaces> places_;
  std::size_t next_place_ = 0;
};

}  // namespace

std::unique_ptr<StreamCodec> make_stream_codec(Device& device, std::size_t num_elements_max) {
  if (device.type() == DeviceType::kHost) return std::make_unique<HostStreamCodec>(num_elements_max);
  return make_cuda_stream_codec(device, num_elements_max);
}

}  // namespace pipedream
