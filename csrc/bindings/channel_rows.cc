#include "bindings/channel_rows.h"

#include "bindings/id_caster.h"

namespace py = pybind11;

namespace pipedream {

py::dict stats_entry(const ChannelStats& stats) {
  py::dict entry;
  entry["wire_bytes_sent"] = stats.link.bytes_sent;
  entry["wire_bytes_received"] = stats.link.bytes_received;
  entry["num_refused"] = stats.link.num_refused;
  entry["num_items"] = stats.num_items;
  entry["num_chunks"] = stats.num_chunks;
  entry["chunk_bytes"] = stats.chunk_bytes;
  entry["tensor_bytes"] = stats.tensor_bytes;
  entry["placed_bytes"] = stats.placed_bytes;
  entry["transfer_ns"] = stats.transfer_ns;
  entry["credit_wait_ns"] = stats.credit_wait_ns;
  entry["wait_ns"] = stats.wait_ns;
  return entry;
}

py::list sent_rows(const std::vector<SentTransfer>& transfers) {
  py::list rows;
  for (const SentTransfer& sent : transfers) {
    rows.append(py::make_tuple(sent.minibatch, sent.microbatch, sent.wire_bytes, sent.queued_ns,
                               sent.started_ns, sent.copied_ns, sent.framed_ns, sent.released_ns));
  }
  return rows;
}

py::list received_rows(const std::vector<ReceivedTransfer>& transfers) {
  py::list rows;
  for (const ReceivedTransfer& received : transfers) {
    rows.append(py::make_tuple(received.minibatch, received.microbatch, received.wire_bytes,
                               received.arrived_ns, received.complete_ns));
  }
  return rows;
}

}  // namespace pipedream
