// Measures how fast a channel sends tensors from device to device, between two processes of one host. For
// comparison it also measures plain copies.
//
//   PIPEDREAM_LIBZMQ=<libzmq> pd_device_transport_bench [--sender DEVICE] [--receiver DEVICE] [--rounds N]
//                             [--seconds S] [--sizes BYTES,...] [--json]
//
// DEVICE is cuda:0 by default. With `host` the measurements that need a GPU are left out. The channel is
// measured over each transport of docs/transport.md: CUDA IPC, shared host memory, tcp. The copies run on one
// stream and use eight buffers in turn, as many as a channel has. They go from the device to pinned host
// memory, back, and from the sender's to the receiver's device.
//
// Each round runs all measurements, beginning with another one each time. Ratios are medians over the rounds.
// An item has arrived when its bytes are in device memory. The receiver is a second process, because CUDA IPC
// needs two. The processes exchange lines through pipes:
//
//   receiver: offer <text>, or offer    sender: place 1 or 0    receiver: endpoints <text>    ...
//   receiver: arrived <ns>    of every item with kLastOfWindow, by the clock that both share
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/failure.h"
#include "stage/worker.h"

namespace pipedream {
namespace {

constexpr std::int64_t kNumInFlightMax = 8;
// A fingerprint that makes the receiver report the item's arrival.
constexpr std::uint64_t kLastOfWindow = 1;
constexpr const char* kChannel = "tensors";

struct Settings {
  std::string sender = "cuda:0";
  std::string receiver = "cuda:0";
  int rounds = 7;
  double seconds = 0.2;  // time of one measurement: one way, at one size, in one round
  std::vector<std::size_t> sizes = {64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
  bool json = false;
};

enum class Road { kCudaIpc, kSharedMemory, kTcp };
constexpr std::array kRoads = {Road::kCudaIpc, Road::kSharedMemory, Road::kTcp};

std::string name_of(Road road) {
  switch (road) {
    case Road::kCudaIpc:
      return "cuda ipc";
    case Road::kSharedMemory:
      return "shared memory";
    case Road::kTcp:
      return "tcp";
  }
  return "";
}

Deadline deadline() { return Clock::now() + std::chrono::seconds(60); }

std::unique_ptr<Device> make_device(const std::string& name) {
  return name == "host" ? make_host_device() : make_cuda_device(std::stoi(name.substr(name.find(':') + 1)));
}

std::unique_ptr<Worker> make_worker(const std::string& device, Road road, std::uintptr_t stream = 0) {
  WorkerOptions options;
  options.device = device;
  options.peer_timeout_s = 60;
  options.shares_memory = road != Road::kTcp;
  options.compute_stream = stream;
  return std::make_unique<Worker>(options);
}

ChannelSpec channel_of(std::size_t num_bytes, bool places_on_device) {
  ChannelSpec spec;
  spec.name = kChannel;
  spec.peer = "the other side";
  spec.item = ItemSpec({{DType::kUInt8, 1, num_bytes}});
  spec.num_items_max = kNumInFlightMax;
  spec.places_on_device = places_on_device;
  return spec;
}

void wait_open(Worker& worker) {
  const Result<bool> open = worker.wait_open(deadline());
  if (!open || !open.value()) throw std::runtime_error("the channel does not open");
}

// ---- The receiver's process ----

std::string read_line(std::FILE* file) {
  std::string line;
  for (int symbol = std::fgetc(file); symbol != EOF && symbol != '\n'; symbol = std::fgetc(file)) {
    line += static_cast<char>(symbol);
  }
  return line;
}
void write_line(std::FILE* file, const std::string& line) {
  std::fputs((line + "\n").c_str(), file);
  std::fflush(file);
}

void receive(const std::string& device, Road road, std::size_t num_bytes) {
  const auto worker = make_worker(device, road);
  write_line(stdout, "offer " + (road == Road::kCudaIpc ? worker->offer_device_memory() : ""));
  const bool places_on_device = read_line(stdin) == "place 1";
  worker->add_receive_channel(channel_of(num_bytes, places_on_device));
  worker->seal();
  write_line(stdout, "endpoints " + worker->listen().at(kChannel));
  wait_open(*worker);
  for (;;) {
    const auto item = worker->receive_item(kChannel, deadline());
    if (!item) throw std::runtime_error(item.failure().message);
    if (!item.value() || item.value()->is_end) break;
    if (item.value()->fields.data_fingerprint != kLastOfWindow) continue;
    if (item.value()->ready != nullptr) item.value()->ready->wait();
    write_line(stdout, "arrived " + std::to_string(now_ns()));
  }
  worker->close(1);
}

// ---- The sender's ----

class Way {
 public:
  Way() = default;
  Way(const Way&) = delete;
  Way& operator=(const Way&) = delete;
  virtual ~Way() = default;

