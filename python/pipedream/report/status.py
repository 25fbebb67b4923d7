"""The status board shows local workers and their caller each other's state. The caller is the process that
called run().

The board is a small file that all these processes map into memory, so it survives a worker that is killed.
Each rank writes its own entry. The caller may ask for an early end; rank 0 then writes at which minibatch the
run ends.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

__all__ = ["LOOK_S", "StatusBoard", "in_turn", "losses_of"]

_Item = TypeVar("_Item")

LOOK_S = 0.05
"""Seconds after which the caller looks at its workers again."""

_COUNT = struct.Struct("<q")
_NUMBER = struct.Struct("<d")
_ROOM_AT_FIRST = 4096


class _Series:
    """A file with a list of numbers. One worker adds numbers, and other processes read them. The file has the
    count in 8 bytes, then the numbers in 8 bytes each, then room for more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: memoryview[int] = memoryview(b"")
        self._numbers: memoryview[float] = memoryview(b"").cast("d")  # the same memory as _counts, as floats
        self._count = 0

    def add(self, number: float) -> None:
        count = self._count = self._count + 1
        if count >= len(self._numbers):
            self._map(max(_ROOM_AT_FIRST, 2 * count))
        self._numbers[count] = number
        self._counts[0] = count  # written last, so that a reader finds a number for every count

    def read(self) -> list[float]:
        if not self._path.exists():
            return []
        content = self._path.read_bytes()
        if not content:  # the writer has made the file but not mapped it yet
            return []
        (count,) = _COUNT.unpack_from(content)
        end = _COUNT.size + _NUMBER.size * count
        numbers: list[float] = list(memoryview(content)[_COUNT.size : end].cast("d"))
        return numbers

    def _map(self, count: int) -> None:
        """Maps the file, with room for `count` numbers. The content of the file stays."""
        num_bytes = _COUNT.size + _NUMBER.size * count
        with self._path.open("r+b" if len(self._numbers) else "wb") as file:
            file.truncate(num_bytes)
        with self._path.open("r+b") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), num_bytes))
        self._counts, self._numbers = mapped.cast("q"), mapped.cast("d")  # element 0 is the count


class StatusBoard:
    """A file with the minibatch at which each local worker is, 8 bytes per rank. Two more entries have the
    request to end early, and the minibatch before which the run then ends.

    Other files beside it have the losses of each replica of the last stage, and the norms of gradients that
    rank 0 adds."""

    def __init__(self, path: Path, num_workers: int, *, create: bool) -> None:
        if create:
            path.write_bytes(b"\xff" * (8 * (num_workers + 2)))  # every entry is -1
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * (num_workers + 2))
        self._minibatches = memoryview(self._map).cast("q")
        self._num_workers = num_workers
        # These two entries follow the entries of the ranks.
        self._asked, self._stop_at = num_workers, num_workers + 1
        self._path = path
        self._own_losses: _Series | None = None  # this worker's own file, if it adds losses
        self._norms = _Series(path.with_name(f"{path.name}-norms"))

    def write(self, rank: int, minibatch: int) -> None:
        self._minibatches[rank] = minibatch

    def read(self, rank: int) -> int:
        return int(self._minibatches[rank])

    def newest(self) -> int:
        """The latest minibatch that any worker has begun; -1 if no worker has begun one."""
        return max(self._minibatches[: self._num_workers])

    def ask_for_stop(self) -> None:
        """Asks rank 0 to end the run as soon as it can. The process that called run() calls this method."""
        self._minibatches[self._asked] = 1

    @property
    def is_stop_asked(self) -> bool:
        return self._minibatches[self._asked] == 1

    @property
    def stop_at(self) -> int:
        """The minibatch before which the run ends early; -1 while rank 0 has chosen none."""
        return self._minibatches[self._stop_at]

    @stop_at.setter
    def stop_at(self, minibatch: int) -> None:
        self._minibatches[self._stop_at] = minibatch

    def add_loss(self, loss: float, replica: int = 0) -> None:
        """Adds a replica's part of the loss of its next minibatch. The worker of that replica of the last
        stage calls it."""
        if self._own_losses is None:
            self._own_losses = self._losses_of(replica)
        self._own_losses.add(loss)

    def losses(self, num_replicas: int = 1, num_microbatches: int = 1) -> list[float]:
        """Returns the losses of the minibatches whose parts all replicas have added."""
        parts = [self._losses_of(replica).read() for replica in range(num_replicas)]
        return losses_of(parts, num_microbatches)

    def _losses_of(self, replica: int) -> _Series:
        return _Series(self._path.with_name(f"{self._path.name}-losses-{replica}"))

    def add_norm(self, norm: float) -> None:
        """Adds the norm of the next update's gradients. Rank 0 calls it."""
        self._norms.add(norm)

    def norms(self) -> list[float]:
        return self._norms.read()


def losses_of(parts: Sequence[Sequence[float]], num_microbatches: int) -> list[float]:
    """Returns the loss of each minibatch, up to the first minibatch of which a part is missing.

    parts: for each replica, its parts of the losses. A replica has a part of every minibatch of which it has
    a microbatch. The parts of a minibatch add up to its loss."""
    num_replicas, m = len(parts), num_microbatches
    if num_replicas == 1:
        return list(parts[0])
    nexts = [0] * num_replicas
    losses: list[float] = []
    while True:
        number = len(losses) * m  # the number of the minibatch's first microbatch, counted through the run
        having = sorted({(number + index) % num_replicas for index in range(min(m, num_replicas))})
        if any(nexts[replica] >= len(parts[replica]) for replica in having):
            return losses
        first, *others = [parts[replica][nexts[replica]] for replica in having]
        losses.append(sum(others, start=first))
        for replica in having:
            nexts[replica] += 1


def in_turn(lists: Sequence[Sequence[_Item]]) -> list[_Item]:
    """Joins the replicas' lists in the order of microbatches, which go to the replicas in turn. [a, c] and
    [b, d] give [a, b, c, d]. It ends where an entry is missing.
    """
    found: list[_Item] = []
    while len(found) // len(lists) < len(lists[len(found) % len(lists)]):
        found.append(lists[len(found) % len(lists)][len(found) // len(lists)])
    return found
