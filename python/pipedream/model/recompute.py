"""Implements recompute (re-materialisation): a stage keeps only the input of a forward, and repeats the
forward right before its backward.

The second forward must equal the first: it uses the same weights and random numbers, and updates no buffer a
second time. Source: Chen et al., Training Deep Nets with Sublinear Memory Cost (2016). Owned by the worker's
compute thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["BufferMemory", "Buffers", "buffers_replayed"]


_SMALL_BYTES = 64 * 1024


class BufferMemory:
    """Keeps the contents of a stage's buffers before each forward, so that the repeated forward reads the
    same contents. This is needed only for buffers that a forward both reads and changes (spectral norm's
    vectors, codebooks).

    Small buffers are copied before each forward. A large buffer is copied only if the first forward changes
    it. If a later forward changes a large buffer that is not copied, it raises an error. Batch norm's running
    statistics are not copied, because a forward in training mode does not read them.
    """

    def __init__(self, stage: nn.Module) -> None:
        self._owned = [
            (module, name)
            for module in stage.modules()
            if not isinstance(module, _BatchNorm)
            for name in module._buffers
        ]
        self._left_out: list[tuple[nn.Module, str]] = []
        """Large buffers that the first forward did not change."""
        self._has_seen_one = False  # whether the first forward is over

    @contextlib.contextmanager
    def forward(self) -> Iterator[Buffers]:
        """A context around a forward. Yields the buffers that buffers_replayed() needs. Raises ValueError for
        a change of a large buffer that the first forward did not change."""
        kept: Buffers = [
            (module, name, None if (buffer := module._buffers.get(name)) is None else buffer.clone())
            for module, name in self._owned
        ]
        watched = self._left_out if self._has_seen_one else self._owned
        before = [(module, name, module._buffers.get(name)) for module, name in watched]
        counts = [None if buffer is None else buffer._version for _, _, buffer in before]
        yield kept
        changed = [
            (module, name)
            for (module, name, buffer), count in zip(before, counts, strict=True)
            if module._buffers.get(name) is not buffer or (buffer is not None and buffer._version != count)
        ]
        if not self._has_seen_one:
            self._has_seen_one = True
            self._leave_out(before, changed)
            kept[:] = [entry for entry in kept if entry[:2] in self._owned]
        elif changed:
            module, name = changed[0]
            raise ValueError(
                f"buffer {name!r} of {type(module).__name__} changes in this forward, and did not in the"
                " first, so its recompute would read other contents: leave the stage out of recompute, or"
                " change the buffer in each forward (self.x.mul_(1))"
            )

    def _leave_out(
        self,
        before: Sequence[tuple[nn.Module, str, torch.Tensor | None]],
        changed: Sequence[tuple[nn.Module, str]],
    ) -> None:
        self._left_out = [
            (module, name)
            for module, name, buffer in before
            if buffer is not None and buffer.nbytes > _SMALL_BYTES and (module, name) not in changed
        ]
        self._owned = [entry for entry in self._owned if entry not in self._left_out]


Buffers = list[tuple[nn.Module, str, torch.Tensor | None]]


@contextlib.contextmanager
def buffers_replayed(stage: nn.Module, kept: Buffers) -> Iterator[None]:
    """A context in which the layers work on copies of their buffers with the kept contents. Afterwards they
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
