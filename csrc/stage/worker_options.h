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

#include "channel/send_channel.h"
#include "device/device.h"
#include "schedule/edge.h"
#include "transport/transport.h"

namespace pipedream {

inline constexpr const char* kInproc = "inproc";

// The transport's options apply to all links of the worker.
struct WorkerOptions : TransportOptions {
  WorkerOptions() { shares_memory = true; }

  std::string device = "host";    // or "cuda:0"
  std::string transport = "zmq";  // or "inproc"
  std::string libzmq_path;        // empty: chosen as make_zmq_transport() says
  bool checksums = false;  // whether sent payloads get a CRC-32C; a receiver checks each one that comes
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
inline constexpr const char* kCudaIpc = "cuda ipc";
// Prefixes for the names of a channel's pool terms; the channel's name follows. The term for received items
// has no prefix.
inline constexpr const char* kStagingTerm = "staging, ";
inline constexpr const char* kResidualTerm = "residual, ";
inline constexpr const char* kEncodedTerm = "encoded, ";

// A channel of this worker. Both ends must give the same name, channel_id, item and codec. A receiver has
// num_items_max slots.
struct ChannelSpec : ChannelOptions {
  ChannelSpec() { num_items_max = 2; }

  std::string peer;       // for errors: "stage 1 (rank 1)"
  bool on_device = true;  // false: items live in host memory, even if the stage is on a GPU
  // Whether the sender writes into the receiver's device memory, so that nothing is staged. Both ends have
  // tested before that the sender can.
  bool places_on_device = false;
  std::int64_t num_residuals = 1;  // of a sender: slots for the codec's residuals, used in turn
  // For a receiving channel: the name of a term in host memory. If it is set, the channel's slots have no
  // memory, and post_items() names the place in this term where each item will land.
  std::string posted_into{};
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
