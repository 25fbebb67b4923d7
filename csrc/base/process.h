// What a worker asks of the operating system for its own process. Call once, at start-up.
#pragma once

namespace pipedream {

// The process gets SIGKILL when the thread that started it dies, so that no worker outlives its launcher.
void die_with_parent();

// Freed memory stays with the process: with the default thresholds malloc maps and unmaps every large
// tensor, and the first touch of each fresh page costs 10 to 100 us on virtual machines.
void keep_freed_memory();

}  // namespace pipedream
