// Tests the memory that control groups still allow: limit minus use, and the least value of nested groups, in
// versions 1 and 2.
#include "device/host/control_group.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

namespace pipedream {
namespace {

constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();
constexpr const char* kVersion2Mount =
    "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw\n";

// A made-up /proc and /sys.
class ControlGroup : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "pipedream-groups-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  void write_version_2(const std::string& group, const std::string& limit, std::size_t in_use,
                       std::size_t inactive_file) const {
    write("/sys/fs/cgroup" + group + "/memory.max", limit + "\n");
    write("/sys/fs/cgroup" + group + "/memory.current", std::to_string(in_use) + "\n");
    write("/sys/fs/cgroup" + group + "/memory.stat",
          "anon 5\nfile 7\nactive_file 9000\ninactive_file " + std::to_string(inactive_file) + "\n");
  }
  void write_version_1(const std::string& path, std::size_t limit, std::size_t in_use,
                       std::size_t inactive_file) const {
    write(path + "/memory.limit_in_bytes", std::to_string(limit) + "\n");
    write(path + "/memory.usage_in_bytes", std::to_string(in_use) + "\n");
    write(path + "/memory.stat",
          "cache 7\ninactive_file 1\ntotal_inactive_file " + std::to_string(inactive_file) + "\n");
  }
  [[nodiscard]] std::size_t available_bytes() const { return control_group_available_bytes(root_); }

 private:
  std::string root_;
};

TEST_F(ControlGroup, WhatIsInUseCountsAgainstTheLimitAndReclaimableFileCacheDoesNot) {
  write("/proc/self/cgroup", "0::/job\n");
  write("/proc/self/mountinfo", kVersion2Mount);
  write_version_2("/job", "10000", 6000, 1500);
  EXPECT_EQ(available_bytes(), 10000u - (6000u - 1500u));
}

TEST_F(ControlGroup, OfNestedGroupsTheOneThatLeavesLeastCounts) {
  write("/proc/self/cgroup", "0::/slice/job/step\n");
  write("/proc/self/mountinfo", kVersion2Mount);
  // 1000 bytes are left, because processes outside of job use the rest.
  write_version_2("/slice", "100000", 99000, 0);
  write_version_2("/slice/job", "20000", 4000, 0);  // 16000
  write_version_2("/slice/job/step", "max", 3000, 0);
  EXPECT_EQ(available_bytes(), 1000u);
  write_version_2("/slice/job/step", "3500", 3000, 0);
  EXPECT_EQ(available_bytes(), 500u);
}

TEST_F(ControlGroup, AGroupBeyondItsLimitLeavesNothing) {
  write("/proc/self/cgroup", "0::/job\n");
  write("/proc/self/mountinfo", kVersion2Mount);
  write_version_2("/job", "1000", 6000, 100);
  EXPECT_EQ(available_bytes(), 0u);
}

TEST_F(ControlGroup, WithoutALimitOrWithoutGroupsNothingIsTakenAway) {
  EXPECT_EQ(available_bytes(), kNoLimit);  // there is no /proc
  write("/proc/self/cgroup", "0::/job\n");
  write("/proc/self/mountinfo", kVersion2Mount);
  EXPECT_EQ(available_bytes(), kNoLimit);  // there is no such folder
  write_version_2("/job", "max", 6000, 100);
  EXPECT_EQ(available_bytes(), kNoLimit);
}

TEST_F(ControlGroup, VersionOneIsReadWhereItsMemoryControllerIsMounted) {
  write("/proc/self/cgroup", "9:name=systemd:/other\n4:cpu,memory:/job/step\n0::/\n");
  write("/proc/self/mountinfo",
        "32 31 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
        "35 31 0:32 / /sys/fs/cgroup/cpu,memory rw - cgroup cgroup rw,cpu,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  const std::string mount = "/sys/fs/cgroup/cpu,memory";
  write_version_1(mount, std::size_t{9223372036854771712u}, 70000, 0);
  write_version_1(mount + "/job", 50000, 45000, 3000);
  write_version_1(mount + "/job/step", 40000, 10000, 0);
  EXPECT_EQ(available_bytes(), 50000u - (45000u - 3000u));
}

TEST_F(ControlGroup, AContainerThatSeesItsOwnGroupAloneReadsThatAtTheMountPoint) {
  // In Docker without a control group namespace the group's path is the path on the host, but the mount shows
  // only the container's group.
  write("/proc/self/cgroup", "4:memory:/docker/1234/inner\n");
  write("/proc/self/mountinfo",
        "35 31 0:32 /docker/1234 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
  write_version_1("/sys/fs/cgroup/memory", 8000, 5000, 0);
  write_version_1("/sys/fs/cgroup/memory/inner", 8000, 7000, 0);
  EXPECT_EQ(available_bytes(), 1000u);
  write("/proc/self/cgroup", "4:memory:/elsewhere\n");
  EXPECT_EQ(available_bytes(), 3000u);
}

}  // namespace
}  // namespace pipedream
