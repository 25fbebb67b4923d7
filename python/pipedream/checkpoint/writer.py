"""A worker's checkpoint writer copies a stage's state in memory. A separate thread writes the copy to disk.

    compute thread    ... B299 U299 | copy | F300 B300 ...
    writer thread                           1 write tensors   2 write the part's JSON   3 if all parts are
                                            there, write the manifest and remove old checkpoints

Training stalls while the state is copied. The memory for the copies is allocated before the first minibatch,
and has room for one copy per stage. So if the next checkpoint is due before the last one is written, the
compute thread also waits for the writer. If a checkpoint cannot be written, the writer logs a warning and the
training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipedream.checkpoint.checkpoint_folder import checkpoints_in, folder_of, is_complete, remove_old
from pipedream.checkpoint.manifest import Header, part_name, write_manifest
from pipedream.checkpoint.stage_files import FROZEN, Content, write_stage
from pipedream.common.errors import FileFormatError, describe_error

__all__ = ["CheckpointWriter", "CopyMemory", "Figures"]

_log = logging.getLogger("pipedream")

_ALIGNMENT_BYTES = 64


class CopyMemory:
    """Host memory for one copy of a stage's state, allocated once. The compute thread owns it while it
    copies; then the writer thread owns it until the copy is written."""

    def __init__(self, memory: Tensor) -> None:
        """memory: a flat uint8 tensor on the host."""
        self._memory = memory
        self._used_bytes = 0
        self._beside_bytes = 0
        self.peak_bytes = 0
        """The most bytes in use. They include separate memory for tensors that do not fit. This happens if a
        buffer has grown."""

    def clear(self) -> None:
        self._used_bytes = self._beside_bytes = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy of the tensor in this memory. If the copy does not fit, allocates separate
        memory."""
        begin = -(-self._used_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        end = begin + tensor.nbytes
        if end > self._memory.numel():
            flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
            self._beside_bytes += tensor.nbytes
        else:
            flat = self._memory[begin:end].view(tensor.dtype)
            self._used_bytes = end
        self.peak_bytes = max(self.peak_bytes, self._used_bytes + self._beside_bytes)
        # empty_like keeps the tensor's strides if they leave no gaps.
        strides = torch.empty_like(tensor, device="meta").stride()
        return torch.as_strided(flat, tensor.shape, strides).copy_(tensor.detach())

    def copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.copy(tensor) for name, tensor in tensors.items()}

    @staticmethod
    def bytes_beside(num_tensors: int) -> int:
        """Returns the most bytes that alignment adds to num_tensors copies."""
        return num_tensors * _ALIGNMENT_BYTES


@dataclass
class Figures:
    """Counts and times of one worker's checkpoints."""

    num_copied: int = 0
    stall_ns: int = 0
    """Nanoseconds in which the compute thread copied, or waited until the last copy was written."""
    num_written: int = 0
    """The number of parts (manifest.py) that were written. Failed parts do not count."""
    write_ns: int = 0
    """Nanoseconds in which the writer thread wrote parts."""


@dataclass(frozen=True)
class _Job:
    folder: Path
    header: Header
    place: tuple[int, int]
    contents: list[Content]
    state: Mapping[str, Any]
    done: threading.Event


class CheckpointWriter:
    """One worker's writer for all of its stages."""

    def __init__(
        self,
        path: Path,
        keep: int,
        memory: Mapping[int, Tensor],
        on_complete: Callable[[Path], None] = lambda checkpoint: None,
    ) -> None:
        """memory: a flat uint8 host tensor for each stage's copy. on_complete: called on the writer thread
        with each checkpoint that this worker has completed."""
        self._path = path
        self._keep = keep
        self._memory = {stage: CopyMemory(of_stage) for stage, of_stage in memory.items()}
        self._is_free = {stage: threading.Event() for stage in memory}
        for is_free in self._is_free.values():
            is_free.set()
        self._on_complete = on_complete
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.figures = Figures()

    def save(
        self,
        header: Header,
        place: tuple[int, int],
        contents: Sequence[Content],
        state: Mapping[str, Any],
    ) -> None:
        """Copies the contents, which the writer thread then writes. Call it on the compute thread, which may
        change the tensors as soon as this returns. place: (stage, replica)."""
        began_ns = time.perf_counter_ns()
        stage_index, _ = place
        is_free, memory = self._is_free[stage_index], self._memory[stage_index]
        is_free.wait()
        is_free.clear()
        memory.clear()
        copied = [
            content if content.kind == FROZEN else replace(content, tensors=memory.copies(content.tensors))
            for content in contents  # stage/saving.py has copied the frozen parameters that may change
        ]
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="pipedream-checkpoints", daemon=True)
            self._thread.start()
        folder = folder_of(self._path, header.minibatch)
        self._jobs.put(_Job(folder, header, place, copied, state, is_free))
        self.figures.num_copied += 1
        self.figures.stall_ns += time.perf_counter_ns() - began_ns

    def close(self) -> None:
        """Returns when everything is written."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def peak_bytes(self) -> int:
        return sum(memory.peak_bytes for memory in self._memory.values())

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            began_ns = time.perf_counter_ns()
            try:
                self._write(job)
                self.figures.num_written += 1
            except (OSError, FileFormatError) as error:
                self._tell(job, error)
            finally:
                job.contents.clear()
                job.done.set()
                self.figures.write_ns += time.perf_counter_ns() - began_ns

    def _write(self, job: _Job) -> None:
        job.folder.mkdir(parents=True, exist_ok=True)
        write_stage(job.folder, job.header, job.place, job.contents, job.state)
        for checkpoint in checkpoints_in(self._path):
            # Earlier checkpoints are tried again, because a network file system may show their last parts
            # late.
            if _completes(checkpoint):
                remove_old(self._path, self._keep)
                self._on_complete(checkpoint)

    def _tell(self, job: _Job, error: Exception) -> None:
        """Logs that a checkpoint could not be written, and removes this part's files to free the disk. If the
        part is complete, its files stay, because another worker may have completed the checkpoint with
        them."""
        part = part_name(*job.place)
        with contextlib.suppress(OSError):
            for path in () if (job.folder / f"{part}.json").exists() else job.folder.glob(f"{part}[-.]*"):
                path.unlink()
        _log.warning(
            "the checkpoint of minibatch %d could not be written at stage %d (%s): the training goes on, and"
            " the checkpoints before it are as they were",
            job.header.minibatch,
            job.place[0],
            describe_error(error),
        )


def _completes(checkpoint: Path) -> bool:
    """Completes the checkpoint if all parts are there. Returns whether this call completed it."""
    try:
        return not is_complete(checkpoint) and write_manifest(checkpoint) is not None
    except FileNotFoundError:
        if checkpoint.exists():
            raise
        return False  # another worker has removed this old checkpoint
