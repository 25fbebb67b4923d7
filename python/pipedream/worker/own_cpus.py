"""CPUs that the compute thread of each worker of a machine would rather run on: an equal part of them each.

Only where all computes on the host and every worker can have one. Nothing is bound to them (cpu_share.h): a
machine may have other work.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

__all__ = ["own_cpus", "share_of"]

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
    """In an order in which those of one core lie side by side, and the cores of one package."""
    return sorted(
        cpus, key=lambda cpu: (_topology(cpu, "physical_package_id"), _topology(cpu, "core_id"), cpu)
    )


def _topology(cpu: int, name: str) -> int:
    try:
        return int(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/{name}").read_text())
    except (OSError, ValueError):  # not told here
        return 0
