// Implements in C++ the parts of CUDA's language that this project's .cu files use: built-in variables,
// barriers, warps, and launches.
//
// One block runs at a time in the process, so a __shared__ variable is a static one. A CUDA thread that
// reaches a barrier waits on its fiber until all threads of its block, or of its warp, have reached the
// barrier.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
  // NOLINTNEXTLINE(google-explicit-constructor): a launch is given a number where CUDA wants a dim3
  constexpr dim3(unsigned blocks = 1, unsigned rows = 1, unsigned planes = 1)
      : x(blocks), y(rows), z(planes) {}
};

namespace cuda_stub {

struct Builtins {
  dim3 thread{0, 0, 0};
  dim3 block{0, 0, 0};
  dim3 block_size;
  dim3 grid_size;
};
inline Builtins current;  // the values of the CUDA thread that runs now

void wait_for_block();
// Every lane of the warp calls this with a value, and gets the value of the lane `from`.
std::uint32_t value_of_lane(std::uint32_t value, unsigned from);
std::uint32_t ballot(bool yes);

// Enqueues the blocks of a grid. `function` is the kernel's address, by which load_kernels() loads it.
// `arguments` are words, and may be addresses of memory that the kernel uses.
void launch_grid(const void* function, const dim3& grid, unsigned block_threads, cudaStream_t stream,
                 const std::vector<std::uint64_t>& arguments, std::function<void()> kernel);

template <class Argument>
void append_words(std::vector<std::uint64_t>& words, const Argument& argument) {
  constexpr std::size_t kNumWords = sizeof(Argument) / sizeof(std::uint64_t);
  const std::size_t before = words.size();
  words.resize(before + kNumWords);
  if constexpr (kNumWords > 0) std::memcpy(&words[before], &argument, kNumWords * sizeof(std::uint64_t));
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const dim3& grid, unsigned block_threads, cudaStream_t stream,
            const Arguments&... arguments) {
  const std::tuple<Parameters...> values(arguments...);
  std::vector<std::uint64_t> words;
  std::apply([&](const auto&... value) { (append_words(words, value), ...); }, values);
  launch_grid(reinterpret_cast<const void*>(kernel), grid, block_threads, stream, words,
              [kernel, values] { std::apply(kernel, values); });
}

}  // namespace cuda_stub

#define PD_LAUNCH(kernel, num_blocks, block_threads, stream, ...) \
  ::cuda_stub::launch((kernel), (num_blocks), (block_threads), (stream), __VA_ARGS__)

#define threadIdx (::cuda_stub::current.thread)
#define blockIdx (::cuda_stub::current.block)
#define blockDim (::cuda_stub::current.block_size)
#define gridDim (::cuda_stub::current.grid_size)

inline void __syncthreads() { ::cuda_stub::wait_for_block(); }
inline std::uint32_t __shfl_xor_sync(unsigned, std::uint32_t value, int mask) {
  return ::cuda_stub::value_of_lane(value, (threadIdx.x % 32) ^ static_cast<unsigned>(mask));
}
inline unsigned __ballot_sync(unsigned, bool yes) { return ::cuda_stub::ballot(yes); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
// One fiber runs at a time.
inline std::uint32_t atomicAdd(std::uint32_t* to, std::uint32_t value) {
  const std::uint32_t before = *to;
  *to += value;
  return before;
}
