// Finds out, before memory is planned, whether one device can write into the memory of another device. The
// receiver offers a little of its device's memory; the sender maps it, reads a text there, and writes to it.
// Any thread.
#pragma once

#include <memory>
#include <string>

#include "device/device.h"
#include "transport/shared_memory.h"

namespace pipedream {

// Makes the offer of one run and incarnation; channel_id is ignored. The offer is the memory's address(), and
// is valid as long as the memory exists. Null, with the reason in `why`, if the device cannot share memory or
// an attempt fails.
[[nodiscard]] std::unique_ptr<SharedMemory> make_device_offer(Device& device, LinkIdentity run,
                                                              std::string* why = nullptr);

// The reason why the device cannot write to the offered memory; empty if it can.
[[nodiscard]] std::string why_out_of_reach(Device& device, const std::string& offer, LinkIdentity run);

}  // namespace pipedream
