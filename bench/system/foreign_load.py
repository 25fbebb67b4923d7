"""Measures how much CPU time other processes, and other machines on the same host (steal), take while a
benchmark runs. It counts the cores that this process may use. Linux only.

    with ForeignLoad() as load: ...
    load.share      the share of these cores' time, 0 to 1
"""

from __future__ import annotations

import os
import time
from types import TracebackType

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ForeignLoad:
    """Measures the load inside the block. This process and its descendants do not count."""

    share = 0.0

    def __enter__(self) -> ForeignLoad:
        self._began_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        elapsed_s = time.monotonic() - self._began_s
        foreign_s = (_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        self.share = max(0.0, foreign_s / elapsed_s / len(os.sched_getaffinity(0))) if elapsed_s > 0 else 0.0


def _busy_s() -> float:
    """Returns the seconds in which these cores were not idle, summed over the cores."""
    names = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
    with open("/proc/stat", encoding="ascii") as file:
        rows = [row[1:9] for line in file if (row := line.split())[0] in names]
    columns = (sum(map(int, column)) for column in zip(*rows, strict=True))
    user, nice, system, _idle, _wait, irq, soft_irq, steal = columns
    return (user + nice + system + irq + soft_irq + steal) / _TICKS_PER_S


def _own_s() -> float:
    """Returns the CPU seconds of this process and its descendants, including those that have ended."""
    parents, times = {}, {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue  # the process has ended
            parents[int(name)], times[int(name)] = int(fields[1]), sum(map(int, fields[11:15]))
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(times[pid] for pid in own) / _TICKS_PER_S
