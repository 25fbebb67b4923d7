// A link for the fuzz targets, without sockets and threads. Frames that the input wants the peer to send
// arrive at once. Frames that this side would send are decoded and dropped. The calling thread drives the
// transport, so that posted functions run.
#pragma once

#include <bit>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/check.h"
#include "fuzz.h"
#include "transport/link_core.h"

namespace pipedream {

class SilentTransport final : public TransportCore {
 public:
  SilentTransport() : TransportCore(TransportOptions{}) {}
  std::string_view name() const override { return "silent"; }
  Link& listen(LinkOptions /*options*/, LinkHandler& /*handler*/) override { PD_CHECK(false, "not used"); }
  Link& connect(LinkOptions /*options*/, const std::string& /*endpoint*/, LinkHandler& /*handler*/) override {
    PD_CHECK(false, "not used");
  }

 private:
  void note_ready(std::uint64_t /*name*/) override {}
  void deliver(Driver /*driver*/) override {}
  [[nodiscard]] bool has_traffic() const override { return false; }
  void teardown() override {}
};

class FuzzLink final : public LinkCore {
 public:
  // on_carried is called with every header that would be sent. Each header must be decodable.
  FuzzLink(TransportCore& transport, LinkOptions options, LinkHandler& handler,
           std::function<void(const FrameHeader&)> on_carried)
      : LinkCore(transport, std::move(options), handler, Role::kListener),
        on_carried_(std::move(on_carried)) {}

  using LinkCore::lost;
  [[nodiscard]] std::string endpoint() const override { return address_; }

  // Runs the tasks that were posted.
  void drive() { transport().drive_without_thread(); }
  // Delivers a frame as if the peer had sent it, and runs the tasks that its handler has posted.
  void bring(const FrameHeader& header, std::span<const std::byte> payload) {
    FrameHeaderBytes bytes;
    encode(header, bytes);
    transport().post([&] { receive(bytes, payload); });
    drive();
  }

 private:
  void carry(const FrameHeaderBytes& header, HeldFrame /*frame*/) override {
    const Result<FrameHeader> decoded = decode(header);
    PD_CHECK(decoded, decoded.failure().message);
    on_carried_(decoded.value());
  }
  void disconnect() override {}
  [[nodiscard]] const std::string& address() const override { return address_; }

  const std::function<void(const FrameHeader&)> on_carried_;
  const std::string address_ = "fuzz://1";
};

inline LinkOptions fuzz_link_options() {
  LinkOptions options;
  options.identity = {7, 1, 3};
  options.plan_hash = 5;
  options.name = "activations";
  options.peer = "stage 0";
  options.payload_bytes_max = 1024;
  return options;
}

inline void change_metadata(FrameHeader& header, std::uint64_t value) {
  switch (value % 10) {
    case 8:
      header.has_last_slot = !header.has_last_slot;
      return;
    case 9:
      header.further_slots = value;
      return;
    case 0:
      header.fields.data_fingerprint = value;
      header.fields.boundary_events = static_cast<std::uint8_t>(value >> 56U);
      return;
    case 1:
      header.fields.loss_scale = std::bit_cast<double>(value);
      return;
    case 2:
      header.fields.gradients_overflowed = !header.fields.gradients_overflowed;
      return;
    case 3:
      header.fields.is_empty = !header.fields.is_empty;
      return;
    case 4:
      header.plan_hash = value;
      return;
    case 6:
      header.fields.num_minibatches = static_cast<std::uint32_t>(value);
      return;
    case 7:
      header.fields.is_end_of_data = !header.fields.is_end_of_data;
      return;
    default:
      header.num_work_items = value;
      return;
  }
}

// Changes one field to a value, both chosen by the input.
inline void change(FrameHeader& header, FuzzInput& input) {
  const auto field = input.take<std::uint8_t>();
  const auto value = input.take<std::uint64_t>();
  switch (field % 20) {
    case 0:
      header.kind = static_cast<FrameKind>(value % 9);
      return;
    case 1:
      header.identity.run_id = value;
      return;
    case 2:
      header.identity.incarnation = static_cast<std::uint32_t>(value);
      return;
    case 3:
      header.identity.channel_id = static_cast<std::uint32_t>(value);
      return;
    case 4:
      header.sequence = value;
      return;
    case 5:
      header.minibatch = MinibatchId(static_cast<std::int64_t>(value));
      return;
    case 6:
      header.microbatch = MicrobatchIndex(static_cast<std::int64_t>(value));
      return;
    case 7:
      header.tensor_index = static_cast<std::uint16_t>(value);
      return;
    case 8:
      header.num_tensors = static_cast<std::uint16_t>(value);
      return;
    case 9:
      header.dtype = static_cast<DType>(value % 16);
      return;
    case 10:
      header.num_dims = static_cast<std::uint8_t>(value % 12);
      return;
    case 11:
      header.shape[value % kNumDimsMax] = static_cast<std::int64_t>(value >> 8U);
      return;
    case 12:
      header.tensor_bytes = value;
      return;
    case 13:
      header.chunk_offset = value;
      return;
    case 14:
      header.payload_bytes = value;
      return;
    case 15:
      header.placed_bytes = value;
      return;
    case 17:
      header.slot = static_cast<std::uint16_t>(value);
      return;
    case 18:
      header.codec = static_cast<CodecKind>(value % 6);
      return;
    case 16:
      change_metadata(header, value);
      return;
    default:
      header.has_payload_checksum = value % 2 == 0;
      header.payload_checksum = static_cast<std::uint32_t>(value >> 8U);
      return;
  }
}

}  // namespace pipedream
