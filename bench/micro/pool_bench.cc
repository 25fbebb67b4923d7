// Lease and release of one slot beside malloc and free of the same size. The target is 50 ns or less for
// the pair, whatever the size; malloc maps large sizes afresh, and their first touch is not even counted.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <vector>

#include "device/device.h"
#include "pool/pool.h"

namespace pipedream {
namespace {

constexpr std::int64_t kNumSlots = 8;

void lease_and_release(benchmark::State& state) {
  const auto device = make_host_device();
  Pool pool(*device);
  const auto slot_bytes = static_cast<std::size_t>(state.range(0));
  SlotGroup& group = pool.add({"bench", slot_bytes, kNumSlots, MemoryKind::kDevice});
  pool.seal();
  for ([[maybe_unused]] auto iteration : state) {
    const Lease lease = group.lease();
    benchmark::DoNotOptimize(lease.data());
  }
}

void malloc_and_free(benchmark::State& state) {
  const auto num_bytes = static_cast<std::size_t>(state.range(0));
  for ([[maybe_unused]] auto iteration : state) {
    void* data = std::malloc(num_bytes);
    benchmark::DoNotOptimize(data);
    std::free(data);
  }
}

// As a pipeline does it: several in flight, the oldest is given back first.
void lease_in_flight(benchmark::State& state) {
  const auto device = make_host_device();
  Pool pool(*device);
  SlotGroup& group = pool.add({"bench", 1 << 20, kNumSlots, MemoryKind::kDevice});
  pool.seal();
  std::vector<Lease> in_flight(static_cast<std::size_t>(state.range(0)));
  std::size_t oldest = 0;
  for ([[maybe_unused]] auto iteration : state) {
    in_flight[oldest].release();
    in_flight[oldest] = group.lease();
    benchmark::DoNotOptimize(in_flight[oldest].data());
    oldest = (oldest + 1) % in_flight.size();
  }
}

BENCHMARK(lease_and_release)->Arg(4 << 10)->Arg(1 << 20)->Arg(16 << 20);
BENCHMARK(malloc_and_free)->Arg(4 << 10)->Arg(1 << 20)->Arg(16 << 20);
BENCHMARK(lease_in_flight)->Arg(4)->Arg(8);

}  // namespace
}  // namespace pipedream
