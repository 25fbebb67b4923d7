// Models how items travel in a replay. Each edge has a lane, which is its own queue of items. Several lanes
// may share a line, which stands for a link. Each worker has lines by which it sends, and one line by which
// it receives. Pure; any thread.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "schedule/edge.h"

namespace pipedream {

inline constexpr std::size_t kNoLine = static_cast<std::size_t>(-1);

// The equal chunks of an item of a push or pull. Each chunk leaves as soon as it is made.
struct LaneChunks {
  double number = 1;
  double first_lead_ms = 0;  // pushes: how long before the SEND the first chunk is made
  double last_lead_ms = 0;   // pushes: how long before the SEND the last chunk is made
  double update_ms = 0;  // time to update one chunk while the next arrives; 0 if updates wait for all chunks
};

// Returns whether the edge carries pushes or pulls. They go between the owners of a stage's shards. Unless
// all items of a worker share one line (Timing::one_link), its pushes and pulls share a line of their own.
[[nodiscard]] constexpr bool is_exchange(EdgeKind kind) {
  return kind == EdgeKind::kPush || kind == EdgeKind::kPull;
}

// The queue of one edge's items, which arrive in the order in which they are sent.
struct Lane {
  Edge edge = {};
  std::size_t sender = 0;
  std::size_t receiver = 0;
  // Index of the line that the items use: the sender's, but for answers of an asynchronous shard the
  // receiver's. kNoLine between stages of one worker.
  std::size_t line = kNoLine;
  bool queues_in = false;  // items queue for the receiver's line with those of other senders
  double transfer_ms = 0;
  double latency_ms = 0;
  LaneChunks chunks = {};
  // For pushes to an asynchronous shard: the lane of the pull that answers.
  std::optional<std::size_t> answer = std::nullopt;
  std::vector<double> arrivals_ms = {};  // per item: when the receiver may go on
  std::vector<double> firsts_ms = {};    // pushes, per item: when the first chunk arrives
  std::size_t num_taken = 0;
  bool is_awaited = false;

  [[nodiscard]] bool has_next() const { return num_taken < arrivals_ms.size(); }
  [[nodiscard]] double next_ms() const { return arrivals_ms[num_taken]; }
};

// A transfer of one item over a line.
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
  double arrives_ms = 0;  // when the whole item arrives; set by Network::send()
};

// All lines of a replay.
class Network {
 public:
  // transfers: gets every transfer; null if the caller needs none.
  Network(std::size_t num_workers, std::vector<Transfer>* transfers);

  // Adds a line by which a worker sends, and returns its index.
  std::size_t add_line();
  // Sends items that one worker sends at the same time. Those that use a line all use the same line.
  void send(std::vector<SentItem>& items, double now_ms);
  // Receives the lane's next item. since_ms: when the receiver became ready for the item. before: the lane of
  // the receiver's previous instruction; null if that was no transfer.
  void receive(Lane& lane, const Lane* before, double since_ms);

 private:
  // The line by which a worker receives.
  struct LineIn {
    double free_ms = 0;             // when the line is free for items of other stages
    double exchanges_until_ms = 0;  // when the last push or pull has arrived
    double taken_ms = 0;            // how long items of other stages took since the last push or pull
  };
  struct Span {
    double begin_ms = 0;
    double end_ms = 0;
  };

  // An item during send(), with the times of its chunks.
  struct Made {
    SentItem* item = nullptr;
    double first_ms = 0;     // when the first chunk was made
    double last_ms = 0;      // when the last chunk was made
    double of_chunk_ms = 0;  // how long one chunk needs on the line
    double left_ms = 0;      // how long the item still needs on the line
    Span leaves = {};
  };

  [[nodiscard]] Made made(SentItem& item, double now_ms);
  // Computes when each item of sent_ leaves. The items of one send() share the line evenly, and items sent
  // later wait for them. Chunks that were made before now_ms have already left, as far as the line was free.
  void carry(double& free_ms, double now_ms);
  // Reserves the receiver's line for an item that could begin to use it at ready_ms. Returns when the item
  // begins.
  double begin_to_come(const Lane& lane, double ready_ms);
  // Returns when the first chunk arrives and when all chunks have arrived.
  Span arrivals(const Made& made);
  static void arrive(SentItem& item, Span arrives, double now_ms);

  std::vector<double> lines_free_ms_ = {};  // per line: when it is free to send again
  std::vector<Made> sent_ = {};             // the items of the current send() that use a line
  std::vector<std::size_t> in_order_ = {};  // indices of sent_, in ascending order of left_ms
  std::vector<LineIn> lines_in_;            // one line per worker
  // By worker: when it had received the first chunk of every push of the round.
  std::vector<double> gathered_ms_;
  std::vector<Transfer>* transfers_;
};

}  // namespace pipedream
