"""Copies between device and host memory that run beside the device's computing.

CUDA copies on streams of its own, one per direction. Events order them, and the CPU waits for none. The
host does the same copies at once: it gains nothing, but its tests then test this code. Owned by the
worker's compute thread.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["CopyStreams", "make_copy_streams"]


class CopyStreams(Protocol):
    """Copies beside the compute stream. What they return says when a copy is done; None: it is."""

    def out(self, source: Tensor, target: Tensor, *after: Any) -> Any:
        """Device to host, after what the compute stream has been given so far and after `after`."""

    def into(self, source: Tensor, target: Tensor, *after: Any) -> Any:
        """Host to device, likewise."""

    def wait(self, *copies: Any) -> None:
        """Makes the compute stream wait for the copies, from now on; the CPU does not wait."""

    def finish(self) -> None:
        """The CPU waits for all copies."""


class _HostCopies:
    """One memory: a copy is done when the call returns."""

    def out(self, source: Tensor, target: Tensor, *after: Any) -> Any:
        with torch.no_grad():
            target.copy_(source)

    into = out

    def wait(self, *copies: Any) -> None:
        pass

    def finish(self) -> None:
        pass


class _CudaCopies:
    """A stream per direction: both directions of the bus work at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._into = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def out(self, source: Tensor, target: Tensor, *after: Any) -> Any:
        return self._copy(self._out, source, target, after)

    def into(self, source: Tensor, target: Tensor, *after: Any) -> Any:
        return self._copy(self._into, source, target, after)

    def wait(self, *copies: Any) -> None:
        compute = torch.cuda.current_stream(self._device)
        for event in copies:
            if event is not None:
                compute.wait_event(event)

    def finish(self) -> None:
        self._out.synchronize()
        self._into.synchronize()

    def _copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor, after: Any) -> Any:
        # The source is made, or the target's former content read, by what compute has been given so far.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)
            return stream.record_event()


def make_copy_streams(device: torch.device) -> CopyStreams:
    return _CudaCopies(device) if device.type == "cuda" else _HostCopies()
