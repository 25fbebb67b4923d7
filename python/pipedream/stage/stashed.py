"""The stash of a microbatch, from its forward to its backward. Owned by the compute thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipedream.budget.offload import SavedTensors
from pipedream.data.batch_reader import Microbatch
from pipedream.model.recompute import Buffers, GeneratorState

__all__ = ["Stashed"]


@dataclass(slots=True)
class Stashed:
    """Everything that the backward of a microbatch needs."""

    minibatch: int
    leaves: list[Tensor]
    """Received tensors: their gradients go upstream."""
    value: Any
    """The stage's input, until the forward has it; under recompute until the second one has."""
    piece: Microbatch
    read_slot: int
    """The slot of the version that the forward read."""
    scale: float
    """The loss scale of float16, if there is one."""
    outputs: list[Tensor] = field(default_factory=list)
    """The outputs of the forward that the backward goes through, or the loss; empty before a recompute."""
    generators: GeneratorState | None = None
    buffers: Buffers = field(default_factory=list)
    """Recompute: what the forward read and changed."""
    saved: SavedTensors | None = None
    """Offloading: what the graph holds."""
    microbatch: int = 0