  // Moves this many messages. Returns the time, by now_ns(), at which the last message had arrived.
  virtual std::int64_t move(std::int64_t num_messages) = 0;
};

class ReceiverProcess {
 public:
  ReceiverProcess(const std::string& device, Road road, std::size_t num_bytes) {
    std::array<int, 2> to{};
    std::array<int, 2> from{};
    if (::pipe(to.data()) != 0 || ::pipe(from.data()) != 0) throw std::runtime_error(std::strerror(errno));
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(to[0], STDIN_FILENO);
      ::dup2(from[1], STDOUT_FILENO);
      for (const int fd : {to[0], to[1], from[0], from[1]}) ::close(fd);
      const std::string kind = std::to_string(static_cast<int>(road));
      ::execl("/proc/self/exe", "receiver", "--receive", device.c_str(), kind.c_str(),
              std::to_string(num_bytes).c_str(), nullptr);
      ::_exit(127);
    }
    ::close(to[0]);
    ::close(from[1]);
    to_ = ::fdopen(to[1], "w");
    from_ = ::fdopen(from[0], "r");
  }
  ~ReceiverProcess() {
    std::fclose(to_);
    std::fclose(from_);
    ::waitpid(pid_, nullptr, 0);
  }
  ReceiverProcess(const ReceiverProcess&) = delete;
  ReceiverProcess& operator=(const ReceiverProcess&) = delete;

  [[nodiscard]] std::string expect(const std::string& word) const {
    const std::string line = read_line(from_);
    if (!line.starts_with(word + " ")) throw std::runtime_error("the receiver ended; see above");
    return line.substr(word.size() + 1);
  }
  void tell(const std::string& line) const { write_line(to_, line); }

 private:
  pid_t pid_ = -1;
  std::FILE* to_ = nullptr;
  std::FILE* from_ = nullptr;
};

class ChannelWay final : public Way {
 public:
  // Sets `why_not` to the reason if the two processes cannot use this transport.
  ChannelWay(const Settings& settings, Road road, std::size_t num_bytes, std::string& why_not)
      : receiver_(settings.receiver, road, num_bytes), worker_(make_worker(settings.sender, road)) {
    const std::string offer = receiver_.expect("offer");
    if (road == Road::kCudaIpc) {
      why_not = offer.empty() ? "the receiver's device shares no memory" : worker_->why_out_of_reach(offer);
    }
    const bool places_on_device = road == Road::kCudaIpc && why_not.empty();
    receiver_.tell(places_on_device ? "place 1" : "place 0");
    worker_->add_send_channel(channel_of(num_bytes, places_on_device));
    worker_->seal();
    worker_->connect({{kChannel, receiver_.expect("endpoints")}});
    wait_open(*worker_);
    const std::string expected = road == Road::kTcp ? "zmq/tcp" : name_of(road);
    const std::string taken = worker_->channel_transports().at(kChannel);
    if (why_not.empty() && taken != expected) why_not = "it went by " + taken;
    payload_ = worker_->device().allocate(num_bytes, MemoryKind::kDevice);
    view_.dtype = DType::kUInt8;
    view_.num_dims = 1;
    view_.shape[0] = static_cast<std::int64_t>(num_bytes);
    view_.data = payload_->data();
  }
  ~ChannelWay() override {
    worker_->send_end(kChannel);
    worker_->close(10);
  }

