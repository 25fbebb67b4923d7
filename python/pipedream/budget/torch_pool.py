"""Puts torch's own tensors into the worker's planned memory, on CUDA. Opt in with PIPEDREAM_TORCH_POOL=1.

Torch's caching allocator gets one term of the worker's pool as a `torch.cuda.MemPool`. Tensors that forwards
and backwards make are allocated there. They cannot exceed the term, and their bytes are reported with the
other terms (budget/memory.py).

A MemPool applies only to the thread that enters it, but autograd runs backwards on its own threads. So
region() turns autograd's multithreading off (pytorch issues 167353, 188205). A pool with a custom allocator
has no expandable segments. The worker's compute thread owns the pool.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from pipedream import _core

__all__ = ["SEGMENT_SLACK_BYTES", "TORCH_TENSORS", "TorchPool", "wants_torch_pool"]

TORCH_TENSORS = "tensors of torch"
"""The name of the term in the worker's pool."""

# The caching allocator puts tensors of up to 1 MiB into segments of 2 MiB, and tensors below 10 MiB into
# segments of 20 MiB. The slack assumes that one segment of 2 MiB and two of 20 MiB are mostly empty.
SEGMENT_SLACK_BYTES = (20 + 20 + 2) << 20


def wants_torch_pool(device: torch.device) -> bool:
    """Whether the user has asked for the pool and the device is a GPU. Raises ValueError if
    $PIPEDREAM_TORCH_POOL is neither 0 nor 1."""
    value = os.environ.get("PIPEDREAM_TORCH_POOL", "0")
    if value not in ("0", "1"):
        raise ValueError(f"PIPEDREAM_TORCH_POOL is {value!r}: use 1 or 0")
    return value == "1" and device.type == "cuda"


class TorchPool:
    """A memory pool for torch's tensors. Use `with pool.region():` around torch's computations."""

    def __init__(self, slot: Tensor) -> None:
        """slot: flat uint8 device memory, which lives as long as the process uses CUDA."""
        device = f"cuda:{slot.device.index}" if slot.is_cuda else "host"
        if not _core.open_segment_arena(slot.data_ptr(), slot.numel(), device):
            raise ValueError(
                "PIPEDREAM_TORCH_POOL is 1, but tensors of an earlier run in this process still lie in its"
                " memory: drop them, or start a new process"
            )
        self._slot = slot
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(
            _core.__file__ or "", "pipedream_segment_allocate", "pipedream_segment_free"
        )
        self._pool = torch.cuda.MemPool(self._allocator.allocator())  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        with (
            torch.cuda.use_mem_pool(self._pool),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield

    @property
    def peak_bytes(self) -> int:
        """The most bytes that torch has had from the pool at once."""
        return _core.segment_arena_bytes()[1]
