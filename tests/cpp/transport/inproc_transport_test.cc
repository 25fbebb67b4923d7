// Tests links inside a process. Their receiver reads the sender's own memory, as no other receiver does.
#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <memory>
#include <thread>
#include <vector>

#include "transport/recorder.h"

namespace pipedream {
namespace {

// A handler whose on_frame() reads the payload until the test lets it return.
class SlowReader final : public LinkHandler {
 public:
  void on_open(Link& /*link*/) override { opened.count_down(); }
  std::optional<Failure> on_frame(Link& /*link*/, const FrameHeader& /*header*/,
                                  std::span<const std::byte> payload) override {
    reading = true;
    began.count_down();
    may_end.wait();
    bytes.assign(payload.begin(), payload.end());
    reading = false;
    return std::nullopt;
  }
  void on_failed(Link& /*link*/, const Failure& /*failure*/) override {}
  void on_closed(Link& /*link*/) override {}

  std::latch opened{1};
  std::latch began{1};
  std::latch may_end{1};
  std::atomic<bool> reading = false;
  std::vector<std::byte> bytes;
};

TEST(InprocTransport, ASenderThatEndsWaitsUntilItsPayloadIsRead) {
  SlowReader reader;
  Recorder sender;
  const auto receiving = make_inproc_transport({});
  const auto sending = make_inproc_transport({});
  auto payload = std::make_unique<std::vector<std::byte>>(patterned_bytes(4096, 3));
  std::atomic<int> num_sent = 0;
  std::atomic<bool> sent_while_reading = false;
  const Link& listener = receiving->listen(link_options(), reader);
  Link& link = sending->connect(link_options(), listener.endpoint(), sender);
  link.send(tensor_frame(0, *payload, [&] {
    sent_while_reading = reader.reading.load();
    ++num_sent;
  }));
  reader.began.wait();
  EXPECT_EQ(num_sent, 0);
  std::thread ender([&] {
    sending->shutdown(0);
    payload.reset();  // if a reader still reads, the sanitizers report it
  });
  reader.may_end.count_down();
  ender.join();
  EXPECT_EQ(num_sent, 1);
  EXPECT_FALSE(sent_while_reading);
  EXPECT_EQ(reader.bytes, patterned_bytes(4096, 3));
}

TEST(InprocTransport, TwoThatEndAtOnceWithFramesUnreadDoNotWaitForEachOther) {
  for (int round = 0; round < 50; ++round) {
    Recorder left_handler;
    Recorder right_handler;
    SentCount sent;
    const auto left = make_inproc_transport({});
    const auto right = make_inproc_transport({});
    const std::vector<std::byte> payload = patterned_bytes(64, 1);
    Link& listener = left->listen(link_options(), left_handler);
    Link& connector = right->connect(link_options(), listener.endpoint(), right_handler);
    ASSERT_TRUE(left_handler.wait_open() && right_handler.wait_open());
    for (int frame = 0; frame < 20; ++frame) {
      listener.send(tensor_frame(frame, payload, sent.callback()));
      connector.send(tensor_frame(frame, payload, sent.callback()));
    }
    std::thread ender([&] { core_of(*left).abandon(); });
    core_of(*right).abandon();
    ender.join();
    EXPECT_EQ(sent.count(), 40);
  }
}

}  // namespace
}  // namespace pipedream
