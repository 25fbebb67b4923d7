// Tells how much more host memory this process's control groups allow. It knows versions 1 and 2, nested
// groups, and containers. Source: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst. Stateless; any thread.
#pragma once

#include <cstddef>
#include <string>

namespace pipedream {

// Returns how many bytes this process may still use: the limit of its control group less what is in use.
// Groups around it count too, as far as the process can see them, and the smallest result counts. File cache
// that the kernel drops first (inactive_file) does not count as use. Returns the largest size if no group has
// a limit. root: a prefix of /proc and of the mount points, for tests.
[[nodiscard]] std::size_t control_group_available_bytes(const std::string& root = "");

}  // namespace pipedream
