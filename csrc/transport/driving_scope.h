// Remembers the transport that the calling thread drives. A thread drives at most one at a time, so a handler
// drives no other. Thread-local.
#pragma once

#include "transport/transport_core.h"

namespace pipedream {

class DrivingScope {
 public:
  explicit DrivingScope(const TransportCore& transport) { enter(transport); }
  ~DrivingScope() { leave(); }
  DrivingScope(const DrivingScope&) = delete;
  DrivingScope& operator=(const DrivingScope&) = delete;

  // The driven transport; null when this thread drives none.
  [[nodiscard]] static const TransportCore* here() { return here_; }
  // For a thread that drives most of the time: it calls leave() before work that is not driving, and enter()
  // after it.
  static void enter(const TransportCore& transport) { here_ = &transport; }
  static void leave() { here_ = nullptr; }

 private:
  static inline thread_local const TransportCore* here_ = nullptr;
};

}  // namespace pipedream
