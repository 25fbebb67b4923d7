// Gives torch's caching allocator segments of the worker's planned memory.
//
// torch.cuda.memory.CUDAPluggableAllocator finds the two C functions by name in this module's file. Torch
// calls them without the GIL, on any thread that allocates. There is one arena per process, because a process
// is one worker.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/check.h"
#include "bindings/bindings.h"
#include "device/device.h"
#include "pool/segment_arena.h"
#include "stage/worker_options.h"

namespace py = pybind11;

namespace {

// The process's arena, set before torch gets the allocator. The last arena is never destroyed, because torch
// may free segments while the process exits.
pipedream::SegmentArena* g_arena = nullptr;

// Waits for all work of the device before a segment may be reused. Torch caches a segment for one stream, but
// frees it without naming that stream, and any stream of the process may get it next.
void wait_for(pipedream::Device& device) {
  try {
    device.synchronize();
  } catch (const pipedream::DeviceError&) {
    // The error is ignored here, because torch's next CUDA call reports it. Nothing runs on the device any
    // more.
  }
}

}  // namespace

#define PD_EXPORT extern "C" __attribute__((visibility("default")))

PD_EXPORT void* pipedream_segment_allocate(ssize_t num_bytes, int /*device*/, void* /*stream*/) {
  if (g_arena == nullptr || num_bytes < 0) return nullptr;
  return g_arena->allocate(static_cast<std::size_t>(num_bytes));
}

PD_EXPORT void pipedream_segment_free(void* segment, ssize_t /*num_bytes*/, int /*device*/,
                                      void* /*stream*/) {
  if (segment != nullptr && g_arena != nullptr) g_arena->free(static_cast<std::byte*>(segment));
}

namespace pipedream {

void bind_segments(py::module_& module) {
  module.def(
      "open_segment_arena",
      [](std::uintptr_t address, std::size_t num_bytes, const std::string& device_name) {
        if (g_arena != nullptr && g_arena->used_bytes() > 0) return false;
        // NOLINTNEXTLINE(performance-no-int-to-ptr, cppcoreguidelines-owning-memory)
        auto* const arena = new SegmentArena(
            reinterpret_cast<std::byte*>(address), num_bytes,
            [device = std::shared_ptr<Device>(make_device(device_name))] { wait_for(*device); });
        delete g_arena;  // NOLINT(cppcoreguidelines-owning-memory)
        g_arena = arena;
        return true;
      },
      py::arg("address"), py::arg("num_bytes"), py::arg("device") = "host");
  module.def("segment_arena_bytes", []() -> std::pair<std::size_t, std::size_t> {
    if (g_arena == nullptr) return {0, 0};
    return {g_arena->used_bytes(), g_arena->peak_bytes()};
  });
}

}  // namespace pipedream
