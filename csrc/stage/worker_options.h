// Defines the options of a worker and of its channels, and makes the device and the transport that the
// options name. Plain values; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.h"
#include "channel/tensor.h"
#include "codec/codec.h"
#include "device/device.h"
#include "schedule/edge.h"
#include "transport/transport.h"

namespace pipedream {

inline constexpr const char* kInproc = "inproc";

struct WorkerOptions {
  std::string device = "host";    // or "cuda:0"
  std::string transport = "zmq";  // or "inproc"
  std::string libzmq_path;        // empty: as transport.h says
  std::string bind_host = "127.0.0.1";
  std::optional<PortRange> ports;
  double peer_timeout_s = 15.0;
  std::optional<CurveKeys> keys;  // ports, keys, insecure, beats: see TransportOptions
  bool insecure = false;
  bool beats = false;
  // Whether senders of the same host may write straight into this worker's receive memory.
  bool shares_memory = true;
  bool checksums = false;  // send a CRC-32C with every payload; a receiver always checks one
  std::uint64_t run_id = 0;
  std::uint32_t incarnation = 0;
  std::uint64_t plan_hash = 0;
  std::uintptr_t compute_stream = 0;  // the framework's stream; 0 on the host
  // Returns the stream on which the framework computes on the calling thread, if it can tell. Any thread.
  std::function<std::uintptr_t()> current_stream;
  std::vector<int> own_cpus;  // preferred CPUs of the compute thread; see cpu_share.h
  // Stages items through pinned memory even if the wire can read device memory. Tests use it to run the code
  // for asynchronous devices on the host.
  bool force_staging = false;
};

// How a channel's tensors travel when both ends map the receiver's memory (Worker::channel_transports()).
inline constexpr const char* kSharedMemory = "shared memory";
inline constexpr const char* kCudaIpc = "cuda ipc";  // of memory of a device
// Prefixes for the names of a channel's pool terms; the channel's name follows. The term for received items
// has no prefix.
inline constexpr const char* kStagingTerm = "staging, ";
inline constexpr const char* kResidualTerm = "residual, ";
inline constexpr const char* kEncodedTerm = "encoded, ";

// A channel of this worker. Both ends must give the same name, channel_id and spec.
struct ChannelSpec {
  std::string name;
  std::string peer;  // for errors: "stage 1 (rank 1)"
  std::uint32_t channel_id = 0;
  ItemSpec item;
  std::int64_t num_items = 2;  // receive: slots; send: items that may wait or be on the wire at once
  // The channel's first microbatch, counted through the run. A minibatch that is not cut is one microbatch.
  std::int64_t first_microbatch = 0;
  std::int64_t num_microbatches = 1;  // of every minibatch
  std::size_t chunk_bytes = 0;        // 0: the usual size (send_channel.h)
  bool on_device = true;              // false: items live in host memory on every device
  Codec codec{};                      // of its float tensors
  // Whether the sender writes into the receiver's device memory, so that nothing is staged. Both ends have
  // tested before that the sender can.
  bool places_on_device = false;
  std::size_t num_transfers_kept = 0;  // how many of the newest items transfers() has
  std::int64_t microbatch_stride = 1;  // the step between its microbatches; 0: irregular
  std::int64_t num_residuals = 1;      // send: slots for the codec's residuals, used in turn
  // For a receiving channel: the name of a term in host memory. If it is set, the channel has no slots, and
  // post_items() names the place in this term where each item will land. num_posts_max: the most places that
  // may be posted before their items have begun to arrive.
  std::string posted_into{};
  std::size_t num_posts_max = 0;
};

// The name of the channel for an edge with one end at this worker.
struct EdgeChannelName {
  Edge edge;
  std::string channel;
};

// The most payload bytes of one frame of the channel.
[[nodiscard]] std::size_t payload_bytes_max(const ChannelSpec& spec);

// make_device() and make_transport() throw UserError for a name that is unknown.
[[nodiscard]] std::unique_ptr<Device> make_device(const std::string& name);
[[nodiscard]] std::unique_ptr<Transport> make_transport(const WorkerOptions& options);

}  // namespace pipedream
