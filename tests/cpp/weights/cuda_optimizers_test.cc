// Compares the optimizers' CUDA kernels with the host's, bit for bit. The kernels run on a device if there is
// one, and otherwise on the tests' own runtime (cuda_stub/cuda_stub.h).
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "base/element.h"
#include "base/failure.h"
#include "device/device.h"
#include "weights/adam.h"
#include "weights/optimizer_kernels.h"
#include "weights/sgd.h"

#if defined(PD_CUDA_STUB)
#include "cuda_stub/cuda_stub.h"
#endif

namespace pipedream {
namespace {

// More tensors than fit in a launch. Some sizes are about those of a pack (the elements that a thread loads
// at once) and of a block of threads. One tensor in seven is misaligned.
constexpr std::size_t kNumTensors = 51;
// The arrays of a tensor are: weights in, weights out and gradient, which have the tensor's element type;
// then two moments, the maximum of the second, and the master.
constexpr std::size_t kNumElementArrays = 3;
constexpr std::size_t kNumArrays = 7;
constexpr std::size_t kExpAvgSq = 4;
constexpr std::size_t kMaxExpAvgSq = 5;

std::size_t num_elements_of(std::size_t tensor) {
  constexpr std::size_t kSizes[] = {0, 1, 3, 4, 5, 255, 256, 257, 1000, 4097};
  return kSizes[tensor % std::size(kSizes)];
}

template <class Element>
class CudaOptimizers : public testing::Test {
 protected:
  using Number = NumberOf<Element>;
  static constexpr DType kDType = std::is_same_v<Element, BFloat16> ? DType::kBFloat16
                                  : std::is_same_v<Element, float>  ? DType::kFloat32
                                                                    : DType::kFloat64;

  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no CUDA device, and no stand-in for one";
    device_ = make_cuda_device(0);
    stream_ = device_->make_stream();
    std::size_t first = 0;  // nothing may write the elements between tensors
    for (std::size_t tensor = 0; tensor < kNumTensors; ++tensor) {
      firsts_.push_back(first + (tensor % 7 == 3 ? 1 : 0));
      first += (num_elements_of(tensor) + 1 + 15) / 16 * 16;
    }
    for (std::size_t array = 0; array < kNumArrays; ++array) {
      const std::size_t num_bytes = first * width_of(array);
      host_.emplace_back(num_bytes);
      for (std::size_t i = 0; i < first; ++i) {
        const Number value = random_value(array == kExpAvgSq || array == kMaxExpAvgSq);
        if (array < kNumElementArrays) {
          const auto element = element_of<Element>(value);
          std::memcpy(&host_.back()[i * sizeof(Element)], &element, sizeof(Element));
        } else {
          std::memcpy(&host_.back()[i * sizeof(Number)], &value, sizeof(Number));
        }
      }
      staging_.push_back(device_->allocate(num_bytes, MemoryKind::kStaging));
      memory_.push_back(device_->allocate(num_bytes, MemoryKind::kDevice));
      std::memcpy(staging_.back()->data(), host_.back().data(), num_bytes);
      stream_->copy(memory_.back()->data(), staging_.back()->data(), num_bytes);
    }
    stream_->synchronize();
  }

  static std::size_t width_of(std::size_t array) {
    return array < kNumElementArrays ? sizeof(Element) : sizeof(Number);
  }

  Number random_value(bool is_square) {
    constexpr Number kSpecials[] = {Number(0), -Number(0), std::numeric_limits<Number>::infinity(),
                                    std::numeric_limits<Number>::denorm_min(),
                                    std::numeric_limits<Number>::quiet_NaN()};
    if (random_() % 50 == 0) return is_square ? Number(0) : kSpecials[random_() % std::size(kSpecials)];
    const Number value = std::normal_distribution<Number>()(random_);
    return is_square ? value * value : value;
  }

  // Describes the tensors in host memory or in the device's.
  template <class Tensor>
  std::vector<Tensor> tensors(bool on_device, bool in_place) {
    std::vector<Tensor> made;
    for (std::size_t tensor = 0; tensor < kNumTensors; ++tensor) {
      const auto at = [&](std::size_t array) -> void* {
        std::byte* const begin = on_device ? memory_[array]->data() : host_[array].data();
        return begin + firsts_[tensor] * width_of(array);
      };
      Tensor one;
      one.num_elements = static_cast<std::int64_t>(num_elements_of(tensor));
      one.weight_in = at(0);
      one.weight_out = at(in_place ? 0 : 1);
      one.gradient = at(2);
      if constexpr (std::is_same_v<Tensor, SgdTensor>) {
        one.momentum_buffer = at(3);
      } else {
        one.exp_avg = at(3);
        one.exp_avg_sq = at(kExpAvgSq);
        one.max_exp_avg_sq = at(kMaxExpAvgSq);
      }
      if (std::is_same_v<Element, BFloat16>) one.master = at(6);
      made.push_back(one);
    }
    return made;
  }

