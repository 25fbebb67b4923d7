#include "stage/worker.h"

#include <algorithm>
#include <utility>

#include "channel/wire_layout.h"
#include "stage/abort_frame.h"
#include "transport/device_offer.h"
#include "transport/endpoint.h"

namespace pipedream {

Worker::Worker(const WorkerOptions& options) : Worker(options, make_device(options.device)) {}

Worker::Worker(WorkerOptions options, std::shared_ptr<Device> device)
    : options_(std::move(options)),
      device_(std::move(device)),
      transport_(make_transport(options_)),
      own_cpus_(options_.own_cpus) {
  wakeup_.drive_while_waiting(*transport_);
  if (device_->type() != DeviceType::kHost) compute_stream_ = device_->wrap_stream(options_.compute_stream);
  // The framework may keep items longer than the worker lives. Items keep the pool alive, and the pool's
  // deleter keeps the device and the stream.
  pool_ = std::shared_ptr<Pool>(new Pool(*device_), [device = device_, stream = compute_stream_](Pool* pool) {
    delete pool;  // NOLINT(cppcoreguidelines-owning-memory)
  });
}

Worker::~Worker() { close(0); }

std::string Worker::offer_device_memory(std::string* why) {
  PD_CHECK(!pool_->sealed(), "an offer of device memory after the seal");
  if (!offer_) offer_ = make_device_offer(*device_, identity(0), why);
  return offer_ ? offer_->address() : "";
}

std::string Worker::why_out_of_reach(const std::string& offer) {
  return ::pipedream::why_out_of_reach(*device_, offer, identity(0));
}

void Worker::seal() {
  offer_.reset();
  pool_->seal();
  for (auto& [name, receiver] : receivers_) {
    if (const auto posted = posted_terms_.find(receiver.spec.posted_into); posted != posted_terms_.end()) {
      receiver.shared = posted->second;
    }
    receiver.channel = std::make_unique<ReceiveChannel>(
        channel_options(receiver.spec), *transport_, wakeup_, *device_, *receiver.slots, receiver.staging,
        receiver.spec.on_device ? compute_stream_.get() : nullptr, receiver.shared, receiver.encoded);
  }
  for (auto& [name, sender] : senders_) {
    sender.channel = std::make_unique<SendChannel>(channel_options(sender.spec), *transport_, wakeup_,
                                                   *device_, sender.staging, sender.residual, sender.encoded);
  }
}

LinkOptions Worker::link_options(const ChannelSpec& spec) const {
  LinkOptions link;
  link.identity = identity(spec.channel_id);
  link.plan_hash = options_.plan_hash;
  link.name = spec.name;
  link.peer = spec.peer;
  link.payload_bytes_max = payload_bytes_max(spec);
  link.checksums_payloads = options_.checksums;
  return link;
}

std::map<std::string, std::string> Worker::listen() {
  std::map<std::string, std::string> endpoints;
  for (auto& [name, receiver] : receivers_) {
    Link& link = transport_->listen(link_options(receiver.spec), *receiver.channel);
    receiver.link.store(&link);
    receiver.channel->attach(link);
    Endpoint endpoint = parse_endpoint(link.endpoint());
    if (receiver.shared != nullptr) endpoint.memory = receiver.shared->address();
    endpoints[name] = to_string(endpoint);
  }
  return endpoints;
}

void Worker::connect(const std::map<std::string, std::string>& endpoints) {
  for (auto& [name, sender] : senders_) {
    const auto text = endpoints.find(name);
    if (text == endpoints.end()) throw UserError("no endpoint for channel '" + name + "'");
    Endpoint endpoint = parse_endpoint(text->second);
    const bool has_memory = !endpoint.memory.empty() || sender.spec.places_on_device;
    if (shares_memory() && has_memory) place(sender, endpoint.memory);
    endpoint.memory.clear();
    Link& link = transport_->connect(link_options(sender.spec), to_string(endpoint), *sender.channel);
    sender.link.store(&link);
    sender.channel->attach(link);
  }
}

Result<bool> Worker::wait_open(Deadline deadline) {
  const bool open = wakeup_.wait_until(deadline, [&] { return channels_not_open().empty(); });
  if (!open) {
    if (auto failure = wakeup_.failure()) return *failure;
  }
  return open;
}

std::vector<std::string> Worker::channels_not_open() const {
  std::vector<std::string> names;
  for (const auto& [name, receiver] : receivers_) {
    if (!receiver.channel->open()) names.push_back(name);
  }
  for (const auto& [name, sender] : senders_) {
    if (!sender.channel->open()) names.push_back(name);
  }
  return names;
}

Worker::HeldSlot Worker::hold_slot(const std::string& term) {
  const auto group = terms_.find(term);
  PD_CHECK(group != terms_.end(), term);
  return {pool_, group->second->lease()};
}

Worker::Sender& Worker::sender(const std::string& name) {
  const auto found = senders_.find(name);
  PD_CHECK(found != senders_.end(), "no send channel '" << name << "'");
  return found->second;
}

Worker::Receiver& Worker::receiver(const std::string& name) {
  const auto found = receivers_.find(name);
  PD_CHECK(found != receivers_.end(), "no receive channel '" << name << "'");
  return found->second;
}

void Worker::start(const ScheduleOptions& options, Rank rank, const std::vector<EdgeChannelName>& edges,
                   std::size_t num_spans_max) {
  const Placement placement = placement_of(options);
  std::vector<EdgeChannel> channels;
  for (const auto& [edge, name] : edges) {
    if (placement.rank_of(edge.from.stage, edge.from.replica) == rank) {
      const Sender& from = sender(name);
      channels.push_back({edge, from.channel.get(), nullptr, from.spec.on_device});
    } else {
      const Receiver& to = receiver(name);
      channels.push_back({edge, nullptr, to.channel.get(), to.spec.on_device});
    }
  }
  std::vector<StagePart> parts;
  for (const StageIndex stage : placement.stages_at(rank)) {
    slots_.push_back(std::make_unique<VersionSlots>(num_versions_kept(options, stage),
                                                    rounds_of(options, stage).first_version(),
                                                    oldest_version(options, stage)));
    parts.push_back({stage, slots_.back().get()});
  }
  compute_thread_ = std::this_thread::get_id();
  engine_ = std::make_unique<StageEngine>(options, rank, parts, std::move(channels), wakeup_, num_spans_max,
                                          exchange_.get());
  started_engine_.store(engine_.get());
}

StageEngine& Worker::engine() {
  PD_CHECK(engine_ != nullptr, "start() comes first");
  return *engine_;
}

Result<std::optional<WorkItem>> Worker::next_work(Deadline deadline) {
  const Deadline began = Clock::now();
  own_cpus_.come_back(nanoseconds_of(began));
  wakeup_.run_deferred();
  const bool waits = began < deadline;
  auto work = engine().next_work(deadline);
  if (waits && work && !work.value()) {
    if (auto failure = device_failure()) return *failure;
  }
  if (work && work.value() && work.value()->received) {
    if (auto failure = wait_for_bytes(*work.value()->received)) return *failure;
  }
  return work;
}

// Asks the device for an error. Called when a wait has ended without an item, because a failure of this
// worker's device may have lost the awaited item.
std::optional<Failure> Worker::device_failure() try {
  device_->check();
  return std::nullopt;
} catch (const DeviceError& error) {
  return located({FailureKind::kDeviceError, error.what()});
}

// Makes the compute stream wait for the item's bytes. Without a compute stream (force_staging on a host) the
// CPU waits.
std::optional<Failure> Worker::wait_for_bytes(const ReceivedItem& item) try {
  if (!item.ready) return std::nullopt;
  if (compute_stream_) {
    compute_stream_->wait(*item.ready);
  } else {
    item.ready->wait();
  }
  return std::nullopt;
} catch (const DeviceError& error) {
  return located({FailureKind::kDeviceError, error.what()});
}

std::unique_ptr<Event> Worker::record_compute() try {
  if (!compute_stream_) return nullptr;
  auto event = device_->make_event();
  compute_stream_->record(*event);
  return event;
} catch (const DeviceError& error) {
  throw DeviceError(located({FailureKind::kDeviceError, error.what()}).message);
}

Result<bool> Worker::send_item(const std::string& channel, const ItemFields& fields,
                               const std::vector<TensorView>& tensors, std::shared_ptr<void> keep_alive,
                               Deadline deadline) {
  Sender& to = sender(channel);
  to.channel->collect_released();
  // A failed channel always has room.
  if (auto failure = wakeup_.failure()) return located(*failure);
  if (!to.channel->wait_for_room(deadline)) {
    if (auto failure = wakeup_.failure()) return located(*failure);
    return false;
  }
  std::unique_ptr<Event> ready;
  try {
    if (to.spec.on_device) ready = record_compute();
  } catch (const DeviceError& error) {
    return Failure{FailureKind::kDeviceError, error.what()};
  }
  to.channel->send(MinibatchId(to.num_items_sent++), MicrobatchIndex(0), fields, tensors, std::move(ready),
                   std::move(keep_alive));
  return true;
}

Result<bool> Worker::wait_until_sent(const std::string& channel, std::size_t num_left_max,
                                     Deadline deadline) {
  const bool have_left = sender(channel).channel->wait_until_fewer(num_left_max + 1, deadline);
  if (auto failure = wakeup_.failure()) return located(*failure);
  return have_left;
}

Failure Worker::located(const Failure& failure) const {
  return engine_ && std::this_thread::get_id() == compute_thread_ ? engine_->located(failure) : failure;
}

void Worker::send_end(const std::string& channel) {
  Sender& to = sender(channel);
  to.channel->send_end(to.num_items_sent);
}

void Worker::post_items(const std::string& channel, std::span<const std::span<std::byte>> places) {
  Receiver& to = receiver(channel);
  const SlotGroup& term = *terms_.at(to.spec.posted_into);
  const std::byte* const begin = term.slot_data(SlotIndex(0));
  const std::byte* const end = term.slot_data(SlotIndex(term.term().num_slots - 1)) + term.term().slot_bytes;
  for (const std::span<std::byte> place : places) {
    PD_CHECK(begin <= place.data() && place.data() + place.size() <= end,
             place.size() << " bytes that are not in '" << to.spec.posted_into << "'");
  }
  to.channel->post(places);
}

Result<std::optional<ReceivedItem>> Worker::receive_item(const std::string& channel, Deadline deadline,
                                                         bool counts_as_wait) {
  ReceiveChannel& from = *receiver(channel).channel;
  ReceivedItem item;
  bool exhausted = false;
  const std::int64_t began_ns = now_ns();
  const bool accepted = wakeup_.wait_until(deadline, [&] {
    if (from.try_take(item)) return true;
    exhausted = from.exhausted();
    return exhausted;
  });
  const std::int64_t wait_ns = now_ns() - began_ns;
  from.add_wait(wait_ns);
  if (engine_ && counts_as_wait) engine_->add_wait(wait_ns);
  if (accepted && !exhausted) {
    if (auto failure = wait_for_bytes(item)) return *failure;
    return std::optional<ReceivedItem>(std::move(item));
  }
  if (auto failure = wakeup_.failure()) return located(*failure);
  if (exhausted)
    return located({FailureKind::kPeerLost, channel + ": closed by the peer before it was complete"});
  if (auto failure = device_failure()) return *failure;
  return std::optional<ReceivedItem>();
}

Result<std::optional<Worker::ItemOfAny>> Worker::receive_any(const std::vector<std::string>& channels,
                                                             Deadline deadline) {
  std::vector<ReceiveChannel*> sources;
  for (const std::string& channel : channels) sources.push_back(receiver(channel).channel.get());
  ItemOfAny found;
  bool is_taken = false;
  const ReceiveChannel* exhausted = nullptr;
  {
    const PassiveScope leaves_driving_to_others;
    static_cast<void>(wakeup_.wait_until(deadline, [&] {
      for (found.channel_index = 0; found.channel_index < sources.size(); ++found.channel_index) {
        ReceiveChannel& source = *sources[found.channel_index];
        is_taken = source.try_take(found.item);
        if (is_taken) return true;
        if (source.exhausted()) exhausted = &source;
      }
      return exhausted != nullptr || stopped_serving_.load();
    }));
  }
  if (is_taken) {
    if (auto failure = wait_for_bytes(found.item)) return *failure;
    return std::optional<ItemOfAny>(std::move(found));
  }
  if (auto failure = wakeup_.failure()) return *failure;
  if (exhausted != nullptr) {
    return Failure{FailureKind::kPeerLost,
                   exhausted->options().name + ": closed by the peer before it was complete"};
  }
  if (auto failure = device_failure()) return *failure;
  return std::optional<ItemOfAny>();
}

void Worker::stop_serving() {
  wakeup_.update([this] { stopped_serving_.store(true); });
}

void Worker::fail(const std::string& why) { wakeup_.fail({FailureKind::kAborted, why}); }

void Worker::abort(const std::string& why) {
  aborted_.store(true);
  for (auto& [name, sender] : senders_) {
    if (Link* link = sender.link.load()) send_abort(*link, why);
  }
  for (auto& [name, receiver] : receivers_) {
    if (Link* link = receiver.link.load()) send_abort(*link, why);
  }
}

void Worker::close(double linger_s) {
  if (closed_) return;
  closed_ = true;
  for (auto& [name, receiver] : receivers_) {
    if (receiver.channel) receiver.channel->detach();
  }
  const Deadline deadline = Clock::now() + duration_of(linger_s);
  for (auto& [name, sender] : senders_) {
    if (sender.link.load() != nullptr && !aborted_.load()) sender.channel->wait_until_sent(deadline);
  }
  transport_->shutdown(std::max(0.0, std::chrono::duration<double>(deadline - Clock::now()).count()));
  for (auto& [name, sender] : senders_) {
    if (!sender.channel) continue;
    sender.channel->collect_released();
    sender.channel->end_placing();
  }
  // Other workers that map this worker's device memory end now, too. The memory's destructors wait for them,
  // all with this one deadline, so that several workers that do not end delay this worker only once.
  const Deadline patience_end = Clock::now() + kOpenerPatience;
  for (auto& [name, receiver] : receivers_) {
    if (receiver.shared != nullptr) receiver.shared->wait_until_at_most(patience_end);
  }
}

std::map<std::string, ChannelStats> Worker::channel_stats() const {
  std::map<std::string, ChannelStats> stats;
  for (const auto& [name, sender] : senders_) {
    if (sender.channel) stats[name] = sender.channel->stats();
  }
  for (const auto& [name, receiver] : receivers_) {
    if (receiver.channel) stats[name] = receiver.channel->stats();
  }
  return stats;
}

std::map<std::string, Worker::Transfers> Worker::transfers() const {
  std::map<std::string, Transfers> transfers;
  for (const auto& [name, sender] : senders_) {
    if (sender.spec.num_transfers_kept > 0) transfers[name].sent = sender.channel->transfers();
  }
  for (const auto& [name, receiver] : receivers_) {
    if (receiver.spec.num_transfers_kept > 0) transfers[name].received = receiver.channel->transfers();
  }
  return transfers;
}

bool Worker::wait_for_transfers(Deadline deadline) {
  return std::all_of(senders_.begin(), senders_.end(), [&](const auto& named) {
    const Sender& sender = named.second;
    return sender.spec.num_transfers_kept == 0 || sender.channel->wait_until_sent(deadline);
  });
}

void Worker::pulse() {
  const StageEngine* const engine = started_engine_.load();
  transport_->pulse(engine != nullptr ? engine->num_completed() : 0);
}

}  // namespace pipedream
