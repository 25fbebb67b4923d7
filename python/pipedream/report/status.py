"""What the caller of local workers can see of them while they run, and after one was killed.

A small file that all of them map; it survives the worker. Each rank writes its own entry.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

__all__ = ["StatusBoard"]

_COUNT = struct.Struct("<q")
_LOSS = struct.Struct("<d")
_NUM_LOSSES_AT_FIRST = 4096


class StatusBoard:
    """Each local worker's minibatch, in a file that survives the worker, 8 bytes per rank; and beside it a
    file of the losses so far: their number, then 8 bytes per minibatch, and room for more."""

    def __init__(self, path: Path, num_workers: int, *, create: bool) -> None:
        if create:
            path.write_bytes(b"\xff" * (8 * num_workers))  # -1: at no minibatch yet
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * num_workers)
        self._minibatches = memoryview(self._map).cast("q")
        self._losses_path = path.with_name(f"{path.name}-losses")
        self._losses: mmap.mmap | None = None  # of the worker that adds some
        self._num_losses = 0

    def write(self, rank: int, minibatch: int) -> None:
        self._minibatches[rank] = minibatch

    def read(self, rank: int) -> int:
        return int(self._minibatches[rank])

    def add_loss(self, loss: float) -> None:
        """Of the next minibatch; by the worker of the last stage."""
        end = _COUNT.size + _LOSS.size * (self._num_losses + 1)
        if self._losses is None or end > len(self._losses):
            self._losses = self._mapped_losses(max(_NUM_LOSSES_AT_FIRST, 2 * self._num_losses))
        _LOSS.pack_into(self._losses, end - _LOSS.size, loss)
        self._num_losses += 1
        _COUNT.pack_into(self._losses, 0, self._num_losses)  # the loss is there before it counts

    def losses(self) -> list[float]:
        """All that were added."""
        if not self._losses_path.exists():
            return []
        content = self._losses_path.read_bytes()
        if not content:  # made and not filled yet
            return []
        (count,) = _COUNT.unpack_from(content)
        end = _COUNT.size + _LOSS.size * count
        return [loss for (loss,) in _LOSS.iter_unpack(content[_COUNT.size : end])]

    def _mapped_losses(self, num_losses: int) -> mmap.mmap:
        """The file, with room for so many; what is in it stays."""
        num_bytes = _COUNT.size + _LOSS.size * num_losses
        with self._losses_path.open("wb" if self._losses is None else "r+b") as file:
            file.truncate(num_bytes)
        with self._losses_path.open("r+b") as file:
            return mmap.mmap(file.fileno(), num_bytes)