  std::int64_t move(std::int64_t num_messages) override {
    for (std::int64_t message = 1; message <= num_messages; ++message) {
      const std::uint64_t which = message == num_messages ? kLastOfWindow : 0;
      const auto sent =
          worker_->send_item(kChannel, {.data_fingerprint = which}, {view_}, nullptr, deadline());
      if (!sent || !sent.value()) throw std::runtime_error("the channel failed");
    }
    return std::stoll(receiver_.expect("arrived"));
  }

 private:
  const ReceiverProcess receiver_;
  const std::unique_ptr<Worker> worker_;
  std::unique_ptr<Memory> payload_;
  TensorView view_;
};

// Copies on one stream, from or to one buffer. The buffers at the other end are used in turn, as many as a
// channel has.
class CopyWay final : public Way {
 public:
  CopyWay(const std::string& from, MemoryKind from_kind, const std::string& to, MemoryKind to_kind,
          std::size_t num_bytes)
      : num_bytes_(num_bytes), from_device_(make_device(from)), to_device_(make_device(to)) {
    const bool from_is_one = from_kind == MemoryKind::kDevice;
    for (std::int64_t index = 0; index < kNumInFlightMax; ++index) {
      if (index == 0 || !from_is_one) from_.push_back(from_device_->allocate(num_bytes, from_kind));
      if (index == 0 || from_is_one) to_.push_back(to_device_->allocate(num_bytes, to_kind));
    }
    stream_ = from_device_->make_stream();
  }

  std::int64_t move(std::int64_t num_messages) override {
    for (std::size_t message = 0; message < static_cast<std::size_t>(num_messages); ++message) {
      stream_->copy(to_[message % to_.size()]->data(), from_[message % from_.size()]->data(), num_bytes_);
    }
    stream_->synchronize();
    return now_ns();
  }

