// Tells ThreadSanitizer of an order that it cannot see: what goes through a library that is not instrumented
// is read by one thread after another has given it away. Nothing in every other build. Any thread.
#pragma once

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_release(void* address);  // NOLINT(bugprone-reserved-identifier): the sanitizer's names
extern "C" void __tsan_acquire(void* address);  // NOLINT(bugprone-reserved-identifier)
#endif

namespace pipedream {

// By whoever gives the object away, before.
inline void note_given_away([[maybe_unused]] void* object) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(object);
#endif
}

// By whoever gets it, before using it.
inline void note_taken_over([[maybe_unused]] void* object) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(object);
#endif
}

}  // namespace pipedream
