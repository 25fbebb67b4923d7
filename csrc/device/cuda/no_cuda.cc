// Replaces the CUDA part of device.h in a build without CUDA, by an error that says how to get CUDA.
#include "base/failure.h"
#include "device/device.h"

namespace pipedream {

bool built_with_cuda() { return false; }

bool cuda_available() { return false; }

std::string why_no_cuda() { return "it was built without CUDA"; }

std::unique_ptr<Device> make_cuda_device(int index) {
  throw UserError("cuda:" + std::to_string(index) +
                  " was asked for, but pipedream was built without CUDA; install the CUDA toolkit and "
                  "reinstall with PIPEDREAM_CUDA=on, or use the host device");
}

}  // namespace pipedream
