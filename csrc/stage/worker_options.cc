#include "stage/worker_options.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "base/failure.h"
#include "channel/wire_layout.h"
#include "stage/abort_frame.h"
#include "weights/optimizer_kernels.h"

namespace pipedream {

std::size_t payload_bytes_max(const ChannelSpec& spec) {
  const std::size_t slot_bytes = WireLayout(spec.item, spec.codec).slot_bytes();
  const std::size_t chunk_bytes = spec.chunk_bytes != 0 ? spec.chunk_bytes : kUsualChunkBytes;
  return std::max(std::min(chunk_bytes, slot_bytes), kAbortTextBytesMax);
}

std::unique_ptr<Device> make_device(const std::string& name) {
  if (name == "host") return make_host_device();
  constexpr std::string_view kCudaPrefix = "cuda:";
  if (name.starts_with(kCudaPrefix)) {
    const char* const end = name.data() + name.size();
    unsigned device_index = 0;
    const auto [stop, error] = std::from_chars(name.data() + kCudaPrefix.size(), end, device_index);
    if (error == std::errc() && stop == end) {
      auto device = make_cuda_device(static_cast<int>(device_index));
      load_optimizer_kernels(device->index());
      return device;
    }
  }
  throw UserError("device '" + name + "' is unknown: use 'host' or 'cuda:N'");
}

std::unique_ptr<Transport> make_transport(const WorkerOptions& options) {
  if (options.transport == "zmq") return make_zmq_transport(options, options.libzmq_path);
  if (options.transport == kInproc) return make_inproc_transport(options);
  throw UserError("transport '" + options.transport + "' is unknown: use 'zmq' or 'inproc'");
}

}  // namespace pipedream
