// Tests the pool: a budget of named terms, which is sealed once, and then leases that allocate nothing.
#include "pool/pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/failure.h"
#include "support/allocation_counter.h"

namespace pipedream {
namespace {

// A host device that counts the pool's allocations. A test can set how little memory it has.
class CountingDevice final : public Device {
 public:
  explicit CountingDevice(std::size_t num_bytes_max = std::numeric_limits<std::size_t>::max(),
                          bool device_memory_is_host_memory = true)
      : num_bytes_max_(num_bytes_max), device_memory_is_host_memory_(device_memory_is_host_memory) {}

  [[nodiscard]] DeviceType type() const override { return host_->type(); }
  [[nodiscard]] int index() const override { return host_->index(); }
  [[nodiscard]] std::string name() const override { return "counting"; }
  [[nodiscard]] std::unique_ptr<Stream> make_stream() override { return host_->make_stream(); }
  [[nodiscard]] std::unique_ptr<Event> make_event() override { return host_->make_event(); }
  [[nodiscard]] std::unique_ptr<Stream> wrap_stream(std::uintptr_t native_handle) override {
    return host_->wrap_stream(native_handle);
  }
  [[nodiscard]] std::unique_ptr<Memory> allocate(std::size_t num_bytes, MemoryKind kind) override {
    if (num_bytes > num_bytes_max_)
      throw UserError("cannot allocate " + std::to_string(num_bytes) + " bytes");
    allocations.emplace_back(num_bytes, kind);
    return host_->allocate(num_bytes, kind);
  }
  [[nodiscard]] std::unique_ptr<HostRegistration> register_host_memory(std::byte* data,
                                                                       std::size_t num_bytes) override {
    return host_->register_host_memory(data, num_bytes);
  }
  [[nodiscard]] bool device_memory_is_host_memory() const override { return device_memory_is_host_memory_; }

  [[nodiscard]] Device& host() { return *host_; }

  std::vector<std::pair<std::size_t, MemoryKind>> allocations;

