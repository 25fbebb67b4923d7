// Converts statistics and transfer records of channels to dicts and rows for Python. Called with the GIL
// held.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "channel/channel_stats.h"
#include "channel/transfer.h"

namespace pipedream {

[[nodiscard]] pybind11::dict stats_entry(const ChannelStats& stats);
[[nodiscard]] pybind11::list sent_rows(const std::vector<SentTransfer>& transfers);
[[nodiscard]] pybind11::list received_rows(const std::vector<ReceivedTransfer>& transfers);

}  // namespace pipedream
