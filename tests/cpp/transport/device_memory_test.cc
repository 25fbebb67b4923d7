// Tests device memory that two processes map, on the hostile device (support/hostile_device.h), and on CUDA
// if there is a device. One process reads what the other writes. Memory that does not match the address is
// refused. The maker frees the memory last. An offer says whether sharing works. The other process executes
// this test program again, with one of its tests.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/hostile_device.h"
#include "transport/device_offer.h"
#include "transport/recorder.h"
#include "transport/shared_memory.h"

namespace pipedream {
namespace {

constexpr const char* kAddressVariable = "PIPEDREAM_TEST_DEVICE_MEMORY";  // set for the other process
constexpr const char* kDeviceVariable = "PIPEDREAM_TEST_DEVICE";
constexpr std::size_t kNumBytes = (std::size_t{3} << 20) + 100;
constexpr LinkIdentity kRun{0xABCDEF, 4, 0};
constexpr SharedMemoryUse kUse{{0xABCDEF, 4, 17}, 1000};

std::unique_ptr<Device> make_device(const std::string& name) {
  if (name == "cuda") return make_cuda_device(0);
  return std::make_unique<HostileDevice>();
}

std::vector<std::byte> read(Device& device, const SharedMemory& memory) {
  std::vector<std::byte> bytes(memory.size_bytes());
  const auto stream = device.make_stream();
  stream->copy(bytes.data(), memory.data(), bytes.size());
  stream->synchronize();
  return bytes;
}
void write(Device& device, const SharedMemory& memory, const std::vector<std::byte>& bytes) {
  const auto stream = device.make_stream();
  stream->copy(memory.data(), bytes.data(), bytes.size());
  stream->synchronize();
}

// ---- The other process, which talks to the test by pipes ----

class OtherProcess {
 public:
  OtherProcess(const std::string& test, const std::string& device, const std::string& address) {
    EXPECT_EQ(::pipe(to_.data()), 0);
    EXPECT_EQ(::pipe(from_.data()), 0);
    const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
    const std::string filter = "--gtest_filter=" + test;
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(to_[0], STDIN_FILENO);
      ::dup2(from_[1], STDOUT_FILENO);
      for (const int fd : {to_[0], to_[1], from_[0], from_[1]}) ::close(fd);
      ::setenv(kAddressVariable, address.c_str(), 1);
      ::setenv(kDeviceVariable, device.c_str(), 1);
      ::execl(program.c_str(), program.c_str(), filter.c_str(), "--gtest_also_run_disabled_tests", nullptr);
      ::_exit(127);
    }
    ::close(std::exchange(to_[0], -1));
    ::close(std::exchange(from_[1], -1));
  }
  ~OtherProcess() {
    if (pid_ > 0) kill();
    ::close(to_[1]);
    ::close(from_[0]);
  }
  OtherProcess(const OtherProcess&) = delete;
  OtherProcess& operator=(const OtherProcess&) = delete;

  // Returns the rest of the next line that begins with the prefix, or "" if the process has ended.
  [[nodiscard]] std::string wait_for(const std::string& prefix) const {
    for (;;) {
      std::string line;
      char symbol = 0;
      while (::read(from_[0], &symbol, 1) == 1 && symbol != '\n') line += symbol;
      if (line.starts_with(prefix)) return line.substr(prefix.size());
      if (line.empty() && symbol != '\n') return "";
    }
  }
  void let_go() const { EXPECT_EQ(::write(to_[1], "\n", 1), 1); }
  void kill() {
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, -1), nullptr, 0);
  }

 private:
  std::array<int, 2> to_{-1, -1};
  std::array<int, 2> from_{-1, -1};
  pid_t pid_ = -1;
};

void say(const std::string& line) {
  const std::string text = "\n" + line + "\n";
  ASSERT_EQ(::write(STDOUT_FILENO, text.data(), text.size()), static_cast<ssize_t>(text.size()));
}
void wait_until_let_go() {
  char symbol = 0;
  ASSERT_EQ(::read(STDIN_FILENO, &symbol, 1), 1);
}

