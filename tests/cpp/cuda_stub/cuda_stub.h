// Declares the functions by which tests control the tests' own CUDA runtime. The runtime runs the real
// sources of csrc/*/cuda on the host:
//
//   streams      are threads. Every operation is asynchronous, with random delays
//   kernels      are C++, with a fiber per CUDA thread (kernel_launch.h)
//   memory       a host thread that touches device memory gets SIGSEGV. Only copies, and kernels while they
//                run, can access it. A copy from or to host memory that is not registered is synchronous
//   errors       a call can be made to fail. After an error of the context every call fails, and enqueued
//                work is dropped
//   aborts       the process ends, with the reason, if a host function calls the runtime, if memory is freed
//                while a stream uses it, if a copy goes beyond an allocation, if a thread of a block returns
//                while others wait for it at a barrier, and for an unknown handle or address
//
// The delays come from the seed $PIPEDREAM_CUDA_STUB_SEED, or from one that an abort prints. The runtime does
// not imitate torch's tensors, timing, a device's memory model, or nvcc's arithmetic.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>

namespace cuda_stub {

constexpr int kNumDevices = 2;

// Makes one call of this name fail, after num_calls_before other calls of the same name. "" stands for any
// name. ends_context: whether all later calls fail as well.
void fail(const std::string& call, cudaError_t error, int num_calls_before = 0, bool ends_context = false);
// Ends the context, as if a kernel of another library had failed.
void end_context(cudaError_t error);
// Forgets errors, requested failures and loaded kernels, so that the runtime is as in a new process. All
// enqueued work must be done.
void reset();

// Makes a stream of the device whose work begins when `wait` has returned. It holds up no other stream,
// because `wait` is neither a kernel nor a host function. The stream is never destroyed. Returns its handle
// as a number, as Device::wrap_stream() takes it.
std::uintptr_t make_held_stream(int device, std::function<void()> wait);

// Begins a capture of a graph in the global mode, as torch does. end_capture_intact() ends the capture. It
// returns false if a forbidden call has broken the capture before.
void begin_capture();
bool end_capture_intact();

// Begins a capture of a graph from the stream, which may be wrapped. The stream only records the work that is
// enqueued meanwhile, and does not do it. An event that is recorded there belongs to the graph, and nothing
// outside can wait for it. end_stream_capture() returns the number of operations in the graph.
void begin_stream_capture(std::uintptr_t stream);
int end_stream_capture(std::uintptr_t stream);
// Makes a stream of the device by cudaStreamCreateWithFlags. The stream is never destroyed. Returns its
// handle as a number.
std::uintptr_t make_stream(int device);

// Sets the compute capability that a device reports (90 is 9.0), and the CUDA version that the driver
// reports. reset() restores both.
void set_capability(int device, int capability);
void set_driver_version(int version);

// Returns how often this function of the runtime was called.
std::uint64_t num_calls(const std::string& call);
// Returns the number of kernels that were loaded only by their first launch. On a real device such a launch
// waits for all enqueued work.
std::uint64_t num_late_loads();
// Returns the number of events for which a thread waited without sleeping.
std::uint64_t num_spins();
// Returns the number of launched kernels that got an address in pinned host memory. On a real device their
// reads and writes cross the bus one by one.
std::uint64_t num_kernels_on_host_memory();

// Sets the longest delay of an operation, in microseconds; 0 for none.
void set_delay_us_max(unsigned delay_us_max);

}  // namespace cuda_stub
