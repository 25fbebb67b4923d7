"""CPUs that a run may use, fewer than the machine has under taskset or in a container; and an equal part of
them for the compute thread of each worker of a machine.

A worker has a part only where all computes on the host and every worker can have one. Nothing is bound to it
(cpu_share.h): a machine may have other work.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

__all__ = ["own_cpus", "share_of", "usable_cpus"]

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cpus(cgroups: Path = _CGROUPS, own_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Number of CPUs that this process may use, at least 1: its affinity, or the whole CPUs of its control
    group's quota (version 2) where these are fewer."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _folders(cgroups, own_cgroup) if (quota := _quota(folder / "cpu.max"))]
    return max(1, int(min([allowed, *quotas])))


def _folders(cgroups: Path, own_cgroup: Path) -> list[Path]:
    """Returns the folders of the group and all those around it: each may have a quota."""
    try:
        lines = own_cgroup.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []
    names = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    return [folder for name in names for folder in (cgroups / name, *(cgroups / name).parents)]


def _quota(file: Path) -> float | None:
    """The quota in cores, or None without one."""
    try:
        quota_us, period_us = file.read_text(encoding="ascii").split()
        return None if quota_us == "max" else int(quota_us) / int(period_us)
    except (OSError, ValueError):
        return None


_SWITCH = "PIPEDREAM_OWN_CPUS"


def own_cpus(local_rank: int) -> list[int]:
    """Returns the CPUs of this machine's worker of that rank; none if $PIPEDREAM_OWN_CPUS is 0."""
    num_workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_workers == 1 or os.environ.get(_SWITCH) == "0":
        return []
    return share_of(_by_core(os.sched_getaffinity(0)), local_rank, num_workers)


def share_of(cpus: list[int], local_rank: int, num_workers: int) -> list[int]:
    """The part of the CPUs, in order, that one of so many has; none where there are fewer than workers."""
    if local_rank >= num_workers or len(cpus) < num_workers:
        return []
    begin, end = (len(cpus) * rank // num_workers for rank in (local_rank, local_rank + 1))
    return cpus[begin:end]


def _by_core(cpus: Collection[int]) -> list[int]:
    """The CPUs in an order in which those of one core, and the cores of one package, are neighbours."""
    return sorted(
        cpus, key=lambda cpu: (_topology(cpu, "physical_package_id"), _topology(cpu, "core_id"), cpu)
    )


def _topology(cpu: int, name: str) -> int:
    try:
        return int(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/{name}").read_text())
    except (OSError, ValueError):  # not told here
        return 0
