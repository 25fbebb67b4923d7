#include "device/host/control_group.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <vector>

namespace pipedream {
namespace {

constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

// The names of the files of version 1 or version 2.
struct Version {
  const char* limit;
  const char* in_use;            // the file with the bytes in use, those of groups inside included
  const char* reclaimable_stat;  // the line of memory.stat with the bytes of file cache that can be dropped
};
constexpr Version kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};
constexpr Version kVersion2{"memory.max", "memory.current", "inactive_file"};

// A mounted hierarchy of control groups that counts memory.
struct Hierarchy {
  const Version* version;
  std::string mounted_group;  // the group that is visible at the mount point: "/", except in some containers
  std::string mount_point;
};

bool names_memory(const std::string& comma_separated) {
  std::istringstream words(comma_separated);
  for (std::string word; std::getline(words, word, ',');) {
    if (word == "memory") return true;
  }
  return false;
}

// Finds the hierarchies that account memory. A line of /proc/self/mountinfo has this form:
// "36 35 98:0 /group /mount/point rw,relatime [optional ...] - cgroup source rw,memory"
std::vector<Hierarchy> mounted_hierarchies(const std::string& root) {
  std::vector<Hierarchy> found;
  std::ifstream mountinfo(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mountinfo, line);) {
    const std::size_t separator = line.find(" - ");
    if (separator == std::string::npos) continue;
    std::istringstream before(line.substr(0, separator));
    std::istringstream after(line.substr(separator + 3));
    std::string skipped;
    std::string group;
    std::string mount_point;
    std::string type;
    std::string options;
    before >> skipped >> skipped >> skipped >> group >> mount_point;
    after >> type >> skipped >> options;
    if (type == "cgroup2") found.push_back({&kVersion2, group, mount_point});
    if (type == "cgroup" && names_memory(options)) found.push_back({&kVersion1, group, mount_point});
  }
  return found;
}

// Returns the process's group in a hierarchy. The file's line is "4:memory:/group" in version 1 and
// "0::/group" in version 2.
std::optional<std::string> own_group(const std::string& root, const Version* version) {
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_it = version == &kVersion2 ? controllers.empty() : names_memory(controllers);
    if (is_it) return line.substr(second + 1);
  }
  return std::nullopt;
}

// Returns the number in the file, or the largest size if the file has "max" or does not exist.
std::size_t number_in(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::size_t number = 0;
  return (file >> number) ? number : kNoLimit;
}

std::size_t reclaimable_bytes(const std::filesystem::path& group, const Version& version) {
  std::ifstream stat(group / "memory.stat");
  std::string name;
  std::size_t num_bytes = 0;
  while (stat >> name >> num_bytes) {
    if (name == version.reclaimable_stat) return num_bytes;
  }
  return 0;
}

std::size_t available_in(const std::filesystem::path& group, const Version& version) {
  const std::size_t limit_bytes = number_in(group / version.limit);
  const std::size_t charged_bytes = number_in(group / version.in_use);
  if (limit_bytes == kNoLimit || charged_bytes == kNoLimit) return limit_bytes;
  const std::size_t in_use_bytes = charged_bytes - std::min(charged_bytes, reclaimable_bytes(group, version));
  return limit_bytes - std::min(limit_bytes, in_use_bytes);
}

// Returns the path of the process's group below the mount point. A container may see only its own group,
// which is then at the mount point itself. /proc still has that group's path on the host. In this case the
// returned path is empty.
std::filesystem::path path_below_mount(const Hierarchy& hierarchy, const std::string& group) {
  const std::string& mounted = hierarchy.mounted_group;
  if (mounted == "/") return std::filesystem::path(group).relative_path();
  if (group == mounted || group.starts_with(mounted + "/")) {
    return std::filesystem::path(group.substr(mounted.size())).relative_path();
  }
  return {};
}

}  // namespace

std::size_t control_group_available_bytes(const std::string& root) {
  std::size_t available_bytes = kNoLimit;
  for (const Hierarchy& hierarchy : mounted_hierarchies(root)) {
    const std::optional<std::string> group = own_group(root, hierarchy.version);
    if (!group) continue;
    std::filesystem::path path = root + hierarchy.mount_point;
    available_bytes = std::min(available_bytes, available_in(path, *hierarchy.version));
    for (const std::filesystem::path& part : path_below_mount(hierarchy, *group)) {
      path /= part;
      available_bytes = std::min(available_bytes, available_in(path, *hierarchy.version));
    }
  }
  return available_bytes;
}

}  // namespace pipedream
