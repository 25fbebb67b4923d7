#include "planner/lanes.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace pipedream {

Network::Network(std::size_t num_workers, std::vector<Transfer>* transfers)
    : lines_in_(num_workers),
      gathered_ms_(num_workers, std::numeric_limits<double>::infinity()),
      transfers_(transfers) {}

std::size_t Network::add_line() {
  lines_free_ms_.push_back(0);
  return lines_free_ms_.size() - 1;
}

void Network::send(std::vector<SentItem>& items, double now_ms) {
  sent_.clear();
  for (SentItem& item : items) {
    const Made one = made(item, now_ms);
    if (item.lane->line == kNoLine) {
      arrive(item, {one.last_ms, one.last_ms}, now_ms);
    } else {
      sent_.push_back(one);
    }
  }
  if (sent_.empty()) return;
  carry(lines_free_ms_[sent_.front().item->lane->line], now_ms);
  for (const Made& one : sent_) {
    const Span arrives = arrivals(one);
    arrive(*one.item, arrives, now_ms);
    if (transfers_ == nullptr) continue;
    const Lane& lane = *one.item->lane;
    transfers_->push_back({lane.edge.kind, lane.sender, lane.receiver, one.item->minibatch,
                           one.item->microbatch, one.leaves.begin_ms, arrives.end_ms});
  }
}

void Network::arrive(SentItem& item, Span arrives, double now_ms) {
  Lane& lane = *item.lane;
  item.arrives_ms = arrives.end_ms;
  double goes_on_ms = arrives.end_ms;
  if (lane.edge.kind == EdgeKind::kPush) {
    lane.firsts_ms.push_back(arrives.begin_ms);
    // All chunks but the last are updated while later chunks arrive.
    goes_on_ms =
        std::max(arrives.begin_ms, arrives.end_ms - (lane.chunks.number - 1) * lane.chunks.update_ms);
  }
  lane.arrivals_ms.push_back(std::max(goes_on_ms, now_ms));  // the receiver never goes on before the SEND
}

Network::Made Network::made(SentItem& item, double now_ms) {
  const Lane& lane = *item.lane;
  const LaneChunks& chunks = lane.chunks;
  Made one{&item, now_ms, now_ms, lane.transfer_ms / chunks.number, lane.transfer_ms, {}};
  if (lane.edge.kind == EdgeKind::kPush) {
    gathered_ms_[lane.sender] = std::numeric_limits<double>::infinity();
    one.first_ms = now_ms - chunks.first_lead_ms;
    one.last_ms = now_ms - chunks.last_lead_ms;
  } else if (lane.edge.kind == EdgeKind::kPull && chunks.number > 1) {
    one.first_ms = std::min(now_ms, gathered_ms_[lane.sender] + chunks.update_ms);
  }
  return one;
}

void Network::receive(Lane& lane, const Lane* before, double since_ms) {
  const std::size_t index = lane.num_taken++;
  if (lane.edge.kind != EdgeKind::kPush) return;
  double& gathered_ms = gathered_ms_[lane.receiver];
  const bool is_of_round_too =
      before != nullptr && before->edge.kind == EdgeKind::kPush && before->receiver == lane.receiver;
  gathered_ms = std::max(is_of_round_too ? gathered_ms : since_ms, lane.firsts_ms[index]);
}

Network::Span Network::arrivals(const Made& made) {
  const Lane& lane = *made.item->lane;
  const auto [begin_ms, end_ms] = made.leaves;
  const bool is_alone = end_ms == begin_ms + lane.transfer_ms;
  double comes_ms = is_alone ? begin_ms : end_ms - lane.transfer_ms;
  double late_ms = 0;
  if (lane.queues_in) {
    const double ready_ms = comes_ms;
    comes_ms = begin_to_come(lane, ready_ms);
    late_ms = comes_ms - ready_ms;
  }
  const double all_ms =
      std::max(comes_ms + lane.transfer_ms, made.last_ms + made.of_chunk_ms) + lane.latency_ms;
  const double first_ms = begin_ms + late_ms + (end_ms - begin_ms) / lane.chunks.number + lane.latency_ms;
  return {std::min(first_ms, all_ms), all_ms};
}

void Network::carry(double& free_ms, double now_ms) {
  const double begin_ms = std::max(now_ms, free_ms);
  in_order_.resize(sent_.size());
  std::iota(in_order_.begin(), in_order_.end(), std::size_t{0});
  for (Made& one : sent_) {
    one.leaves = {begin_ms, begin_ms};
    const double early_ms = std::max(one.first_ms, free_ms);
    const double not_there_ms = std::max(0.0, one.last_ms + one.of_chunk_ms - begin_ms);
    const double taken_ms = std::min(begin_ms - early_ms, one.item->lane->transfer_ms - not_there_ms);
    if (taken_ms <= 0) continue;
    one.leaves.begin_ms = early_ms;
    one.left_ms = one.item->lane->transfer_ms - taken_ms;
    free_ms = early_ms + taken_ms;
  }
  if (sent_.size() > 1) {  // stable_sort would allocate even for one item
    std::ranges::stable_sort(in_order_, [&](std::size_t one, std::size_t other) {
      return sent_[one].left_ms < sent_[other].left_ms;
    });
  }
  double carried_ms = 0;
  auto sharing = static_cast<double>(sent_.size());
  for (const std::size_t index : in_order_) {
    Made& one = sent_[index];
    one.leaves.end_ms = one.left_ms > 0 ? begin_ms + (carried_ms + sharing * one.left_ms)
                                        : one.leaves.begin_ms + one.item->lane->transfer_ms;
    carried_ms += one.left_ms;
    sharing -= 1;
  }
  if (carried_ms > 0) free_ms = begin_ms + carried_ms;
}

double Network::begin_to_come(const Lane& lane, double ready_ms) {
  LineIn& line = lines_in_[lane.receiver];
  if (is_exchange(lane.edge.kind)) {
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
