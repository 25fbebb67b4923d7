"""Copies tensors between device and host memory while the device computes.

On CUDA the copies run on two separate streams, one per direction. Events order the copies, and the CPU does
not wait for them. On the host each copy is done before the call returns. That saves no time, but lets tests
run the code that offloads. The worker's compute thread owns the streams.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["CopyStreams", "make_copy_streams"]


class CopyStreams:
    """Copies that run at the same time as the compute stream. out() and into() return an event that is
    recorded when the copy is done. They return None if the copy is done already, as it is on the host."""

    def out(self, source: Tensor, target: Tensor, *after: Any) -> Any:
        """Copies from device to host. The copy waits for all work that the compute stream has so far, and for
        the events `after`."""
        with torch.no_grad():
            target.copy_(source)

    def into(self, source: Tensor, target: Tensor, *after: Any) -> Any:
        """Copies from host to device. The copy waits for the same work and events as in out()."""
        return self.out(source, target, *after)

    def wait(self, *copies: Any) -> None:
        """Makes the compute stream wait for the copies. The CPU does not wait."""

    def finish(self) -> None:
        """Makes the CPU wait for all copies."""


class _CudaCopies(CopyStreams):
    """Copies on one stream per direction, because both directions of the bus can work at once."""

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
        # Work that is queued on the compute stream may write the source, or may read the target's old
        # content.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)
            return stream.record_event()


def make_copy_streams(device: torch.device) -> CopyStreams:
    return _CudaCopies(device) if device.type == "cuda" else CopyStreams()
