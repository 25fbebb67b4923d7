#include "planner/lanes.h"

#include <algorithm>
#include <limits>

namespace pipedream {

Network::Network(std::size_t num_workers)
    : lines_in_(num_workers), gathered_ms_(num_workers, std::numeric_limits<double>::infinity()) {}

std::size_t Network::add_line() {
  lines_free_ms_.push_back(0);
  return lines_free_ms_.size() - 1;
}

void Network::send(const std::vector<Lane*>& lanes, double now_ms) {
  std::vector<Span> arrives;
  std::vector<double> first_ms;
  std::vector<double> transfers_ms;
  std::vector<std::size_t> carried;
  for (std::size_t index = 0; index < lanes.size(); ++index) {
    const Span chunks = made(*lanes[index], now_ms);
    arrives.push_back({chunks.end_ms, chunks.end_ms});
    if (lanes[index]->line == kNoLine) continue;
    carried.push_back(index);
    first_ms.push_back(chunks.begin_ms);
    transfers_ms.push_back(lanes[index]->transfer_ms);
  }
  if (!carried.empty()) {
    double& free_ms = lines_free_ms_[lanes[carried.front()]->line];
    const std::vector<Span> leaving = carry(free_ms, now_ms, first_ms, transfers_ms);
    for (std::size_t place = 0; place < carried.size(); ++place) {
      Span& span = arrives[carried[place]];
      span = arrivals(*lanes[carried[place]], leaving[place], span.end_ms);
    }
  }
  for (std::size_t index = 0; index < lanes.size(); ++index) {
    Lane& lane = *lanes[index];
    const Span span = arrives[index];
    if (lane.kind != LaneKind::kPush) {
      lane.arrivals_ms.push_back(span.end_ms);
      continue;
    }
    lane.firsts_ms.push_back(span.begin_ms);
    // All chunks but one are updated while others come.
    const double hidden_ms = (lane.chunks.number - 1) * lane.chunks.update_ms;
    lane.arrivals_ms.push_back(std::max(span.begin_ms, span.end_ms - hidden_ms));
  }
}

Network::Span Network::made(const Lane& lane, double now_ms) {
  const LaneChunks& chunks = lane.chunks;
  if (lane.kind == LaneKind::kPush) {
    gathered_ms_[lane.sender] = std::numeric_limits<double>::infinity();
    return {now_ms - chunks.first_lead_ms, now_ms - chunks.last_lead_ms};
  }
  if (lane.kind == LaneKind::kPull && chunks.number > 1) {
    return {std::min(now_ms, gathered_ms_[lane.sender] + chunks.update_ms), now_ms};
  }
  return {now_ms, now_ms};
}

void Network::receive(Lane& lane, const Lane* before, double since_ms) {
  const std::size_t index = lane.num_taken++;
  if (lane.kind != LaneKind::kPush) return;
  double& gathered_ms = gathered_ms_[lane.receiver];
  const bool is_of_round_too =
      before != nullptr && before->kind == LaneKind::kPush && before->receiver == lane.receiver;
  gathered_ms = std::max(is_of_round_too ? gathered_ms : since_ms, lane.firsts_ms[index]);
}

Network::Span Network::arrivals(const Lane& lane, Span leaves, double last_ms) {
  const double transfer_ms = lane.transfer_ms;
  const bool is_alone = leaves.end_ms == leaves.begin_ms + transfer_ms;
  double comes_ms = is_alone ? leaves.begin_ms : leaves.end_ms - transfer_ms;
  double late_ms = 0;
  if (lane.queues_in) {
    const double ready_ms = comes_ms;
    comes_ms = begin_to_come(lane, ready_ms);
    late_ms = comes_ms - ready_ms;
  }
  const double of_chunk_ms = transfer_ms / lane.chunks.number;
  const double all_ms = std::max(comes_ms + transfer_ms, last_ms + of_chunk_ms) + lane.latency_ms;
  return {std::min(all_ms, leaves.begin_ms + late_ms + of_chunk_ms + lane.latency_ms), all_ms};
}

std::vector<Network::Span> Network::carry(double& free_ms, double now_ms, const std::vector<double>& first_ms,
                                          const std::vector<double>& transfers_ms) {
  const double begin_ms = std::max(now_ms, free_ms);
  std::vector<Span> spans(first_ms.size(), {begin_ms, begin_ms});
  std::vector<double> left_ms = transfers_ms;
  std::vector<std::size_t> in_order(first_ms.size());
  for (std::size_t index = 0; index < first_ms.size(); ++index) {
    in_order[index] = index;
    const double early_ms = std::max(first_ms[index], free_ms);
    const double taken_ms = std::min(transfers_ms[index], begin_ms - early_ms);
    if (taken_ms <= 0) continue;
    spans[index].begin_ms = early_ms;
    left_ms[index] = transfers_ms[index] - taken_ms;
    free_ms = early_ms + taken_ms;
  }
  std::ranges::stable_sort(in_order,
                           [&](std::size_t one, std::size_t other) { return left_ms[one] < left_ms[other]; });
  double carried_ms = 0;
  auto sharing = static_cast<double>(in_order.size());
  for (const std::size_t index : in_order) {
    Span& span = spans[index];
    span.end_ms = left_ms[index] > 0 ? begin_ms + (carried_ms + sharing * left_ms[index])
                                     : span.begin_ms + transfers_ms[index];
    carried_ms += left_ms[index];
    sharing -= 1;
  }
  if (carried_ms > 0) free_ms = begin_ms + carried_ms;
  return spans;
}

double Network::begin_to_come(const Lane& lane, double ready_ms) {
  LineIn& line = lines_in_[lane.receiver];
  if (lane.kind != LaneKind::kBoundary) {
    const double begin_ms = std::max(ready_ms, std::min(ready_ms, line.exchanges_until_ms) + line.taken_ms);
    line.taken_ms = 0;
    line.exchanges_until_ms = std::max(line.exchanges_until_ms, begin_ms + lane.transfer_ms);
    return begin_ms;
  }
  const double begin_ms = std::max(ready_ms, line.free_ms);
  line.free_ms = begin_ms + lane.transfer_ms;
  line.taken_ms += std::max(0.0, std::min(line.free_ms, line.exchanges_until_ms) - begin_ms);
  return begin_ms;
}

}  // namespace pipedream
