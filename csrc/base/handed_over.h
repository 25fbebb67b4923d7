// Tells ThreadSanitizer about an order that it cannot see, when one thread hands an object to another thread
// through a library that is not instrumented. Does nothing in other builds. Any thread.
#pragma once

#include <unistd.h>

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_release(void* address);  // NOLINT(bugprone-reserved-identifier): the sanitizer's names
extern "C" void __tsan_acquire(void* address);  // NOLINT(bugprone-reserved-identifier)
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);
#endif

namespace pipedream {

// Called by the thread that gives the object away, before it does.
inline void note_given_away([[maybe_unused]] void* object) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(object);
#endif
}

// Called by the thread that gets the object, before it uses it.
inline void note_taken_over([[maybe_unused]] void* object) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(object);
#endif
}

// Closes a file of memfd_create(). The sanitizer does not see memfd_create(), nor close() calls inside
// libraries that are not instrumented. So it may take the file for an earlier one that had the same
// descriptor. Without this function it would then report a race with a thread that watched the earlier file.
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
