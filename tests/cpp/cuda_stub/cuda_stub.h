// A CUDA runtime on the host, under the real sources of csrc/*/cuda: what tests ask of it.
//
//   streams      threads; every operation is asynchronous, and late at random
//   kernels      C++, a fiber per CUDA thread (kernel_launch.h)
//   memory       host that touches device memory gets SIGSEGV: copies use a second mapping, and the first can
//   be
//                read and written only while a kernel runs. Pinned memory is registered; a copy from or to
//                other host memory is synchronous, as the driver's
//   errors       a call fails on demand; after an error of the context every call fails, what is enqueued is
//                dropped, and a host function that runs ends as it likes
//   aborts       with the call's name: a call inside a host function, memory that is freed while a stream
//   uses it,
//                a copy beyond an allocation, a handle that does not exist
//
// The delays come from $PIPEDREAM_CUDA_STUB_SEED, or from a seed that an abort prints. It shows neither
// torch's tensors, nor timing, nor the memory model of a device, nor nvcc's arithmetic.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>

namespace cuda_stub {

constexpr int kNumDevices = 2;

// The call of this name, of any name where it is "", after so many others of it fails once. ends_context: and
// all calls after it.
void fail(const std::string& call, cudaError_t error, int num_calls_before = 0, bool ends_context = false);
// A kernel fails that nobody of ours has launched.
void end_context(cudaError_t error);
// Forgets errors, failures on demand and loaded kernels, as a new process has none. All that is enqueued must
// be done.
void reset();

// A stream of the device whose work begins when `wait` has returned: neither kernel nor host function, so it
// holds up nobody else's. It is not destroyed. As a number, as Device::wrap_stream() takes it.
std::uintptr_t make_held_stream(int device, std::function<void()> wait);

// Somebody else captures a graph in the global mode, which is torch's, until is_capture_intact() says whether
// no call has ended that.
void begin_capture();
bool end_capture_intact();

// Somebody captures a graph from the stream, made here or wrapped: what is enqueued there meanwhile is not
// done, and an event that is recorded there is of the graph, of no use to anybody else. end: how many
// operations the graph has.
void begin_stream_capture(std::uintptr_t stream);
int end_stream_capture(std::uintptr_t stream);
// A stream as cudaStreamCreateWithFlags makes it, on the device; not destroyed. As a number.
std::uintptr_t make_stream(int device);

// What a device says it is; 90 is 9.0, which reset() brings back. What the driver says it runs; reset()
// likewise.
void set_capability(int device, int capability);
void set_driver_version(int version);

// How often a function of the runtime was called.
std::uint64_t num_calls(const std::string& call);
// Kernels that their first launch has loaded: on a device that waits for all that is enqueued.
std::uint64_t num_late_loads();
// Events for which a thread waited without sleeping.
std::uint64_t num_spins();
// Kernels that were given an address in pinned host memory: on a device their reads and writes cross the bus
// one by one.
std::uint64_t num_kernels_on_host_memory();

// How long operations are late at most, microseconds; 0 is never.
void set_delay_us_max(unsigned delay_us_max);

}  // namespace cuda_stub