 private:
  const std::size_t num_bytes_max_;
  const bool device_memory_is_host_memory_;
  const std::unique_ptr<Device> host_ = make_host_device();
};

class PoolTest : public testing::Test {
 protected:
  CountingDevice device_;
  Pool pool_{device_};
};

using PoolDeathTest = PoolTest;

TEST_F(PoolTest, SealAllocatesTheSumOfTheTermsOncePerKind) {
  pool_.add({"weights", 1000, 3, MemoryKind::kDevice});
  pool_.add({"gradients", 1024, 1, MemoryKind::kDevice});
  pool_.add({"receive staging", 300, 4, MemoryKind::kStaging});
  EXPECT_TRUE(device_.allocations.empty());
  EXPECT_FALSE(pool_.sealed());
  pool_.seal();
  EXPECT_TRUE(pool_.sealed());
  // The sizes are 3 x 1024 + 1024 and 4 x 512, because the distance between slots is a multiple of
  // kSlotAlignment.
  const std::vector<std::pair<std::size_t, MemoryKind>> expected = {{4096, MemoryKind::kDevice},
                                                                    {2048, MemoryKind::kStaging}};
  EXPECT_EQ(device_.allocations, expected);
  EXPECT_EQ(pool_.planned_bytes(MemoryKind::kDevice), 4096u);
  EXPECT_EQ(pool_.planned_bytes(MemoryKind::kStaging), 2048u);
}

TEST_F(PoolTest, NothingIsAllocatedAfterTheSeal) {
  SlotGroup& group = pool_.add({"activations", 64, 2, MemoryKind::kDevice});
  pool_.seal();
  const std::size_t num_allocations = device_.allocations.size();
  for (int i = 0; i < 100; ++i) {
    const Lease lease = group.lease();
    EXPECT_TRUE(lease.valid());
  }
  EXPECT_EQ(device_.allocations.size(), num_allocations);
}

TEST_F(PoolTest, AKindWithoutTermsIsNotAllocated) {
  pool_.add({"weights", 8, 1, MemoryKind::kDevice});
  pool_.seal();
  ASSERT_EQ(device_.allocations.size(), 1u);
  EXPECT_EQ(device_.allocations[0].second, MemoryKind::kDevice);
}

TEST_F(PoolTest, ATermWithMemoryOfItsOwnLiesThereAlone) {
  std::vector<std::pair<std::size_t, std::byte*>> own;
  const auto allocate = [&](std::size_t num_bytes) {
    auto memory = device_.host().allocate(num_bytes, MemoryKind::kStaging);
    own.emplace_back(num_bytes, memory->data());
    return memory;
  };
  pool_.add({"weights", 1000, 3, MemoryKind::kDevice});
  SlotGroup& received = pool_.add({"received", 300, 2, MemoryKind::kDevice, true, allocate});
  pool_.add({"nothing", 0, 2, MemoryKind::kDevice, true, allocate});
  pool_.add({"gradients", 1024, 1, MemoryKind::kDevice});
  pool_.seal();
  ASSERT_EQ(own.size(), 1U);  // a term of no bytes allocates nothing
  EXPECT_EQ(own[0].first, 1024U);
  // The term `received` leaves no gap between the other terms, and counts in the sum like any term.
  const std::vector<std::pair<std::size_t, MemoryKind>> expected = {{4096, MemoryKind::kDevice}};
  EXPECT_EQ(device_.allocations, expected);
  EXPECT_EQ(pool_.planned_bytes(MemoryKind::kDevice), 4096U + 1024);
  EXPECT_EQ(pool_.report().at(1).planned_bytes, 1024U);
  for (std::int64_t slot = 0; slot < 2; ++slot) {
    EXPECT_EQ(received.slot_data(SlotIndex(slot)),
              own[0].second + static_cast<std::size_t>(slot) * slot_stride_bytes(300));
  }
}

TEST_F(PoolTest, SlotsAreAlignedAndDoNotOverlap) {
  SlotGroup& first = pool_.add({"first", 257, 3, MemoryKind::kDevice});
  SlotGroup& second = pool_.add({"second", 1, 2, MemoryKind::kDevice});
  pool_.seal();
  std::vector<Lease> leases;
  for (int i = 0; i < 3; ++i) leases.push_back(first.lease());
  for (int i = 0; i < 2; ++i) leases.push_back(second.lease());
  for (std::size_t i = 0; i < leases.size(); ++i) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(leases[i].data()) % kSlotAlignment, 0u);
    std::memset(leases[i].data(), static_cast<int>(i + 1), leases[i].size_bytes());
  }
  for (std::size_t i = 0; i < leases.size(); ++i) {
    for (std::size_t byte = 0; byte < leases[i].size_bytes(); ++byte) {
      ASSERT_EQ(leases[i].data()[byte], static_cast<std::byte>(i + 1)) << "slot " << i << ", byte " << byte;
    }
  }
  EXPECT_EQ(leases[0].size_bytes(), 257u);
}

TEST_F(PoolTest, TheSlotReleasedLastIsLeasedFirst) {
  SlotGroup& group = pool_.add({"activations", 64, 3, MemoryKind::kDevice});
  pool_.seal();
  Lease first = group.lease();
  Lease second = group.lease();
  EXPECT_EQ(first.slot(), SlotIndex(0));
  EXPECT_EQ(second.slot(), SlotIndex(1));
  first.release();
  second.release();
  EXPECT_EQ(group.lease().slot(), SlotIndex(1));
  const Lease again = group.lease();
  EXPECT_EQ(again.slot(), SlotIndex(1));
  EXPECT_EQ(again.data(), group.slot_data(SlotIndex(1)));
}

TEST_F(PoolTest, TryLeaseIsEmptyWhenAllSlotsAreOut) {
  SlotGroup& group = pool_.add({"credits", 64, 2, MemoryKind::kStaging});
  pool_.seal();
  std::optional<Lease> first = group.try_lease();
  const std::optional<Lease> second = group.try_lease();
  ASSERT_TRUE(first && second);
  EXPECT_FALSE(group.try_lease());
  EXPECT_EQ(group.num_free(), 0);
  first->release();
  EXPECT_EQ(group.num_free(), 1);
  EXPECT_TRUE(group.try_lease());
}

