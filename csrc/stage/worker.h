// One worker: the device, the pool, the transport, the named channels and the stage engine of one
// process, put together in the order in which they depend on each other.
//
//   add_*  ->  seal  ->  listen  ->  connect  ->  wait_open  ->  start  ->  next_work / complete_*  ->  close
//
// Before add_*, workers on devices of one host may find out whose memory each of them can write into: the
// receiver makes an offer, the sender tries it, and a channel between two that can has places_on_device.
//
// Owned by the compute thread; every call is on it. abort(), pulse(), fail() and stop_serving() may come from
// any thread. One more thread may serve what comes at any time: it calls receive_any(), and send_item() for
// channels that the compute thread leaves to it.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/cpu_share.h"
#include "base/failure.h"
#include "channel/channel_stats.h"
#include "channel/receive_channel.h"
#include "channel/send_channel.h"
#include "channel/transfer.h"
#include "channel/wakeup.h"
#include "device/device.h"
#include "param_server/shard_exchange.h"
#include "pool/pool.h"
#include "schedule/program.h"
#include "stage/engine.h"
#include "stage/worker_options.h"
#include "transport/shared_memory.h"
#include "transport/transport.h"
#include "weights/version_slots.h"
#include "wire/item_fields.h"

namespace pipedream {

class Worker {
 public:
  explicit Worker(const WorkerOptions& options);
  // On this device instead of the one that the options name.
  Worker(WorkerOptions options, std::shared_ptr<Device> device);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // An offer with which workers that will send to this one try whether they can write into its device's
  // memory; until seal(). Empty, with the reason, if there is none to share.
  [[nodiscard]] std::string offer_device_memory(std::string* why = nullptr);
  // Empty when this worker can write into the memory that another offered; else why not.
  [[nodiscard]] std::string why_out_of_reach(const std::string& offer);

  // Before seal. Throw UserError for a name that is taken.
  void add_receive_channel(const ChannelSpec& spec);
  void add_send_channel(const ChannelSpec& spec);
  // is_posted_into: the items of some channels land there, so that workers of this host are to write it.
  void add_term(PoolTerm term, bool is_posted_into = false);
  // Allocates and pre-faults everything.
  void seal();
  // Channel name -> endpoint, for every receive channel.
  [[nodiscard]] std::map<std::string, std::string> listen();
  // Endpoints of every send channel; throws UserError naming the one that is missing.
  void connect(const std::map<std::string, std::string>& endpoints);
  // True: all channels are open. False: the deadline; channels_not_open() says which.
  [[nodiscard]] Result<bool> wait_open(Deadline deadline);
  [[nodiscard]] std::vector<std::string> channels_not_open() const;

  // A slot of a term, leased for the worker's life. The holder keeps pool and memory alive.
  struct HeldSlot {
    std::shared_ptr<Pool> pool;
    Lease lease;
  };
  [[nodiscard]] HeldSlot hold_slot(const std::string& term);

  // Makes the exchange of a stage that has shards at other workers, too: after its channels, before start().
  ShardExchange& make_exchange(ExchangeSpec spec);

  // edges: all of which this worker has one end, but for those of its exchange.
  void start(const ScheduleOptions& options, Rank rank, const std::vector<EdgeChannelName>& edges,
             std::size_t num_spans_max);
  [[nodiscard]] StageEngine& engine();

  // engine().next_work(); on an asynchronous device the compute stream waits for the item's bytes. So in
  // receive_item().
  [[nodiscard]] Result<std::optional<WorkItem>> next_work(Deadline deadline);
  // An event after which what the compute stream does now is done; null on the host. Throws DeviceError,
  // which says where in the program it was.
  [[nodiscard]] std::unique_ptr<Event> record_compute();

  // Items outside the schedule (weights, results): strictly in order, minibatch counts them.
  // False at the deadline: no room yet.
  [[nodiscard]] Result<bool> send_item(const std::string& channel, const ItemFields& fields,
                                       const std::vector<TensorView>& tensors,
                                       std::shared_ptr<void> keep_alive, Deadline deadline);
  void send_end(const std::string& channel);
  // Waits until at most so many of what send_item() was given have not left; the others' memory may change.
  // False at the deadline.
  [[nodiscard]] Result<bool> wait_until_sent(const std::string& channel, std::size_t num_left_max,
                                             Deadline deadline);
  // Destroys what kept sent items alive, of those that have left.
  void collect_released(const std::string& channel) { sender(channel).channel->collect_released(); }
  // The next items of the channel, which has no slots, are to land there: each a part of the term that it is
  // posted into, and of just so many bytes.
  void post_items(const std::string& channel, std::span<const std::span<std::byte>> places);
  // counts_as_wait: in the engine's figures; false where the caller counts it as its own time.
  [[nodiscard]] Result<std::optional<ReceivedItem>> receive_item(const std::string& channel,
                                                                 Deadline deadline,
                                                                 bool counts_as_wait = true);

  // The next item of whichever of the channels has one, and its place among them: the first in their order.
  // Empty at the deadline, and at once after stop_serving(). For a thread that serves: it leaves it to others
  // to drive the transport.
  struct ItemOfAny {
    std::size_t channel_index = 0;
    ReceivedItem item;
  };
  [[nodiscard]] Result<std::optional<ItemOfAny>> receive_any(const std::vector<std::string>& channels,
                                                             Deadline deadline);
  void stop_serving();
  [[nodiscard]] bool has_stopped_serving() const { return stopped_serving_.load(); }

  // Whoever waits here, or will, fails, as this worker cannot go on. Any thread.
  void fail(const std::string& why);

