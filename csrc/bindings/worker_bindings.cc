// Defines pipedream._core.Worker, with one object per worker. advance() completes a work item, sends its
// results and waits for the next item. So Python calls the core once per item. No wait holds the GIL
// (waiting.h).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/derived_seed.h"
#include "base/process.h"
#include "bindings/bindings.h"
#include "bindings/channel_rows.h"
#include "bindings/engine_rows.h"
#include "bindings/fast_method.h"
#include "bindings/id_caster.h"
#include "bindings/item_fields_type.h"
#include "bindings/items.h"
#include "bindings/shard_exchange_type.h"
#include "bindings/tensor_exchange.h"
#include "bindings/waiting.h"
#include "channel/wire_layout.h"
#include "codec/codec.h"
#include "stage/worker.h"
#include "transport/transport.h"
#include "wire/frame.h"
#include "wire/item_fields.h"

namespace py = pybind11;

namespace pipedream {

namespace {

constexpr double kStarvedCheckSeconds = 1.0;

// Each tensor of an item: its dtype's name, number of dimensions, and largest size in bytes.
using TensorFields = std::vector<std::tuple<std::string, int, std::size_t>>;

ItemSpec item_spec(const TensorFields& tensors) {
  std::vector<TensorSpec> specs;
  for (const auto& [dtype, num_dims, bytes_max] : tensors) {
    specs.push_back({dtype_from_name(dtype), static_cast<std::uint8_t>(num_dims), bytes_max});
  }
  return ItemSpec(std::move(specs));
}

}  // namespace

// This worker's public key and secret key, and the public keys of the peers with which it may talk.
using KeyFields = std::tuple<std::string, std::string, std::vector<std::string>>;
// The first and the last port that the worker may listen on.
using PortFields = std::pair<std::uint16_t, std::uint16_t>;

class PyWorker {
 public:
  explicit PyWorker(const WorkerOptions& options) : worker_(std::make_unique<Worker>(options)) {}
  // In a child of fork() the worker is leaked, because its threads and sockets belong to the parent.
  ~PyWorker() {
    if (!home_.is_this()) static_cast<void>(worker_.release());
  }
  PyWorker(const PyWorker&) = delete;
  PyWorker& operator=(const PyWorker&) = delete;

  static std::unique_ptr<PyWorker> make(const std::string& device, const std::string& transport,
                                        const std::string& libzmq_path, const std::string& bind_host,
                                        const std::optional<PortFields>& ports, double peer_timeout_s,
                                        const std::optional<KeyFields>& keys, bool insecure, bool beats,
                                        bool shares_memory, bool checksums, std::uint64_t run_id,
                                        std::uint32_t incarnation, std::uint64_t plan_hash,
                                        std::uintptr_t compute_stream, const std::vector<int>& own_cpus,
                                        bool force_staging) {
    WorkerOptions options;
    options.device = device;
    options.transport = transport;
    options.libzmq_path = libzmq_path;
    options.bind_host = bind_host;
    if (ports) options.ports = PortRange{ports->first, ports->second};
    options.peer_timeout_s = peer_timeout_s;
    if (keys) {
      const auto& [public_key, secret_key, allowed] = *keys;
      options.keys = CurveKeys{public_key, secret_key, allowed};
    }
    options.insecure = insecure;
    options.beats = beats;
    options.shares_memory = shares_memory;
    options.checksums = checksums;
    options.run_id = run_id;
    options.incarnation = incarnation;
    options.plan_hash = plan_hash;
    options.compute_stream = compute_stream;
    const auto current = std::make_shared<CurrentStream>();
    options.current_stream = [current, compute_stream] {
      return current->is_known.load() ? current->ask() : compute_stream;
    };
    options.own_cpus = own_cpus;
    options.force_staging = force_staging;
    auto made = std::make_unique<PyWorker>(options);
    made->current_stream_ = current;
    return made;
  }

