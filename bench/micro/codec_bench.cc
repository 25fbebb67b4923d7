// Measures how many bytes of a tensor one thread encodes and decodes per second, for each codec and size. For
// comparison it measures one memcpy of the tensor. The values are normally distributed. topk adds the tensor
// to the residual of the rounds before. It cannot be faster than this addition, which is measured as "add".
//
//   pd_codec_bench --benchmark_enable_random_interleaving=true --benchmark_repetitions=5
//       --benchmark_report_aggregates_only=true
#include <benchmark/benchmark.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "codec/codec.h"
#include "device/device.h"

namespace pipedream {
namespace {

constexpr std::size_t kMebibytes[] = {1, 16, 64};
const char* const kCodecNames[] = {"bf16", "fp16", "int8", "topk:0.01", "topk:0.05", "topk:0.1"};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};

// The memory of one measurement: a tensor, its encoded form, and topk's residual.
class Workspace {
 public:
  Workspace(const Codec& codec, DType dtype, std::size_t tensor_bytes) {
    work_.codec = codec;
    work_.dtype = dtype;
    work_.num_elements = tensor_bytes / dtype_bytes(dtype);
    work_.values = memory(tensor_bytes);
    work_.encoded = memory(encoded_bytes(codec, dtype, work_.num_elements));
    if (codec.kind == CodecKind::kTopK) {
      work_.residual = memory(residual_bytes(codec, dtype, work_.num_elements));
    }
    fill();
    encode_host(work_);
  }
  [[nodiscard]] const CodecWork& work() const { return work_; }

 private:
  std::byte* memory(std::size_t num_bytes) {
    memories_.push_back(device_->allocate(num_bytes, MemoryKind::kDevice));
    return memories_.back()->data();
  }
  // Fills the tensor with random values. 16-bit values are made from float32 by the codec of their type.
  void fill() {
    if (work_.dtype == DType::kFloat64) return fill_normal(reinterpret_cast<double*>(work_.values));
    if (work_.dtype == DType::kFloat32) return fill_normal(reinterpret_cast<float*>(work_.values));
    std::vector<float> wide(work_.num_elements);
    fill_normal(wide.data());
    const CodecKind kind = work_.dtype == DType::kBFloat16 ? CodecKind::kBFloat16 : CodecKind::kFloat16;
    encode_host({{kind},
                 DType::kFloat32,
                 wide.size(),
                 reinterpret_cast<std::byte*>(wide.data()),
                 work_.values,
                 nullptr});
  }
  template <class T>
  void fill_normal(T* values) const {
    std::mt19937_64 generator(20191027);
    std::normal_distribution<T> distribution;
    for (std::size_t i = 0; i < work_.num_elements; ++i) values[i] = distribution(generator);
  }

  const std::unique_ptr<Device> device_ = make_host_device();
  std::vector<std::unique_ptr<Memory>> memories_;
  CodecWork work_;
};

template <class Body>
void measure(benchmark::State& state, std::size_t tensor_bytes, const Body& body) {
  for (auto _ : state) {
    body();
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(tensor_bytes));
}

template <class Run>
void register_benchmark(const std::string& name, std::size_t num_mebibytes, const Run& run) {
  const std::string label = name + "/" + std::to_string(num_mebibytes) + "MiB";
  benchmark::RegisterBenchmark(label.c_str(),
                               [=](benchmark::State& state) { run(state, num_mebibytes << 20U); });
}

void register_codec(const Codec& codec, DType dtype, std::size_t num_mebibytes) {
  const std::string label = codec_name(codec) + "/" + std::string(dtype_name(dtype));
  register_benchmark("encode/" + label, num_mebibytes, [=](benchmark::State& state, std::size_t num_bytes) {
    const Workspace workspace(codec, dtype, num_bytes);
    measure(state, num_bytes, [&] { encode_host(workspace.work()); });
  });
  register_benchmark("decode/" + label, num_mebibytes, [=](benchmark::State& state, std::size_t num_bytes) {
    const Workspace workspace(codec, dtype, num_bytes);
    measure(state, num_bytes, [&] { decode_host(workspace.work()); });
  });
}

void register_limits(std::size_t num_mebibytes) {
  register_benchmark("memcpy", num_mebibytes, [](benchmark::State& state, std::size_t num_bytes) {
    const Workspace workspace(Codec{}, DType::kFloat32, num_bytes);
    const CodecWork& work = workspace.work();
    measure(state, num_bytes, [&] { std::memcpy(work.encoded, work.values, num_bytes); });
  });
  register_benchmark("add", num_mebibytes, [](benchmark::State& state, std::size_t num_bytes) {
    const Workspace workspace({CodecKind::kTopK}, DType::kFloat32, num_bytes);
    const CodecWork& work = workspace.work();
    const auto* const values = reinterpret_cast<const float*>(work.values);
    auto* const residual = reinterpret_cast<float*>(work.residual);
    measure(state, num_bytes, [&] {
      for (std::size_t i = 0; i < work.num_elements; ++i) residual[i] += values[i];
    });
  });
}

[[maybe_unused]] const bool kRegistered = [] {
  for (const std::size_t num_mebibytes : kMebibytes) {
    register_limits(num_mebibytes);
    for (const DType dtype : kDTypes) {
      for (const char* const name : kCodecNames) {
        const Codec codec = codec_from_name(name);
        if (codec_for(codec, dtype) == codec) register_codec(codec, dtype, num_mebibytes);
      }
    }
  }
  return true;
}();

}  // namespace
}  // namespace pipedream
