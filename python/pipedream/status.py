"""What the caller of local workers can see of them while they run, and after one was killed.

A small file that all of them map; it survives the worker. Each rank writes its own entries.
"""

from __future__ import annotations

import mmap
from pathlib import Path

__all__ = ["NO_PID", "StatusBoard"]

NO_PID = -1


class StatusBoard:
    """Each local worker's minibatch and process, in a file that survives the worker. 16 bytes per rank.

    A pid is there while its worker is at work: one that ends before has failed.
    """

    def __init__(self, path: Path, num_workers: int, *, create: bool) -> None:
        if create:
            path.write_bytes(b"\xff" * (16 * num_workers))  # -1: at no minibatch yet, and NO_PID
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 16 * num_workers)
        numbers = memoryview(self._map).cast("q")
        self._minibatches, self._pids = numbers[:num_workers], numbers[num_workers:]

    def write(self, rank: int, minibatch: int) -> None:
        self._minibatches[rank] = minibatch

    def read(self, rank: int) -> int:
        return int(self._minibatches[rank])

    def write_pid(self, rank: int, pid: int) -> None:
        self._pids[rank] = pid

    def pids(self) -> dict[int, int]:
        """Rank -> pid, of the workers at work."""
        return {rank: pid for rank, pid in enumerate(self._pids) if pid != NO_PID}
