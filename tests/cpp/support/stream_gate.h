// Holds a stream of any device until the gate is opened or destroyed. With it a test proves an order without
// sleeps.
#pragma once

#include <functional>
#include <latch>
#include <memory>
#include <utility>

#include "device/device.h"
#include "support/hostile_device.h"

#if defined(PD_CUDA_STUB)
#include "cuda_stub/cuda_stub.h"
#endif

namespace pipedream {

// On a hostile device and on the tests' CUDA the gate is a kernel, which holds up no other stream. On other
// devices it is a host function. On a GPU that function also holds up the host functions of all other
// streams.
class StreamGate {
 public:
  StreamGate(Device& device, Stream& stream) {
    auto wait = [opened = opened_] { opened->wait(); };
    if (auto* hostile = dynamic_cast<HostileDevice*>(&device)) {
      hostile->launch(stream, std::move(wait));
    } else if (!hold_cuda(device, stream, wait)) {
      stream.call(std::move(wait));
    }
  }
  ~StreamGate() { open(); }
  StreamGate(const StreamGate&) = delete;
  StreamGate& operator=(const StreamGate&) = delete;

  // Whether other streams can run their host functions while the gate is closed. False only on a GPU, where
  // one thread may run all host functions.
  [[nodiscard]] static bool leaves_others_free([[maybe_unused]] const Device& device) {
#if defined(PD_CUDA_STUB)
    return true;
#else
    return device.type() == DeviceType::kHost || dynamic_cast<const HostileDevice*>(&device) != nullptr;
#endif
  }

  void open() {
    if (!std::exchange(is_open_, true)) opened_->count_down();
  }

 private:
  static bool hold_cuda([[maybe_unused]] Device& device, [[maybe_unused]] Stream& stream,
                        [[maybe_unused]] const std::function<void()>& wait) {
#if defined(PD_CUDA_STUB)
    if (device.type() == DeviceType::kHost) return false;
    const std::unique_ptr<Stream> aside =
        device.wrap_stream(cuda_stub::make_held_stream(device.index(), wait));
    const std::unique_ptr<Event> opened = device.make_event();
    aside->record(*opened);
    stream.wait(*opened);
    return true;
#else
    return false;
#endif
  }

  const std::shared_ptr<std::latch> opened_ =
      std::make_shared<std::latch>(1);  // shared, because the stream may outlive the gate
  bool is_open_ = false;
};

// Skips a test that closes a gate while channels work, if on this device the closed gate would hold up the
// channels.
#define PD_SKIP_WITHOUT_GATES(device)                             \
  if (!StreamGate::leaves_others_free(device)) {                  \
    GTEST_SKIP() << "a gate holds all of a GPU's host functions"; \
  }                                                               \
  static_assert(true)

}  // namespace pipedream
