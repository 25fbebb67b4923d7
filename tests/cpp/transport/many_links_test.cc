// Tests every transport with many links to several peers that all send at random. No frame is lost or out of
// order, whichever threads sleep.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "recorder.h"

namespace pipedream {
namespace {

constexpr double kNeverDueS = 1e4;  // so late that no timeout hides a lost frame
constexpr std::size_t kNumOthers = 3;
constexpr std::size_t kNumLinksOfHub = 90;
constexpr std::size_t kNumFramesOfOthers = 4000;

// One end of a link. It checks the order of the received frames, and that none comes after END.
class CountingEnd final : public LinkHandler {
 public:
  // num_ends_due counts the ENDs that the whole transport still waits for.
  CountingEnd(std::size_t number, std::atomic<std::size_t>& num_ends_due)
      : number_(number), num_ends_due_(num_ends_due) {}

  [[nodiscard]] bool is_quick() const override { return number_ % 2 == 0; }
  void on_open(Link& link) override {
    link.let_wait(static_cast<Patience>(number_ % 3));
    link_.store(&link);
  }
  std::optional<Failure> on_frame(Link& link, const FrameHeader& header,
                                  std::span<const std::byte> payload) override {
    if (header.kind == FrameKind::kEnd) {
      --num_ends_due_;
      return std::nullopt;
    }
    EXPECT_EQ(number_of(header), num_received_++);
    EXPECT_EQ(payload.empty(), header.kind == FrameKind::kCredit);
    // The link's patience changes with every frame, as in a channel.
    link.let_wait(static_cast<Patience>((number_ + num_received_) % 3));
    return std::nullopt;
  }
  void on_failed(Link& /*link*/, const Failure& failure) override { ADD_FAILURE() << failure.message; }
  void on_closed(Link& /*link*/) override {}

  [[nodiscard]] bool is_open() const { return link_.load() != nullptr; }
  // Runs on the thread that drives the transport.
  void send(bool has_payload) {
    static const std::vector<std::byte> payload = patterned_bytes(100, 1);
    OutgoingFrame frame = credit_frame(num_sent_);
    if (has_payload) frame = tensor_frame(static_cast<std::int64_t>(num_sent_), payload);
    ++num_sent_;
    link_.load()->send(std::move(frame));
  }
  void send_end() {
    OutgoingFrame end;
    end.header.kind = FrameKind::kEnd;
    link_.load()->send(std::move(end));
  }

 private:
  const std::size_t number_;
  std::atomic<std::size_t>& num_ends_due_;
  std::atomic<Link*> link_{nullptr};
  std::uint64_t num_sent_ = 0;
  std::uint64_t num_received_ = 0;
};

// A transport with its ends, a thread that sends on its links, and a thread that drives it until every end
// has received END.
struct Party {
  std::atomic<std::size_t> num_ends_due{0};
  std::vector<std::unique_ptr<CountingEnd>> ends;  // declared first, so that the ends outlive the transport
  std::unique_ptr<Transport> transport;
  std::vector<std::thread> threads;

  CountingEnd& new_end(std::size_t number) {
    ++num_ends_due;
    return *ends.emplace_back(std::make_unique<CountingEnd>(number, num_ends_due));
  }
  void begin(unsigned seed, std::size_t num_frames) {
    threads.emplace_back([this, seed, num_frames] {
      std::mt19937 random(seed);
      for (std::size_t frame = 0; frame < num_frames; ++frame) {
        CountingEnd* const end = ends[random() % ends.size()].get();
        const bool has_payload = random() % 16 == 0;
        const auto send = [end, has_payload] { end->send(has_payload); };
        if (random() % 2 == 0) {
          transport->post_and_drive(send);
        } else {
          transport->post(send);
        }
      }
      transport->post_and_drive([this] {
        for (const auto& end : ends) end->send_end();
      });
    });
    threads.emplace_back([this] {
      EXPECT_TRUE(
          transport->drive_until(Clock::now() + kPatience, [this] { return num_ends_due.load() == 0; }));
    });
  }
};

class ManyLinks : public testing::TestWithParam<std::string> {};

TEST_P(ManyLinks, LoseNothingToWhoeverSleeps) {
  TransportOptions options;
  options.peer_timeout_s = kNeverDueS;
  std::vector<std::unique_ptr<Party>> parties;  // party 0 has links to all others
  for (std::size_t party = 0; party <= kNumOthers; ++party) {
    parties.push_back(std::make_unique<Party>());
    parties.back()->transport = make_transport(GetParam(), options);
    if (!parties.back()->transport) GTEST_SKIP() << GetParam() << " is not available";
  }
  for (std::size_t number = 0; number < kNumLinksOfHub; ++number) {
    Party& peer = *parties[1 + number % kNumOthers];
    LinkOptions link = link_options();
    link.identity.channel_id = static_cast<std::uint32_t>(number);
    const Link& listening = parties[0]->transport->listen(link, parties[0]->new_end(number));
    static_cast<void>(peer.transport->connect(link, listening.endpoint(), peer.new_end(number + 1)));
  }
  for (const auto& party : parties) {
    for (const auto& end : party->ends) ASSERT_TRUE(wait_until([&] { return end->is_open(); }));
  }
  unsigned seed = 1;
  for (const auto& party : parties) {
    party->begin(seed++, party == parties[0] ? kNumOthers * kNumFramesOfOthers : kNumFramesOfOthers);
  }
  // A party's waiting thread may have looked just before another thread received the last frame. interrupt()
  // makes it look again.
  for (const auto& party : parties) {
    EXPECT_TRUE(wait_until([&] {
      party->transport->interrupt();
      return party->num_ends_due.load() == 0;
    }));
    for (std::thread& thread : party->threads) thread.join();
  }
  for (const auto& party : parties) party->transport->shutdown(1);
}

INSTANTIATE_TEST_SUITE_P(Transports, ManyLinks, testing::Values("inproc", "zmq", "zmq_rings"),
                         [](const auto& parameter) { return parameter.param; });

}  // namespace
}  // namespace pipedream
