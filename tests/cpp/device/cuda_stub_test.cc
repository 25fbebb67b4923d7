// Tests that the tests' own CUDA runtime (cuda_stub/cuda_stub.h) behaves like CUDA as far as this project
// depends on it. It ends the process where CUDA would corrupt memory or hang.
#if defined(PD_CUDA_STUB)
#include "cuda_stub/cuda_stub.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <csignal>
#include <future>
#include <thread>

#include "base/failure.h"
#include "device/cuda/cuda_calls.h"
#include "device/cuda/cuda_launch.h"
#include "device/device.h"

namespace pipedream {
namespace {

constexpr std::size_t kNumBytes = 4096;

class CudaStub : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    cuda_stub::reset();
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
  }

  // Holds the stream until the gate is opened or destroyed.
  struct Gate {
    std::promise<void> opened;
    ~Gate() {
      if (!is_open) opened.set_value();
    }
    void open() {
      opened.set_value();
      is_open = true;
    }
    bool is_open = false;
  };
  void close(Gate& gate) {
    static std::array<std::shared_future<void>, 1> held;
    held[0] = gate.opened.get_future().share();
    ASSERT_EQ(cudaLaunchHostFunc(
                  stream_, [](void* future) { static_cast<std::shared_future<void>*>(future)->wait(); },
                  held.data()),
              cudaSuccess);
  }

  cudaStream_t stream_ = nullptr;
};

using CudaStubDeathTest = CudaStub;

TEST_F(CudaStub, AnEventThatIsRecordedAgainIsDoneWithTheLastRecord) {
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);  // never recorded, so it counts as done
  ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
  ASSERT_EQ(cudaEventSynchronize(event), cudaSuccess);
  Gate gate;
  close(gate);
  ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  gate.open();
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
}

TEST_F(CudaStub, AWaitIsForTheRecordBeforeIt) {
  cudaEvent_t event = nullptr;
  cudaStream_t other = nullptr;
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(other, event, 0), cudaSuccess);
  Gate gate;
  close(gate);
  // No stream waits for this record, which is behind the gate.
  ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(other), cudaSuccess);
  cudaStream_t third = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&third, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(other, event, 0), cudaSuccess);
  // This record is done, but `other` waits for the earlier one.
  ASSERT_EQ(cudaEventRecord(event, third), cudaSuccess);
  ASSERT_EQ(cudaEventSynchronize(event), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(other), cudaErrorNotReady);
  ASSERT_EQ(cudaEventDestroy(event), cudaSuccess);  // an enqueued wait still needs the record
  gate.open();
  EXPECT_EQ(cudaStreamSynchronize(other), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(third), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
}

TEST_F(CudaStub, ACopyOfPageableMemoryIsSynchronousAndOfPinnedMemoryIsNot) {
  void* device = nullptr;
  ASSERT_EQ(cudaMalloc(&device, kNumBytes), cudaSuccess);
  std::vector<char> pageable(kNumBytes, 'a');
  ASSERT_EQ(cudaMemcpyAsync(device, pageable.data(), kNumBytes, cudaMemcpyDefault, stream_), cudaSuccess);
  std::vector<char> pinned(kNumBytes, 'b');
  ASSERT_EQ(cudaHostRegister(pinned.data(), kNumBytes, cudaHostRegisterPortable), cudaSuccess);
  Gate gate;
  close(gate);
  ASSERT_EQ(cudaMemcpyAsync(pinned.data(), device, kNumBytes, cudaMemcpyDefault, stream_), cudaSuccess);
  EXPECT_EQ(pinned.front(), 'b');
  gate.open();
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(pinned, pageable);
  EXPECT_EQ(cudaHostUnregister(pinned.data()), cudaSuccess);
  EXPECT_EQ(cudaFree(device), cudaSuccess);
}

