// Tests memory that two processes map. One process reads what the other writes, memory that does not match
// its address is refused, and nothing is left behind. The other process executes this test program again,
// with one of its tests and an address.
#include "transport/shared_memory.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/failure.h"
#include "base/scope_exit.h"

// The page size that sysconf() returns; 0 stands for the system's own.
static long page_bytes_said = 0;

// Replaces the C library's sysconf in this test program.
extern "C" long sysconf(int name) noexcept {
  if (name == _SC_PAGESIZE && page_bytes_said != 0) return page_bytes_said;
  static const auto by_itself = reinterpret_cast<long (*)(int)>(::dlsym(RTLD_NEXT, "sysconf"));
  return by_itself(name);
}

namespace pipedream {
namespace {

constexpr const char* kAddressVariable = "PIPEDREAM_TEST_SHARED_MEMORY";  // set for the other process
constexpr std::size_t kNumBytes = (std::size_t{3} << 20) + 100;
constexpr SharedMemoryUse kUse{{0xABCDEF, 4, 17}, 1000};
constexpr std::byte kWritten{0x5A};
constexpr std::byte kAnswered{0xA5};

// Returns the reason that open() gives for refusing the address.
std::string refusal_of(const std::string& address, const SharedMemoryUse& use = kUse) {
  std::string why;
  const auto memory = SharedMemory::open(address, use, &why);
  EXPECT_EQ(memory, nullptr) << address;
  EXPECT_EQ(SharedMemory::open(address, use), nullptr);  // refuses also if the caller wants no reason
  return why;
}

std::vector<std::string> parts_of(const std::string& address) {
  std::vector<std::string> parts(1);
  for (const char symbol : address) {
    if (symbol == ':') {
      parts.emplace_back();
    } else {
      parts.back() += symbol;
    }
  }
  return parts;
}
std::string joined(const std::vector<std::string>& parts) {
  return parts.at(0) + ":" + parts.at(1) + ":" + parts.at(2) + ":" + parts.at(3);
}

struct Mapping {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
};

// Returns this process's mapping that contains the address.
Mapping mapping_of(const std::byte* address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    void* begin = nullptr;
    void* end = nullptr;
    if (std::sscanf(line.c_str(), "%p-%p ", &begin, &end) != 2) continue;
    if (begin <= address && address < end) {
      return {static_cast<const std::byte*>(begin), static_cast<const std::byte*>(end)};
    }
  }
  return {};
}

// A pipe, one end of which the other process uses.
struct Pipe {
  Pipe() { EXPECT_EQ(::pipe(fds.data()), 0); }
  ~Pipe() {
    ::close(fds[0]);
    if (fds[1] >= 0) ::close(fds[1]);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void close_writing() { ::close(std::exchange(fds[1], -1)); }
  [[nodiscard]] std::string read_line() const {
    std::string line;
    for (char symbol = 0; ::read(fds[0], &symbol, 1) == 1 && symbol != '\n';) line += symbol;
    return line;
  }
  std::array<int, 2> fds{-1, -1};
};

std::string this_program() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

// Runs one test of this program in a new process. Its stdout goes to the pipe, if there is one.
pid_t spawn(const std::string& test, const std::string& address, const Pipe* output = nullptr) {
  const std::string program = this_program();
  const std::string filter = "--gtest_filter=" + test;
  const pid_t child = ::fork();
  if (child != 0) return child;
  if (output != nullptr) ::dup2(output->fds[1], STDOUT_FILENO);
  ::setenv(kAddressVariable, address.c_str(), 1);
  ::execl(program.c_str(), program.c_str(), filter.c_str(), "--gtest_also_run_disabled_tests", nullptr);
  ::_exit(127);
}
int exit_status_of(pid_t child) {
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// ---- What is shared ----

TEST(SharedMemory, IsMappedTwiceInOneProcess) {
  const auto made = SharedMemory::make(kNumBytes, kUse);
  const auto opened = SharedMemory::open(made->address(), kUse);
  ASSERT_NE(opened, nullptr);
  EXPECT_EQ(made->size_bytes(), kNumBytes);
  EXPECT_EQ(opened->size_bytes(), kNumBytes);
  EXPECT_NE(opened->data(), made->data());
  for (const SharedMemory* memory : {made.get(), opened.get()}) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory->data()) % 4096, 0U);
  }
  EXPECT_TRUE(std::all_of(made->data(), made->data() + kNumBytes,
                          [](std::byte byte) { return byte == std::byte{0}; }));
  std::memset(opened->data(), 0x5A, kNumBytes);
  EXPECT_TRUE(
      std::all_of(made->data(), made->data() + kNumBytes, [](std::byte byte) { return byte == kWritten; }));
}