TEST_F(PoolTest, AMovedLeaseGivesItsSlotBackOnce) {
  SlotGroup& group = pool_.add({"activations", 64, 2, MemoryKind::kDevice});
  pool_.seal();
  Lease first = group.lease();
  Lease second = group.lease();
  std::byte* const data = first.data();
  Lease moved(std::move(first));
  EXPECT_FALSE(first.valid());  // NOLINT(bugprone-use-after-move): the test is about this
  EXPECT_EQ(first.data(), nullptr);
  EXPECT_EQ(moved.data(), data);
  EXPECT_EQ(group.num_free(), 0);
  second = std::move(moved);  // gives back the slot of `second`
  EXPECT_EQ(group.num_free(), 1);
  EXPECT_EQ(second.data(), data);
  second.release();
  second.release();
  EXPECT_EQ(group.num_free(), 2);
}

TEST_F(PoolTest, ReportSaysPlannedAndPeakBytes) {
  SlotGroup& group = pool_.add({"activations", 100, 4, MemoryKind::kDevice});
  pool_.add({"unused", 10, 1, MemoryKind::kStaging});
  pool_.seal();
  {
    const Lease first = group.lease();
    const Lease second = group.lease();
  }
  const Lease third = group.lease();
  const std::vector<TermReport> reports = pool_.report();
  ASSERT_EQ(reports.size(), 2u);
  EXPECT_EQ(reports[0].name, "activations");
  EXPECT_EQ(reports[0].slot_bytes, 100u);
  EXPECT_EQ(reports[0].num_slots, 4);
  EXPECT_EQ(reports[0].planned_bytes, 4 * kSlotAlignment);
  EXPECT_EQ(reports[0].peak_bytes, 2 * kSlotAlignment);
  EXPECT_EQ(reports[1].kind, MemoryKind::kStaging);
  EXPECT_EQ(reports[1].peak_bytes, 0u);
}

TEST_F(PoolTest, OnReleaseRunsOnceAfterEachReleaseAndMayLease) {
  SlotGroup& group = pool_.add({"staging", 64, 1, MemoryKind::kStaging});
  pool_.seal();
  int num_releases = 0;
  bool could_lease = false;
  group.on_release([&] {
    // The callback runs outside the lock, and the slot is free already. So the callback can lease the slot
    // for a waiter.
    if (++num_releases == 1) could_lease = group.try_lease().has_value();
  });
  Lease lease = group.lease();
  EXPECT_EQ(num_releases, 0);
  lease.release();
  EXPECT_TRUE(could_lease);
  EXPECT_EQ(num_releases, 2);  // counts the release of the callback's own lease too
}

TEST_F(PoolTest, DescribeHasOneTermALineThenTheSums) {
  pool_.add({"weights (versions kept)", 1 << 20, 3, MemoryKind::kDevice});
  pool_.add({"send staging", 512, 2, MemoryKind::kStaging});
  EXPECT_EQ(pool_.describe(),
            "weights (versions kept)  3.00 MiB = 3 x 1.00 MiB (device)\n"
            "send staging             1.00 KiB = 2 x 512 bytes (staging)\n"
            "sum, device              3.00 MiB\n"
            "sum, staging             1.00 KiB\n");
}

TEST_F(PoolTest, ASecondTermOfOneNameIsRefused) {
  pool_.add({"weights", 8, 1, MemoryKind::kDevice});
  try {
    pool_.add({"weights", 16, 1, MemoryKind::kStaging});
    FAIL();
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("'weights'"), std::string::npos) << error.what();
  }
}

TEST_F(PoolTest, SizesThatOverflowAreRefused) {
  const std::size_t huge = std::numeric_limits<std::size_t>::max();
  EXPECT_THROW(pool_.add({"one slot", huge, 1, MemoryKind::kDevice}), UserError);
  EXPECT_THROW(pool_.add({"product", huge / 2, 3, MemoryKind::kDevice}), UserError);
  pool_.add({"half", huge / 2, 1, MemoryKind::kDevice});
  pool_.add({"other half", huge / 2, 1, MemoryKind::kDevice});
  EXPECT_THROW((void)pool_.planned_bytes(MemoryKind::kDevice), UserError);
}

