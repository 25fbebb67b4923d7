// Makes and opens memory that two processes of one host both map. The receiver makes the memory, and the
// sender opens it by its address.
//
// The memory has no name in any file system (memfd), so that nothing is left behind after a crash. The sender
// opens it as /proc/<pid>/fd/<fd> of the receiver, which the kernel allows to processes of the same user in
// the same pid namespace. A secret in the first page proves that the sender has opened the right memory, and
// the page also says what the memory is for. So a forged or mixed-up address is refused. If any of this
// fails, the two processes are not on one host or may not share memory, and the caller uses the network
// connection.
//
// Device memory is shared in the same way: the file at its address holds a handle by which the other
// process's device maps the device memory. The maker frees the memory last: its destructor waits until the
// other process has unmapped it, or until a deadline. After the deadline the memory stays until this process
// ends.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.h"
#include "device/device.h"
#include "wire/frame.h"

namespace pipedream {

// The use of the memory: the channel that receives into it, and the size that both sides plan for each slot.
// Memory of no channel, such as a board (ring_board.h), has values that no channel has.
struct SharedMemoryUse {
  LinkIdentity identity;
  std::uint64_t slot_bytes = 0;

  friend bool operator==(const SharedMemoryUse&, const SharedMemoryUse&) = default;
};

// The channel_id of memory in which receivers post places. Several channels receive into such memory, each at
// its posted places.
inline constexpr std::uint32_t kPostedChannelId = 0xFFFFFFFF;

// How long the destructor of a maker of device memory waits for the opener, unless wait_until_at_most() sets
// a deadline. A few seconds are enough, because all workers of a run end at the same time.
inline constexpr auto kOpenerPatience = std::chrono::seconds(5);

// Any thread. The destructor unmaps the memory; the other side's mapping stays valid.
class SharedMemory {
 public:
  // Makes memory in pre-faulted pages, and advises the kernel to use huge pages. Throws a UserError that
  // names the size when there is not enough memory.
  [[nodiscard]] static std::unique_ptr<SharedMemory> make(std::size_t num_bytes, const SharedMemoryUse& use);
  // Opens the memory at this address. Null when it cannot be opened here or was made for another use; `why`,
  // if given, gets the reason.
  [[nodiscard]] static std::unique_ptr<SharedMemory> open(const std::string& address,
                                                          const SharedMemoryUse& use,
                                                          std::string* why = nullptr);
  // Makes memory on the device; the device outlives it. Null, with the reason in `why`, if the device cannot
  // share memory.
  [[nodiscard]] static std::unique_ptr<SharedMemory> make_on(Device& device, std::size_t num_bytes,
                                                             const SharedMemoryUse& use,
                                                             std::string* why = nullptr);
  // Opens memory that was made by make_on() on a device of the same kind. Null in the same cases as open().
  [[nodiscard]] static std::unique_ptr<SharedMemory> open_on(Device& device, const std::string& address,
                                                             const SharedMemoryUse& use,
                                                             std::string* why = nullptr);

  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  virtual ~SharedMemory() = default;

  // Host memory begins behind the first page of the mapping.
  [[nodiscard]] virtual std::byte* data() const = 0;
  // Whether the memory lies on the device. Then only the device's streams may read and write it.
  [[nodiscard]] virtual bool on_device() const = 0;
  [[nodiscard]] virtual std::size_t size_bytes() const = 0;
  // "<pid>:<fd>:<bytes>:<secret, hex>". Only the side that made the memory may ask.
  [[nodiscard]] virtual std::string address() const = 0;

  // Called by the side that opened the memory, to say that it will write here. Both sides see this claim.
  virtual void claim() = 0;
  [[nodiscard]] virtual bool is_claimed() const = 0;
  // Claims the memory for one channel, when several channels write to it. False when the table of claims is
  // full.
  [[nodiscard]] virtual bool claim_for(std::uint32_t channel_id) = 0;
  [[nodiscard]] virtual bool is_claimed_for(std::uint32_t channel_id) const = 0;

  // Sets the latest time until which the maker's destructor waits, so that all memory freed together shares
  // one deadline. Does nothing except for memory of make_on().
  virtual void wait_until_at_most(Deadline /*deadline*/) {}

 protected:
  SharedMemory() = default;
};

}  // namespace pipedream
