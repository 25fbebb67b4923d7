"""Finds the CPUs that a run may use. Under taskset or in a container these are fewer than the machine has.
The module also divides them into equal parts, one for the compute thread of each worker on a machine.

A worker has a part only if it computes on the host and the machine has enough CPUs for all its workers. No
thread is bound to its part (cpu_share.h), because the machine may have other work.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

__all__ = ["own_cpus", "share_of", "usable_cpus"]

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cpus(cgroups: Path = _CGROUPS, own_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Returns the number of CPUs that this process may use, at least 1. The number is the smallest of the
    CPUs in the process's affinity mask, the quota of its control group (version 2) in whole CPUs, and the
    quotas of the groups around it.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _folders(cgroups, own_cgroup) if (quota := _quota(folder / "cpu.max"))]
    return max(1, int(min([allowed, *quotas])))


def _folders(cgroups: Path, own_cgroup: Path) -> list[Path]:
    """Returns the folders of the control group and of all groups around it. Each may have a quota."""
    try:
        lines = own_cgroup.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []
    names = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    return [folder for name in names for folder in (cgroups / name, *(cgroups / name).parents)]


def _quota(file: Path) -> float | None:
    """Returns the quota in CPUs; None if there is none."""
    try:
        quota_us, period_us = file.read_text(encoding="ascii").split()
        return None if quota_us == "max" else int(quota_us) / int(period_us)
    except (OSError, ValueError):
        return None


_SWITCH = "PIPEDREAM_OWN_CPUS"


def own_cpus(local_rank: int) -> list[int]:
    """Returns the CPUs for the worker with this local rank. The list is empty if the machine has one worker
    or fewer CPUs than workers, or if $PIPEDREAM_OWN_CPUS is 0.
    """
    num_workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_workers == 1 or os.environ.get(_SWITCH) == "0":
        return []
    return share_of(_by_core(os.sched_getaffinity(0)), local_rank, num_workers)


def share_of(cpus: list[int], local_rank: int, num_workers: int) -> list[int]:
    """Returns one worker's part of the CPUs, in order. Empty if there are fewer CPUs than workers, or if the
    local rank is not below num_workers.
    """
    if local_rank >= num_workers or len(cpus) < num_workers:
        return []
    begin, end = (len(cpus) * rank // num_workers for rank in (local_rank, local_rank + 1))
    return cpus[begin:end]


def _by_core(cpus: Collection[int]) -> list[int]:
    """Returns the CPUs ordered by package and core, so that the CPUs of one core are neighbours."""
    return sorted(
        cpus, key=lambda cpu: (_topology(cpu, "physical_package_id"), _topology(cpu, "core_id"), cpu)
    )


def _topology(cpu: int, name: str) -> int:
    try:
        return int(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/{name}").read_text())
    except (OSError, ValueError):  # the system does not tell
        return 0
