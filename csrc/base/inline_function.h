// An InlineFunction is a function without arguments or result that keeps its captures inside the object.
// Making, moving and running it allocates nothing, and its captures may be move-only. A std::function of
// libstdc++ keeps only 16 trivial bytes of captures inside. Plain value; not thread-safe.
#pragma once

#include <concepts>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

#include "base/check.h"

namespace pipedream {

template <std::size_t kCaptureBytesMax>
class InlineFunction {
 public:
  InlineFunction() = default;

  template <class Function>
  requires(!std::same_as<std::remove_cvref_t<Function>, InlineFunction> &&
           std::invocable<Function&>) explicit InlineFunction(Function function)
      : operations_(&kOperationsOf<Function>) {
    static_assert(sizeof(Function) <= kCaptureBytesMax, "captures more than there is room for");
    static_assert(alignof(Function) <= alignof(std::max_align_t));
    static_assert(std::is_nothrow_move_constructible_v<Function>);
    std::construct_at(reinterpret_cast<Function*>(captures_), std::move(function));
  }
  InlineFunction(InlineFunction&& other) noexcept { take(other); }
  InlineFunction& operator=(InlineFunction&& other) noexcept {
    if (this != &other) {
      reset();
      take(other);
    }
    return *this;
  }
  InlineFunction(const InlineFunction&) = delete;
  InlineFunction& operator=(const InlineFunction&) = delete;
  ~InlineFunction() { reset(); }

  [[nodiscard]] explicit operator bool() const { return operations_ != nullptr; }
  void operator()() {
    PD_CHECK(operations_ != nullptr, "a function that is empty is called");
    operations_->call(captures_);
  }
  // Destroys the captured values.
  void reset() {
    if (operations_ != nullptr) std::exchange(operations_, nullptr)->destroy(captures_);
  }

 private:
  struct Operations {
    void (*call)(void* function);
    void (*move)(void* from, void* to);  // `from` is destroyed
    void (*destroy)(void* function);
  };

  template <class Function>
  static constexpr Operations kOperationsOf = {
      [](void* function) { (*static_cast<Function*>(function))(); },
      [](void* from, void* to) {
        std::construct_at(static_cast<Function*>(to), std::move(*static_cast<Function*>(from)));
        std::destroy_at(static_cast<Function*>(from));
      },
      [](void* function) { std::destroy_at(static_cast<Function*>(function)); },
  };

  void take(InlineFunction& other) {
    if (other.operations_ == nullptr) return;
    operations_ = std::exchange(other.operations_, nullptr);
    operations_->move(other.captures_, captures_);
  }

  const Operations* operations_ = nullptr;  // null when empty
  alignas(std::max_align_t) std::byte captures_[kCaptureBytesMax];
};

}  // namespace pipedream
