// Bytes per second between two workers on this machine, per message size: a link over ZeroMQ, raw TCP on
// loopback, and one memcpy. All three end with the bytes in the receiver's own buffer.
//
//   PIPEDREAM_LIBZMQ=<libzmq> pd_transport_bench --benchmark_enable_random_interleaving=true
//       --benchmark_repetitions=5 --benchmark_report_aggregates_only=true
#include <arpa/inet.h>
#include <benchmark/benchmark.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/failure.h"
#include "transport/transport.h"

namespace pipedream {
namespace {

constexpr std::int64_t kNumInFlightMax = 8;  // as credits bound it in a pipeline

// How many messages have arrived; the sender waits while too many are on their way.
class Arrivals {
 public:
  void add_one() {
    {
      const std::lock_guard lock(mutex_);
      ++count_;
    }
    changed_.notify_one();
  }
  void wait_for(std::int64_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return count_ >= count; });
  }

 private:
  std::mutex mutex_;  // guards count_
  std::condition_variable changed_;
  std::int64_t count_ = 0;
};

// Lands each payload in its own buffer, as a channel does.
class Landing final : public LinkHandler {
 public:
  explicit Landing(std::size_t num_bytes) : buffer_(num_bytes) {}
  void on_open(Link& /*link*/) override { opened_.add_one(); }
  std::optional<Failure> on_frame(Link& /*link*/, const FrameHeader& /*header*/,
                                  std::span<const std::byte> payload) override {
    std::memcpy(buffer_.data(), payload.data(), payload.size());
    arrivals_.add_one();
    return std::nullopt;
  }
  void on_failed(Link& /*link*/, const Failure& failure) override {
    throw std::runtime_error(failure.message);
  }
  void on_closed(Link& /*link*/) override {}

  [[nodiscard]] Arrivals& opened() { return opened_; }
  [[nodiscard]] Arrivals& arrivals() { return arrivals_; }

 private:
  std::vector<std::byte> buffer_;
  Arrivals opened_;
  Arrivals arrivals_;
};

void set_bytes(benchmark::State& state) { state.SetBytesProcessed(state.iterations() * state.range(0)); }

void BM_ZmqLink(benchmark::State& state) {
  const auto num_bytes = static_cast<std::size_t>(state.range(0));
  Landing receiver(num_bytes);
  Landing sender(num_bytes);
  const std::vector<std::byte> payload(num_bytes, std::byte{1});
  std::unique_ptr<Transport> receiving;
  std::unique_ptr<Transport> sending;
  try {
    receiving = make_zmq_transport({});
    sending = make_zmq_transport({});
  } catch (const UserError& error) {
    state.SkipWithError(error.what());
    return;
  }
  LinkOptions options;
  options.payload_bytes_max = num_bytes;
  const Link& listener = receiving->listen(options, receiver);
  Link& link = sending->connect(options, listener.endpoint(), sender);
  sender.opened().wait_for(1);
  OutgoingFrame frame;
  frame.header.kind = FrameKind::kTensor;
  frame.header.num_tensors = 1;
  frame.header.num_dims = 1;
  frame.header.shape[0] = state.range(0);
  frame.header.tensor_bytes = frame.header.payload_bytes = num_bytes;
  frame.payload = payload;
  std::int64_t num_sent = 0;
  for (auto _ : state) {
    link.send(frame);
    receiver.arrivals().wait_for(++num_sent - kNumInFlightMax);
  }
  receiver.arrivals().wait_for(num_sent);
  sending->shutdown(1);
  set_bytes(state);
}

void must(bool succeeded, const char* what) {
  if (!succeeded) throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

// Two ends of one TCP connection over loopback.
struct TcpPair {
  TcpPair() {
    const int listening_fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t address_bytes = sizeof(address);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    must(::bind(listening_fd, generic, address_bytes) == 0, "bind");
    must(::getsockname(listening_fd, generic, &address_bytes) == 0, "getsockname");
    must(::listen(listening_fd, 1) == 0, "listen");
    send_fd = ::socket(AF_INET, SOCK_STREAM, 0);
    must(::connect(send_fd, generic, address_bytes) == 0, "connect");
    receive_fd = ::accept(listening_fd, nullptr, nullptr);
    must(receive_fd >= 0, "accept");
    const int no_delay = 1;
    must(::setsockopt(send_fd, IPPROTO_TCP, TCP_NODELAY, &no_delay, sizeof(no_delay)) == 0, "TCP_NODELAY");
    ::close(listening_fd);
  }
  ~TcpPair() {
    ::close(send_fd);
    ::close(receive_fd);
  }
  TcpPair(const TcpPair&) = delete;
  TcpPair& operator=(const TcpPair&) = delete;

  int send_fd = -1;
  int receive_fd = -1;
};

void send_all(int fd, const std::vector<std::byte>& bytes) {
  for (std::size_t offset = 0; offset < bytes.size();) {
    const ssize_t num_sent = ::send(fd, bytes.data() + offset, bytes.size() - offset, 0);
    must(num_sent > 0, "send");
    offset += static_cast<std::size_t>(num_sent);
  }
}

void BM_RawTcp(benchmark::State& state) {
  const auto num_bytes = static_cast<std::size_t>(state.range(0));
  const std::vector<std::byte> payload(num_bytes, std::byte{1});
  const TcpPair tcp;
  Arrivals arrivals;
  std::thread receiver([&] {
    std::vector<std::byte> buffer(num_bytes);
    while (::recv(tcp.receive_fd, buffer.data(), num_bytes, MSG_WAITALL) == static_cast<ssize_t>(num_bytes)) {
      arrivals.add_one();
    }
  });
  std::int64_t num_sent = 0;
  for (auto _ : state) {
    send_all(tcp.send_fd, payload);
    arrivals.wait_for(++num_sent - kNumInFlightMax);
  }
  arrivals.wait_for(num_sent);
  ::shutdown(tcp.send_fd, SHUT_WR);
  receiver.join();
  set_bytes(state);
}

void BM_Memcpy(benchmark::State& state) {
  const auto num_bytes = static_cast<std::size_t>(state.range(0));
  const std::vector<std::byte> from(num_bytes, std::byte{1});
  std::vector<std::byte> to(num_bytes);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), num_bytes);
    benchmark::ClobberMemory();
  }
  set_bytes(state);
}

void message_sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->Arg(64 << 10)->Arg(1 << 20)->Arg(8 << 20)->UseRealTime();
}

BENCHMARK(BM_ZmqLink)->Apply(message_sizes);
BENCHMARK(BM_RawTcp)->Apply(message_sizes);
BENCHMARK(BM_Memcpy)->Apply(message_sizes);

}  // namespace
}  // namespace pipedream