TEST_F(CudaStub, RegisteredPagesMayNotOverlap) {
  std::vector<char> memory(4 * kNumBytes);
  ASSERT_EQ(cudaHostRegister(memory.data(), 2 * kNumBytes, cudaHostRegisterPortable), cudaSuccess);
  EXPECT_EQ(cudaHostRegister(memory.data() + kNumBytes, kNumBytes, cudaHostRegisterPortable),
            cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(cudaGetLastError(), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(cudaHostUnregister(memory.data()), cudaSuccess);
}

TEST_F(CudaStub, AnErrorOfTheContextFailsEveryCallAndDropsWhatIsEnqueued) {
  static std::atomic<bool> has_run;
  has_run = false;
  Gate gate;
  close(gate);
  ASSERT_EQ(cudaLaunchHostFunc(
                stream_, [](void* ran) { *static_cast<std::atomic<bool>*>(ran) = true; }, &has_run),
            cudaSuccess);
  cuda_stub::end_context(cudaErrorLaunchFailure);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);  // sticky
  gate.open();
  EXPECT_FALSE(has_run);
}

TEST_F(CudaStub, ACallFailsOnDemandOnce) {
  cuda_stub::fail("cudaEventCreateWithFlags", cudaErrorMemoryAllocation, 1);
  cudaEvent_t first = nullptr;
  cudaEvent_t second = nullptr;
  EXPECT_EQ(cudaEventCreateWithFlags(&first, 0), cudaSuccess);
  EXPECT_EQ(cudaEventCreateWithFlags(&second, 0), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaEventCreateWithFlags(&second, 0), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(first), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(second), cudaSuccess);
}

TEST_F(CudaStub, AQueryEndsAGlobalCaptureButNotInOurScope) {
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreateWithFlags(&event, 0), cudaSuccess);
  cuda_stub::begin_capture();
  {
    const DeviceScope scope(0);
    EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
  }
  EXPECT_TRUE(cuda_stub::end_capture_intact());
  cuda_stub::begin_capture();
  EXPECT_EQ(cudaEventQuery(event), cudaErrorStreamCaptureUnsupported);
  EXPECT_FALSE(cuda_stub::end_capture_intact());
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
}

TEST_F(CudaStub, EveryThreadHasACurrentDevice) {
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  std::thread([] {
    int device = -1;
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(device, 0);
  }).join();
  cudaEvent_t of_other_device = nullptr;
  ASSERT_EQ(cudaEventCreateWithFlags(&of_other_device, 0), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(of_other_device, stream_), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventDestroy(of_other_device), cudaSuccess);
  EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

// Sums over a block with barriers, and over warps with shuffles. The sums are wrong if a thread does not
// wait.
__global__ void sums_kernel(unsigned* by_barriers, unsigned* by_shuffles, unsigned* ballots) {
  __shared__ unsigned values[64];
  values[threadIdx.x] = threadIdx.x + blockIdx.x;
  __syncthreads();
  for (unsigned width = blockDim.x / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) values[threadIdx.x] += values[threadIdx.x + width];
    __syncthreads();
  }
  if (threadIdx.x == 0) by_barriers[blockIdx.x] = values[0];
  unsigned value = threadIdx.x;
  for (int width = 16; width > 0; width /= 2) value += __shfl_xor_sync(0xffffffffU, value, width);
  if (threadIdx.x % 32 == 0) by_shuffles[threadIdx.x / 32] = value;
  const unsigned odd = __ballot_sync(0xffffffffU, threadIdx.x % 2 != 0);
  if (threadIdx.x % 32 == 0) ballots[threadIdx.x / 32] = odd;
}

TEST_F(CudaStub, ThreadsOfABlockWaitForEachOther) {
  std::vector<unsigned> pinned(3 * 1024);
  ASSERT_EQ(cudaHostRegister(pinned.data(), pinned.size() * sizeof(unsigned), cudaHostRegisterMapped),
            cudaSuccess);
  PD_LAUNCH(sums_kernel, 3, 64, stream_, pinned.data(), pinned.data() + 1024, pinned.data() + 2048);
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  for (unsigned block = 0; block < 3; ++block) EXPECT_EQ(pinned[block], 64 * 63 / 2 + 64 * block);
  EXPECT_EQ(pinned[1024], 32 * 31 / 2);
  EXPECT_EQ(pinned[1025], 32 * 31 / 2 + 32 * 32);
  EXPECT_EQ(pinned[2048], 0xaaaaaaaaU);
  EXPECT_EQ(pinned[2049], 0xaaaaaaaaU);
  EXPECT_EQ(cudaHostUnregister(pinned.data()), cudaSuccess);
}

TEST_F(CudaStub, AfterAnErrorSynchronizeWaitsForTheHostFunctionThatRunsAndNoOtherBegins) {
  const auto device = make_cuda_device(0);
  const auto stream = device->make_stream();
  std::promise<void> begun;
  Gate gate;
  std::atomic<bool> is_done = false;
  std::atomic<bool> next_has_run = false;
  stream->call([&] {
    begun.set_value();
    gate.opened.get_future().wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    is_done = true;
  });
  stream->call([&] { next_has_run = true; });
  begun.get_future().wait();
  cuda_stub::end_context(cudaErrorLaunchFailure);
  gate.open();
  EXPECT_THROW(stream->synchronize(), DeviceError);
  EXPECT_TRUE(is_done);
  EXPECT_FALSE(next_has_run);
}

