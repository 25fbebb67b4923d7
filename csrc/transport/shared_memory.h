// Memory that two processes of one host both map: the receiver makes it, the sender opens it by its address.
//
// It has no name in any file system (memfd), so that nothing is left behind, whoever dies: the sender opens
// it as /proc/<pid>/fd/<fd> of the receiver, which the kernel allows to processes of the same user in the
// same pid namespace. A secret in its first page proves that it is the one that was meant, and what it is for
// stands there, too: an address that was exchanged on its way is not believed. Where any of this fails the
// two are not on the same host, or may not share memory, and the caller takes the wire.
//
// Device memory is shared alike: what is opened by its address says how the device maps the rest. Its maker
// frees it last: its destructor waits for the other process, until a deadline, and where that does not let go
// it leaves the memory to the end of this process.
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

// Whose slots the memory holds, and how large both sides plan each of them.
struct SharedMemoryUse {
  LinkIdentity identity;
  std::uint64_t slot_bytes = 0;

  friend bool operator==(const SharedMemoryUse&, const SharedMemoryUse&) = default;
};

// The channel_id of memory that belongs to no channel: several receive into it, where they are told to.
inline constexpr std::uint32_t kPostedChannelId = 0xFFFFFFFF;

// How long a maker of device memory waits for whoever opened it, from its destructor on where nobody says
// until when. All of a run end at the same time.
inline constexpr auto kOpenerPatience = std::chrono::seconds(5);

// Any thread; unmapped when it dies. The other side's mapping stays valid.
class SharedMemory {
 public:
  // Pre-faulted, huge pages advised. Throws UserError naming the size when there is not enough.
  [[nodiscard]] static std::unique_ptr<SharedMemory> make(std::size_t num_bytes, const SharedMemoryUse& use);
  // Null when it cannot be opened here, or was made for another use; why, if given, says the reason.
  [[nodiscard]] static std::unique_ptr<SharedMemory> open(const std::string& address,
                                                          const SharedMemoryUse& use,
                                                          std::string* why = nullptr);
  // The same of the device's own memory; the device outlives it. Null, with the reason, where the device
  // shares none.
  [[nodiscard]] static std::unique_ptr<SharedMemory> make_on(Device& device, std::size_t num_bytes,
                                                             const SharedMemoryUse& use,
                                                             std::string* why = nullptr);
  // For what make_on() made, on a device of the same kind.
  [[nodiscard]] static std::unique_ptr<SharedMemory> open_on(Device& device, const std::string& address,
                                                             const SharedMemoryUse& use,
                                                             std::string* why = nullptr);

  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  virtual ~SharedMemory() = default;

  [[nodiscard]] virtual std::byte* data() const = 0;  // behind the first page, from the second on
  // True: only the device's streams may read and write it.
  [[nodiscard]] virtual bool on_device() const = 0;
  [[nodiscard]] virtual std::size_t size_bytes() const = 0;
  [[nodiscard]] virtual std::string address()
      const = 0;  // "<pid>:<fd>:<bytes>:<secret, hex>"; of make() only

  // Whoever opened it says that it will write here; both sides see that it has.
  virtual void claim() = 0;
  [[nodiscard]] virtual bool is_claimed() const = 0;
  // The same where several may open it: who sends by this channel. False when as many have as can.
  [[nodiscard]] virtual bool claim_for(std::uint32_t channel_id) = 0;
  [[nodiscard]] virtual bool is_claimed_for(std::uint32_t channel_id) const = 0;

  // Until when its maker's destructor waits at most: one deadline for whatever is freed together. Nothing to
  // do but for what make_on() made.
  virtual void wait_until_at_most(Deadline /*deadline*/) {}

 protected:
  SharedMemory() = default;
};

}  // namespace pipedream
