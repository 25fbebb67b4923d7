// A Worker owns the device, pool, transport, named channels and stage engine of a process. It makes them in
// the order in which they depend on each other.
//
//   add_* -> seal -> listen -> connect -> wait_open -> start -> next_work, engine().complete -> close
//
// Before add_*, workers with devices on one host may find out which worker can write into which other
// worker's device memory. The receiver makes an offer, and the sender tries to use it. If this succeeds, a
// channel of device tensors between the two has places_on_device, unless it has a codec.
//
// The compute thread owns the worker and makes every call. Only abort(), pulse(), fail() and stop_serving()
// may be called from any thread. One more thread may serve requests at any time: it calls receive_any(). On
// channels that the compute thread leaves to it, it also calls send_item(), wait_until_sent() and
// collect_released().
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
  // Uses this device instead of the one that the options name.
  Worker(WorkerOptions options, std::shared_ptr<Device> device);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // An offer of device memory, valid until seal(). Workers that will send to this worker use the offer to
  // test whether they can write into its device memory. Empty, with the reason in `why`, if the device cannot
  // share memory.
  [[nodiscard]] std::string offer_device_memory(std::string* why = nullptr);
  // The reason why this worker cannot write into the memory of the offer; empty if it can.
  [[nodiscard]] std::string why_out_of_reach(const std::string& offer);

  // add_receive_channel(), add_send_channel() and add_term() are called before seal(). They throw UserError
  // for a name that is taken.
  void add_receive_channel(const ChannelSpec& spec);
  void add_send_channel(const ChannelSpec& spec);
  // is_posted_into: whether items of some channels land in this term, so that other workers of this host must
  // be able to write to its memory.
  void add_term(PoolTerm term, bool is_posted_into = false);
  // Allocates and pre-faults all memory, and makes the channels.
  void seal();
  // Listens on every receive channel, and returns the endpoints by the channels' names.
  [[nodiscard]] std::map<std::string, std::string> listen();
  // endpoints: the endpoint of every send channel, by the channel's name. Throws UserError if an endpoint is
  // missing or wrong, or if device memory into which a channel places cannot be opened.
  void connect(const std::map<std::string, std::string>& endpoints);
  // True when all channels are open. False at the deadline; then channels_not_open() returns the names of the
  // channels that are not open.
  [[nodiscard]] Result<bool> wait_open(Deadline deadline);
  [[nodiscard]] std::vector<std::string> channels_not_open() const;

  // A slot of a term (a group of equal slots in the pool). It is leased as long as this object lives, and
  // `pool` keeps the memory alive.
  struct HeldSlot {
    std::shared_ptr<Pool> pool;
    Lease lease;
  };
  [[nodiscard]] HeldSlot hold_slot(const std::string& term);

  // Makes the exchange of a stage whose shards have several owners. Called after its channels are added and
  // before start().
  ShardExchange& make_exchange(ExchangeSpec spec);

  // edges: all edges with one end at this worker, except the edges of its exchange.
  void start(const ScheduleOptions& options, Rank rank, const std::vector<EdgeChannelName>& edges,
             std::size_t num_spans_max);
  [[nodiscard]] StageEngine& engine();

  // Returns engine().next_work(). On an asynchronous device the compute stream waits for the item's bytes, as
  // in receive_item().
  [[nodiscard]] Result<std::optional<WorkItem>> next_work(Deadline deadline);
  // An event that is done when the compute stream's present work is done; null on the host. Throws
  // DeviceError with the position in the program.
  [[nodiscard]] std::unique_ptr<Event> record_compute();

  // Sends an item outside the schedule, such as weights or results, strictly in order. In place of a
  // minibatch, an item has its number among the channel's items. False if there was no room until the
  // deadline.
  [[nodiscard]] Result<bool> send_item(const std::string& channel, const ItemFields& fields,
                                       const std::vector<TensorView>& tensors,
                                       std::shared_ptr<void> keep_alive, Deadline deadline);
  void send_end(const std::string& channel);
  // Waits until at most num_left_max items of send_item() are unsent. The memory of the sent items may change
  // then. False at the deadline.
  [[nodiscard]] Result<bool> wait_until_sent(const std::string& channel, std::size_t num_left_max,
                                             Deadline deadline);
  // Destroys the keep_alives of items that are sent.
  void collect_released(const std::string& channel) { sender(channel).channel->collect_released(); }
  // Posts the places where the channel's next items will land, because the channel's slots have no memory.
  // Each place is a part of the term that the channel is posted into, and has exactly the item's bytes.
  void post_items(const std::string& channel, std::span<const std::span<std::byte>> places);
  // Receives the channel's next item; nothing at the deadline. counts_as_wait: whether the time is added to
  // the engine's wait. Pass false if the caller counts it as its own time.
  [[nodiscard]] Result<std::optional<ReceivedItem>> receive_item(const std::string& channel,
                                                                 Deadline deadline,
                                                                 bool counts_as_wait = true);

  // The next item of the first channel in the list that has one, and that channel's index in the list.
  // receive_any() returns nothing at the deadline. After stop_serving() it does not wait. It is for a thread
  // that serves requests, and leaves it to other threads to drive the transport.
  struct ItemOfAny {
    std::size_t channel_index = 0;
    ReceivedItem item;
  };
  [[nodiscard]] Result<std::optional<ItemOfAny>> receive_any(const std::vector<std::string>& channels,
                                                             Deadline deadline);
  void stop_serving();
  [[nodiscard]] bool has_stopped_serving() const { return stopped_serving_.load(); }

  // Makes all present and later waits in this worker fail, because the worker cannot go on. Any thread.
  void fail(const std::string& why);

  // Tells every peer why this worker stops. Any thread.
  void abort(const std::string& why);
  // Waits at most linger_s until all items are sent, even items that wait for a credit. After abort() it does
  // not wait for items. Then it stops the transport. Idempotent.
  void close(double linger_s);

  // Whether the channel's items are in device memory at this worker.
  [[nodiscard]] bool sends_on_device(const std::string& channel) { return sender(channel).spec.on_device; }
  [[nodiscard]] bool receives_on_device(const std::string& channel) {
    return receiver(channel).spec.on_device;
  }
  [[nodiscard]] const WorkerOptions& options() const { return options_; }
  [[nodiscard]] Device& device() { return *device_; }
  [[nodiscard]] const std::shared_ptr<Pool>& pool() const { return pool_; }
  [[nodiscard]] std::map<std::string, ChannelStats> channel_stats() const;
  // The transfers at one end of a channel that records transfers. A sender fills `sent` and a receiver fills
  // `received`; the other list is empty.
  struct Transfers {
    std::vector<SentTransfer> sent;
    std::vector<ReceivedTransfer> received;
  };
  // The newest transfers of each channel that records transfers, in the order of the items, without items
  // that are not sent yet.
  [[nodiscard]] std::map<std::string, Transfers> transfers() const;
  // Waits until all items of channels that record transfers are sent, so that transfers() is complete. False
  // at the deadline or when the run has failed.
  [[nodiscard]] bool wait_for_transfers(Deadline deadline);
  // The codec's residuals of a channel on which this worker sends (SendChannel). Empty if the codec keeps
  // none. After seal().
  [[nodiscard]] std::vector<std::vector<std::span<std::byte>>> residuals(const std::string& channel) {
    return sender(channel).channel->residuals();
  }
  // How each channel's tensors travel: "zmq/tcp", "zmq/tcp curve", "shared memory", "cuda ipc", "inproc".
  // Known after connect() for channels that send, and after wait_open() for channels that receive.
  [[nodiscard]] std::map<std::string, std::string> channel_transports() const;
  // Says that this program is alive. With options.beats call it more often than every peer_timeout_s / 4, so
  // that every beat has a pulse (TransportOptions). Any thread.
  void pulse();

 private:
  friend class ExchangeCarrier;  // sends and receives the exchange's items

  struct Sender {
    ChannelSpec spec;
    SlotGroup* staging = nullptr;
    SlotGroup* residual = nullptr;
    SlotGroup* encoded = nullptr;
    std::unique_ptr<SendChannel> channel;
    std::atomic<Link*> link{nullptr};  // atomic, because abort() may be called on any thread
    std::int64_t num_items_sent = 0;
  };
  struct Receiver {
    ChannelSpec spec;
    SlotGroup* slots = nullptr;
    SlotGroup* staging = nullptr;
    SlotGroup* encoded = nullptr;
    // The shared memory into which the sender may write: the slots that the wire writes, or the term that the
    // channel is posted into. The pool owns it. Null if no memory is shared.
    SharedMemory* shared = nullptr;
    std::unique_ptr<ReceiveChannel> channel;
    std::atomic<Link*> link{nullptr};  // atomic, because abort() may be called on any thread
  };

  void check_new(const std::string& name) const;
  // Aborts, or throws UserError, if a channel with this spec is impossible.
  void check_spec(const ChannelSpec& spec) const;
  [[nodiscard]] bool is_staged(const ChannelSpec& spec) const;
  [[nodiscard]] bool shares_memory() const;
  [[nodiscard]] PoolTerm staging_term(const ChannelSpec& spec) const;
  // Adds the channel's term for encoded items to the pool, and returns its slots. Null if the channel encodes
  // nothing, or encodes straight into staging memory.
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
  // Adds the position in the program, if there is a program and this is its thread.
  [[nodiscard]] Failure located(const Failure& failure) const;

  const WorkerOptions options_;
  // Members are destroyed from the last to the first, after close(). By then the transport calls no channels.
  // But the channels' copy streams, which end together with the channels, may still post to the transport.
  std::shared_ptr<Device> device_;
  std::shared_ptr<Stream> compute_stream_;
  std::unique_ptr<SharedMemory> offer_;  // of device memory; null after seal()
  std::shared_ptr<Pool> pool_;
  Wakeup wakeup_;
  std::unique_ptr<Transport> transport_;
  std::map<std::string, Sender> senders_;
  std::map<std::string, Receiver> receivers_;
  std::map<std::string, SlotGroup*> terms_;
  std::map<std::string, SharedMemory*> posted_terms_;  // terms that other workers of this host write, by name
  std::vector<std::unique_ptr<VersionSlots>> slots_;   // of each stage
  CpuShare own_cpus_;
  std::unique_ptr<ItemCarrier> carrier_;     // of the exchange
  std::unique_ptr<ShardExchange> exchange_;  // null if the stage's shards have one owner
  std::unique_ptr<StageEngine> engine_;
  // Atomic, because pulse() may be called on any thread.
  std::atomic<const StageEngine*> started_engine_{nullptr};
  std::thread::id compute_thread_;  // of the engine
  std::atomic<bool> stopped_serving_{false};
  std::atomic<bool> aborted_{false};
  bool closed_ = false;
};

}  // namespace pipedream
