"""What the caller of local workers can see of them while they run, and after one was killed.

A small file that all of them map; it survives the worker. Each rank writes its own entry.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import BinaryIO

__all__ = ["StatusBoard"]

_LOSS = struct.Struct("<d")


class StatusBoard:
    """Each local worker's minibatch, in a file that survives the worker, 8 bytes per rank; and beside it a
    file of the losses so far, 8 bytes per minibatch."""

    def __init__(self, path: Path, num_workers: int, *, create: bool) -> None:
        if create:
            path.write_bytes(b"\xff" * (8 * num_workers))  # -1: at no minibatch yet
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * num_workers)
        self._minibatches = memoryview(self._map).cast("q")
        self._losses_path = path.with_name(f"{path.name}-losses")
        self._losses_file: BinaryIO | None = None  # of the worker that adds some

    def write(self, rank: int, minibatch: int) -> None:
        self._minibatches[rank] = minibatch

    def read(self, rank: int) -> int:
        return int(self._minibatches[rank])

    def add_loss(self, loss: float) -> None:
        """Of the next minibatch; by the worker of the last stage."""
        if self._losses_file is None:
            self._losses_file = self._losses_path.open("wb", buffering=0)
        self._losses_file.write(_LOSS.pack(loss))

    def losses(self) -> list[float]:
        """All that were added."""
        if not self._losses_path.exists():
            return []
        content = self._losses_path.read_bytes()
        return [loss for (loss,) in _LOSS.iter_unpack(content[: len(content) // _LOSS.size * _LOSS.size])]
