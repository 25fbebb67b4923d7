"""The stash of a microbatch, from its forward to its backward, and its offloading: the place of the forward's
graph meanwhile, and the moment when it and the weight versions come back. Owned by the compute thread.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipedream.budget.offload import SavedTensors, StageOffload, graph_root
from pipedream.data.batch_reader import Microbatch
from pipedream.model.boundary import tensors_of
from pipedream.model.recompute import Buffers, GeneratorState
from pipedream.model.stage_module import StageModule
from pipedream.update.weights import StageWeights

__all__ = ["OffloadedStash", "Stashed"]


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


class OffloadedStash:
    """The offloading of one stage's stash."""

    def __init__(self, offload: StageOffload, stage: StageModule, weights: StageWeights) -> None:
        self._offload = offload
        self._stage = stage
        self._weights = weights

    def saving(
        self, stashed: Stashed, given: Any, *, is_next: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """Around what makes the microbatch's graph. is_next: its backward is the stage's next."""
        kept = [*stashed.leaves, *tensors_of(given)]
        kept += [buffer for _, buffer in self._stage.stage_buffers()]
        stashed.saved = self._offload.forward(kept, is_next=is_next)
        return contextlib.nullcontext() if stashed.saved is None else stashed.saved

    def roots(self, stashed: Stashed, outputs: list[Tensor]) -> list[Tensor]:
        """Returns the tensors at which the backward begins. A stash that leaves the device keeps no outputs,
        which are sent."""
        if stashed.saved is None or not stashed.saved.leaves_device:
            return outputs
        return [graph_root(output) for output in outputs]

    def arrive(self, stashed: Stashed, following: Stashed | None) -> None:
        """Before a backward. following: what the next one needs comes back while this one runs."""
        if stashed.saved is not None:
            stashed.saved.arrive()
        if following is None:
            return
        self._weights.own.prefetch(following.read_slot)
        if following.saved is not None:
            following.saved.prefetch()
