"""How many cores a run may use: fewer than the machine has under taskset or in a container."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["usable_cpus"]

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cpus(cgroups: Path = _CGROUPS, own_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """At least 1: those that this process may run on, or the whole ones of its control group's quota (version
    2), where that is less."""
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
    """In cores; None: there is none."""
    try:
        quota_us, period_us = file.read_text(encoding="ascii").split()
        return None if quota_us == "max" else int(quota_us) / int(period_us)
    except (OSError, ValueError):
        return None
