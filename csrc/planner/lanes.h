// Models how items travel in a replay. Each edge has a lane, its own queue of items. Lanes share lines, which
// are the links: each worker has lines by which it sends, and one line by which it receives. Pure; any
// thread.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "schedule/edge.h"

namespace pipedream {

inline constexpr std::size_t kNoLine = static_cast<std::size_t>(-1);

// The equal chunks of an item that an edge carries between replicas. Each chunk leaves as soon as it is made.
struct LaneChunks {
  double number = 1;
  double first_lead_ms = 0;  // of pushes: from the time when the first chunk is made to the SEND
  double last_lead_ms = 0;   // of pushes: from the time when the last chunk is made to the SEND
  double update_ms = 0;      // time to update one chunk while the next arrives; 0 if chunks do not overlap
};

// Whether the edge carries pushes or pulls. They go between the replicas of a stage, and share a line of
// their own.
[[nodiscard]] constexpr bool is_exchange(EdgeKind kind) {
  return kind == EdgeKind::kPush || kind == EdgeKind::kPull;
}

// An edge, on which items arrive in the order in which they are sent.
struct Lane {
  Edge edge = {};
  std::size_t sender = 0;
  std::size_t receiver = 0;
  std::size_t line = kNoLine;  // by which the sender sends; none between stages of one worker
  bool queues_in = false;      // whether items queue for the receiver's line with those of other senders
  double transfer_ms = 0;
  double latency_ms = 0;
  LaneChunks chunks = {};
  std::optional<std::size_t> answer = std::nullopt;  // pushes to an asynchronous shard: the lane back
  std::vector<double> arrivals_ms = {};              // when the receiver may go on, by item
  std::vector<double> firsts_ms = {};                // pushes: when the first chunk arrives, by item
  std::size_t num_taken = 0;
  bool is_awaited = false;

  [[nodiscard]] bool has_next() const { return num_taken < arrivals_ms.size(); }
  [[nodiscard]] double next_ms() const { return arrivals_ms[num_taken]; }
};

// An item of an edge that a line has carried.
struct Transfer {
  EdgeKind what = EdgeKind::kActivation;
  std::size_t from_worker = 0;
  std::size_t to_worker = 0;
  MinibatchId minibatch;
  MicrobatchIndex microbatch;
  double begin_ms = 0;
  double end_ms = 0;
};

struct SentItem {
  Lane* lane = nullptr;
  MinibatchId minibatch;
  MicrobatchIndex microbatch;
  double arrives_ms = 0;  // when all of it arrives; set by Network::send()
};

// All lines of a replay.
class Network {
 public:
  // transfers: the list to which every transfer is added; null if the caller needs no transfers.
  Network(std::size_t num_workers, std::vector<Transfer>* transfers);

  // Adds a line by which a worker sends, and returns its index.
  std::size_t add_line();
  // Sends the items that one worker sends at the same time, all on the same line.
  void send(std::vector<SentItem>& items, double now_ms);
  // Receives the lane's next item. since_ms: when the receiver became ready for the item. before: the lane of
  // the receiver's previous instruction; null if that instruction was no transfer.
  void receive(Lane& lane, const Lane* before, double since_ms);

 private:
  // The line by which a worker receives.
  struct LineIn {
    double free_ms = 0;             // when it is free for items of other stages
    double exchanges_until_ms = 0;  // when the last push or pull will have come
    double taken_ms = 0;            // time that items of other stages took since the last push or pull
  };
  struct Span {
    double begin_ms = 0;
    double end_ms = 0;
  };

  // An item that send() is sending, chunk by chunk, with the times of its chunks.
  struct Made {
    SentItem* item = nullptr;
    double first_ms = 0;     // when the first chunk was made
    double last_ms = 0;      // when the last chunk was made
    double of_chunk_ms = 0;  // time that one chunk needs on the line
    double left_ms = 0;      // time that the item still needs on the line
    Span leaves = {};
  };

  [[nodiscard]] Made made(SentItem& item, double now_ms);
  // Computes when each item of sent_ leaves. These items share the line evenly, and items sent later wait for
  // them. Chunks that were made before now_ms have left before it, as far as the line was free.
  void carry(double& free_ms, double now_ms);
  // When an item that is ready to come at ready_ms begins to use the receiver's line.
  double begin_to_come(const Lane& lane, double ready_ms);
  // The times when the first chunk arrives and when all chunks have arrived.
  Span arrivals(const Made& made);
  static void arrive(SentItem& item, Span arrives, double now_ms);

  std::vector<double> lines_free_ms_ = {};  // when each line by which workers send is free
  std::vector<Made> sent_ = {};             // the items of the present send() that use a line
  std::vector<std::size_t> in_order_ = {};  // indices of sent_, in ascending order of left_ms
  std::vector<LineIn> lines_in_;            // by worker
  // For each worker: the time when it had received the first chunk of every push of the round.
  std::vector<double> gathered_ms_;
  std::vector<Transfer>* transfers_;
};

}  // namespace pipedream
