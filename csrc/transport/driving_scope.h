// Remembers the transport that the calling thread drives. A thread drives at most one transport at a time, so
// a handler cannot drive another transport. Thread-local.
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
  // For a thread that drives most of the time, such as the transport thread. It calls leave() before other
  // work, and enter() after that work.
  static void enter(const TransportCore& transport) { here_ = &transport; }
  static void leave() { here_ = nullptr; }

 private:
  static inline thread_local const TransportCore* here_ = nullptr;
};

}  // namespace pipedream
