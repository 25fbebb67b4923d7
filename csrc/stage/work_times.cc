#include "stage/work_times.h"

#include <algorithm>

#include "base/check.h"
#include "base/clock.h"

namespace pipedream {

WorkTimes::WorkTimes(std::size_t num_spans_max) : spans_(num_spans_max) {
  PD_CHECK(num_spans_max > 0, num_spans_max);
}

void WorkTimes::ask() {
  if (asked_ns_ == 0) asked_ns_ = now_ns();
  if (started_ns_ == 0) started_ns_ = asked_ns_;
}

void WorkTimes::begin() { ready_ns_ = now_ns(); }

void WorkTimes::end(const Instruction& done, std::int64_t compute_ns) {
  const std::int64_t completed_ns = now_ns();
  const bool is_later = compute_ns == kComputedLater;
  PD_CHECK(is_later || num_told_ == 0, "compute_ns " << compute_ns << " after some that came later");
  spans_.add({done.opcode, done.stage, done.minibatch, done.microbatch, asked_ns_, ready_ns_, completed_ns,
              wait_ns_, is_later ? 0 : compute_ns});
  ++totals_.num_work_items;
  num_completed_.fetch_add(1);
  totals_.wait_ns += wait_ns_;
  if (!is_later) totals_.compute_ns += compute_ns;
  totals_.elapsed_ns = std::max(totals_.elapsed_ns, completed_ns - started_ns_);
  asked_ns_ = 0;
  wait_ns_ = 0;
}

// Counts only the part of a wait in which the device was idle:
//
//   host    | wait for item 2 |launch|
//   device  | item 1 |               | item 2 |
//                    |--wait--|        counted
void WorkTimes::add_compute(std::int64_t began_ns, std::int64_t ended_ns) {
  PD_CHECK(num_told_ < spans_.num_added(), "no item is left of " << spans_.num_added());
  PD_CHECK(compute_ended_ns_ <= began_ns && began_ns <= ended_ns,
           compute_ended_ns_ << ", " << began_ns << ", " << ended_ns);
  totals_.compute_ns += ended_ns - began_ns;
  totals_.elapsed_ns = std::max(totals_.elapsed_ns, ended_ns - started_ns_);
  if (Span* span = spans_.find(num_told_)) {
    const std::int64_t free_ns = std::min(std::max(span->asked_ns, compute_ended_ns_), began_ns);
    const std::int64_t idle_wait_ns = std::clamp<std::int64_t>(span->ready_ns - free_ns, 0, span->wait_ns);
    totals_.wait_ns -= span->wait_ns - idle_wait_ns;
    span->asked_ns = free_ns;
    span->ready_ns = began_ns;
    span->completed_ns = ended_ns;
    span->wait_ns = idle_wait_ns;
    span->compute_ns = ended_ns - began_ns;
  }
  ++num_told_;
  compute_ended_ns_ = ended_ns;
}

}  // namespace pipedream
