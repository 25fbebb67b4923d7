// The optimizers' kernels against the host's, bit for bit: on a device where there is one, else on the tests'
// own runtime (cuda_stub/cuda_stub.h).
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

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

// More tensors than a launch takes, of sizes around a pack's and a block's; one is misaligned.
constexpr std::size_t kNumTensors = 51;
constexpr std::size_t kNumStates = 3;

std::size_t num_elements_of(std::size_t tensor) {
  constexpr std::size_t kSizes[] = {0, 1, 3, 4, 5, 255, 256, 257, 1000, 4097};
  return kSizes[tensor % std::size(kSizes)];
}

template <class T>
class CudaOptimizers : public testing::Test {
 protected:
  static constexpr DType kDType = sizeof(T) == sizeof(float) ? DType::kFloat32 : DType::kFloat64;

  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no CUDA device, and no stand-in for one";
    device_ = make_cuda_device(0);
    stream_ = device_->make_stream();
    // Weights in, out and gradient, then states; a pad between tensors, which nothing may write.
    std::size_t first = 0;
    for (std::size_t tensor = 0; tensor < kNumTensors; ++tensor) {
      firsts_.push_back(first + (tensor % 7 == 3 ? 1 : 0));
      first += (num_elements_of(tensor) + 1 + 15) / 16 * 16;
    }
    for (std::size_t array = 0; array < 3 + kNumStates; ++array) {
      host_.emplace_back(first);
      for (T& value : host_.back()) value = random_value(array >= 4);
      staging_.push_back(device_->allocate(first * sizeof(T), MemoryKind::kStaging));
      memory_.push_back(device_->allocate(first * sizeof(T), MemoryKind::kDevice));
      std::memcpy(staging_.back()->data(), host_.back().data(), first * sizeof(T));
      stream_->copy(memory_.back()->data(), staging_.back()->data(), first * sizeof(T));
    }
    stream_->synchronize();
  }

  T random_value(bool is_square) {
    constexpr T kSpecials[] = {T(0), -T(0), std::numeric_limits<T>::infinity(),
                               std::numeric_limits<T>::denorm_min(), std::numeric_limits<T>::quiet_NaN()};
    if (random_() % 50 == 0) return is_square ? T(0) : kSpecials[random_() % std::size(kSpecials)];
    const T value = std::normal_distribution<T>()(random_);
    return is_square ? value * value : value;
  }

  // The tensors in host memory, or in the device's.
  template <class Tensor>
  std::vector<Tensor> tensors(bool on_device, bool in_place) {
    std::vector<Tensor> made;
    for (std::size_t tensor = 0; tensor < kNumTensors; ++tensor) {
      const auto at = [&](std::size_t array) -> void* {
        T* const begin = on_device ? reinterpret_cast<T*>(memory_[array]->data()) : host_[array].data();
        return begin + firsts_[tensor];
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
        one.exp_avg_sq = at(4);
        one.max_exp_avg_sq = at(5);
      }
      made.push_back(one);
    }
    return made;
  }

  void expect_the_hosts_bytes(const std::string& what) {
    for (std::size_t array = 0; array < host_.size(); ++array) {
      const std::size_t num_bytes = host_[array].size() * sizeof(T);
      stream_->copy(staging_[array]->data(), memory_[array]->data(), num_bytes);
      stream_->synchronize();
      const auto* const values = reinterpret_cast<const T*>(staging_[array]->data());
      for (std::size_t i = 0; i < host_[array].size(); ++i) {
        const bool both_nan = values[i] != values[i] && host_[array][i] != host_[array][i];
        ASSERT_TRUE(both_nan || std::memcmp(&values[i], &host_[array][i], sizeof(T)) == 0)
            << what << ", array " << array << ", element " << i << ": " << values[i] << ", on the host "
            << host_[array][i];
      }
    }
  }

  std::uintptr_t native_stream() const { return 0; }  // the default one

  std::mt19937_64 random_{7};
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::size_t> firsts_;
  std::vector<std::vector<T>> host_;
  std::vector<std::unique_ptr<Memory>> staging_;
  std::vector<std::unique_ptr<Memory>> memory_;
};

using Elements = testing::Types<float, double>;
TYPED_TEST_SUITE(CudaOptimizers, Elements);

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
