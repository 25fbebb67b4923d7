"""Values that a stage's forward takes from elsewhere than its input and weights, found while it is rehearsed:
numbers from generators that belong to the data, and what it has kept of earlier forwards.

Stateless; the worker's compute thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipedream.model.boundary import tensors_of
from pipedream.model.recompute import BufferMemory, GeneratorState, buffers_replayed
from pipedream.model.seeding import RngState
from pipedream.model.stage_module import StageModule

__all__ = ["foreign_draws", "gives_the_same_again"]


def foreign_draws(before: RngState, after: RngState) -> tuple[str, ...]:
    """Returns the generators, torch's apart, that were drawn from between the two."""
    found = []
    if before.python != after.python:
        found.append("random")
    if before.of_numpy() != after.of_numpy():
        found.append("numpy.random")
    return tuple(found)


def gives_the_same_again(stage: StageModule, device: torch.device, run: Callable[[], Any]) -> bool:
    """Whether the stage's forward, done again as a recompute does it, gives what it gave. True too where it
    fails, which is told otherwise. run: does it; its output has no in-place work to come."""
    generators = GeneratorState.capture(device)
    with contextlib.suppress(Exception):
        with BufferMemory(stage).forward() as buffers:
            first = tensors_of(run())
        with generators.replayed(device), buffers_replayed(stage, buffers):
            second = tensors_of(run())
        pairs = zip(first, second, strict=True)
        return all(_is_same(one, other, device) for one, other in pairs)
    return True


def _is_same(one: Tensor, other: Tensor, device: torch.device) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # On a device two sums may be added up in different orders.
    tolerance = 0.0 if device.type == "cpu" else 1e-2
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
