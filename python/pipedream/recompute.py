"""Recompute (re-materialisation): a forward that keeps only its input, done again right before its backward.

The second forward must be the first one again: the same weights, the same random numbers, and no second step
of any buffer. Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016). Owned by the
worker's compute thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["GeneratorState", "buffers_kept"]


@dataclass(frozen=True)
class GeneratorState:
    """Of torch's generators on this worker: the CPU's, and the device's when it is CUDA."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> GeneratorState:
        on_cuda = device.type == "cuda"
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_cuda else None)

    @contextlib.contextmanager
    def replayed(self, device: torch.device) -> Iterator[None]:
        """Inside, random numbers come as they came after the capture; afterwards go on as before."""
        outside = GeneratorState.capture(device)
        self._set(device)
        try:
            yield
        finally:
            outside._set(device)

    def _set(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


@contextlib.contextmanager
def buffers_kept(stage: nn.Module) -> Iterator[None]:
    """Inside, the layers work on copies of their buffers; afterwards they have their own again, untouched."""
    owned = [(module, dict(module._buffers)) for module in stage.modules() if module._buffers]
    for module, buffers in owned:
        for name, buffer in buffers.items():
            module._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for module, buffers in owned:
            module._buffers.clear()
            module._buffers.update(buffers)