TEST(SharedMemory, BothSidesSeeThatItIsClaimed) {
  const auto made = SharedMemory::make(100, kUse);
  const auto opened = SharedMemory::open(made->address(), kUse);
  ASSERT_NE(opened, nullptr);
  EXPECT_FALSE(made->is_claimed());
  opened->claim();
  EXPECT_TRUE(made->is_claimed());
  EXPECT_TRUE(opened->is_claimed());
}

TEST(SharedMemory, EachOfSeveralSendersClaimsItForItself) {
  const auto made = SharedMemory::make(100, kUse);
  const auto first = SharedMemory::open(made->address(), kUse);
  const auto second = SharedMemory::open(made->address(), kUse);
  EXPECT_TRUE(first->claim_for(0));
  EXPECT_TRUE(second->claim_for(7));
  EXPECT_TRUE(second->claim_for(7));
  EXPECT_TRUE(made->is_claimed_for(0));
  EXPECT_TRUE(made->is_claimed_for(7));
  EXPECT_FALSE(made->is_claimed_for(1));
  EXPECT_FALSE(made->is_claimed());
  std::uint32_t num_claimed = 2;
  while (first->claim_for(100 + num_claimed)) ++num_claimed;
  EXPECT_EQ(num_claimed, 512U);  // more senders than this use the wire
}

TEST(SharedMemory, EveryOneHasASecretOfItsOwn) {
  const auto first = SharedMemory::make(100, kUse);
  const auto second = SharedMemory::make(100, kUse);
  EXPECT_EQ(parts_of(first->address()).at(3).size(), 32U);
  EXPECT_NE(parts_of(first->address()).at(3), parts_of(second->address()).at(3));
}

TEST(SharedMemory, MappingOutlivesItsMaker) {
  auto made = SharedMemory::make(kNumBytes, kUse);
  made->data()[kNumBytes - 1] = kWritten;
  const std::string address = made->address();
  const auto opened = SharedMemory::open(address, kUse);
  ASSERT_NE(opened, nullptr);
  made.reset();
  EXPECT_EQ(opened->data()[kNumBytes - 1], kWritten);
  opened->data()[0] = kWritten;
  EXPECT_NE(refusal_of(address), "");
}

TEST(SharedMemory, OpeningWritesNothing) {
  const auto made = SharedMemory::make(kNumBytes, kUse);
  std::memset(made->data(), 0x5A, kNumBytes);
  const auto opened = SharedMemory::open(made->address(), kUse);
  ASSERT_NE(opened, nullptr);
  EXPECT_TRUE(std::all_of(opened->data(), opened->data() + kNumBytes,
                          [](std::byte byte) { return byte == kWritten; }));
}

// ---- Another process ----

// The next test runs this one in a process of its own.
TEST(SharedMemoryOther, DISABLED_AnswersWhatItReads) {
  const char* const address = std::getenv(kAddressVariable);
  ASSERT_NE(address, nullptr);
  std::string why;
  const auto memory = SharedMemory::open(address, kUse, &why);
  ASSERT_NE(memory, nullptr) << why;
  ASSERT_EQ(memory->size_bytes(), kNumBytes);
  for (std::size_t offset = 0; offset < kNumBytes; ++offset) ASSERT_EQ(memory->data()[offset], kWritten);
  std::memset(memory->data(), 0xA5, kNumBytes);
  memory->claim();
}

TEST(SharedMemory, AnotherProcessReadsWhatIsWrittenAndAnswers) {
  const auto made = SharedMemory::make(kNumBytes, kUse);
  std::memset(made->data(), 0x5A, kNumBytes);
  const Pipe output;  // keeps the child's output out of this test's
  const pid_t child = spawn("SharedMemoryOther.DISABLED_AnswersWhatItReads", made->address(), &output);
  ASSERT_GT(child, 0);
  EXPECT_EQ(exit_status_of(child), 0);
  EXPECT_TRUE(
      std::all_of(made->data(), made->data() + kNumBytes, [](std::byte byte) { return byte == kAnswered; }));
  EXPECT_TRUE(made->is_claimed());
}

// Makes memory, prints its address, and waits to be killed.
TEST(SharedMemoryOther, DISABLED_WaitsToBeKilled) {
  const auto memory = SharedMemory::make(kNumBytes, kUse);
  memory->data()[7] = kWritten;
  const std::string line = "\naddress=" + memory->address() + "\n";
  ASSERT_EQ(::write(STDOUT_FILENO, line.data(), line.size()), static_cast<ssize_t>(line.size()));
  for (;;) ::pause();
}