// Opens the test's memory and replaces each byte by its complement. Keeps the memory until the test says
// otherwise.
TEST(DeviceMemoryOther, DISABLED_AnswersAndKeepsIt) {
  const auto device = make_device(std::getenv(kDeviceVariable));
  std::string why;
  const auto memory = SharedMemory::open_on(*device, std::getenv(kAddressVariable), kUse, &why);
  ASSERT_NE(memory, nullptr) << why;
  std::vector<std::byte> bytes = read(*device, *memory);
  for (std::byte& byte : bytes) byte = ~byte;
  write(*device, *memory, bytes);
  memory->claim();
  say("answered=yes");
  wait_until_let_go();
}

TEST(DeviceMemoryOther, DISABLED_TriesTheOffer) {
  const auto device = make_device(std::getenv(kDeviceVariable));
  say("why=" + why_out_of_reach(*device, std::getenv(kAddressVariable), kRun) + ".");
}

class DeviceMemory : public testing::TestWithParam<std::string> {
 protected:
  [[nodiscard]] std::unique_ptr<SharedMemory> make(std::size_t num_bytes = kNumBytes) const {
    std::string why;
    auto memory = SharedMemory::make_on(*device_, num_bytes, kUse, &why);
    EXPECT_NE(memory, nullptr) << why;
    return memory;
  }
  [[nodiscard]] std::string refusal_of(const std::string& address, const SharedMemoryUse& use = kUse) const {
    std::string why;
    EXPECT_EQ(SharedMemory::open_on(*device_, address, use, &why), nullptr) << address;
    EXPECT_EQ(SharedMemory::open_on(*device_, address, use), nullptr);
    return why;
  }

  const std::unique_ptr<Device> device_ = make_device(GetParam());
};

TEST_P(DeviceMemory, WhatOneSideWritesTheOtherReads) {
  const auto made = make();
  const auto opened = SharedMemory::open_on(*device_, made->address(), kUse);
  ASSERT_NE(opened, nullptr);
  EXPECT_TRUE(made->on_device());
  EXPECT_TRUE(opened->on_device());
  EXPECT_EQ(made->size_bytes(), kNumBytes);
  EXPECT_EQ(opened->size_bytes(), kNumBytes);
  EXPECT_EQ(read(*device_, *made), std::vector<std::byte>(kNumBytes));
  const std::vector<std::byte> pattern = patterned_bytes(kNumBytes, 1);
  write(*device_, *opened, pattern);
  EXPECT_EQ(read(*device_, *made), pattern);
  EXPECT_FALSE(made->is_claimed());
  opened->claim();
  EXPECT_TRUE(made->is_claimed());
}

TEST_P(DeviceMemory, AnotherProcessReadsWhatIsWrittenAndAnswers) {
  const auto made = make();
  std::vector<std::byte> bytes = patterned_bytes(kNumBytes, 2);
  write(*device_, *made, bytes);
  OtherProcess other("DeviceMemoryOther.DISABLED_AnswersAndKeepsIt", GetParam(), made->address());
  ASSERT_EQ(other.wait_for("answered="), "yes");
  for (std::byte& byte : bytes) byte = ~byte;
  EXPECT_EQ(read(*device_, *made), bytes);
  EXPECT_TRUE(made->is_claimed());
  other.let_go();
}

TEST_P(DeviceMemory, MakerFreesItAfterTheOtherProcessHasLetGo) {
  auto made = make();
  OtherProcess other("DeviceMemoryOther.DISABLED_AnswersAndKeepsIt", GetParam(), made->address());
  ASSERT_EQ(other.wait_for("answered="), "yes");
  std::atomic<bool> freed{false};
  std::thread maker([&] {
    made.reset();
    freed = true;
  });
  // A maker that did not wait would end in this time.
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_FALSE(freed.load());
  other.let_go();
  maker.join();
  if (const auto* hostile = dynamic_cast<const HostileDevice*>(device_.get())) {
    EXPECT_EQ(hostile->num_exported(), 0);
  }
}

