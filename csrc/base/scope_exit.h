// A ScopeExit runs a function when the scope that holds it ends, even if an exception ends it. Any thread.
#pragma once

#include <utility>

namespace pipedream {

template <class Function>
class ScopeExit {
 public:
  explicit ScopeExit(Function function) : function_(std::move(function)) {}
  ~ScopeExit() { function_(); }
  ScopeExit(const ScopeExit&) = delete;
  ScopeExit& operator=(const ScopeExit&) = delete;

 private:
  const Function function_;
};

}  // namespace pipedream