TEST_F(PoolTest, MoreSlotsThanCanBeCountedAreRefusedAndTheMostAreAllLeasedOnce) {
  try {
    pool_.add({"too many", 0, kNumSlotsMax + 1, MemoryKind::kDevice});
    FAIL();
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("'too many' has 65536 slots, at most 65535"), std::string::npos)
        << error.what();
  }
  SlotGroup& group = pool_.add({"the most", 0, kNumSlotsMax, MemoryKind::kDevice});
  pool_.seal();
  std::vector<Lease> leases;
  for (std::int64_t slot = 0; slot < kNumSlotsMax; ++slot) {
    leases.push_back(group.lease());
    ASSERT_EQ(leases.back().slot(), SlotIndex(slot));
  }
  EXPECT_FALSE(group.try_lease());
  leases.clear();
  EXPECT_EQ(group.num_free(), kNumSlotsMax);
}

TEST_F(PoolTest, TermsOfNoSlotsOrNoBytesTakeNoMemory) {
  SlotGroup& no_slots = pool_.add({"no slots", 64, 0, MemoryKind::kDevice});
  SlotGroup& no_bytes = pool_.add({"no bytes", 0, 2, MemoryKind::kDevice});
  pool_.seal();
  EXPECT_TRUE(device_.allocations.empty());
  EXPECT_FALSE(no_slots.try_lease());
  const Lease lease = no_bytes.lease();
  EXPECT_TRUE(lease.valid());
  EXPECT_EQ(lease.size_bytes(), 0u);
}

TEST(Pool, TooSmallADeviceIsReportedWithTheTableOfTerms) {
  CountingDevice device(/*num_bytes_max=*/4096);
  Pool pool(device);
  pool.add({"weights", 4096, 2, MemoryKind::kDevice});
  try {
    pool.seal();
    FAIL();
  } catch (const UserError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("cannot allocate 8192 bytes"), std::string::npos) << text;
    EXPECT_NE(text.find("weights       8.00 KiB = 2 x 4.00 KiB (device)"), std::string::npos) << text;
  }
  EXPECT_FALSE(pool.sealed());
}

