// Measures how long a worker's items take, and how long they wait. Owned by the compute thread, which makes
// every call, unless a function says otherwise.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/newest_log.h"
#include "schedule/instruction.h"

namespace pipedream {

// The times of one work item: when it was asked for, when its inputs were there, and when it was completed.
// compute_ns is the time spent in user code. If the device still works after the completion, add_compute()
// replaces these times by times of the device: asked is when the device ran out of work, but not before the
// item was asked for; ready is when the device began the item, and completed when it ended the item.
struct Span {
  Opcode opcode = Opcode::kForward;
  StageIndex stage;
  MinibatchId minibatch;
  MicrobatchIndex microbatch;
  std::int64_t asked_ns = 0;
  std::int64_t ready_ns = 0;
  std::int64_t completed_ns = 0;
  // The part of the time from asked_ns to ready_ns in which the item waited, as add_wait() was told.
  std::int64_t wait_ns = 0;
  std::int64_t compute_ns = 0;
};

// The compute_ns of an item that is completed before the device has done its work. add_compute() gives the
// time later.
inline constexpr std::int64_t kComputedLater = -1;

struct EngineTotals {
  std::int64_t num_work_items = 0;  // completed, without SENDs and RECVs
  std::int64_t wait_ns = 0;         // the sum over these items
  std::int64_t compute_ns = 0;      // the sum over these items
  std::int64_t elapsed_ns = 0;      // from the first ask() to the end of the last item
};

class WorkTimes {
 public:
  // The last num_spans_max spans are kept.
  explicit WorkTimes(std::size_t num_spans_max);

  // Notes that the caller asks for the next item. May be called again until the item is there.
  void ask();
  [[nodiscard]] bool is_asking() const { return asked_ns_ != 0; }
  // Adds to the time for which the next item waited.
  void add_wait(std::int64_t wait_ns) { wait_ns_ += wait_ns; }
  // Notes that the item has all its inputs and is handed out.
  void begin();
  // The item is done. compute_ns: as in StageEngine::complete().
  void end(const Instruction& done, std::int64_t compute_ns);
  // Sets the device's times, as StageEngine::add_compute() says.
  void add_compute(std::int64_t began_ns, std::int64_t ended_ns);

  [[nodiscard]] std::vector<Span> spans() const { return spans_.items(); }  // oldest first
  [[nodiscard]] EngineTotals totals() const { return totals_; }
  // The number of calls of end(). Any thread.
  [[nodiscard]] std::uint64_t num_completed() const { return num_completed_.load(); }

 private:
  std::int64_t asked_ns_ = 0;  // when the caller first asked for the next item; 0 before it has asked
  std::int64_t ready_ns_ = 0;
  std::int64_t wait_ns_ = 0;
  std::int64_t started_ns_ = 0;
  std::uint64_t num_told_ = 0;         // items whose times add_compute() has set
  std::int64_t compute_ended_ns_ = 0;  // when the device ended the last of these items
  NewestLog<Span> spans_;
  EngineTotals totals_;
  std::atomic<std::uint64_t> num_completed_{0};
};

}  // namespace pipedream
