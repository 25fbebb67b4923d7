// Measures how fast messages go from one worker to another: by our channel over ZeroMQ and over shared
// memory, and for comparison by bare ZeroMQ, raw TCP, a ring in memory, and one memcpy.
//
//   PIPEDREAM_LIBZMQ=<libzmq> pd_transport_bench [--rounds N] [--seconds S] [--sizes BYTES,...] [--json]
//                             [--only WAY,...] [--sender-netns NAME --receiver-netns NAME --address IP]
//
// All ways put the bytes into eight buffers of the receiver in turn. Each round runs all ways, beginning with
// another one each time, so that a change of the machine's speed affects all. Ratios are medians over the
// rounds. For sizes up to 4 KiB the latency of single messages is measured, too: from the sender's call until
// the receiver's thread has the message.
//
// With --*-netns sender and receiver are in two network namespaces (bench/system/transport.py makes them),
// and ways within one host are left out. Both are threads of one process. The program starts itself again
// with settings that make malloc keep freed memory, because otherwise fresh pages would change the times.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/failure.h"
#include "stage/worker.h"
#include "transport/zmq/libzmq.h"

namespace pipedream {
namespace {

constexpr std::int64_t kNumInFlightMax = 8;  // in messages; a pipeline bounds them by credits
constexpr std::size_t kLatencyBytes = 4096;
constexpr double kPeerTimeoutSeconds = 60;
constexpr std::size_t kBytesAlignment = 4096;

struct Settings {
  int rounds = 7;
  double seconds = 0.15;  // time of one measurement: one way, at one size, in one round
  std::vector<std::size_t> sizes = {4096, 65536, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
  std::string only;  // comma-separated names of ways to measure; empty for all
  std::string sender_netns;
  std::string receiver_netns;
  std::string address = "127.0.0.1";
  bool json = false;

  [[nodiscard]] bool over_wire_only() const { return !receiver_netns.empty(); }
};

void must(bool succeeded, const std::string& what) {
  if (!succeeded) throw std::runtime_error(what + ": " + std::strerror(errno));
}

// Moves this thread into the namespace. Sockets and threads that it makes from now on belong to the
// namespace.
void enter_netns(const std::string& name) {
  if (name.empty()) return;
  const int fd = ::open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC);
  must(fd >= 0, "network namespace '" + name + "'");
  must(::setns(fd, CLONE_NEWNET) == 0, "setns");
  ::close(fd);
}

template <class Function>
auto in_netns(const std::string& name, Function function) {
  std::exception_ptr error;
  std::invoke_result_t<Function> result{};
  std::thread([&] {
    try {
      enter_netns(name);
      result = function();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
  return result;
}

// Counts the messages that have arrived, and keeps the time of the last one.
class Arrivals {
 public:
  void add_one() {
    {
      const std::lock_guard lock(mutex_);
      ++count_;
      last_ns_ = now_ns();
    }
    changed_.notify_one();
  }
  std::int64_t wait_for(std::int64_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return count_ >= count; });
    return last_ns_;
  }

 private:
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::int64_t count_ = 0;
  std::int64_t last_ns_ = 0;
};

// Page-aligned memory whose pages have all been written once.
class Buffer {
 public:
  explicit Buffer(std::size_t num_bytes)
      : bytes_(static_cast<std::byte*>(std::aligned_alloc(kBytesAlignment, rounded(num_bytes)))) {
    must(bytes_ != nullptr, "memory");
    std::memset(bytes_.get(), 1, rounded(num_bytes));
  }
  [[nodiscard]] std::byte* data() const { return bytes_.get(); }

 private:
  struct Free {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };
  static std::size_t rounded(std::size_t num_bytes) {
    return std::max(kBytesAlignment, (num_bytes + kBytesAlignment - 1) / kBytesAlignment * kBytesAlignment);
  }
  std::unique_ptr<std::byte, Free> bytes_;
};

// The receiver's buffers, used in turn. There are as many as messages may be on their way at once.
class Landing {
 public:
  explicit Landing(std::size_t num_bytes) {
    for (std::int64_t index = 0; index < kNumInFlightMax; ++index) buffers_.emplace_back(num_bytes);
  }
  [[nodiscard]] std::byte* current() const { return buffers_[next_].data(); }
  void take_next() { next_ = (next_ + 1) % buffers_.size(); }

 private:
  std::vector<Buffer> buffers_;
  std::size_t next_ = 0;
};

// One way to move messages of one size.
class Way {
 public:
  Way() = default;
  Way(const Way&) = delete;
  Way& operator=(const Way&) = delete;
  virtual ~Way() = default;

  // Sends a message. Waits only while kNumInFlightMax messages are on their way, not until this one arrives.
  virtual void send() = 0;
  // Waits until all messages have arrived. Returns the time, by now_ns(), at which the last message arrived.
  virtual std::int64_t finish() = 0;
};

// Ways whose receiver counts arrivals.
class CountedWay : public Way {
 public:
  std::int64_t finish() override { return arrivals_.wait_for(num_sent_); }

 protected:
  void begin_send() { arrivals_.wait_for(++num_sent_ - kNumInFlightMax); }
  Arrivals& arrivals() { return arrivals_; }

 private:
  Arrivals arrivals_;
  std::int64_t num_sent_ = 0;
};

// ---- Our channel ----

class ChannelWay final : public CountedWay {
 public:
  ChannelWay(const Settings& settings, std::size_t num_bytes, bool shares_memory)
      : payload_(num_bytes), view_(view_of(num_bytes)) {
    const std::string& here = settings.address;
    receiver_ =
        in_netns(settings.receiver_netns, [&] { return make(num_bytes, shares_memory, here, false); });
    const auto endpoints = in_netns(settings.receiver_netns, [&] { return receiver_->listen(); });
    sender_ = in_netns(settings.sender_netns, [&] { return make(num_bytes, shares_memory, here, true); });
    in_netns(settings.sender_netns, [&] {
      sender_->connect(endpoints);
      return true;
    });
    wait_open(*sender_);
    wait_open(*receiver_);
    thread_ = std::thread([this] { receive(); });
  }
  ~ChannelWay() override {
    sender_->send_end(kName);
    thread_.join();
    std::thread closing([this] { receiver_->close(1); });
    sender_->close(1);
    closing.join();
  }

  void send() override {
    begin_send();
    const auto sent = sender_->send_item(kName, {}, {view_}, nullptr, deadline());
    if (!sent || !sent.value()) throw std::runtime_error("the channel failed");
  }

 private:
  static constexpr const char* kName = "tensors";

  static Deadline deadline() { return Clock::now() + std::chrono::seconds(60); }

  [[nodiscard]] TensorView view_of(std::size_t num_bytes) const {
    TensorView view;
    view.dtype = DType::kUInt8;
    view.num_dims = 1;
    view.shape[0] = static_cast<std::int64_t>(num_bytes);
    view.data = payload_.data();
    return view;
  }

  static std::unique_ptr<Worker> make(std::size_t num_bytes, bool shares_memory, const std::string& host,
                                      bool sends) {
    WorkerOptions options;
    options.bind_host = host;
    options.insecure = true;
    options.peer_timeout_s = kPeerTimeoutSeconds;
    options.shares_memory = shares_memory;
    auto worker = std::make_unique<Worker>(options);
    ChannelSpec spec;
    spec.name = kName;
    spec.peer = "the other side";
    spec.item = ItemSpec({{DType::kUInt8, 1, num_bytes}});
    spec.num_items_max = kNumInFlightMax;
    if (sends) {
      worker->add_send_channel(spec);
    } else {
      worker->add_receive_channel(spec);
    }
    worker->seal();
    return worker;
  }

  static void wait_open(Worker& worker) {
    const auto open = worker.wait_open(deadline());
    if (!open || !open.value()) throw std::runtime_error("the channel did not open");
  }

  void receive() {
    for (;;) {
      const auto item = receiver_->receive_item(kName, deadline());
      if (!item || !item.value()) throw std::runtime_error("the channel failed");
      if (item.value()->is_end) return;
      arrivals().add_one();
    }
  }

  Buffer payload_;
  TensorView view_;
  std::unique_ptr<Worker> receiver_;
  std::unique_ptr<Worker> sender_;
  std::thread thread_;
};

// ---- Bare ZeroMQ: zero-copy send, one copy on receive ----

class ZmqWay final : public CountedWay {
 public:
  ZmqWay(const Settings& settings, std::size_t num_bytes)
      : num_bytes_(num_bytes), zmq_(load_libzmq("")), payload_(num_bytes), landing_(num_bytes) {
    const std::string address = "tcp://" + settings.address + ":*";
    receiver_ = in_netns(settings.receiver_netns, [&] {
      void* const socket = open(receiving_context_);
      must(zmq_.bind(socket, address.c_str()) == 0, "bind");
      return socket;
    });
    char endpoint[256] = {};
    std::size_t endpoint_bytes = sizeof(endpoint);
    must(zmq_.getsockopt(receiver_, zmq::kLastEndpoint, endpoint, &endpoint_bytes) == 0, "endpoint");
    sender_ = in_netns(settings.sender_netns, [&] { return open(sending_context_); });
    must(zmq_.connect(sender_, endpoint) == 0, "connect");
    thread_ = std::thread([this] { receive(); });
  }
  ~ZmqWay() override {
    must(zmq_.send(sender_, "", 0, 0) == 0, "send");  // an empty message ends the receiver's thread
    thread_.join();
    zmq_.close(sender_);
    zmq_.close(receiver_);
    zmq_.ctx_term(sending_context_);
    zmq_.ctx_term(receiving_context_);
  }

  void send() override {
    begin_send();
    ZmqMessage message;
    must(zmq_.msg_init_data(
             &message, payload_.data(), num_bytes_, [](void*, void*) {}, nullptr) == 0,
         "message");
    must(zmq_.msg_send(&message, sender_, 0) >= 0, "send");
  }

 private:
  void* open(void*& context) {
    context = zmq_.ctx_new();
    void* const socket = zmq_.socket(context, zmq::kPair);
    const int none = 0;
    must(socket != nullptr && zmq_.setsockopt(socket, zmq::kLinger, &none, sizeof(none)) == 0, "socket");
    return socket;
  }

  void receive() {
    for (;;) {
      ZmqMessage message;
      zmq_.msg_init(&message);
      must(zmq_.msg_recv(&message, receiver_, 0) >= 0, "receive");
      const std::size_t arrived = zmq_.msg_size(&message);
      std::memcpy(landing_.current(), zmq_.msg_data(&message), arrived);
      zmq_.msg_close(&message);
      if (arrived == 0) return;
      landing_.take_next();
      arrivals().add_one();
    }
  }

  const std::size_t num_bytes_;
  const LibZmq& zmq_;
  Buffer payload_;
  Landing landing_;
  void* receiving_context_ = nullptr;
  void* sending_context_ = nullptr;
  void* receiver_ = nullptr;
  void* sender_ = nullptr;
  std::thread thread_;
};

// ---- Raw TCP ----

class TcpWay final : public CountedWay {
 public:
  TcpWay(const Settings& settings, std::size_t num_bytes)
      : num_bytes_(num_bytes), payload_(num_bytes), landing_(num_bytes) {
    const auto new_socket = [] { return ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); };
    const int listening_fd = in_netns(settings.receiver_netns, new_socket);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    must(::inet_pton(AF_INET, settings.address.c_str(), &address.sin_addr) == 1, "address");
    socklen_t address_bytes = sizeof(address);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    must(::bind(listening_fd, generic, address_bytes) == 0, "bind");
    must(::getsockname(listening_fd, generic, &address_bytes) == 0, "getsockname");
    must(::listen(listening_fd, 1) == 0, "listen");
    send_fd_ = in_netns(settings.sender_netns, new_socket);
    must(::connect(send_fd_, generic, address_bytes) == 0, "connect");
    receive_fd_ = ::accept(listening_fd, nullptr, nullptr);
    must(receive_fd_ >= 0, "accept");
    ::close(listening_fd);
    const int no_delay = 1;
    must(::setsockopt(send_fd_, IPPROTO_TCP, TCP_NODELAY, &no_delay, sizeof(no_delay)) == 0, "TCP_NODELAY");
    thread_ = std::thread([this] { receive(); });
  }
  ~TcpWay() override {
    ::shutdown(send_fd_, SHUT_WR);
    thread_.join();
    ::close(send_fd_);
    ::close(receive_fd_);
  }

  void send() override {
    begin_send();
    for (std::size_t offset = 0; offset < num_bytes_;) {
      const ssize_t num_sent = ::send(send_fd_, payload_.data() + offset, num_bytes_ - offset, 0);
      must(num_sent > 0, "send");
      offset += static_cast<std::size_t>(num_sent);
    }
  }

 private:
  void receive() {
    const auto whole = static_cast<ssize_t>(num_bytes_);
    while (::recv(receive_fd_, landing_.current(), num_bytes_, MSG_WAITALL) == whole) {
      landing_.take_next();
      arrivals().add_one();
    }
  }

  const std::size_t num_bytes_;
  Buffer payload_;
  Landing landing_;
  int send_fd_ = -1;
  int receive_fd_ = -1;
  std::thread thread_;
};

// ---- A ring in memory: the sender copies in, the receiver copies out ----

class RingWay final : public CountedWay {
 public:
  explicit RingWay(std::size_t num_bytes)
      : num_bytes_(num_bytes), payload_(num_bytes), landing_(num_bytes), ring_(kRingBytes) {
    thread_ = std::thread([this] { receive(); });
  }
  ~RingWay() override {
    stopped_ = true;
    written_.fetch_add(0);
    written_.notify_one();
    pass(written_, written_.load() + kRingBytes * 2);
    thread_.join();
  }