TEST_F(PoolTest, ThreadsNeverHoldTheSameSlotAtOnce) {
  constexpr int kNumThreads = 4;
  constexpr int kNumRounds = 5000;
  SlotGroup& group = pool_.add({"activations", sizeof(int), 3, MemoryKind::kDevice});
  pool_.seal();
  std::atomic<int> num_leases = 0;
  std::vector<std::thread> threads;
  for (int thread = 1; thread <= kNumThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int round = 0; round < kNumRounds; ++round) {
        const std::optional<Lease> lease = group.try_lease();
        if (!lease) continue;
        // No mutex guards the writes, because the lease keeps other threads away. ThreadSanitizer checks that
        // it does.
        int owner = thread;
        std::memcpy(lease->data(), &owner, sizeof(owner));
        std::memcpy(&owner, lease->data(), sizeof(owner));
        EXPECT_EQ(owner, thread);
        ++num_leases;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(num_leases, 0);
  EXPECT_EQ(group.num_free(), 3);
  EXPECT_LE(group.report().peak_bytes, 3 * kSlotAlignment);
}

// --- Poison ---

class PoisonTest : public testing::Test {
 protected:
  static bool all_bytes_are(const std::byte* data, std::size_t num_bytes, std::byte value) {
    return std::all_of(data, data + num_bytes, [&](std::byte byte) { return byte == value; });
  }
  static bool is_poison(const Lease& lease) {
    return all_bytes_are(lease.data(), lease.size_bytes(), kPoisonByte);
  }

  CountingDevice device_;
};

TEST_F(PoisonTest, ReadingASlotAfterItsReleaseSeesPoisonAndNothingElseIsTouched) {
  Pool pool(device_, /*poison=*/true);
  SlotGroup& group = pool.add({"activations", 1000, 2, MemoryKind::kDevice});
  pool.seal();
  Lease held = group.lease();
  Lease released = group.lease();
  std::memset(held.data(), 7, held.size_bytes());
  std::memset(released.data(), 7, released.size_bytes());
  const std::byte* const stale = released.data();
  released.release();
  EXPECT_TRUE(all_bytes_are(stale, 1000, kPoisonByte));
  EXPECT_TRUE(all_bytes_are(held.data(), 1000, std::byte{7}));
}

TEST_F(PoisonTest, IsNanInFloatsAndMinusOneInIntegers) {
  Pool pool(device_, /*poison=*/true);
  SlotGroup& group = pool.add({"activations", 8, 1, MemoryKind::kDevice});
  pool.seal();
  const Lease lease = group.lease();
  float as_float = 0;
  double as_double = 0;
  std::int64_t as_integer = 0;
  std::memcpy(&as_float, lease.data(), sizeof(as_float));
  std::memcpy(&as_double, lease.data(), sizeof(as_double));
  std::memcpy(&as_integer, lease.data(), sizeof(as_integer));
  EXPECT_TRUE(std::isnan(as_float));
  EXPECT_TRUE(std::isnan(as_double));
  EXPECT_EQ(as_integer, -1);
}

TEST_F(PoisonTest, FreshSlotsOfBothKindsArePoisonedUnlessTheirUserRefuses) {
  Pool pool(device_, /*poison=*/true);
  SlotGroup& device_slots = pool.add({"activations", 300, 3, MemoryKind::kDevice});
  SlotGroup& staging_slots = pool.add({"staging", 300, 1, MemoryKind::kStaging});
  SlotGroup& zeroed = pool.add({"moments", 300, 1, MemoryKind::kDevice, /*poison=*/false});
  SlotGroup& no_bytes = pool.add({"no bytes", 0, 1, MemoryKind::kDevice});
  pool.seal();
  for (std::int64_t slot = 0; slot < 3; ++slot) {
    EXPECT_TRUE(all_bytes_are(device_slots.slot_data(SlotIndex(slot)), 300, kPoisonByte)) << slot;
  }
  EXPECT_TRUE(is_poison(staging_slots.lease()));
  EXPECT_TRUE(all_bytes_are(zeroed.lease().data(), 300, std::byte{0}));
  EXPECT_TRUE(no_bytes.lease().valid());
}

TEST_F(PoisonTest, APoisonedSlotIsUsedAgainLikeAnyOther) {
  Pool pool(device_, /*poison=*/true);
  SlotGroup& group = pool.add({"activations", 64, 1, MemoryKind::kDevice});
  pool.seal();
  for (int round = 0; round < 3; ++round) {
    const Lease lease = group.lease();
    EXPECT_TRUE(is_poison(lease));
    std::memset(lease.data(), round, lease.size_bytes());
    EXPECT_TRUE(all_bytes_are(lease.data(), 64, static_cast<std::byte>(round)));
  }
}

TEST_F(PoisonTest, OffLeavesTheBytes) {
  Pool pool(device_, /*poison=*/false);
  SlotGroup& group = pool.add({"activations", 64, 1, MemoryKind::kDevice});
  pool.seal();
  EXPECT_TRUE(all_bytes_are(group.slot_data(SlotIndex(0)), 64, std::byte{0}));
  {
    const Lease lease = group.lease();
    std::memset(lease.data(), 7, lease.size_bytes());
  }
  EXPECT_TRUE(all_bytes_are(group.slot_data(SlotIndex(0)), 64, std::byte{7}));
}

TEST_F(PoisonTest, MemoryThatTheCpuCannotWriteIsLeftAlone) {
  CountingDevice device(std::numeric_limits<std::size_t>::max(), /*device_memory_is_host_memory=*/false);
  Pool pool(device, /*poison=*/true);
  SlotGroup& device_slots = pool.add({"activations", 64, 1, MemoryKind::kDevice});
  SlotGroup& staging_slots = pool.add({"staging", 64, 1, MemoryKind::kStaging});
  pool.seal();
  { const Lease lease = device_slots.lease(); }
  EXPECT_TRUE(all_bytes_are(device_slots.slot_data(SlotIndex(0)), 64, std::byte{0}));
  EXPECT_TRUE(is_poison(staging_slots.lease()));
}

// ---- On a device with memory that the host cannot touch ----

TEST(PoolOnCuda, SlotsOfBothKindsHoldWhatItsStreamsWriteAndAreNotPoisoned) {
  if (!cuda_available()) GTEST_SKIP() << "no CUDA device, and no stand-in for one";
  constexpr std::size_t kBytes = 1000;
  const auto device = make_cuda_device(0);
  Pool pool(*device);
  SlotGroup& slots = pool.add({"weights", kBytes, 3, MemoryKind::kDevice});
  SlotGroup& staging = pool.add({"staging", kBytes, 2, MemoryKind::kStaging, /*poison=*/false});
  pool.seal();
  const auto stream = device->make_stream();
  const Lease from = staging.lease();
  const Lease to = staging.lease();
  std::vector<Lease> leases;
  for (int slot = 0; slot < 3; ++slot) {
    leases.push_back(slots.lease());
    std::memset(from.data(), slot + 1, kBytes);
    stream->copy(leases.back().data(), from.data(), kBytes);
    stream->synchronize();
  }
  leases[1].release();
  leases[1] = slots.lease();
  for (int slot = 0; slot < 3; ++slot) {
    stream->copy(to.data(), leases[static_cast<std::size_t>(slot)].data(), kBytes);
    stream->synchronize();
    EXPECT_EQ(std::vector<std::byte>(to.data(), to.data() + kBytes),
              std::vector<std::byte>(kBytes, static_cast<std::byte>(slot + 1)));
  }
}

TEST(PoisonByDefault, FollowsTheEnvironmentAndRefusesWhatItDoesNotKnow) {
  const char* const before = std::getenv("PIPEDREAM_POISON");
  const std::string restored = before == nullptr ? "" : before;
  ::setenv("PIPEDREAM_POISON", "1", 1);
  EXPECT_TRUE(poison_by_default());
  ::setenv("PIPEDREAM_POISON", "0", 1);
  EXPECT_FALSE(poison_by_default());
  ::setenv("PIPEDREAM_POISON", "yes", 1);
  try {
    static_cast<void>(poison_by_default());
    FAIL();
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("PIPEDREAM_POISON is 'yes'"), std::string::npos) << error.what();
  }
  if (before == nullptr) {
    ::unsetenv("PIPEDREAM_POISON");
  } else {
    ::setenv("PIPEDREAM_POISON", restored.c_str(), 1);
  }
}

