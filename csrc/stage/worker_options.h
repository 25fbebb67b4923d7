// Options that make a worker: its own, its channels', and the device and transport that they name. Plain
// values; any thread.
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
  // Receive into memory that senders of the same host write straight into.
  bool shares_memory = true;
  bool checksums = false;  // a CRC-32C of every payload that is sent; a receiver checks whatever has one
  std::uint64_t run_id = 0;
  std::uint32_t incarnation = 0;
  std::uint64_t plan_hash = 0;
  std::uintptr_t compute_stream = 0;  // the framework's stream; 0 on the host
  // The stream that the calling thread's framework computes on now, where it can tell; any thread.
  std::function<std::uintptr_t()> current_stream;
  std::vector<int> own_cpus;  // where the compute thread would rather run; see cpu_share.h
  // Stage through pinned memory even where the wire reads device memory: how the tests run the path of
  // an asynchronous device on the host.
  bool force_staging = false;
};

// A channel of this worker. Both ends give the same name, channel_id and spec.
// How a channel's tensors travel where both ends map the receiver's memory (Worker::channel_transports()).
inline constexpr const char* kSharedMemory = "shared memory";
inline constexpr const char* kCudaIpc = "cuda ipc";  // of memory of a device
// Before the name of the channel: what its terms of the pool are called, besides received items.
inline constexpr const char* kStagingTerm = "staging, ";
inline constexpr const char* kResidualTerm = "residual, ";
inline constexpr const char* kEncodedTerm = "encoded, ";

struct ChannelSpec {
  std::string name;
  std::string peer;  // for errors: "stage 1 (rank 1)"
  std::uint32_t channel_id = 0;
  ItemSpec item;
  std::int64_t num_items = 2;  // receive: slots, and so credits; send: items that may wait or be on the wire
  // First microbatch of its items, counted through the run; a minibatch that is not cut is one microbatch.
  std::int64_t first_microbatch = 0;
  std::int64_t num_microbatches = 1;  // of every minibatch
  std::size_t chunk_bytes = 0;        // 0: measured on the first items, see chunk_tuner.h
  bool on_device = true;              // false: items live in host memory on every device
  Codec codec{};                      // of its float tensors
  // The sender writes into the receiver's device memory: nothing is staged. Both ends have found that it can.
  bool places_on_device = false;
  std::size_t num_transfers_kept = 0;  // the newest items whose times are kept, for transfers()
  std::int64_t microbatch_stride = 1;  // from one of its microbatches to the next; 0: irregular
  std::int64_t num_residuals = 1;      // send: what the codec has left out is kept of so many items, in turn
  // Receive: the items have no slots, post_items() says where in this term each is to land, which lies in the
  // host's memory; and how many places may be posted before their items have begun to come. Empty: slots.
  std::string posted_into{};
  std::size_t num_posts_max = 0;
};

// The channel of an edge of which the worker has one end.
struct EdgeChannelName {
  Edge edge;
  std::string channel;
};

// The most bytes of one frame of the channel: chunks of a slot may be larger than the rest of it, never
// larger than this.
[[nodiscard]] std::size_t payload_bytes_max(const ChannelSpec& spec);

// Throw UserError for a name that is unknown.
[[nodiscard]] std::unique_ptr<Device> make_device(const std::string& name);
[[nodiscard]] std::unique_ptr<Transport> make_transport(const WorkerOptions& options);

}  // namespace pipedream
