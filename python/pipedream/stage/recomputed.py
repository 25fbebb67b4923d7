"""The forward and backward of a stage that recomputes: a forward without a graph, and right before the
backward the same forward once more with it. Owned by the worker's compute thread.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from pipedream.common.regions import entered
from pipedream.model.boundary import map_tensors, tensors_of
from pipedream.model.recompute import BufferMemory, GeneratorState, buffers_replayed
from pipedream.stage.passes import StagePasses, begins_to_work_in_place
from pipedream.stage.stashed import Stashed

__all__ = ["RecomputedPasses"]


class RecomputedPasses(StagePasses):
    """The passes of a stage that keeps no graph from the forward to the backward."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._buffers = BufferMemory(self._stage)

    def _forward(self, stashed: Stashed, *, is_next: bool) -> Any:
        """Keeps what the recompute needs."""
        # The first layer may work in place, and the recompute needs its input as it was.
        in_place = self._works_in_place is not False
        given = map_tensors(
            lambda tensor: tensor.detach().clone() if in_place else tensor.detach(), stashed.value
        )
        counts = [tensor._version for tensor in tensors_of(given)]
        with torch.no_grad(), self._buffers.forward() as stashed.buffers:
            if self._stage.draws is None:  # else it is seeded for each forward
                stashed.generators = GeneratorState.capture(self._device)
            output = self._run_layers(stashed, given)
            self._learn_works_in_place(stashed.minibatch, given, counts)
            return output

    def recompute(self, stashed: Stashed) -> Any:
        """The output or the loss again, now with its graph."""
        replayed: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._stage.draws is not None:
            self._stage.draws.begin(stashed.minibatch, stashed.microbatch, self._stage)
        elif stashed.generators is not None:
            replayed = stashed.generators.replayed(self._device)
        with entered(self._around_again), buffers_replayed(self._stage, stashed.buffers), replayed:
            return super()._forward(stashed, is_next=True)

    def _learn_works_in_place(self, minibatch: int, given: Any, counts: list[int]) -> None:
        changed = [tensor._version for tensor in tensors_of(given)] != counts
        if self._works_in_place is None:
            self._works_in_place = changed
        elif changed and not self._works_in_place:
            raise begins_to_work_in_place(self._stage.stage_index, minibatch)