TEST_P(DeviceMemory, MakerWaitsForNobodyWhoWasKilled) {
  auto made = make();
  OtherProcess other("DeviceMemoryOther.DISABLED_AnswersAndKeepsIt", GetParam(), made->address());
  ASSERT_EQ(other.wait_for("answered="), "yes");
  other.kill();
  made.reset();
  if (const auto* hostile = dynamic_cast<const HostileDevice*>(device_.get())) {
    EXPECT_EQ(hostile->num_exported(), 0);  // the memory was freed
  }
}

// The deadline is the same for memories that are freed together, so they do not wait one after the other.
TEST(DeviceSharedMemory, MakerWaitsUntilTheDeadlineAndThenLeavesIt) {
  HostileDevice device;
  auto made = SharedMemory::make_on(device, kNumBytes, kUse);
  auto also_made = SharedMemory::make_on(device, kNumBytes, kUse);
  ASSERT_TRUE(made && also_made);
  const OtherProcess one("DeviceMemoryOther.DISABLED_AnswersAndKeepsIt", "hostile", made->address());
  const OtherProcess other("DeviceMemoryOther.DISABLED_AnswersAndKeepsIt", "hostile", also_made->address());
  ASSERT_EQ(one.wait_for("answered="), "yes");
  ASSERT_EQ(other.wait_for("answered="), "yes");
  const Deadline deadline = Clock::now();
  for (auto* memory : {&made, &also_made}) {
    (*memory)->wait_until_at_most(deadline);
    memory->reset();
  }
  EXPECT_EQ(device.num_exported(), 2);  // neither is freed while the other process uses it
}

TEST_P(DeviceMemory, MemoryOfAnotherUseIsRefused) {
  const auto made = make(100);
  SharedMemoryUse other = kUse;
  ++other.identity.channel_id;
  EXPECT_NE(refusal_of(made->address(), other).find("it is for channel 17 of run"), std::string::npos);
  other = kUse;
  ++other.slot_bytes;
  EXPECT_NE(refusal_of(made->address(), other).find("it is for channel 17 of run"), std::string::npos);
  EXPECT_FALSE(made->is_claimed());
}

TEST_P(DeviceMemory, AddressThatIsNoneOrWithoutItsSecretIsRefused) {
  const auto made = make(100);
  EXPECT_NE(refusal_of("").find("is not an address"), std::string::npos);
  std::string changed = made->address();
  changed.back() = changed.back() == '0' ? '1' : '0';
  EXPECT_NE(refusal_of(changed).find("its secret is another"), std::string::npos);
}

TEST_P(DeviceMemory, HostAndDeviceMemoryAreNotTakenForEachOther) {
  const auto on_device = make(100);
  const auto on_host = SharedMemory::make(100, kUse);
  std::string why;
  EXPECT_EQ(SharedMemory::open(on_device->address(), kUse, &why), nullptr);
  EXPECT_EQ(why, "it is memory of a device");
  EXPECT_EQ(refusal_of(on_host->address()), "it is memory of the host");
  EXPECT_FALSE(on_host->on_device());
}

// ---- Offers ----

TEST_P(DeviceMemory, OfferIsInReachOfThisProcessAndOfAnother) {
  const auto offer = make_device_offer(*device_, kRun);
  ASSERT_NE(offer, nullptr);
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(why_out_of_reach(*device_, offer->address(), kRun), "");
  }
  const OtherProcess other("DeviceMemoryOther.DISABLED_TriesTheOffer", GetParam(), offer->address());
  EXPECT_EQ(other.wait_for("why="), ".");
}

TEST_P(DeviceMemory, OfferOfAnotherRunIsOutOfReach) {
  const auto offer = make_device_offer(*device_, kRun);
  ASSERT_NE(offer, nullptr);
  LinkIdentity other = kRun;
  ++other.incarnation;
  EXPECT_NE(why_out_of_reach(*device_, offer->address(), other).find("incarnation 4"), std::string::npos);
  EXPECT_NE(why_out_of_reach(*device_, "", kRun).find("is not an address"), std::string::npos);
}

std::vector<std::string> devices_here() {
  std::vector<std::string> names = {"hostile"};
  if (cuda_available()) names.emplace_back("cuda");
  return names;
}
INSTANTIATE_TEST_SUITE_P(Devices, DeviceMemory, testing::ValuesIn(devices_here()),
                         [](const auto& device) { return device.param; });

