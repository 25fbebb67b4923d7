// Implements the defaults of Device, for devices whose memory other processes cannot map.
#include "device/device.h"

namespace pipedream {

std::unique_ptr<ExportedMemory> Device::export_memory(std::size_t /*num_bytes*/, std::string* why) {
  if (why != nullptr) *why = name() + " exports no memory";
  return nullptr;
}

std::unique_ptr<Memory> Device::import_memory(const std::string& /*handle*/, std::size_t /*num_bytes*/,
                                              std::string* why) {
  if (why != nullptr) *why = name() + " maps no memory of other devices";
  return nullptr;
}

}  // namespace pipedream
