// Runs the codecs on the caller's CUDA stream. Used by one thread at a time.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "base/check.h"
#include "codec/codec_elements.h"
#include "codec/cuda/cuda_codec_kernels.h"
#include "codec/cuda/cuda_stream_codec.h"
#include "device/cuda/cuda_calls.h"
#include "device/device.h"

namespace pipedream {
namespace {

static_assert(kInt8Block == kInt8BlockElements);

template <class T>
constexpr bool kIsHalf = std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>;

// Encodes by bf16 or fp16, for elements with more than 16 bits.
template <class T>
int launch_rounding(const CodecWork& work, std::uintptr_t stream) {
  const auto* const values = reinterpret_cast<const T*>(work.values);
  auto* const halves = reinterpret_cast<std::uint16_t*>(work.encoded);
  return work.codec.kind == CodecKind::kBFloat16
             ? launch_encode_bfloat16(work.num_elements, values, halves, stream)
             : launch_encode_float16(work.num_elements, values, halves, stream);
}
template <class T>
int launch_unrounding(const CodecWork& work, std::uintptr_t stream) {
  auto* const values = reinterpret_cast<T*>(work.values);
  const auto* const halves = reinterpret_cast<const std::uint16_t*>(work.encoded);
  return work.codec.kind == CodecKind::kBFloat16
             ? launch_decode_bfloat16(work.num_elements, halves, values, stream)
             : launch_decode_float16(work.num_elements, halves, values, stream);
}

template <class T>
int launch_encode(const CodecWork& work, std::size_t num_chosen, TopKScratch* scratch,
                  std::uintptr_t stream) {
  const auto* const values = reinterpret_cast<const T*>(work.values);
  auto* const indices = reinterpret_cast<std::uint32_t*>(work.encoded);
  switch (work.codec.kind) {
    case CodecKind::kNone:
      break;  // encode() copies
    case CodecKind::kBFloat16:
    case CodecKind::kFloat16:
      if constexpr (!kIsHalf<T>) return launch_rounding<T>(work, stream);
      break;
    case CodecKind::kInt8:
      return launch_encode_int8(work.num_elements, values, work.encoded, stream);
    case CodecKind::kTopK:
      PD_CHECK(work.residual != nullptr, "topk without a residual");
      return launch_encode_topk<T>(
          {work.num_elements, num_chosen, values, reinterpret_cast<NumberOf<T>*>(work.residual), indices,
           reinterpret_cast<SentOf<T>*>(indices + num_chosen)},
          scratch, stream);
  }
  PD_CHECK(false, "codec " << static_cast<int>(work.codec.kind));
}

template <class T>
int launch_decode(const CodecWork& work, std::size_t num_chosen, std::uintptr_t stream) {
  auto* const values = reinterpret_cast<T*>(work.values);
  const auto* const indices = reinterpret_cast<const std::uint32_t*>(work.encoded);
  switch (work.codec.kind) {
    case CodecKind::kNone:
      break;  // decode() copies
    case CodecKind::kBFloat16:
    case CodecKind::kFloat16:
      if constexpr (!kIsHalf<T>) return launch_unrounding<T>(work, stream);
      break;
    case CodecKind::kInt8:
      return launch_decode_int8(work.num_elements, work.encoded, values, stream);
    case CodecKind::kTopK:
      return launch_decode_topk(work.num_elements, num_chosen, indices,
                                reinterpret_cast<const SentOf<T>*>(indices + num_chosen), values, stream);
  }
  PD_CHECK(false, "codec " << static_cast<int>(work.codec.kind));
}

class CudaStreamCodec final : public StreamCodec {
 public:
  CudaStreamCodec(Device& device, std::size_t num_elements_max)
      : device_index_(device.index()),
        num_elements_max_(num_elements_max),
        scratch_(device.allocate(sizeof(TopKScratch), MemoryKind::kDevice)) {
    const DeviceScope scope(device_index_);
    throw_if_failed(static_cast<cudaError_t>(load_codec_kernels()), "loading the codecs' kernels",
                    device_index_);
  }

  void encode(Stream& stream, const CodecWork& work) override {
    if (work.codec.kind == CodecKind::kNone) return stream.copy(work.encoded, work.values, bytes_of(work));
    run(work, [&](std::size_t num_chosen) {
      auto* const scratch = reinterpret_cast<TopKScratch*>(scratch_->data());
      return with_element_type(work.dtype, [&](auto element) {
        return launch_encode<typename decltype(element)::Type>(work, num_chosen, scratch,
                                                               stream.native_handle());
      });
    });
  }

  void decode(Stream& stream, const CodecWork& work) override {
    if (work.codec.kind == CodecKind::kNone) return stream.copy(work.values, work.encoded, bytes_of(work));
    run(work, [&](std::size_t num_chosen) {
      return with_element_type(work.dtype, [&](auto element) {
        return launch_decode<typename decltype(element)::Type>(work, num_chosen, stream.native_handle());
      });
    });
  }

 private:
  static std::size_t bytes_of(const CodecWork& work) {
    return encoded_bytes(work.codec, work.dtype, work.num_elements);
  }

  template <class Launch>
  void run(const CodecWork& work, const Launch& launch) {
    PD_CHECK(work.num_elements <= num_elements_max_,
             work.num_elements << " elements, at most " << num_elements_max_);
    const std::size_t num_chosen =
        work.codec.kind == CodecKind::kTopK ? topk_num_chosen(work.codec, work.num_elements) : 0;
    if (work.num_elements == 0) return;
    const DeviceScope scope(device_index_);
    const int status = launch(num_chosen);
    throw_if_failed(static_cast<cudaError_t>(status), "a codec's kernel", device_index_);
  }

  const int device_index_;
  const std::size_t num_elements_max_;
  const std::unique_ptr<Memory> scratch_;
};

}  // namespace

std::unique_ptr<StreamCodec> make_cuda_stream_codec(Device& device, std::size_t num_elements_max) {
  return std::make_unique<CudaStreamCodec>(device, num_elements_max);
}

}  // namespace pipedream