  void send() override {
    begin_send();
    for (std::size_t offset = 0; offset < num_bytes_;) {
      const std::uint64_t at = written_.load();
      std::uint64_t read = read_.load();
      while (at - read == kRingBytes) {
        read_.wait(read);
        read = read_.load();
      }
      const std::size_t length = piece(at, kRingBytes - (at - read), num_bytes_ - offset);
      std::memcpy(ring_.data() + at % kRingBytes, payload_.data() + offset, length);
      pass(written_, at + length);
      offset += length;
    }
  }

 private:
  static constexpr std::uint64_t kRingBytes = 4 << 20;
  static constexpr std::uint64_t kPieceBytes = 256 << 10;

  static std::size_t piece(std::uint64_t at, std::uint64_t room, std::size_t left) {
    return std::min({kPieceBytes, kRingBytes - at % kRingBytes, room, std::uint64_t{left}});
  }
  static void pass(std::atomic<std::uint64_t>& position, std::uint64_t to) {
    position.store(to);
    position.notify_one();
  }

  void receive() {
    std::size_t offset = 0;
    for (;;) {
      const std::uint64_t at = read_.load();
      std::uint64_t written = written_.load();
      while (written == at) {
        written_.wait(written);
        written = written_.load();
      }
      if (stopped_) return;
      const std::size_t length = piece(at, written - at, num_bytes_ - offset);
      std::memcpy(landing_.current() + offset, ring_.data() + at % kRingBytes, length);
      pass(read_, at + length);
      offset += length;
      if (offset < num_bytes_) continue;
      offset = 0;
      landing_.take_next();
      arrivals().add_one();
    }
  }