  // Tells every peer why this worker stops. Any thread.
  void abort(const std::string& why);
  // Waits linger_s at most for what was sent to leave, items that wait for a credit included, then stops
  // the transport. After abort() items do not count. Idempotent.
  void close(double linger_s);

  // Whether the channel's items are, or arrive, in device memory.
  [[nodiscard]] bool sends_on_device(const std::string& channel) { return sender(channel).spec.on_device; }
  [[nodiscard]] bool receives_on_device(const std::string& channel) {
    return receiver(channel).spec.on_device;
  }
  [[nodiscard]] const WorkerOptions& options() const { return options_; }
  [[nodiscard]] Device& device() { return *device_; }
  [[nodiscard]] const std::shared_ptr<Pool>& pool() const { return pool_; }
  [[nodiscard]] std::map<std::string, ChannelStats> channel_stats() const;
  // Transfers of one end of a channel that keeps them; the other list is empty.
  struct Transfers {
    std::vector<SentTransfer> sent;
    std::vector<ReceivedTransfer> received;
  };
  // By channel, in the order of the items. What has not left yet is not in it.
  [[nodiscard]] std::map<std::string, Transfers> transfers() const;
  // Waits until everything that was sent by channels that keep transfers has left, so that they are complete.
  // False at the deadline or when the run has failed.
  [[nodiscard]] bool wait_for_transfers(Deadline deadline);
  // The residuals of the codec of a channel that this worker sends by (SendChannel). Empty where it keeps
  // nothing. After seal().
  [[nodiscard]] std::vector<std::vector<std::span<std::byte>>> residuals(const std::string& channel) {
    return sender(channel).channel->residuals();
  }
  // How each channel's tensors travel: "zmq/tcp", "zmq/tcp curve", "shared memory", "cuda ipc", "inproc".
  // After connect(); of what this worker receives, after wait_open().
  [[nodiscard]] std::map<std::string, std::string> channel_transports() const;
  // This program is alive. Any thread, every peer_timeout_s / 8 at least where options.beats.
  void pulse();

 private:
  friend class ExchangeCarrier;  // of the exchange's items

  struct Sender {
    ChannelSpec spec;
    SlotGroup* staging = nullptr;
    SlotGroup* residual = nullptr;
    SlotGroup* encoded = nullptr;
    std::unique_ptr<SendChannel> channel;
    std::atomic<Link*> link{nullptr};  // abort() may come from any thread
    std::int64_t num_items_sent = 0;
  };
  struct Receiver {
    ChannelSpec spec;
    SlotGroup* slots = nullptr;
    SlotGroup* staging = nullptr;
    SlotGroup* encoded = nullptr;
    SharedMemory* shared = nullptr;  // what the wire's slots lie in, the pool's; null when private
    std::unique_ptr<ReceiveChannel> channel;
    std::atomic<Link*> link{nullptr};  // abort() may come from any thread
  };

  void check_new(const std::string& name) const;
  // Aborts or throws when the channel cannot be.
  void check_spec(const ChannelSpec& spec) const;
  [[nodiscard]] bool is_staged(const ChannelSpec& spec) const;
  [[nodiscard]] bool shares_memory() const;
  [[nodiscard]] PoolTerm staging_term(const ChannelSpec& spec) const;
  // Null where nothing is encoded on a device.
  [[nodiscard]] SlotGroup* add_encoded(const ChannelSpec& spec);
  [[nodiscard]] LinkIdentity identity(std::uint32_t channel_id) const;
  [[nodiscard]] SharedMemoryUse shared_use(const ChannelSpec& spec) const;
  [[nodiscard]] SharedMemoryUse posted_use() const;
  [[nodiscard]] std::unique_ptr<Memory> share(Receiver& receiver, std::size_t num_bytes) const;
  [[nodiscard]] ChannelOptions channel_options(const ChannelSpec& spec) const;
  void place(Sender& sender, const std::string& address) const;
  [[nodiscard]] LinkOptions link_options(const ChannelSpec& spec) const;
  [[nodiscard]] Sender& sender(const std::string& name);
  [[nodiscard]] Receiver& receiver(const std::string& name);
  [[nodiscard]] std::optional<Failure> wait_for_bytes(const ReceivedItem& item);
  [[nodiscard]] std::optional<Failure> device_failure();
  // Says where in the program it was; before there is one, and to another thread than the program's, as it
  // is.
  [[nodiscard]] Failure located(const Failure& failure) const;

  const WorkerOptions options_;
  // Destroyed from the last to the first. close() runs before: the transport calls the channels no more, and
  // the channels' copy streams, which end with them, may still post to it.
  std::shared_ptr<Device> device_;
  std::shared_ptr<Stream> compute_stream_;
  std::unique_ptr<SharedMemory> offer_;  // of device memory; until seal()
  std::shared_ptr<Pool> pool_;
  Wakeup wakeup_;
  std::unique_ptr<Transport> transport_;
  std::map<std::string, Sender> senders_;
  std::map<std::string, Receiver> receivers_;
  std::map<std::string, SlotGroup*> terms_;
  std::map<std::string, SharedMemory*> posted_terms_;  // those that others of this host write, by name
  std::vector<std::unique_ptr<VersionSlots>> slots_;   // of each stage
  CpuShare own_cpus_;
  std::unique_ptr<ItemCarrier> carrier_;     // of the exchange
  std::unique_ptr<ShardExchange> exchange_;  // null where there is none
  std::unique_ptr<StageEngine> engine_;
  std::atomic<const StageEngine*> started_engine_{nullptr};  // pulse() may come from any thread
  std::thread::id compute_thread_;                           // of the engine
  std::atomic<bool> stopped_serving_{false};
  std::atomic<bool> aborted_{false};
  bool closed_ = false;
};

}  // namespace pipedream
