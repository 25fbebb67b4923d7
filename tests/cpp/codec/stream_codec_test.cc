// Tests that every backend encodes to the same bytes as the host, in the order of the stream. The host is
// always tested, and CUDA is tested if there is a device.
#include "codec/stream_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <future>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "codec/encoding.h"
#include "support/allocation_counter.h"

#if defined(PD_CUDA_STUB)
#include "cuda_stub/cuda_stub.h"
#endif

namespace pipedream {
namespace {

// One element more than the largest grid has threads.
constexpr std::size_t kNumElementsMax = (std::size_t{1} << 20) + 1;
#if defined(__SANITIZE_THREAD__)
// ThreadSanitizer takes microseconds for every switch of the CUDA stand-in's threads.
constexpr bool kTakesLong = true;
constexpr std::size_t kNumMany = 1'401;
constexpr std::size_t kSizes[] = {0, 1, 2, 3, 255, 256, 257, 1000, kNumMany};
#else
constexpr bool kTakesLong = false;
constexpr std::size_t kNumMany = 70'001;
// topk divides the tensor into parts, one per block of threads. With the last size half of the parts have two
// rows of a block, and the others are empty.
constexpr std::size_t kSizes[] = {0, 1, 2, 3, 255, 256, 257, 1000, kNumMany, 263'001};
#endif
const char* const kCodecNames[] = {"none", "bf16", "fp16", "int8", "topk:0.01", "topk:0.3", "topk:1"};

class StreamCodecContract : public testing::TestWithParam<DeviceType> {
 protected:
  const std::unique_ptr<Device> device_ =
      GetParam() == DeviceType::kHost ? make_host_device() : make_cuda_device(0);
  const std::unique_ptr<Stream> stream_ = device_->make_stream();
  const std::unique_ptr<StreamCodec> codec_ = make_stream_codec(*device_, kNumElementsMax);
  std::mt19937_64 generator_{20191027};

  template <class T>
  std::vector<T> normal_values(std::size_t num_elements) {
    std::normal_distribution<NumberOf<T>> distribution;
    std::vector<T> values(num_elements);
    for (T& value : values) value = element_of<T>(distribution(generator_));
    return values;
  }

  // A copy of a CodecWork of the host. Its tensors are in device memory, and its encoding in memory of the
  // given kind.
  struct Mirror {
    std::vector<std::unique_ptr<Memory>> memories;
    CodecWork work;
  };
  [[nodiscard]] Mirror mirror_of(const CodecWork& host, MemoryKind kind_of_encoded) const {
    Mirror mirror{{}, host};
    const std::size_t tensor_bytes = host.num_elements * dtype_bytes(host.dtype);
    const auto allocate = [&](std::size_t num_bytes, MemoryKind kind) {
      mirror.memories.push_back(device_->allocate(num_bytes + 1, kind));
      return mirror.memories.back()->data();
    };
    mirror.work.values = allocate(tensor_bytes, MemoryKind::kDevice);
    mirror.work.encoded = allocate(encoded_bytes(host.codec, host.dtype, host.num_elements), kind_of_encoded);
    if (host.residual != nullptr) {
      mirror.work.residual =
          allocate(residual_bytes(host.codec, host.dtype, host.num_elements), MemoryKind::kDevice);
    }
    return mirror;
  }

  template <class T>
  void put(std::byte* to, const std::vector<T>& values) {
    const auto staging = device_->allocate(values.size() * sizeof(T) + 1, MemoryKind::kStaging);
    if (!values.empty()) std::memcpy(staging->data(), values.data(), values.size() * sizeof(T));
    stream_->copy(to, staging->data(), values.size() * sizeof(T));
    stream_->synchronize();
  }
  template <class T>
  std::vector<T> get(const std::byte* from, std::size_t num_elements) {
    const auto staging = device_->allocate(num_elements * sizeof(T) + 1, MemoryKind::kStaging);
    stream_->copy(staging->data(), from, num_elements * sizeof(T));
    stream_->synchronize();
    std::vector<T> values(num_elements);
    if (!values.empty()) std::memcpy(values.data(), staging->data(), num_elements * sizeof(T));
    return values;
  }

  // Encodes three items, so that topk has a residual.
  template <class T>
  void expect_host_bytes(const std::string& name, std::vector<T> values, MemoryKind kind_of_encoded) {
    Encoding<T> host(codec_from_name(name), values.size());
    Mirror mirror = mirror_of(host.work(), kind_of_encoded);
    for (int item = 0; item < 3; ++item) {
      put(mirror.work.values, values);
      codec_->encode(*stream_, mirror.work);
      host.encode(values);
      const auto bytes = host.encoded_span();
      const std::vector<std::byte> expected(bytes.begin(), bytes.end());
      ASSERT_TRUE(get<std::byte>(mirror.work.encoded, bytes.size()) == expected)
          << name << " of " << values.size() << " elements, item " << item;

      put(mirror.work.values, std::vector<T>(values.size(), element_of<T>(1234.0F)));
      codec_->decode(*stream_, mirror.work);
      const auto decoded = get<T>(mirror.work.values, values.size());
      ASSERT_TRUE(same_bits(decoded, host.decode())) << name << " of " << values.size() << " elements";
      if (mirror.work.residual != nullptr) {
        ASSERT_TRUE(same_bits(get<NumberOf<T>>(mirror.work.residual, values.size()), host.residual()))
            << name;
      }
      for (T& value : values) value = element_of<T>(number_of(value) / 2 + 1);
    }
  }
  // Compares the bits, but takes all NaNs as equal.
  template <class T>
  static bool same_bits(const std::vector<T>& one, const std::vector<T>& other) {
    if (one.size() != other.size()) return false;
    if (one.empty() || std::memcmp(one.data(), other.data(), one.size() * sizeof(T)) == 0) return true;
    for (std::size_t i = 0; i < one.size(); ++i) {
      if (std::isnan(number_of(one[i])) && std::isnan(number_of(other[i]))) continue;
      if (std::memcmp(&one[i], &other[i], sizeof(T)) != 0) return false;
    }
    return true;
  }
};

TEST_P(StreamCodecContract, GivesTheHostsBytesAtEverySize) {
  const auto expect_at_every_size = [&]<class T>(const std::string& name, const std::vector<T>& values) {
    for (const std::size_t num_elements : kSizes) {
      const auto end = values.begin() + static_cast<std::ptrdiff_t>(num_elements);
      expect_host_bytes(name, std::vector<T>(values.begin(), end), MemoryKind::kDevice);
    }
  };
  const std::size_t num_elements = std::ranges::max(kSizes);
  const auto floats = normal_values<float>(num_elements);
  const auto doubles = normal_values<double>(num_elements);
  for (const char* const name : kCodecNames) {
    expect_at_every_size(name, floats);
    expect_at_every_size(name, doubles);
  }
  const auto bfloats = normal_values<BFloat16>(num_elements);
  const auto halves = normal_values<Float16>(num_elements);
  for (const char* const name : {"none", "int8", "topk:0.01", "topk:0.3", "topk:1"}) {
    expect_at_every_size(name, bfloats);
    expect_at_every_size(name, halves);
  }
}

// One dtype is enough, because the loops are the same for all. The CUDA stand-in takes seconds for each
// dtype.
TEST_P(StreamCodecContract, GivesTheHostsBytesOfMoreElementsThanAGridHasThreads) {
  if (kTakesLong) GTEST_SKIP() << "takes minutes under ThreadSanitizer";
  const auto floats = normal_values<float>(kNumElementsMax);
  for (const char* const name : kCodecNames) expect_host_bytes(name, floats, MemoryKind::kDevice);
}

TEST_P(StreamCodecContract, EncodesIntoStagingMemoryAndDecodesFromIt) {
  for (const char* const name : kCodecNames)
    expect_host_bytes(name, normal_values<float>(kNumMany), MemoryKind::kStaging);
}

TEST_P(StreamCodecContract, GivesTheHostsBytesOfEveryMagnitudeAndOfSpecials) {
  std::vector<float> floats(kNumMany);
  for (float& value : floats) value = from_bits<float>(static_cast<std::uint32_t>(generator_()));
  std::vector<double> doubles(kNumMany);
  for (double& value : doubles) value = from_bits<double>(generator_());
  for (const char* const name : {"bf16", "fp16", "int8"}) {
    expect_host_bytes(name, floats, MemoryKind::kDevice);
    expect_host_bytes(name, doubles, MemoryKind::kDevice);
  }
  std::vector<BFloat16> bfloats(kNumMany);
  std::vector<Float16> halves(kNumMany);
  for (BFloat16& value : bfloats) value = {static_cast<std::uint16_t>(generator_())};
  for (Float16& value : halves) value = {static_cast<std::uint16_t>(generator_())};
  for (const char* const name : {"int8", "topk:0.01", "topk:0.3"}) {
    expect_host_bytes(name, bfloats, MemoryKind::kDevice);
    expect_host_bytes(name, halves, MemoryKind::kDevice);
  }
}

// The tensor has more infinities and NaNs than are sent. The residual also drops those that are not sent.
TEST_P(StreamCodecContract, TopKForgetsWhatIsNotFiniteAsTheHostDoes) {
  auto values = normal_values<double>(kNumMany);
  for (std::size_t i = 0; i < values.size(); i += 3) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    const double specials[] = {kInfinity, std::numeric_limits<double>::quiet_NaN(), -kInfinity};
    values[i] = specials[i / 3 % 3];
  }
  const std::vector<float> floats(values.begin(), values.end());
  for (const char* const name : {"topk:0.01", "topk:0.3"}) {
    expect_host_bytes(name, values, MemoryKind::kDevice);
    expect_host_bytes(name, floats, MemoryKind::kDevice);
  }
}

TEST_P(StreamCodecContract, TopKBreaksTiesAsTheHostDoes) {
  std::uniform_int_distribution<int> few(-3, 3);
  std::vector<float> values(kNumMany);
  for (float& value : values) value = static_cast<float>(few(generator_));
  for (const char* const name : {"topk:0.001", "topk:0.2", "topk:0.9"}) {
    expect_host_bytes(name, values, MemoryKind::kDevice);
    expect_host_bytes(name, std::vector<float>(5000), MemoryKind::kDevice);
    expect_host_bytes(name, std::vector<double>(5000, std::numeric_limits<double>::infinity()),
                      MemoryKind::kDevice);
  }
}

TEST_P(StreamCodecContract, WorkRunsInTheOrderOfTheStreamAndEnqueuingDoesNotWait) {
  const auto values = normal_values<float>(1000);
  Encoding<float> host(codec_from_name("int8"), values.size());
  const std::vector<float> expected = host.sent(values);
  const Mirror mirror = mirror_of(host.work(), MemoryKind::kDevice);
  const auto from = device_->allocate(4000, MemoryKind::kStaging);
  const auto to = device_->allocate(4000, MemoryKind::kStaging);
  const auto done = device_->make_event();
  std::memcpy(from->data(), values.data(), 4000);

  std::promise<void> opened;
  stream_->call([gate = opened.get_future().share()] { gate.wait(); });
  stream_->copy(mirror.work.values, from->data(), 4000);
  codec_->encode(*stream_, mirror.work);
  codec_->decode(*stream_, mirror.work);
  stream_->copy(to->data(), mirror.work.values, 4000);
  stream_->record(*done);
  EXPECT_FALSE(done->done());
  opened.set_value();
  done->wait();
  EXPECT_EQ(std::memcmp(to->data(), expected.data(), 4000), 0);
}

TEST_P(StreamCodecContract, MoreWorkThanTheDepthOfAStreamKeepsEveryItem) {
  constexpr std::size_t kNumItems = 3 * kStreamDepth;
  const auto values = device_->allocate(64 * kNumItems, MemoryKind::kDevice);
  const auto encoded = device_->allocate(64 * kNumItems, MemoryKind::kDevice);
  const auto whole_numbers = [] {
    std::vector<float> numbers(kNumItems * 16);
    for (std::size_t i = 0; i < numbers.size(); ++i)
      numbers[i] = static_cast<float>(i % 256);  // exact in bf16
    return numbers;
  }();
  put(values->data(), whole_numbers);
  for (std::size_t item = 0; item < kNumItems; ++item) {
    codec_->encode(*stream_, {{CodecKind::kBFloat16},
                              DType::kFloat32,
                              16,
                              values->data() + 64 * item,
                              encoded->data() + 64 * item,
                              nullptr});
  }
  put(values->data(), std::vector<float>(kNumItems * 16));
  for (std::size_t item = 0; item < kNumItems; ++item) {
    codec_->decode(*stream_, {{CodecKind::kBFloat16},
                              DType::kFloat32,
                              16,
                              values->data() + 64 * item,
                              encoded->data() + 64 * item,
                              nullptr});
  }
  EXPECT_TRUE(get<float>(values->data(), kNumItems * 16) == whole_numbers);
}

TEST_P(StreamCodecContract, EnqueuingAllocatesNothing) {
  if (!AllocationCounter::counts()) GTEST_SKIP() << "a sanitizer has the allocator";
  if (GetParam() == DeviceType::kCuda) GTEST_SKIP() << "the driver's own allocations would count";
  Encoding<float> host(codec_from_name("topk:0.1"), 1000);
  host.set_values(normal_values<float>(1000));
  const Mirror mirror = mirror_of(host.work(), MemoryKind::kDevice);
  codec_->encode(*stream_, mirror.work);  // the first call may allocate
  codec_->decode(*stream_, mirror.work);
  stream_->synchronize();
  const AllocationCounter counter;
  for (int item = 0; item < 100; ++item) {
    codec_->encode(*stream_, mirror.work);
    codec_->decode(*stream_, mirror.work);
  }
  EXPECT_EQ(counter.num_on_this_thread(), 0U) << counter.first();
  stream_->synchronize();
}

TEST_P(StreamCodecContract, AWrappedStreamIsAsGood) {
  const auto values = normal_values<float>(5000);
  Encoding<float> host(codec_from_name("fp16"), values.size());
  const Mirror mirror = mirror_of(host.work(), MemoryKind::kDevice);
  const auto wrapped = device_->wrap_stream(0);
  const auto of_wrapped = make_stream_codec(*device_, values.size());
  put(mirror.work.values, values);
  of_wrapped->encode(*wrapped, mirror.work);
  of_wrapped->decode(*wrapped, mirror.work);
  wrapped->synchronize();
  EXPECT_EQ(get<float>(mirror.work.values, values.size()), host.sent(values));
}

TEST_P(StreamCodecContract, MoreElementsThanWasSaidIsOurBug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // the stream has a thread
  const auto small = make_stream_codec(*device_, 10);
  CodecWork work;
  work.codec = codec_from_name("bf16");
  work.num_elements = 11;
  EXPECT_DEATH(small->encode(*stream_, work), "11 elements, at most 10");
}

#if defined(PD_CUDA_STUB)
TEST_P(StreamCodecContract, KernelsAreLoadedBeforeTheFirstItem) {
  if (GetParam() == DeviceType::kHost) GTEST_SKIP() << "the host has no kernels";
  cuda_stub::reset();
  const auto fresh = make_stream_codec(*device_, 1);
  const std::uint64_t num_before = cuda_stub::num_late_loads();
  for (const char* const name : {"bf16", "fp16", "int8", "topk:0.3"}) {
    expect_host_bytes(name, normal_values<float>(300), MemoryKind::kDevice);
    expect_host_bytes(name, normal_values<double>(300), MemoryKind::kDevice);
  }
  for (const char* const name : {"int8", "topk:0.3"}) {
    expect_host_bytes(name, normal_values<BFloat16>(300), MemoryKind::kDevice);
    expect_host_bytes(name, normal_values<Float16>(300), MemoryKind::kDevice);
  }
  EXPECT_EQ(cuda_stub::num_late_loads(), num_before);
}

// The number of launches matters: each takes the thread that drives the transport 2 to 4 us, and makes a gap
// on the device.
TEST_P(StreamCodecContract, TopKIsOneLaunchForEachDigitAndTwo) {
  if (GetParam() == DeviceType::kHost) GTEST_SKIP() << "the host launches nothing";
  const auto num_launches = [&]<class T>(const std::vector<T>& values) {
    Encoding<T> host(codec_from_name("topk:0.1"), values.size());
    const Mirror mirror = mirror_of(host.work(), MemoryKind::kDevice);
    put(mirror.work.values, values);
    const std::uint64_t num_before = cuda_stub::num_calls("cudaLaunchKernel");
    codec_->encode(*stream_, mirror.work);
    stream_->synchronize();
    return cuda_stub::num_calls("cudaLaunchKernel") - num_before;
  };
  EXPECT_EQ(num_launches(normal_values<float>(300)), 5U);
  EXPECT_EQ(num_launches(normal_values<double>(300)), 8U);
}
#endif

std::vector<DeviceType> devices_here() {
  std::vector<DeviceType> types = {DeviceType::kHost};
  if (cuda_available()) types.push_back(DeviceType::kCuda);
  return types;
}

std::string backend_name(const testing::TestParamInfo<DeviceType>& backend) {
  return backend.param == DeviceType::kHost ? "Host" : "Cuda";
}

INSTANTIATE_TEST_SUITE_P(Backends, StreamCodecContract, testing::ValuesIn(devices_here()), backend_name);

}  // namespace
}  // namespace pipedream