  void expect_the_hosts_bytes(const std::string& what) {
    for (std::size_t array = 0; array < host_.size(); ++array) {
      stream_->copy(staging_[array]->data(), memory_[array]->data(), host_[array].size());
      stream_->synchronize();
      SCOPED_TRACE(what + ", array " + std::to_string(array));
      if (array < kNumElementArrays) {
        expect_same_bits<Element>(staging_[array]->data(), host_[array]);
      } else {
        expect_same_bits<Number>(staging_[array]->data(), host_[array]);
      }
    }
  }

  template <class T>
  static void expect_same_bits(const std::byte* of_device, const std::vector<std::byte>& of_host) {
    for (std::size_t offset = 0; offset < of_host.size(); offset += sizeof(T)) {
      T value{};
      T expected{};
      std::memcpy(&value, of_device + offset, sizeof(T));
      std::memcpy(&expected, &of_host[offset], sizeof(T));
      const auto number = number_of(value);
      const auto expected_number = number_of(expected);
      const bool both_nan = number != number && expected_number != expected_number;
      ASSERT_TRUE(both_nan || std::memcmp(&value, &expected, sizeof(T)) == 0)
          << "element " << offset / sizeof(T) << ": " << number << ", on the host " << expected_number;
    }
  }

  std::uintptr_t native_stream() const { return 0; }  // the default stream

  std::mt19937_64 random_{7};
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::size_t> firsts_;
  std::vector<std::vector<std::byte>> host_;
  std::vector<std::unique_ptr<Memory>> staging_;
  std::vector<std::unique_ptr<Memory>> memory_;
};

using CudaElements = testing::Types<float, double, BFloat16>;
TYPED_TEST_SUITE(CudaOptimizers, CudaElements);

TYPED_TEST(CudaOptimizers, SgdGivesTheHostsBits) {
  int step = 0;
  for (const SgdOptions& options :
       {SgdOptions{.lr = 0.1}, SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1},
        SgdOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true, .maximize = true}}) {
    for (const bool in_place : {false, true}) {
      const bool is_first = step++ % 2 == 0;
      sgd_step_host(options, this->kDType, this->template tensors<SgdTensor>(false, in_place), is_first, 0.5);
      sgd_step_cuda(options, this->kDType, this->template tensors<SgdTensor>(true, in_place), is_first, 0.5,
                    this->native_stream());
      this->device_->wrap_stream(this->native_stream())->synchronize();
      this->expect_the_hosts_bytes("sgd, step " + std::to_string(step));
    }
  }
}

TYPED_TEST(CudaOptimizers, AdamGivesTheHostsBits) {
  int step = 0;
  for (const AdamOptions& options :
       {AdamOptions{.lr = 0.1}, AdamOptions{.lr = 0.1, .beta1 = 0.3, .weight_decay = 0.1, .amsgrad = true},
        AdamOptions{.lr = 0.1, .weight_decay = 0.1, .decoupled_weight_decay = true, .maximize = true},
        AdamOptions{.lr = 0.1,
        .weight_decay = 0.1,
        .decoupled_weight_decay = true,
        .nesterov = true,
        .momentum_product = 0.4}}) {
    for (const bool in_place : {false, true}) {
      ++step;
      adam_step_host(options, this->kDType, this->template tensors<AdamTensor>(false, in_place), step, 0.5);
      adam_step_cuda(options, this->kDType, this->template tensors<AdamTensor>(true, in_place), step, 0.5,
                     this->native_stream());
      this->device_->wrap_stream(this->native_stream())->synchronize();
      this->expect_the_hosts_bytes("adam, step " + std::to_string(step));
    }
  }
}

#if defined(PD_CUDA_STUB)
TYPED_TEST(CudaOptimizers, KernelsAreLoadedBeforeTheirFirstStep) {
  cuda_stub::reset();
  load_optimizer_kernels(0);
  const std::uint64_t num_before = cuda_stub::num_late_loads();
  sgd_step_cuda({}, this->kDType, this->template tensors<SgdTensor>(true, true), true, 1,
                this->native_stream());
  adam_step_cuda({}, this->kDType, this->template tensors<AdamTensor>(true, true), 1, 1,
                 this->native_stream());
  this->device_->wrap_stream(this->native_stream())->synchronize();
  EXPECT_EQ(cuda_stub::num_late_loads(), num_before);
}
#endif

}  // namespace
}  // namespace pipedream
