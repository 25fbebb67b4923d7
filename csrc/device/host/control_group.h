// The host memory that this process's control groups still allow: versions 1 and 2, nested groups, inside a
// container or not. Source: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst. Stateless; any thread.
#pragma once

#include <cstddef>
#include <string>

namespace pipedream {

// The least of limit minus use over this process's group and those around it, as far as they can be seen.
// File cache that the kernel drops first (inactive_file) is not in use. The largest size when no group has a
// limit. root: in front of /proc and the mount points, for tests.
[[nodiscard]] std::size_t control_group_available_bytes(const std::string& root = "");

}  // namespace pipedream
