#include "transport/device_offer.h"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>

#include "base/check.h"

namespace pipedream {
namespace {

// The size of each half of the offered memory. The first half holds the offer's text, which contains a
// secret. The sender writes to the second half.
constexpr std::size_t kTextBytes = 256;
using Text = std::array<char, kTextBytes>;

constexpr std::uint32_t kOfferChannelId = std::numeric_limits<std::uint32_t>::max();

SharedMemoryUse use_of(LinkIdentity run) {
  run.channel_id = kOfferChannelId;
  return {run, kTextBytes};
}

Text padded(const std::string& text) {
  PD_CHECK(text.size() <= kTextBytes, "an offer of " << text.size() << " bytes");
  Text bytes{};
  std::copy(text.begin(), text.end(), bytes.begin());
  return bytes;
}

void copy(Device& device, void* to, const void* from) {
  const auto stream = device.make_stream();
  stream->copy(to, from, kTextBytes);
  stream->synchronize();
}

std::string try_offer(Device& device, const std::string& offer, LinkIdentity run) {
  std::string why;
  const auto memory = SharedMemory::open_on(device, offer, use_of(run), &why);
  if (!memory) return why;
  if (memory->size_bytes() != 2 * kTextBytes) return "it was made by another build of pipedream";
  const Text expected = padded(offer);
  Text read{};
  copy(device, read.data(), memory->data());
  if (read != expected) return "what is mapped is not what was offered";
  Text written{};
  std::reverse_copy(expected.begin(), expected.end(), written.begin());
  copy(device, memory->data() + kTextBytes, written.data());
  copy(device, read.data(), memory->data() + kTextBytes);
  if (read != written) return "what is written to it is not there afterwards";
  return "";
}

}  // namespace

// An exception here, such as a DeviceError or a UserError about too little memory, does not end the run: the
// two workers then exchange their items without shared device memory.

std::unique_ptr<SharedMemory> make_device_offer(Device& device, LinkIdentity run, std::string* why) {
  try {
    auto memory = SharedMemory::make_on(device, 2 * kTextBytes, use_of(run), why);
    if (!memory) return nullptr;
    const Text text = padded(memory->address());
    copy(device, memory->data(), text.data());
    return memory;
  } catch (const std::runtime_error& error) {
    if (why != nullptr) *why = error.what();
    return nullptr;
  }
}

std::string why_out_of_reach(Device& device, const std::string& offer, LinkIdentity run) {
  try {
    return try_offer(device, offer, run);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

}  // namespace pipedream
