"""Implements recompute (re-materialisation): a stage keeps only the input of a forward, and repeats the
forward right before its backward.

The second forward must equal the first: it uses the same weights and random numbers, and updates no buffer a
second time. Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016). Owned by the worker's
compute thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["BufferMemory", "Buffers", "GeneratorState", "buffers_replayed"]


@dataclass(frozen=True)
class GeneratorState:
    """The states of torch's generators on this worker: the generator of the CPU, and of the device if it is
    CUDA.
    """

    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> GeneratorState:
        on_cuda = device.type == "cuda"
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_cuda else None)

    def has_moved_on(self, device: torch.device) -> bool:
        """Whether anything was drawn since the capture."""
        now = GeneratorState.capture(device)
        same_cuda = self.cuda is None or now.cuda is None or torch.equal(self.cuda, now.cuda)
        return not (same_cuda and torch.equal(self.cpu, now.cpu))

    @contextlib.contextmanager
    def replayed(self, device: torch.device) -> Iterator[None]:
        """In the with block, the generators draw the same random numbers as after the capture. Afterwards the
        generators have the states from before the block.
        """
        outside = GeneratorState.capture(device)
        self.restore(device)
        try:
            yield
        finally:
            outside.restore(device)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


class BufferMemory:
    """Keeps the contents of a stage's buffers before each forward, so that the repeated forward reads the
    same contents. This is needed only for buffers that a forward both reads and changes (spectral norm's
    vectors, codebooks).

    The first forward shows which buffers change. Batch norm's running statistics do not count, because a
    forward in training mode does not read them.
    """

    def __init__(self, stage: nn.Module) -> None:
        self._owned = [
            (module, name)
            for module in stage.modules()
            if not isinstance(module, _BatchNorm)
            for name in module._buffers
        ]
        self._changing: list[tuple[nn.Module, str]] | None = None

    @contextlib.contextmanager
    def forward(self) -> Iterator[Buffers]:
        """A context around a forward. Yields the buffers that buffers_replayed() needs."""
        watched = self._owned if self._changing is None else self._changing
        before = [(module, name, module._buffers.get(name)) for module, name in watched]
        counts = [None if buffer is None else buffer._version for _, _, buffer in before]
        kept: Buffers = [
            (module, name, None if buffer is None else buffer.clone()) for module, name, buffer in before
        ]
        yield kept
        if self._changing is not None:
            return
        changed = [
            module._buffers.get(name) is not buffer or (buffer is not None and buffer._version != count)
            for (module, name, buffer), count in zip(before, counts, strict=True)
        ]
        self._changing = [
            entry for entry, has_changed in zip(self._owned, changed, strict=True) if has_changed
        ]
        kept[:] = [entry for entry, moved in zip(kept, changed, strict=True) if moved]


Buffers = list[tuple[nn.Module, str, torch.Tensor | None]]


@contextlib.contextmanager
def buffers_replayed(stage: nn.Module, kept: Buffers) -> Iterator[None]:
    """In the with block, the layers work on copies of their buffers with the kept contents. Afterwards they
    have their own buffers again, unchanged.
    """
    owned = [(module, dict(module._buffers)) for module in stage.modules() if module._buffers]
    for module, buffers in owned:
        for name, buffer in buffers.items():
            module._buffers[name] = None if buffer is None else buffer.clone()
    for module, name, content in kept:
        module._buffers[name] = None if content is None else content.clone()
    try:
        yield
    finally:
        for module, buffers in owned:
            module._buffers.clear()
            module._buffers.update(buffers)