TEST_F(CudaStub, ADeviceThatIsSynchronizedHasDoneTheWorkOfStreamsThatItDoesNotKnow) {
  const auto device = make_cuda_device(0);
  std::atomic<bool> is_done = false;
  const std::uintptr_t stream = cuda_stub::make_held_stream(0, [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    is_done = true;
  });
  EXPECT_NE(stream, 0U);
  device->synchronize();
  EXPECT_TRUE(is_done);
}

TEST_F(CudaStub, AnEventOfTheDeviceIsTakenAgainAndHasNothingOfItsFormerUser) {
  const auto device = make_cuda_device(0);
  const auto stream = device->make_stream();
  device->make_event().reset();
  const std::uint64_t num_before = cuda_stub::num_calls("cudaEventCreateWithFlags");
  Gate gate;
  close(gate);
  const auto held = device->wrap_stream(reinterpret_cast<std::uintptr_t>(stream_));
  {
    const auto event = device->make_event();
    held->record(*event);
    EXPECT_FALSE(event->done());
  }
  const auto event = device->make_event();
  EXPECT_EQ(cuda_stub::num_calls("cudaEventCreateWithFlags"), num_before);
  EXPECT_TRUE(event->done());  // The new user has not recorded it. The former user's record is still to come.
  event->wait();
  stream->wait(*event);
  stream->synchronize();
  gate.open();
  held->record(*event);
  event->wait();
  EXPECT_TRUE(event->done());
}

// A thread that waited without sleeping would take a core from the thread that drives the transport.
TEST_F(CudaStub, WhoWaitsForAnEventOfTheDeviceSleeps) {
  const auto device = make_cuda_device(0);
  const auto stream = device->make_stream();
  const auto event = device->make_event();
  const std::uint64_t num_before = cuda_stub::num_spins();
  stream->record(*event);
  event->wait();
  EXPECT_EQ(cuda_stub::num_spins(), num_before);
}

TEST_F(CudaStub, ADeviceThatIsCurrentIsNotSetAgain) {
  const auto device = make_cuda_device(0);
  const auto stream = device->make_stream();
  const auto event = device->make_event();
  const std::uint64_t num_before = cuda_stub::num_calls("cudaSetDevice");
  stream->record(*event);
  stream->wait(*event);
  stream->synchronize();
  EXPECT_EQ(cuda_stub::num_calls("cudaSetDevice"), num_before);
}

std::uint64_t num_streams() {
  return cuda_stub::num_calls("cudaStreamCreateWithFlags") - cuda_stub::num_calls("cudaStreamDestroy");
}

TEST_F(CudaStub, StreamsForCopiesAreTwoOfAUseHoweverManyAreAskedFor) {
  auto device = make_cuda_device(0);
  const std::uint64_t num_before = num_streams();
  std::vector<std::unique_ptr<Stream>> streams;
  std::atomic<int> num_called = 0;
  for (int channel = 0; channel < 10; ++channel) {
    for (const CopyUse use : {CopyUse::kSend, CopyUse::kTell, CopyUse::kReceive}) {
      streams.push_back(device->make_copy_stream(use));
      streams.back()->call([&] { ++num_called; });
    }
  }
  device->check();
  EXPECT_EQ(num_streams() - num_before, 2 * kNumCopyUses);
  // Each direction of the pipeline has a stream.
  EXPECT_NE(streams[0]->native_handle(), streams[3]->native_handle());
  streams[0].reset();  // the other streams that share its CUDA stream still work
  for (std::size_t index = 1; index < streams.size(); ++index) streams[index]->synchronize();
  EXPECT_EQ(num_called, 30);
  device.reset();
  streams.clear();
  EXPECT_EQ(num_streams(), num_before);
}

TEST_F(CudaStub, AnErrorEndsTheCallsOfEveryStreamOfAnOrder) {
  const auto device = make_cuda_device(0);
  std::vector<std::unique_ptr<Stream>> streams;
  std::atomic<int> num_called = 0;
  Gate gate;
  close(gate);
  const auto held = device->wrap_stream(reinterpret_cast<std::uintptr_t>(stream_));
  const auto event = device->make_event();
  held->record(*event);
  for (int channel = 0; channel < 4; ++channel) {
    streams.push_back(device->make_copy_stream(CopyUse::kTell));
    streams.back()->wait(*event);
    streams.back()->call([&] { ++num_called; });
  }
  cuda_stub::end_context(cudaErrorLaunchFailure);
  gate.open();
  for (const auto& stream : streams) EXPECT_THROW(stream->synchronize(), DeviceError);
  EXPECT_EQ(num_called, 0);
}

