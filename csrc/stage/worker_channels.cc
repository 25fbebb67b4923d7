// This part of Worker plans its channels: the memory that each channel needs, and how the channel's items
// travel. Used on the compute thread.
#include <utility>

#include "channel/wire_layout.h"
#include "stage/shared_term_memory.h"
#include "stage/worker.h"

namespace pipedream {

void Worker::check_new(const std::string& name) const {
  if (senders_.contains(name) || receivers_.contains(name))
    throw UserError("channel '" + name + "' exists already");
}

void Worker::check_spec(const ChannelSpec& spec) const {
  check_new(spec.name);
  if (spec.num_items_max < 1) {
    throw UserError("channel '" + spec.name + "' has num_items " + std::to_string(spec.num_items_max) +
                    "; it must be 1 or more");
  }
  if (spec.chunk_bytes > kChunkBytesMax) {
    throw UserError("channel '" + spec.name + "' has chunk_bytes " + std::to_string(spec.chunk_bytes) +
                    "; a frame has at most " + std::to_string(kChunkBytesMax));
  }
  if (!spec.on_device && WireLayout(spec.item, spec.codec).encodes()) {
    throw UserError("channel '" + spec.name + "' of host memory has codec " + codec_name(spec.codec) +
                    "; only items on the device can be encoded");
  }
  if (!spec.places_on_device) return;
  // The caller has tested at both ends that the sender can write into the receiver's device memory.
  PD_CHECK(spec.on_device && !WireLayout(spec.item, spec.codec).encodes(), spec.name);
  PD_CHECK(shares_memory(), spec.name);
}

bool Worker::is_staged(const ChannelSpec& spec) const {
  if (!spec.on_device || spec.places_on_device) return false;
  return options_.force_staging || !device_->device_memory_is_host_memory() ||
         WireLayout(spec.item, spec.codec).encodes();
}

// Whether other workers of the same host may use this worker's memory.
bool Worker::shares_memory() const { return options_.shares_memory && options_.transport != kInproc; }

PoolTerm Worker::staging_term(const ChannelSpec& spec) const {
  return {kStagingTerm + spec.name, WireLayout(spec.item, spec.codec).slot_bytes(),
          static_cast<std::int64_t>(spec.num_items_max), MemoryKind::kStaging};
}

SlotGroup* Worker::add_encoded(const ChannelSpec& spec) {
  const WireLayout layout(spec.item, spec.codec);
  if (!layout.encodes() || device_->device_memory_is_host_memory()) return nullptr;
  return &pool_->add({kEncodedTerm + spec.name, layout.slot_bytes(), 1, MemoryKind::kDevice});
}

LinkIdentity Worker::identity(std::uint32_t channel_id) const {
  return {options_.run_id, options_.incarnation, channel_id};
}

// How the channel uses shared memory. Both ends compute it from the plan and do not read it from the
// endpoint, because strangers may write endpoints.
SharedMemoryUse Worker::shared_use(const ChannelSpec& spec) const {
  return {identity(spec.channel_id), WireLayout(spec.item, spec.codec).slot_bytes()};
}

// The SharedMemoryUse of a pool term in which several channels' items land.
SharedMemoryUse Worker::posted_use() const { return {identity(kPostedChannelId), 0}; }

std::unique_ptr<Memory> Worker::share(Receiver& receiver, std::size_t num_bytes) const {
  const SharedMemoryUse use = shared_use(receiver.spec);
  std::string why;
  auto shared = receiver.spec.places_on_device ? SharedMemory::make_on(*device_, num_bytes, use, &why)
                                               : SharedMemory::make(num_bytes, use);
  if (!shared) throw UserError("the slots of " + receiver.spec.name + ": " + why);
  auto memory = std::make_unique<SharedTermMemory>(*device_, std::move(shared));
  receiver.shared = &memory->shared();
  return memory;
}

void Worker::add_receive_channel(const ChannelSpec& spec) {
  check_spec(spec);
  Receiver& receiver = receivers_[spec.name];
  receiver.spec = spec;
  const bool is_posted = !spec.posted_into.empty();
  PD_CHECK(!is_posted || (device_->device_memory_is_host_memory() && !is_staged(spec)), spec.name);
  PoolTerm slots{spec.name, is_posted ? 0 : spec.item.slot_bytes(),
                 static_cast<std::int64_t>(spec.num_items_max),
                 spec.on_device ? MemoryKind::kDevice : MemoryKind::kStaging};
  PoolTerm staging = staging_term(spec);
  if (shares_memory() && !is_posted) {  // shares the slots that the wire writes
    (is_staged(spec) ? staging : slots).allocate = [this, &receiver](std::size_t num_bytes) {
      return share(receiver, num_bytes);
    };
  }
  receiver.slots = &pool_->add(std::move(slots));
  if (is_staged(spec)) receiver.staging = &pool_->add(std::move(staging));
  receiver.encoded = add_encoded(spec);
}

void Worker::add_send_channel(const ChannelSpec& spec) {
  check_spec(spec);
  Sender& sender = senders_[spec.name];
  sender.spec = spec;
  if (is_staged(spec)) sender.staging = &pool_->add(staging_term(spec));
  sender.encoded = add_encoded(spec);
  const std::size_t residual_bytes = WireLayout(spec.item, spec.codec).residual_bytes();
  if (residual_bytes > 0) {  // residuals must be zero at first, so they are not poisoned
    sender.residual = &pool_->add({kResidualTerm + spec.name, residual_bytes, spec.num_residuals,
                                   MemoryKind::kDevice, /*poison=*/false});
  }
}

void Worker::add_term(PoolTerm term, bool is_posted_into) {
  const std::string name = term.name;
  if (is_posted_into && shares_memory()) {
    PD_CHECK(device_->device_memory_is_host_memory(), name);
    term.allocate = [this, name](std::size_t num_bytes) {
      auto memory = std::make_unique<SharedTermMemory>(*device_, SharedMemory::make(num_bytes, posted_use()));
      posted_terms_[name] = &memory->shared();
      return memory;
    };
  }
  terms_[name] = &pool_->add(std::move(term));
}

ChannelOptions Worker::channel_options(const ChannelSpec& spec) const {
  ChannelOptions options = spec;
  if (compute_stream_ && options_.current_stream) {
    options.side_stream = [device = device_, compute = options_.compute_stream,
                           current = options_.current_stream]() -> std::unique_ptr<Stream> {
      const std::uintptr_t stream = current();
      return stream == compute ? nullptr : device->wrap_stream(stream);
    };
  }
  return options;
}

// Opens the receiver's memory for the sender. If host memory cannot be opened, the receiver is on another
// host, or the address belongs to something else, and the wire carries the bytes. Device memory must open,
// because the plan has no staging memory for the wire.
void Worker::place(Sender& sender, const std::string& address) const {
  const ChannelSpec& spec = sender.spec;
  std::string why;
  auto memory = spec.places_on_device ? SharedMemory::open_on(*device_, address, shared_use(spec), &why)
                                      : SharedMemory::open(address, shared_use(spec));
  if (memory) {
    sender.channel->place_into(std::move(memory));
  } else if (auto posted = SharedMemory::open(address, posted_use());
             posted && posted->claim_for(spec.channel_id)) {
    sender.channel->place_where_posted(std::move(posted));
  } else if (spec.places_on_device) {
    throw UserError("the device memory of " + spec.peer + " cannot be opened for " + spec.name +
                    ", though that was tried before: " + why + "; use transport='shm' or 'tcp'");
  }
}

// The sender decides how a channel's items travel. If it writes into the receiver's memory, it claims that
// memory before its HELLO, so that the receiver knows.
std::map<std::string, std::string> Worker::channel_transports() const {
  const bool encrypts = options_.keys && options_.transport != kInproc;
  std::string by_link = std::string(transport_->name()) + (encrypts ? " curve" : "");
  const auto text = [&](const ChannelSpec& spec, bool placed) -> std::string {
    if (!placed) return by_link;
    return spec.places_on_device ? kCudaIpc : kSharedMemory;
  };
  std::map<std::string, std::string> transports;
  for (const auto& [name, sender] : senders_) {
    transports[name] = text(sender.spec, sender.channel && sender.channel->places());
  }
  for (const auto& [name, receiver] : receivers_) {
    transports[name] = text(receiver.spec, receiver.channel && receiver.channel->is_claimed());
  }
  return transports;
}

}  // namespace pipedream