// Descriptors are checked only for the hostile device, because a CUDA driver may keep some open.
TEST(DeviceSharedMemory, DescriptorsAndMappingsAreGivenBack) {
  const auto num_descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  HostileDevice device;
  const auto before = num_descriptors();
  for (int round = 0; round < 20; ++round) {
    const auto made = SharedMemory::make_on(device, 1 << 20, kUse);
    ASSERT_NE(made, nullptr);
    const auto opened = SharedMemory::open_on(device, made->address(), kUse);
    ASSERT_NE(opened, nullptr);
    SharedMemoryUse other = kUse;
    ++other.slot_bytes;
    EXPECT_EQ(SharedMemory::open_on(device, made->address(), other), nullptr);
  }
  EXPECT_EQ(num_descriptors(), before);
  EXPECT_EQ(device.num_imported(), 0);
  EXPECT_EQ(device.num_exported(), 0);
}

TEST(DeviceOffer, ReasonOfADeviceThatExportsNothingIsSaid) {
  HostileDevice device;
  device.why_not_exported = "hostile:0 does not support it";
  std::string why;
  EXPECT_EQ(make_device_offer(device, kRun, &why), nullptr);
  EXPECT_EQ(why, device.why_not_exported);
  EXPECT_EQ(make_device_offer(device, kRun), nullptr);
  const auto host = make_host_device();
  EXPECT_EQ(make_device_offer(*host, kRun, &why), nullptr);
  EXPECT_EQ(why, "host exports no memory");
}

TEST(DeviceOffer, ReasonOfADeviceThatCannotMapItIsSaid) {
  HostileDevice device;
  const auto offer = make_device_offer(device, kRun);
  ASSERT_NE(offer, nullptr);
  device.why_not_imported = "hostile:0 has no peer access to hostile:1";
  EXPECT_EQ(why_out_of_reach(device, offer->address(), kRun), device.why_not_imported);
  const auto host = make_host_device();
  EXPECT_EQ(why_out_of_reach(*host, offer->address(), kRun), "host maps no memory of other devices");
}

TEST(DeviceOffer, WhatADeviceThrowsMeanwhileIsTheReason) {
  HostileDevice device;
  const auto offer = make_device_offer(device, kRun);
  ASSERT_NE(offer, nullptr);
  const HostileDevice::Fault fault{
      .call = "copy", .why = "peer mapping resources exhausted", .ends_context = false};
  const std::string text = "hostile:0: copy failed: peer mapping resources exhausted";
  device.fail(fault);
  EXPECT_EQ(why_out_of_reach(device, offer->address(), kRun), text);
  std::string why;
  device.fail(fault);
  EXPECT_EQ(make_device_offer(device, kRun, &why), nullptr);
  EXPECT_EQ(why, text);
  device.why_no_memory = "hostile:0 has not enough memory";
  EXPECT_EQ(make_device_offer(device, kRun, &why), nullptr);
  EXPECT_EQ(why, device.why_no_memory);
  EXPECT_EQ(make_device_offer(device, kRun), nullptr);
  EXPECT_EQ(device.num_imported(), 0);
  EXPECT_EQ(device.num_exported(), 1);  // only the first memory exists
}

TEST(DeviceOffer, MappingOfOtherMemoryIsFoundOut) {
  HostileDevice device;
  const auto offer = make_device_offer(device, kRun);
  ASSERT_NE(offer, nullptr);
  device.maps_another_memory = true;
  EXPECT_EQ(why_out_of_reach(device, offer->address(), kRun), "what is mapped is not what was offered");
}

TEST(DeviceOffer, NothingIsLeftOfItOrOfWhoTriedIt) {
  HostileDevice device;
  {
    const auto offer = make_device_offer(device, kRun);
    ASSERT_NE(offer, nullptr);
    EXPECT_EQ(why_out_of_reach(device, offer->address(), kRun), "");
    EXPECT_EQ(device.num_imported(), 0);
  }
  EXPECT_EQ(device.num_exported(), 0);
}

}  // namespace
}  // namespace pipedream
