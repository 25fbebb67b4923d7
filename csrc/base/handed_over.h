// Tells ThreadSanitizer about an order that it cannot see: one thread hands an object over through a library
// that is not instrumented, and another thread reads it. Does nothing in other builds. Any thread.
#pragma once

#include <unistd.h>

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_release(void* address);  // NOLINT(bugprone-reserved-identifier): the sanitizer's names
extern "C" void __tsan_acquire(void* address);  // NOLINT(bugprone-reserved-identifier)
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);
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

// Closes what memfd_create() has made. The sanitizer sees no memfd_create(), nor what a library that is not
// instrumented closes: it would take the descriptor for that library's, which had its number before and which
// another thread of ours has watched.
inline void close_memory_file(int fd) {
#if defined(__SANITIZE_THREAD__)
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
  ::close(fd);
#if defined(__SANITIZE_THREAD__)
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
#endif
}

}  // namespace pipedream