  const std::size_t num_bytes_;
  Buffer payload_;
  Landing landing_;
  Buffer ring_;
  std::atomic<std::uint64_t> written_{0};
  std::atomic<std::uint64_t> read_{0};
  std::atomic<bool> stopped_{false};
  std::thread thread_;
};

// ---- One memcpy ----

class MemcpyWay final : public Way {
 public:
  explicit MemcpyWay(std::size_t num_bytes)
      : num_bytes_(num_bytes), payload_(num_bytes), landing_(num_bytes) {}
  void send() override {
    std::memcpy(landing_.current(), payload_.data(), num_bytes_);
    landing_.take_next();
  }
  std::int64_t finish() override { return now_ns(); }

 private:
  const std::size_t num_bytes_;
  Buffer payload_;
  Landing landing_;
};

// ---- Measuring ----

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

struct Contender {
  std::string name;
  std::unique_ptr<Way> way;
  std::int64_t num_messages = 1;  // number of messages in one round
  std::vector<double> gb_per_s;
  std::vector<double> latency_us;
};

double time_messages(Way& way, std::int64_t num_messages) {
  const std::int64_t began_ns = now_ns();
  for (std::int64_t index = 0; index < num_messages; ++index) way.send();
  return static_cast<double>(way.finish() - began_ns) / 1e9;
}

void measure_latency(Contender& contender) {
  constexpr int kNumMessages = 200;
  std::vector<double> latencies;
  for (int index = 0; index < kNumMessages; ++index) {
    const std::int64_t began_ns = now_ns();
    contender.way->send();
    latencies.push_back(static_cast<double>(contender.way->finish() - began_ns) / 1e3);
  }
  contender.latency_us.push_back(median(std::move(latencies)));
}

std::vector<Contender> contenders(const Settings& settings, std::size_t num_bytes) {
  std::vector<Contender> all;
  const auto add = [&](const char* name, const auto& make) {
    if (!settings.only.empty() &&
        ("," + settings.only + ",").find("," + std::string(name) + ",") == std::string::npos)
      return;
    all.push_back({name, make(), 1, {}, {}});
  };
  add("channel", [&] { return std::make_unique<ChannelWay>(settings, num_bytes, false); });
  add("bare zmq", [&] { return std::make_unique<ZmqWay>(settings, num_bytes); });
  add("raw tcp", [&] { return std::make_unique<TcpWay>(settings, num_bytes); });
  if (settings.over_wire_only()) return all;
  add("shared memory", [&] { return std::make_unique<ChannelWay>(settings, num_bytes, true); });
  add("ring", [&] { return std::make_unique<RingWay>(num_bytes); });
  add("memcpy", [&] { return std::make_unique<MemcpyWay>(num_bytes); });
  return all;
}

// Chooses the number of messages of one measurement so that it takes `seconds`. They are at least four times
// as many as may be in flight at once.
void choose_num_messages(Contender& contender, double seconds) {
  std::int64_t num_messages = 2 * kNumInFlightMax;
  double taken = time_messages(*contender.way, num_messages);
  taken = std::max(1e-6, std::min(taken, time_messages(*contender.way, num_messages)));
  contender.num_messages = std::max<std::int64_t>(
      4 * kNumInFlightMax, static_cast<std::int64_t>(static_cast<double>(num_messages) * seconds / taken));
}

double ratio(const Contender& ours, const Contender& other) {
  std::vector<double> ratios;
  for (std::size_t round = 0; round < ours.gb_per_s.size(); ++round) {
    ratios.push_back(ours.gb_per_s[round] / other.gb_per_s[round]);
  }
  return median(std::move(ratios));
}

void show(const Settings& settings, std::size_t num_bytes, const std::vector<Contender>& all) {
  for (const Contender& contender : all) {
    const auto [low, high] = std::minmax_element(contender.gb_per_s.begin(), contender.gb_per_s.end());
    const double latency_us = contender.latency_us.empty() ? 0 : median(contender.latency_us);
    const bool is_shared = contender.name == "shared memory";
    std::string ratios;
    std::string json;
    for (const Contender& other : all) {
      const bool is_ours = contender.name == "channel" || is_shared;
      if (!is_ours || &other == &contender) continue;
      char text[80];
      std::snprintf(text, sizeof(text), "  %.3f of %s", ratio(contender, other), other.name.c_str());
      ratios += text;
      std::snprintf(text, sizeof(text), "%s\"%s\": %.4f", json.empty() ? "" : ", ", other.name.c_str(),
                    ratio(contender, other));
      json += text;
    }
    if (settings.json) {
      std::printf(
          "{\"bytes\": %zu, \"way\": \"%s\", \"gb_per_s\": %.4f, \"min\": %.4f, \"max\": %.4f, "
          "\"latency_us\": %.2f, \"ratio_to\": {%s}}\n",
          num_bytes, contender.name.c_str(), median(contender.gb_per_s), *low, *high, latency_us,
          json.c_str());
    } else {
      std::printf("%9zu  %-14s %8.3f GB/s (%.3f to %.3f)", num_bytes, contender.name.c_str(),
                  median(contender.gb_per_s), *low, *high);
      if (latency_us > 0) std::printf("  %7.1f us", latency_us);
      std::printf("%s\n", ratios.c_str());
    }
  }
  std::fflush(stdout);
}

void measure(const Settings& settings, std::size_t num_bytes) {
  std::vector<Contender> all = contenders(settings, num_bytes);
  for (Contender& contender : all) choose_num_messages(contender, settings.seconds);
  for (int round = 0; round < settings.rounds; ++round) {
    for (std::size_t turn = 0; turn < all.size(); ++turn) {
      Contender& contender = all[(turn + static_cast<std::size_t>(round)) % all.size()];
      const double seconds = time_messages(*contender.way, contender.num_messages);
      contender.gb_per_s.push_back(static_cast<double>(contender.num_messages) *
                                   static_cast<double>(num_bytes) / seconds / 1e9);
      if (num_bytes <= kLatencyBytes) measure_latency(contender);
    }
  }
  show(settings, num_bytes, all);
}

std::vector<std::size_t> parse_sizes(const std::string& text) {
  std::vector<std::size_t> sizes;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    sizes.push_back(std::stoul(text.substr(at, comma - at)));
    at = comma + 1;
  }
  return sizes;
}

Settings parse(int num_arguments, char** arguments) {
  Settings settings;
  const std::map<std::string, std::function<void(const std::string&)>> options = {
      {"--rounds", [&](const std::string& text) { settings.rounds = std::stoi(text); }},
      {"--seconds", [&](const std::string& text) { settings.seconds = std::stod(text); }},
      {"--sizes", [&](const std::string& text) { settings.sizes = parse_sizes(text); }},
      {"--sender-netns", [&](const std::string& text) { settings.sender_netns = text; }},
      {"--receiver-netns", [&](const std::string& text) { settings.receiver_netns = text; }},
      {"--only", [&](const std::string& text) { settings.only = text; }},
      {"--address", [&](const std::string& text) { settings.address = text; }},
  };
  for (int index = 1; index < num_arguments; ++index) {
    const std::string argument = arguments[index];
    if (argument == "--json") {
      settings.json = true;
      continue;
    }
    const auto option = options.find(argument);
    if (option == options.end() || index + 1 == num_arguments) {
      throw std::runtime_error("'" + argument + "' is unknown, or needs a value; see the top of this source");
    }
    option->second(arguments[++index]);
  }
  return settings;
}

void keep_memory(char** arguments) {
  if (std::getenv("MALLOC_MMAP_MAX_") != nullptr) return;
  must(::setenv("MALLOC_MMAP_MAX_", "0", 1) == 0 && ::setenv("MALLOC_TRIM_THRESHOLD_", "8589934592", 1) == 0,
       "setenv");
  ::execv("/proc/self/exe", arguments);
  must(false, "exec");
}

}  // namespace
}  // namespace pipedream

int main(int num_arguments, char** arguments) {
  try {
    pipedream::keep_memory(arguments);
    const pipedream::Settings settings = pipedream::parse(num_arguments, arguments);
    for (const std::size_t num_bytes : settings.sizes) pipedream::measure(settings, num_bytes);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