TEST(SharedMemory, NothingIsLeftWhenItsMakerIsKilled) {
  Pipe output;
  const pid_t child = spawn("SharedMemoryOther.DISABLED_WaitsToBeKilled", "", &output);
  ASSERT_GT(child, 0);
  output.close_writing();  // reading then ends when the child ends
  std::string line;
  constexpr std::string_view kPrefix = "address=";
  for (int number = 0; number < 100 && !line.starts_with(kPrefix); ++number) line = output.read_line();
  ASSERT_TRUE(line.starts_with(kPrefix)) << line;
  const std::string address = line.substr(kPrefix.size());
  auto opened = SharedMemory::open(address, kUse);
  ::kill(child, SIGKILL);
  EXPECT_EQ(exit_status_of(child), 128 + SIGKILL);
  ASSERT_NE(opened, nullptr);
  EXPECT_EQ(opened->data()[7], kWritten);  // the mapping stays valid after the maker's end
  EXPECT_NE(refusal_of(address), "");      // no other process can open it
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    EXPECT_EQ(entry.path().filename().string().find("pipedream"), std::string::npos) << entry.path();
  }
}

TEST(SharedMemory, ProcessThatIsExecutedDoesNotInheritIt) {
  const auto made = SharedMemory::make(100, kUse);
  const int fd = std::stoi(parts_of(made->address()).at(1));
  EXPECT_NE(::fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
}

// ---- What is refused ----

TEST(SharedMemory, AddressThatIsNoneIsRefused) {
  const auto made = SharedMemory::make(100, kUse);
  const std::string good = made->address();
  const std::vector<std::string> parts = parts_of(good);
  const std::string secret = parts.at(3);
  std::vector<std::string> bad = {"",
                                  ":",
                                  ":::",
                                  "::::",
                                  "1:2:3",
                                  "a:b:c:d",
                                  good + ":1",
                                  good + "0",
                                  " " + good,
                                  good + " ",
                                  "-1:3:100:" + secret,
                                  "1:-3:100:" + secret,
                                  parts[0] + ":" + parts[1] + ":0:" + secret,
                                  parts[0] + ":" + parts[1] + ":18446744073709551615:" + secret,
                                  parts[0] + ":" + parts[1] + ":99999999999999999999:" + secret,
                                  parts[0] + ":" + parts[1] + ":1e2:" + secret,
                                  parts[0] + ":" + parts[1] + ":100:" + secret.substr(1),
                                  parts[0] + ":" + parts[1] + ":100:" + secret.substr(1) + "g",
                                  parts[0] + "/../self:" + parts[1] + ":100:" + secret,
                                  std::string(1000, 'x'),
                                  std::string(100, ':')};
  for (const std::string& address : bad) {
    EXPECT_EQ(refusal_of(address), "'" + address + "' is not an address of shared memory");
  }
  for (std::size_t length = 0; length < good.size(); ++length) {
    EXPECT_NE(refusal_of(good.substr(0, length)), "");
  }
}

TEST(SharedMemory, WrongSecretIsRefused) {
  const auto made = SharedMemory::make(100, kUse);
  std::vector<std::string> parts = parts_of(made->address());
  for (const std::size_t place : {std::size_t{0}, std::size_t{15}, std::size_t{31}}) {
    std::vector<std::string> changed = parts;
    changed[3][place] = changed[3][place] == '0' ? '1' : '0';
    EXPECT_NE(refusal_of(joined(changed)).find("its secret is another"), std::string::npos);
  }
}

TEST(SharedMemory, MemoryOfAnotherUseIsRefused) {
  const auto made = SharedMemory::make(100, kUse);
  const LinkIdentity identity = kUse.identity;
  const SharedMemoryUse others[] = {
      {{identity.run_id + 1, identity.incarnation, identity.channel_id}, kUse.slot_bytes},
      {{identity.run_id, identity.incarnation + 1, identity.channel_id}, kUse.slot_bytes},
      {{identity.run_id, identity.incarnation, identity.channel_id + 1}, kUse.slot_bytes},
      {identity, kUse.slot_bytes + 64}};
  for (const SharedMemoryUse& other : others) {
    EXPECT_NE(refusal_of(made->address(), other)
                  .find("it is for channel 17 of run 11259375, incarnation 4, with slots of 1000 bytes, not"),
              std::string::npos);
  }
  EXPECT_FALSE(made->is_claimed());
  EXPECT_NE(SharedMemory::open(made->address(), kUse), nullptr);
}

TEST(SharedMemory, ExchangedAddressesAreNotOpened) {
  SharedMemoryUse other_use = kUse;
  ++other_use.identity.channel_id;
  const auto one = SharedMemory::make(100, kUse);
  const auto other = SharedMemory::make(100, other_use);
  EXPECT_NE(refusal_of(other->address(), kUse).find("it is for channel 18"), std::string::npos);
  EXPECT_NE(refusal_of(one->address(), other_use).find("it is for channel 17"), std::string::npos);
}

TEST(SharedMemory, WrongSizeIsRefused) {
  const auto made = SharedMemory::make(100'000, kUse);
  for (const char* num_bytes : {"1", "90000", "110000", "4611686018427387904"}) {
    std::vector<std::string> parts = parts_of(made->address());
    parts[2] = num_bytes;
    EXPECT_NE(refusal_of(joined(parts)).find("not what the address says"), std::string::npos);
  }
  // This size needs as many pages as the right one, but is not the right one.
  std::vector<std::string> parts = parts_of(made->address());
  parts[2] = "99999";
  EXPECT_NE(refusal_of(joined(parts)), "");
}

TEST(SharedMemory, ProcessThatHasEndedIsRefused) {
  const auto made = SharedMemory::make(100, kUse);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  EXPECT_EQ(exit_status_of(child), 0);
  std::vector<std::string> parts = parts_of(made->address());
  parts[0] = std::to_string(child);
  EXPECT_NE(refusal_of(joined(parts)).find("No such file or directory"), std::string::npos);
}

TEST(SharedMemory, DescriptorOfAnotherKindIsNotEvenOpened) {
  const auto made = SharedMemory::make(100, kUse);
  std::array<int, 2> fds{};
  ASSERT_EQ(::pipe(fds.data()), 0);  // opening a pipe for writing would keep its reader waiting
  std::vector<std::string> parts = parts_of(made->address());
  for (const int fd : fds) {
    parts[1] = std::to_string(fd);
    EXPECT_NE(refusal_of(joined(parts)).find("is not memory of pipedream"), std::string::npos);
    ::close(fd);
  }
}

// This memory has the right name, but lacks the seal that keeps it from shrinking while it is mapped.
TEST(SharedMemory, MemoryThatMayShrinkIsRefused) {
  const int fd = ::memfd_create("pipedream", MFD_CLOEXEC);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(::ftruncate(fd, 2 * 4096), 0);
  const std::string address =
      std::to_string(::getpid()) + ":" + std::to_string(fd) + ":100:00112233445566778899aabbccddeeff";
  EXPECT_NE(refusal_of(address).find("is not sealed"), std::string::npos);
  ::close(fd);
}

TEST(SharedMemory, MoreThanThereIsIsRefusedWithItsSize) {
  try {
    static_cast<void>(SharedMemory::make(std::numeric_limits<std::size_t>::max() / 4, kUse));
    FAIL() << "there is so much memory";
  } catch (const UserError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("4611686018427387903 bytes"), std::string::npos) << text;
    EXPECT_NE(text.find("memory to share"), std::string::npos) << text;
  }
}

TEST(SharedMemory, DescriptorsAndMappingsAreGivenBack) {
  const auto num_descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const auto before = num_descriptors();
  for (int round = 0; round < 50; ++round) {
    const auto made = SharedMemory::make(1 << 20, kUse);
    const auto opened = SharedMemory::open(made->address(), kUse);
    ASSERT_NE(opened, nullptr);
    std::vector<std::string> parts = parts_of(made->address());
    parts[3][0] = parts[3][0] == '0' ? '1' : '0';
    EXPECT_NE(refusal_of(joined(parts)), "");
  }
  EXPECT_EQ(num_descriptors(), before);
}

// Memories must begin at different offsets from a huge page. Otherwise their first bytes would all compete
// for the same sets of the caches.
TEST(SharedMemory, SmallOnesDoNotAllBeginWithAHugePage) {
  std::vector<std::unique_ptr<SharedMemory>> memories;
  std::set<std::uintptr_t> places;
  for (int index = 0; index < 8; ++index) {
    memories.push_back(SharedMemory::make(100, kUse));
    places.insert(reinterpret_cast<std::uintptr_t>(memories.back()->data()) % (std::uintptr_t{2} << 20));
  }
  EXPECT_GT(places.size(), 1U);
}

// A kernel with 4 KiB pages accepts any multiple of 4 KiB, so its checks for larger pages cannot be tested
// here.
TEST(SharedMemory, WhatIsSharedBeginsAtAPageOfTheSystemsWhateverItsSize) {
  const ScopeExit own_size([] { page_bytes_said = 0; });
  page_bytes_said = 64 << 10;
  const auto made = SharedMemory::make(100, kUse);
  const auto opened = SharedMemory::open(made->address(), kUse);
  ASSERT_NE(opened, nullptr);
  for (const SharedMemory* memory : {made.get(), opened.get()}) {
    const Mapping mapping = mapping_of(memory->data());
    EXPECT_EQ(memory->data() - mapping.begin, 64 << 10);
    EXPECT_EQ(mapping.end - mapping.begin, 128 << 10);
  }
}

}  // namespace
}  // namespace pipedream