  void add_channel(const std::string& name, bool sends, const std::string& peer, std::uint32_t channel_id,
                   const TensorFields& tensors, std::size_t num_items, std::int64_t first_microbatch,
                   std::int64_t microbatch_stride, std::int64_t num_microbatches, std::size_t chunk_bytes,
                   bool on_device, const std::string& codec, bool places_on_device,
                   std::size_t num_transfers_kept, std::int64_t num_residuals, const std::string& posted_into,
                   std::size_t num_posts_max) {
    ChannelSpec spec;
    spec.name = name;
    spec.peer = peer;
    spec.channel_id = channel_id;
    spec.item = item_spec(tensors);
    spec.num_items_max = num_items;
    spec.first_microbatch = first_microbatch;
    spec.microbatch_stride = microbatch_stride;
    spec.num_microbatches = num_microbatches;
    spec.chunk_bytes = chunk_bytes;
    spec.on_device = on_device;
    spec.codec = codec_from_name(codec);
    spec.places_on_device = places_on_device;
    spec.num_transfers_kept = num_transfers_kept;
    spec.num_residuals = num_residuals;
    spec.posted_into = posted_into;
    spec.num_posts_max = num_posts_max;
    if (sends) {
      worker_->add_send_channel(spec);
    } else {
      worker_->add_receive_channel(spec);
    }
  }

  void add_term(const std::string& name, std::size_t slot_bytes, std::int64_t num_slots, bool staging,
                bool is_posted_into) {
    const MemoryKind kind = staging ? MemoryKind::kStaging : MemoryKind::kDevice;
    worker_->add_term({name, slot_bytes, num_slots, kind}, is_posted_into);
    if (staging) staging_terms_.insert(name);
  }

  // Returns (the offer, the reason if there is none).
  std::pair<std::string, std::string> offer_device_memory() {
    std::string why;
    std::string offer = worker_->offer_device_memory(&why);
    return {std::move(offer), std::move(why)};
  }
  std::string why_out_of_reach(const std::string& offer) { return worker_->why_out_of_reach(offer); }

  void seal() { worker_->seal(); }
  std::map<std::string, std::string> listen() { return worker_->listen(); }
  void connect(const std::map<std::string, std::string>& endpoints) { worker_->connect(endpoints); }

  bool wait_open(double timeout_s) {
    return with_signals(
               timeout_s, [&](Deadline deadline) { return worker_->wait_open(deadline); },
               [](bool open) { return open; })
        .value();
  }

  // Returns a capsule of a flat uint8 tensor over one slot of a term. The slot stays leased as long as the
  // tensor lives.
  py::capsule hold_slot(const std::string& term) {
    auto held = std::make_shared<Worker::HeldSlot>(worker_->hold_slot(term));
    TensorView view;
    view.dtype = DType::kUInt8;
    view.num_dims = 1;
    view.shape[0] = static_cast<std::int64_t>(held->lease.size_bytes());
    view.data = held->lease.data();
    if (staging_terms_.contains(term)) return to_capsule(view, DeviceType::kHost, 0, held);
    return to_capsule(view, worker_->device().type(), worker_->device().index(), held);
  }

  // Returns the residuals, which are the values that the channel's codec has not sent yet. They are capsules
  // of flat uint8 tensors. Items use the lists in turn; a list has one tensor for each tensor of an item.
  py::list residuals(const std::string& channel) {
    py::list items;
    for (const auto& of_item : worker_->residuals(channel)) {
      py::list tensors;
      for (const std::span<std::byte> residual : of_item) {
        TensorView view;
        view.dtype = DType::kUInt8;
        view.num_dims = 1;
        view.shape[0] = static_cast<std::int64_t>(residual.size());
        view.data = residual.data();
        tensors.append(
            to_capsule(view, worker_->device().type(), worker_->device().index(), worker_->pool()));
      }
      items.append(tensors);
    }
    return items;
  }

