// Tests host memory: huge pages are advised, and all pages are mapped before the first use.
#include "device/host/host_memory.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/failure.h"

namespace pipedream {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

// Returns the VmFlags of the mapping that holds the address, as /proc/self/smaps prints them, or "" if they
// are unknown.
std::string vm_flags_at(const void* address) {
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  while (std::getline(smaps, line)) {
    unsigned long begin = 0;
    unsigned long end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      const auto value = reinterpret_cast<std::uintptr_t>(address);
      inside = begin <= value && value < end;
    } else if (inside && line.rfind("VmFlags:", 0) == 0) {
      return line;
    }
  }
  return "";
}

TEST(HostMemory, EveryPageIsThereBeforeTheFirstUse) {
  const std::size_t num_bytes = 3 * kHugePageBytes + 4097;
  const HostMemory memory(num_bytes, "device memory on host");
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> resident((num_bytes + page - 1) / page);
  ASSERT_EQ(::mincore(memory.data(), num_bytes, resident.data()), 0);
  std::size_t num_missing = 0;
  for (const unsigned char flags : resident) num_missing += (flags & 1u) == 0;
  EXPECT_EQ(num_missing, 0u);
}

// Makes the kernel answer madvise(MADV_POPULATE_WRITE) on this thread with this error.
void let_populating_fail_with(std::uint32_t error) {
  std::array<sock_filter, 6> program = {{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_madvise, 0, 3),
      // The low half, because the machine is little-endian.
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[2])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 23, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  ASSERT_EQ(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), 0) << std::strerror(errno);
}

// manylinux's headers have no name for MADV_POPULATE_WRITE, so the code must use its number.
TEST(HostMemory, KernelIsAskedForAllPagesAtOnceWhateverTheHeadersKnow) {
  std::thread([] {
    let_populating_fail_with(ENOMEM);
    EXPECT_THROW(HostMemory(kHugePageBytes, "device memory on host"), UserError);
  }).join();
}

TEST(HostMemory, EveryPageIsThereAlsoWithAKernelThatDoesNotKnowTheAdvice) {
  std::thread([] {
    let_populating_fail_with(EINVAL);
    const std::size_t num_bytes = kHugePageBytes + 4097;
    const HostMemory memory(num_bytes, "device memory on host");
    std::vector<unsigned char> resident((num_bytes + page_bytes() - 1) / page_bytes());
    ASSERT_EQ(::mincore(memory.data(), num_bytes, resident.data()), 0);
    EXPECT_TRUE(std::ranges::all_of(resident, [](unsigned char flags) { return (flags & 1u) != 0; }));
  }).join();
}

TEST(HostMemory, LargeAllocationsStartAtAHugePageAndAdviseThem) {
  const HostMemory memory(2 * kHugePageBytes, "device memory on host");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % kHugePageBytes, 0u);
  const std::string flags = vm_flags_at(memory.data());
  const bool kernel_has_huge_pages = std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled").good();
  if (flags.empty() || !kernel_has_huge_pages) GTEST_SKIP() << "this kernel does not say, or has none";
  EXPECT_NE(flags.find(" hg"), std::string::npos) << flags;
}

TEST(HostMemory, SmallAllocationsAreWholePages) {
  const HostMemory memory(1, "device memory on host");
  EXPECT_EQ(memory.size_bytes(), 1u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % 4096, 0u);
}

TEST(HostMemory, TheErrorSaysHowMuchIsAvailable) {
  try {
    const HostMemory memory(std::size_t{1} << 52, "staging memory of stage 1");
    FAIL();
  } catch (const UserError& error) {
    const std::string text = error.what();
    EXPECT_EQ(
        text.rfind("cannot allocate 4.00 PiB (4503599627370496 bytes) of staging memory of stage 1: ", 0), 0u)
        << text;
    EXPECT_NE(text.find(" are available; use smaller minibatches"), std::string::npos) << text;
  }
}

TEST(HostMemory, AvailableMemoryIsMoreThanNothingAndLessThanEverything) {
  EXPECT_GT(host_memory_available_bytes(), std::size_t{1} << 20);
  EXPECT_LT(host_memory_available_bytes(), std::size_t{1} << 50);
}

TEST(HostMemoryDeathTest, AnAllocationOfNothingAborts) {
  EXPECT_DEATH(HostMemory(0, "device memory on host"), "0 bytes of device memory on host");
}

}  // namespace
}  // namespace pipedream
