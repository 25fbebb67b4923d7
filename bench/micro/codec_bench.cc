// Bytes of tensor per second that one thread encodes and decodes, per codec, beside one memcpy of the tensor:
// the aim is the speed of memory. The tensor is larger than the caches of one core; numbers are normal, as
// gradients are. topk is measured with its feedback: the residual is that of the rounds before.
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
#include "device/device.h"
#include "wire/codec.h"

namespace pipedream {
namespace {

constexpr std::size_t kTensorBytes = std::size_t{64} << 20;
const char* const kCodecNames[] = {"bf16", "fp16", "int8", "topk:0.01", "topk:0.1"};

// A tensor, what it is encoded to, and topk's residual.
class Workspace {
 public:
  Workspace(const Codec& codec, DType dtype) {
    work_.codec = codec;
    work_.dtype = dtype;
    work_.num_elements = kTensorBytes / dtype_bytes(dtype);
    work_.values = memory(kTensorBytes);
    work_.encoded = memory(encoded_bytes(codec, dtype, work_.num_elements));
    if (codec.kind == CodecKind::kTopK) work_.residual = memory(kTensorBytes);
    if (dtype == DType::kFloat32) {
      fill<float>();
    } else {
      fill<double>();
    }
    encode_host(work_);
  }
  [[nodiscard]] const CodecWork& work() const { return work_; }

 private:
  std::byte* memory(std::size_t num_bytes) {
    memories_.push_back(device_->allocate(num_bytes, MemoryKind::kDevice));
    return memories_.back()->data();
  }
  template <class T>
  void fill() {
    std::mt19937_64 generator(20191027);
    std::normal_distribution<T> distribution;
    auto* const values = reinterpret_cast<T*>(work_.values);
    for (std::size_t i = 0; i < work_.num_elements; ++i) values[i] = distribution(generator);
  }

  const std::unique_ptr<Device> device_ = make_host_device();
  std::vector<std::unique_ptr<Memory>> memories_;
  CodecWork work_;
};

template <class Body>
void measure(benchmark::State& state, const Body& body) {
  for (auto _ : state) {
    body();
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(kTensorBytes));
}

void register_codec(const std::string& name, DType dtype) {
  const std::string label = name + "/" + std::string(dtype_name(dtype));
  benchmark::RegisterBenchmark(("encode/" + label).c_str(), [=](benchmark::State& state) {
    const Workspace workspace(codec_from_name(name), dtype);
    measure(state, [&] { encode_host(workspace.work()); });
  });
  benchmark::RegisterBenchmark(("decode/" + label).c_str(), [=](benchmark::State& state) {
    const Workspace workspace(codec_from_name(name), dtype);
    measure(state, [&] { decode_host(workspace.work()); });
  });
}

[[maybe_unused]] const bool kRegistered = [] {
  benchmark::RegisterBenchmark("memcpy", [](benchmark::State& state) {
    const Workspace workspace(Codec{}, DType::kFloat32);
    measure(state, [&] { std::memcpy(workspace.work().encoded, workspace.work().values, kTensorBytes); });
  });
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    for (const char* const name : kCodecNames) register_codec(name, dtype);
  }
  return true;
}();

}  // namespace
}  // namespace pipedream