TEST_F(PoolTest, LeasingAndReleasingCallsNoAllocator) {
  if (!AllocationCounter::counts()) GTEST_SKIP() << "a sanitizer has the allocator";
  SlotGroup& group = pool_.add({"activations", 64, 4, MemoryKind::kDevice});
  pool_.seal();
  const AllocationCounter counter;
  for (int round = 0; round < 1000; ++round) {
    const Lease first = group.lease();
    const std::optional<Lease> second = group.try_lease();
  }
  EXPECT_EQ(counter.num_in_all(), 0u);
}

TEST_F(PoolDeathTest, LeaseWithoutAFreeSlotAbortsAndNamesTheUser) {
  SlotGroup& group = pool_.add({"received activations", 64, 1, MemoryKind::kDevice});
  pool_.seal();
  const Lease lease = group.lease();
  EXPECT_DEATH((void)group.lease(), "all 1 slots of 'received activations' \\(64 bytes each\\) are leased");
}

TEST_F(PoolDeathTest, LeasingBeforeTheSealAborts) {
  SlotGroup& group = pool_.add({"weights", 64, 1, MemoryKind::kDevice});
  EXPECT_DEATH((void)group.try_lease(), "'weights' is leased before the pool is sealed");
}

TEST_F(PoolDeathTest, AddingAfterTheSealAbortsAndSaysSizeAndUser) {
  pool_.seal();
  EXPECT_DEATH(pool_.add({"late", 4096, 2, MemoryKind::kDevice}),
               "'late' of 2 x 4096 bytes is added after the seal");
}

TEST_F(PoolDeathTest, ASlotThatDoesNotExistAborts) {
  SlotGroup& group = pool_.add({"weights", 64, 2, MemoryKind::kDevice});
  pool_.seal();
  EXPECT_DEATH((void)group.slot_data(SlotIndex(2)), "slot 2 of 2 of 'weights'");
}

TEST(PoolDeathTestOfLifetime, ALeaseThatOutlivesItsPoolAborts) {
  EXPECT_DEATH(
      {
        CountingDevice device;
        auto pool = std::make_unique<Pool>(device);
        SlotGroup& group = pool->add({"activations", 64, 2, MemoryKind::kDevice});
        pool->seal();
        const Lease lease = group.lease();
        pool.reset();
      },
      "1 of 2 slots of 'activations' are still leased");
}

}  // namespace
}  // namespace pipedream