  // edges: all edges with one end at this worker, each with the name of its channel, except the edges of its
  // exchange.
  void start(const ScheduleOptions& options, Rank rank,
             const std::vector<std::pair<Edge, std::string>>& edges, std::shared_ptr<TensorExchange> tensors,
             std::size_t num_spans_max) {
    exchange_ = std::move(tensors);
    if (exchange_ && worker_->device().type() == DeviceType::kCuda && !current_stream_->is_known.load()) {
      current_stream_->ask = exchange_->current_stream(worker_->device().index());
      current_stream_->is_known.store(static_cast<bool>(current_stream_->ask));
    }
    std::vector<EdgeChannelName> channels;
    for (const auto& [edge, name] : edges) channels.push_back({edge, name});
    worker_->start(options, rank, channels, num_spans_max);
  }

  py::object next_work() { return wait_for_work(std::nullopt, 0, py::none()); }

  // arguments: (tensors, fields, compute_ns, while_waiting). Empties the list of tensors, so that it does not
  // keep them alive after they are sent.
  py::object advance(FastArguments arguments) {
    const py::list tensors = list_in(arguments[0]);
    const ItemFields* const fields = item_fields_in(arguments[1]);
    if (fields == nullptr) throw py::type_error("fields are no ItemFields");
    const std::int64_t compute_ns = PyLong_AsLongLong(arguments[2]);
    if (compute_ns == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    Outgoing made = outgoing(tensors, *fields);
    if (PyList_SetSlice(tensors.ptr(), 0, PY_SSIZE_T_MAX, nullptr) != 0) throw py::error_already_set();
    return wait_for_work(std::move(made), compute_ns, arguments[3]);
  }

  void add_compute(std::int64_t began_ns, std::int64_t ended_ns) {
    worker_->engine().add_compute(began_ns, ended_ns);
  }
  void begin_evaluation(MinibatchId boundary) { worker_->engine().begin_evaluation(boundary); }
  void evaluate_first() { worker_->engine().evaluate_first(); }
  void end_of_data(std::int64_t num_minibatches, std::uint8_t events) {
    worker_->engine().end_of_data(num_minibatches, events);
  }
  std::optional<std::int64_t> num_minibatches() { return worker_->engine().num_minibatches(); }

  bool send_item(const std::string& channel, const py::list& tensors, const ItemFields& fields,
                 double timeout_s) {
    const DeviceType device =
        worker_->sends_on_device(channel) ? worker_->device().type() : DeviceType::kHost;
    const Borrowed borrowed =
        from_capsules(tensors, device, worker_->device().index(), [&] { return "'" + channel + "'"; });
    return with_signals(
               timeout_s,
               [&](Deadline deadline) {
                 return worker_->send_item(channel, fields, borrowed.tensors, borrowed.owner, deadline);
               },
               [](bool sent) { return sent; })
        .value();
  }
  // items: (channel, capsules) for each
  void send_items(const std::vector<std::pair<std::string, py::list>>& items, const ItemFields& fields) {
    for (const auto& [channel, tensors] : items) send_item(channel, tensors, fields, kForeverSeconds);
  }
  void send_end(const std::string& channel) { worker_->send_end(channel); }
  bool wait_until_sent(const std::string& channel, std::size_t num_left_max, double timeout_s) {
    const auto attempt = [&](Deadline deadline) {
      return worker_->wait_until_sent(channel, num_left_max, deadline);
    };
    const bool have_left = with_signals(timeout_s, attempt, [](bool left) { return left; }).value();
    worker_->collect_released(channel);  // with the GIL, because this drops Python's tensors
    return have_left;
  }

  // Null at the time-out.
  std::unique_ptr<PyItem> receive_item(const std::string& channel, double timeout_s, bool counts_as_wait) {
    auto result = with_signals(
        timeout_s,
        [&](Deadline deadline) { return worker_->receive_item(channel, deadline, counts_as_wait); },
        [](const std::optional<ReceivedItem>& item) { return item.has_value(); });
    if (!result.value()) return nullptr;
    return item_of(channel, std::move(*result.value()));
  }
  // Returns (the channel's index in `channels`, its next item), or None after stop_serving().
  py::object receive_any(const std::vector<std::string>& channels) {
    auto result = with_signals(
        kForeverSeconds, [&](Deadline deadline) { return worker_->receive_any(channels, deadline); },
        [&](const std::optional<Worker::ItemOfAny>& found) {
          return found.has_value() || worker_->has_stopped_serving();
        });
    if (!result.value()) return py::none();
    const std::size_t channel_index = result.value()->channel_index;
    return py::make_tuple(channel_index, item_of(channels[channel_index], std::move(result.value()->item)));
  }
  void stop_serving() { worker_->stop_serving(); }
  void fail(const std::string& why) { worker_->fail(why); }

  py::list versions(StageIndex stage) const { return version_rows(worker_->engine().versions(stage)); }
  std::map<WeightVersion, SlotIndex> kept_versions(StageIndex stage, MinibatchId minibatch) const {
    return worker_->engine().kept_versions(stage, minibatch);
  }
  py::list spans() const { return span_rows(worker_->engine().spans()); }
  // Returns (sent, received). Each is a dict from a channel to its rows, and is complete after
  // wait_for_transfers().
  py::tuple transfers() const {
    py::dict sent;
    py::dict received;
    for (const auto& [name, transfers] : worker_->transfers()) {
      if (!transfers.sent.empty()) sent[py::str(name)] = sent_rows(transfers.sent);
      if (!transfers.received.empty()) received[py::str(name)] = received_rows(transfers.received);
    }
    return py::make_tuple(sent, received);
  }
  bool wait_for_transfers(double timeout_s) {
    const py::gil_scoped_release release;
    return worker_->wait_for_transfers(deadline_after(timeout_s));
  }
  py::dict totals() const { return totals_entry(worker_->engine().totals()); }
  py::list memory() const {
    py::list rows;
    for (const TermReport& term : worker_->pool()->report()) {
      rows.append(py::make_tuple(term.name, term.planned_bytes, term.peak_bytes));
    }
    return rows;
  }
  py::dict channel_stats() const {
    py::dict entries;
    for (const auto& [name, stats] : worker_->channel_stats()) entries[py::str(name)] = stats_entry(stats);
    return entries;
  }

  Worker& worker() { return *worker_; }

 private:
  std::unique_ptr<PyItem> item_of(const std::string& channel, ReceivedItem received) {
    auto item = std::make_unique<PyItem>();
    item->pool = worker_->pool();
    if (worker_->receives_on_device(channel)) item->device = worker_->device().type();
    item->device_index = worker_->device().index();
    item->fields = received.fields;
    item->is_end = received.is_end;
    item->received = std::move(received);
    return item;
  }

  // Completes the current item, if `made` has its results, and waits for the next item. while_waiting: called
  // once if the next item is not there yet. Its argument is that item without its tensors, or None. The
  // call's time counts as waiting if the item is still not there afterwards.
  py::object wait_for_work(std::optional<Outgoing> made, std::int64_t compute_ns, py::handle while_waiting) {
    Clock::time_point starved_since = kNotStarved;
    std::optional<SlotIndex> freed;
    const auto attempt = [&](Deadline deadline) {
      if (made) freed = worker_->engine().complete(doing_, *std::exchange(made, std::nullopt), compute_ns);
      return worker_->next_work(deadline);
    };
    if (!while_waiting.is_none()) {
      auto result = at_once(attempt);
      if (result.value()) return hand_out(std::move(*result.value()), freed);
      const std::int64_t began_ns = now_ns();
      const std::optional<WorkItem> upcoming = worker_->engine().upcoming();
      while_waiting(upcoming ? make_work_item(*upcoming, {}, py::list(), -1) : py::none());
      const std::int64_t called_ns = now_ns() - began_ns;
      result = at_once(attempt);
      if (result.value()) return hand_out(std::move(*result.value()), freed);
      worker_->engine().add_wait(called_ns);
    }
    for (;;) {
      worker_->engine().collect_released();  // with the GIL, because this drops Python's tensors
      auto result = with_signals(kStarvedCheckSeconds, attempt,
                                 [](const std::optional<WorkItem>& work) { return work.has_value(); });
      if (result.value()) return hand_out(std::move(*result.value()), freed);
      check_not_starved(starved_since);
    }
  }

  py::object hand_out(WorkItem work, std::optional<SlotIndex> freed) {
    worker_->engine().collect_released();   // with the GIL, because this drops Python's tensors
    doing_ = work.opcode.value_or(doing_);  // DONE has no opcode, and is never completed

    on_device_ = work.on_device;
    ItemFields fields;
    fields.boundary_events = work.end_events;
    py::list tensors;
    if (work.received) {
      fields = work.received->fields;
      auto holder = std::make_shared<ItemHolder>(ItemHolder{worker_->pool(), std::move(*work.received)});
      for (const TensorView& tensor : holder->item.tensors) {
        tensors.append(exchange_->lend(tensor, device_of_item(), worker_->device().index(), holder));
      }
    }
    return make_work_item(work, fields, tensors, freed ? freed->value() : -1);
  }

  // Throws UserError if nothing could arrive for a while because all slots of a channel are in use. User code
  // that keeps its input tensors keeps their slots. Garbage may also hold tensors, so it is collected first.
  void check_not_starved(Clock::time_point& starved_since) {
    const ReceiveChannel* channel = worker_->engine().starved_channel();
    if (channel == nullptr) {
      starved_since = kNotStarved;
    } else if (starved_since == kNotStarved) {
      starved_since = Clock::now();
      py::module_::import("gc").attr("collect")();
    } else if (Clock::now() - starved_since >
               std::chrono::duration<double>(worker_->options().peer_timeout_s)) {
      throw UserError(
          worker_->engine().position() + ": nothing can arrive on '" + channel->options().name +
          "', because all tensors that came before are still in use; a layer that keeps its input must "
          "keep a clone");
    }
  }

  Outgoing outgoing(const py::list& tensors, const ItemFields& fields) {
    Borrowed borrowed = exchange_->borrow(tensors, device_of_item(), worker_->device().index(),
                                          [&] { return worker_->engine().position(); });
    try {
      auto ready = on_device_ ? worker_->record_compute() : nullptr;
      return {fields, std::move(borrowed.tensors), std::move(ready), std::move(borrowed.owner)};
    } catch (const DeviceError& error) {
      raise({FailureKind::kDeviceError, error.what()});
    }
  }

  [[nodiscard]] DeviceType device_of_item() const {
    return on_device_ ? worker_->device().type() : DeviceType::kHost;
  }

  static constexpr Clock::time_point kNotStarved = Clock::time_point::max();

  const HomeProcess home_;
  std::unique_ptr<Worker> worker_;
  // Holds the function that returns the framework's current stream. start() sets it; the threads that drop
  // tensors call it.
  struct CurrentStream {
    std::function<std::uintptr_t()> ask;  // set before is_known becomes true
    std::atomic<bool> is_known{false};
  };

  std::shared_ptr<CurrentStream> current_stream_;
  std::shared_ptr<TensorExchange> exchange_;  // set by start()
  Opcode doing_ = Opcode::kForward;
  bool on_device_ = true;                // whether the current item's tensors are on the device
  std::set<std::string> staging_terms_;  // the terms in pinned host memory, by name
};

void bind_worker(py::module_& module) {
  bind_run_failure(module);
  bind_items(module);
  bind_shard_exchange(module);

  py::class_<PyWorker> worker(module, "Worker");
  def_fast<PyWorker, [](PyWorker& self, FastArguments arguments) { return self.advance(arguments); }, 4>(
      worker, "advance");
  worker
      .def(py::init(&PyWorker::make), py::kw_only(), py::arg("device") = "host", py::arg("transport") = "zmq",
           py::arg("libzmq_path") = "", py::arg("bind_host") = "127.0.0.1", py::arg("ports") = py::none(),
           py::arg("peer_timeout_s") = 15.0, py::arg("keys") = py::none(), py::arg("insecure") = false,
           py::arg("beats") = false, py::arg("shares_memory") = true, py::arg("checksums") = false,
           py::arg("run_id") = 0, py::arg("incarnation") = 0, py::arg("plan_hash") = 0,
           py::arg("compute_stream") = 0, py::arg("own_cpus") = std::vector<int>(),
           py::arg("force_staging") = false)
      .def("add_channel", &PyWorker::add_channel, py::kw_only(), py::arg("name"), py::arg("sends"),
           py::arg("peer"), py::arg("channel_id"), py::arg("tensors"), py::arg("num_items"),
           py::arg("first_microbatch") = 0, py::arg("microbatch_stride") = 1, py::arg("num_microbatches") = 1,
           py::arg("chunk_bytes") = 0, py::arg("on_device") = true, py::arg("codec") = "none",
           py::arg("places_on_device") = false, py::arg("num_transfers_kept") = 0,
           py::arg("num_residuals") = 1, py::arg("posted_into") = "", py::arg("num_posts_max") = 0)
      .def("offer_device_memory", &PyWorker::offer_device_memory, py::call_guard<py::gil_scoped_release>())
      .def("why_out_of_reach", &PyWorker::why_out_of_reach, py::arg("offer"),
           py::call_guard<py::gil_scoped_release>())
      .def("add_term", &PyWorker::add_term, py::arg("name"), py::arg("slot_bytes"), py::arg("num_slots"),
           py::arg("staging") = false, py::arg("is_posted_into") = false)
      .def("seal", &PyWorker::seal, py::call_guard<py::gil_scoped_release>())
      .def("listen", &PyWorker::listen, py::call_guard<py::gil_scoped_release>())
      .def("connect", &PyWorker::connect, py::arg("endpoints"), py::call_guard<py::gil_scoped_release>())
      .def("wait_open", &PyWorker::wait_open, py::arg("timeout_s"))
      .def("channels_not_open", [](PyWorker& self) { return self.worker().channels_not_open(); })
      .def("hold_slot", &PyWorker::hold_slot, py::arg("term"))
      .def("residuals", &PyWorker::residuals, py::arg("channel"))
      .def(
          "make_exchange",
          [](PyWorker& self, const py::kwargs& spec) {
            return std::make_unique<PyShardExchange>(self.worker(), spec);
          },
          py::keep_alive<0, 1>())
      .def("start", &PyWorker::start, py::kw_only(), py::arg("options"), py::arg("rank"), py::arg("edges"),
           py::arg("tensors"), py::arg("num_spans_max") = 50'000)
      .def("next_work", &PyWorker::next_work)
      .def("add_compute", &PyWorker::add_compute, py::arg("began_ns"), py::arg("ended_ns"))
      .def("begin_evaluation", &PyWorker::begin_evaluation, py::arg("boundary"))
      .def("evaluate_first", &PyWorker::evaluate_first)
      .def("end_of_data", &PyWorker::end_of_data, py::arg("num_minibatches"), py::arg("boundary_events") = 0)
      .def("num_minibatches", &PyWorker::num_minibatches)
      .def("send_item", &PyWorker::send_item, py::arg("channel"), py::arg("tensors"),
           py::arg("fields") = ItemFields{}, py::arg("timeout_s") = 1e9)
      .def("send_items", &PyWorker::send_items, py::arg("items"), py::arg("fields") = ItemFields{})
      .def("send_end", &PyWorker::send_end, py::arg("channel"))
      .def("wait_until_sent", &PyWorker::wait_until_sent, py::arg("channel"), py::arg("num_left_max") = 0,
           py::arg("timeout_s") = 1e9)
      .def("receive_item", &PyWorker::receive_item, py::arg("channel"), py::arg("timeout_s") = 1e9,
           py::arg("counts_as_wait") = true)
      .def("receive_any", &PyWorker::receive_any, py::arg("channels"))
      .def("stop_serving", &PyWorker::stop_serving)
      .def("fail", &PyWorker::fail, py::arg("why"))
      .def("versions", &PyWorker::versions, py::arg("stage"))
      .def("kept_versions", &PyWorker::kept_versions, py::arg("stage"), py::arg("minibatch"))
      .def("spans", &PyWorker::spans)
      .def("transfers", &PyWorker::transfers)
      .def("wait_for_transfers", &PyWorker::wait_for_transfers, py::arg("timeout_s"))
      .def("totals", &PyWorker::totals)
      .def("memory", &PyWorker::memory)
      .def("describe_memory", [](PyWorker& self) { return self.worker().pool()->describe(); })
      .def("channel_stats", &PyWorker::channel_stats)
      .def("channel_transports", [](PyWorker& self) { return self.worker().channel_transports(); })
      // pulse() keeps the GIL on purpose: a beat says that the interpreter runs.
      .def("pulse", [](PyWorker& self) { self.worker().pulse(); })
      .def(
          "abort", [](PyWorker& self, const std::string& why) { self.worker().abort(why); }, py::arg("why"))
      .def(
          "close",
          [](PyWorker& self, double linger_s) {
            const py::gil_scoped_release release;
            self.worker().close(linger_s);
          },
          py::arg("linger_s") = 5.0);

  module.def("poisons_released_slots", &poison_by_default);
  py::list dtypes;
  for (int code = 0; code <= std::numeric_limits<std::uint8_t>::max(); ++code) {
    if (is_known_dtype(static_cast<std::uint8_t>(code))) {
      dtypes.append(dtype_name(static_cast<DType>(code)));
    }
  }
  module.attr("DTYPES") = dtypes;
  module.attr("SHARED_MEMORY") = kSharedMemory;
  module.attr("CUDA_IPC") = kCudaIpc;
  module.attr("STAGING_TERM") = kStagingTerm;
  module.attr("RESIDUAL_TERM") = kResidualTerm;
  module.attr("ENCODED_TERM") = kEncodedTerm;
  module.def("slot_stride_bytes", &slot_stride_bytes, py::arg("slot_bytes"));
  module.attr("NUM_TENSORS_MAX") = py::int_(ItemSpec::kNumTensorsMax);
  module.attr("NUM_DIMS_MAX") = py::int_(kNumDimsMax);
  module.attr("COMPUTED_LATER") = kComputedLater;
  module.def(
      "channel_bytes",
      [](const TensorFields& tensors, const std::string& codec) {
        const ItemSpec item = item_spec(tensors);
        const WireLayout wire(item, codec_from_name(codec));
        return py::make_tuple(item.slot_bytes(), wire.slot_bytes(), wire.residual_bytes(), wire.encodes());
      },
      py::arg("tensors"), py::arg("codec"));
  module.def(
      "codec_name", [](const std::string& name) { return codec_name(codec_from_name(name)); },
      py::arg("name"));
  module.def("derived_seed", &derived_seed, py::arg("seed"), py::arg("number"));
  module.def("make_curve_keys", &make_curve_keys, py::arg("libzmq_path") = "");
  module.def("die_with_parent", &die_with_parent, py::arg("parent_pid"));
  module.def("keep_freed_memory", &keep_freed_memory);
  module.def("cuda_available", &cuda_available);
  module.def("why_no_cuda", &why_no_cuda);
  module.def("built_with_cuda", &built_with_cuda);
}

}  // namespace pipedream