std::string why_not(int device_index) {
  try {
    (void)make_cuda_device(device_index);
    return "";
  } catch (const UserError& error) {
    return error.what();
  }
}

TEST_F(CudaStub, ADeviceWithoutKernelsIsRefusedAndSaysHowToBuildThem) {
  for (const int capability : {75, 80, 86, 87, 89, 90, 100, 120}) {
    cuda_stub::set_capability(0, capability);
    EXPECT_EQ(why_not(0), "") << capability;
  }
  cuda_stub::set_capability(0, 70);
  EXPECT_EQ(
      why_not(0),
      "cuda:0 was asked for, but pipedream cannot use it: cuda:0 has compute capability 7.0, and it was "
      "built "
      "for 7.5, 8.0, 8.6, 8.9, 9.0 and later: PIPEDREAM_CUDA_ARCHS=70 at its installation adds kernels for "
      "this one, with a CUDA 12 toolkit, as CUDA 13 has dropped it; leave it out of CUDA_VISIBLE_DEVICES");
  EXPECT_EQ(why_not(1), "");
  EXPECT_TRUE(cuda_available());
  cuda_stub::set_capability(1, 61);
  EXPECT_FALSE(cuda_available());
  EXPECT_EQ(why_no_cuda().find("cuda:0 has compute capability 7.0"), 0U) << why_no_cuda();
  EXPECT_NE(why_not(1).find("CUDA is not available: cuda:0 has"), std::string::npos) << why_not(1);
}

TEST_F(CudaStub, ADriverThatIsOlderThanTheToolkitIsNamedWithTheOneThatIsNeeded) {
  cuda_stub::set_driver_version(12040);
  EXPECT_EQ(
      why_no_cuda(),
      "it was built with CUDA 13.0, which needs driver 580 or later, and the driver here runs CUDA 12.4 at "
      "most");
  EXPECT_NE(why_not(0).find(why_no_cuda()), std::string::npos) << why_not(0);
  cuda_stub::set_driver_version(0);
  EXPECT_EQ(why_no_cuda(), "there is no CUDA driver");
}

// Each call runs in a new process, because a stream's thread does not survive fork().
TEST_F(CudaStubDeathTest, WhatWouldCorruptMemoryOrHangEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto host_function_calls = [this] {
    (void)cudaLaunchHostFunc(
        stream_, [](void*) { (void)cudaGetLastError(); }, nullptr);
    (void)cudaStreamSynchronize(stream_);
  };
  EXPECT_DEATH(host_function_calls(), "cudaGetLastError: is called inside a host function");
  const auto frees_what_is_used = [this] {
    void* data = nullptr;
    (void)cudaMalloc(&data, kNumBytes);
    (void)cudaLaunchHostFunc(
        stream_, [](void*) { ::pause(); }, nullptr);
    (void)cudaMemsetAsync(data, 0, kNumBytes, stream_);
    (void)cudaFree(data);
  };
  EXPECT_DEATH(frees_what_is_used(), "cudaFree: a stream still uses the memory");
  const auto copies_too_much = [this] {
    void* data = nullptr;
    (void)cudaMalloc(&data, kNumBytes);
    (void)cudaMemcpyAsync(data, data, kNumBytes + 1, cudaMemcpyDefault, stream_);
  };
  EXPECT_DEATH(copies_too_much(), "cudaMemcpyAsync: ends beyond an allocation");
  const auto reads_on_the_host = [] {
    void* data = nullptr;
    (void)cudaMalloc(&data, kNumBytes);
    std::printf("%d", *static_cast<volatile char*>(data));
  };
  EXPECT_DEATH(reads_on_the_host(), "the host has touched device memory");
  const auto uses_a_destroyed_event = [this] {
    cudaEvent_t event = nullptr;
    (void)cudaEventCreateWithFlags(&event, 0);
    (void)cudaEventDestroy(event);
    (void)cudaEventRecord(event, stream_);
  };
  EXPECT_DEATH(uses_a_destroyed_event(), "cudaEventRecord: there is no such event");
}

}  // namespace
}  // namespace pipedream
#endif
