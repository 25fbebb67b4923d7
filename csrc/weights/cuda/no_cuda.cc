// Replaces the CUDA part of sgd.h and adam.h in a build without CUDA, by errors that say how to get CUDA.
#include <string>

#include "base/failure.h"
#include "weights/adam.h"
#include "weights/optimizer_kernels.h"
#include "weights/sgd.h"

namespace pipedream {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw UserError(what +
                  " on a CUDA device was asked for, but pipedream was built without CUDA; install the CUDA "
                  "toolkit and reinstall with PIPEDREAM_CUDA=on, or use torch.optim's");
}

}  // namespace

void load_optimizer_kernels(int /*device_index*/) {}

void sgd_step_cuda(const SgdOptions&, DType, std::span<const SgdTensor>, bool, double, std::uintptr_t) {
  refuse("the native SGD");
}

void adam_step_cuda(const AdamOptions&, DType, std::span<const AdamTensor>, std::int64_t, double,
                    std::uintptr_t) {
  refuse("the native Adam");
}

}  // namespace pipedream