 private:
  const std::size_t num_bytes_;
  const std::unique_ptr<Device> from_device_;
  const std::unique_ptr<Device> to_device_;
  std::vector<std::unique_ptr<Memory>> from_;
  std::vector<std::unique_ptr<Memory>> to_;
  std::unique_ptr<Stream> stream_;
};

// ---- Measuring ----

struct Contender {
  std::string name;
  std::unique_ptr<Way> way;
  std::int64_t num_messages = 1;  // number of messages in one round
  std::vector<double> gb_per_s;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double seconds_of(Way& way, std::int64_t num_messages) {
  const std::int64_t began_ns = now_ns();
  return static_cast<double>(way.move(num_messages) - began_ns) / 1e9;
}

std::vector<Contender> contenders(const Settings& settings, std::size_t num_bytes) {
  std::vector<Contender> all;
  for (const Road road : kRoads) {
    std::string why_not;
    auto way = std::make_unique<ChannelWay>(settings, road, num_bytes, why_not);
    if (why_not.empty()) {
      all.push_back({"channel, " + name_of(road), std::move(way), 1, {}});
    } else {
      std::fprintf(stderr, "%zu bytes, no %s: %s\n", num_bytes, name_of(road).c_str(), why_not.c_str());
    }
  }
  const auto copy = [&](const char* name, MemoryKind from, const std::string& to_device, MemoryKind to) {
    all.push_back({name, std::make_unique<CopyWay>(settings.sender, from, to_device, to, num_bytes), 1, {}});
  };
  copy("copy, device to host", MemoryKind::kDevice, settings.sender, MemoryKind::kStaging);
  copy("copy, host to device", MemoryKind::kStaging, settings.sender, MemoryKind::kDevice);
  copy("copy, device to device", MemoryKind::kDevice, settings.receiver, MemoryKind::kDevice);
  return all;
}

// Chooses the number of messages of one measurement so that it takes `seconds`. They are at least four times
// as many as may be in flight at once.
void choose_num_messages(Contender& contender, double seconds) {
  const std::int64_t num_messages = 2 * kNumInFlightMax;
  double taken = seconds_of(*contender.way, num_messages);
  taken = std::max(1e-6, std::min(taken, seconds_of(*contender.way, num_messages)));
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

// Returns the channel's rate divided by the rate of each copy, as "name: ratio".
std::string ratios_of(const Contender& contender, const std::vector<Contender>& all, const char* format) {
  std::string text;
  for (const Contender& other : all) {
    if (!contender.name.starts_with("channel") || other.name.starts_with("channel")) continue;
    std::array<char, 80> part{};
    std::snprintf(part.data(), part.size(), format, other.name.c_str(), ratio(contender, other));
    text += (text.empty() ? "" : ", ") + std::string(part.data());
  }
  return text;
}

void show(const Settings& settings, std::size_t num_bytes, const std::vector<Contender>& all) {
  for (const Contender& contender : all) {
    const auto [low, high] = std::minmax_element(contender.gb_per_s.begin(), contender.gb_per_s.end());
    const double middle = median(contender.gb_per_s);
    if (settings.json) {
      std::printf(
          "{\"bytes\": %zu, \"way\": \"%s\", \"gb_per_s\": %.4f, \"min\": %.4f, \"max\": %.4f, "
          "\"ratio_to\": {%s}}\n",
          num_bytes, contender.name.c_str(), middle, *low, *high,
          ratios_of(contender, all, "\"%s\": %.4f").c_str());
    } else {
      std::printf("%9zu  %-23s %8.3f GB/s (%.3f to %.3f)  %s\n", num_bytes, contender.name.c_str(), middle,
                  *low, *high, ratios_of(contender, all, "%s %.3f").c_str());
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
      const double seconds = seconds_of(*contender.way, contender.num_messages);
      contender.gb_per_s.push_back(static_cast<double>(contender.num_messages) *
                                   static_cast<double>(num_bytes) / seconds / 1e9);
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

Settings parse(const std::vector<std::string>& arguments) {
  Settings settings;
  const std::map<std::string, std::function<void(const std::string&)>> options = {
      {"--sender", [&](const std::string& text) { settings.sender = text; }},
      {"--receiver", [&](const std::string& text) { settings.receiver = text; }},
      {"--rounds", [&](const std::string& text) { settings.rounds = std::stoi(text); }},
      {"--seconds", [&](const std::string& text) { settings.seconds = std::stod(text); }},
      {"--sizes", [&](const std::string& text) { settings.sizes = parse_sizes(text); }},
  };
  for (std::size_t index = 1; index < arguments.size(); ++index) {
    if (arguments[index] == "--json") {
      settings.json = true;
      continue;
    }
    const auto option = options.find(arguments[index]);
    if (option == options.end() || index + 1 == arguments.size()) {
      throw std::runtime_error("'" + arguments[index] +
                               "' is unknown, or needs a value; see the top of this source");
    }
    option->second(arguments[++index]);
  }
  return settings;
}

}  // namespace
}  // namespace pipedream

int main(int num_arguments, char** argument_texts) {
  const std::vector<std::string> arguments(argument_texts, argument_texts + num_arguments);
  try {
    if (arguments.size() == 5 && arguments[1] == "--receive") {
      pipedream::receive(arguments[2], static_cast<pipedream::Road>(std::stoi(arguments[3])),
                         std::stoul(arguments[4]));
      return 0;
    }
    const pipedream::Settings settings = pipedream::parse(arguments);
    for (const std::size_t num_bytes : settings.sizes) pipedream::measure(settings, num_bytes);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
