// How items travel in a replay: a lane for each edge, over the lines of its two workers. Pure; any thread.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "schedule/edge.h"

namespace pipedream {

inline constexpr std::size_t kNoLine = static_cast<std::size_t>(-1);

// The equal chunks of what an edge carries between replicas. Each leaves as soon as it is made.
struct LaneChunks {
  double number = 1;
  double first_lead_ms = 0;  // of a push: how long before all chunks are made the first one is
  double last_lead_ms = 0;   // and the last one
  double update_ms = 0;      // of one chunk, which hides behind the next; 0 where none does
};

// Pushes and pulls go between the replicas of a stage, and share a line of their own.
[[nodiscard]] constexpr bool is_exchange(EdgeKind kind) {
  return kind == EdgeKind::kPush || kind == EdgeKind::kPull;
}

// An edge, on which items arrive in the order in which they are sent.
struct Lane {
  Edge edge = {};
  std::size_t sender = 0;
  std::size_t receiver = 0;
  std::size_t line = kNoLine;  // by which the sender sends; none between stages of one worker
  bool queues_in = false;      // at the receiver, with what others send
  double transfer_ms = 0;
  double latency_ms = 0;
  LaneChunks chunks = {};
  std::optional<std::size_t> answer = std::nullopt;  // of a push to an asynchronous shard: the lane back
  std::vector<double> arrivals_ms = {};              // from when the receiver may go on
  std::vector<double> firsts_ms = {};                // of pushes: when the first chunk arrives
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
  // transfers: gets every transfer; null if none is wanted.
  Network(std::size_t num_workers, std::vector<Transfer>* transfers);

  // Adds a line by which a worker sends, and returns its index.
  std::size_t add_line();
  // Sends the items that one worker sends at the same time, all on the same line.
  void send(std::vector<SentItem>& items, double now_ms);
  // Takes the lane's next item, for which its receiver has been ready since then. before: the lane of the
  // list's step before, null if that is of none.
  void receive(Lane& lane, const Lane* before, double since_ms);

 private:
  // The line by which a worker receives.
  struct LineIn {
    double free_ms = 0;  // for what other stages send
    double exchanges_until_ms = 0;
    double taken_ms = 0;  // of what replicas exchange, by what has come meanwhile
  };
  struct Span {
    double begin_ms = 0;
    double end_ms = 0;
  };

  // An item that send() is sending, chunk by chunk.
  struct Made {
    SentItem* item = nullptr;
    double first_ms = 0;  // when the first chunk was there
    double last_ms = 0;   // and the last one
    double of_chunk_ms = 0;
    double left_ms = 0;  // time that the item still needs on the line
    Span leaves = {};
  };

  [[nodiscard]] Made made(SentItem& item, double now_ms);
  // When each of what is sent now leaves: it shares the line evenly, and what is sent later waits. Its chunks
  // from before have left if nothing else did then.
  void carry(double& free_ms, double now_ms);
  // When what is ready to come begins to.
  double begin_to_come(const Lane& lane, double ready_ms);
  // Arrivals of the first chunk, and of all.
  Span arrivals(const Made& made);
  static void arrive(SentItem& item, Span arrives, double now_ms);

  std::vector<double> lines_free_ms_ = {};  // by which workers send: from when
  std::vector<Made> sent_ = {};             // what has a line of what is sent now
  std::vector<std::size_t> in_order_ = {};  // of these, those first that have least left
  std::vector<LineIn> lines_in_;            // by worker
  // By worker, since when it has the first chunk of all gradients of its shard.
  std::vector<double> gathered_ms_;
  std::vector<Transfer>* transfers_;
};

}  // namespace pipedream
