"""Norms with running statistics that a stage evaluates and trains in turn, while minibatches are in flight.

The backward of a norm that was evaluated reads the running statistics again, as they are then: torch moves
them in place and counts no version of them, so that a minibatch trained in between is a wrong gradient
without a word, in a plain loop, too. Owned by the worker's compute thread.
"""

from __future__ import annotations

from collections.abc import Container

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from pipedream.model.stage_module import StageModule

__all__ = ["EvaluatedNorms"]

Item = tuple[int, int]
"""(minibatch, microbatch)."""


class EvaluatedNorms:
    """The norms of one stage. Call `check()` after each forward that has a graph."""

    def __init__(self, stage: StageModule) -> None:
        names = {id(buffer): name.rpartition(".")[0] for name, buffer in stage.stage_buffers()}
        self._stage_index = stage.stage_index
        self._norms: list[tuple[str, nn.Module, Tensor]] = []
        """With its name and what counts its steps."""
        for module in stage.modules():
            if isinstance(module, _NormBase) and module.running_mean is not None:
                counter = module.num_batches_tracked
                assert counter is not None
                self._norms.append((names.get(id(counter), type(module).__name__), module, counter))
        self._counts = [counter._version for _, _, counter in self._norms]
        self._evaluated: list[Item | None] = [None] * len(self._norms)
        """By norm, in the latest forward that did."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._norms)

    def check(self, item: Item, in_flight: Container[Item]) -> None:
        """The item's forward is done. in_flight: whose backward is not. Raises ValueError where a norm has
        been trained that was evaluated for one of them."""
        for index, (name, norm, counter) in enumerate(self._norms):
            # Some train without a step that is counted; one that has stepped may be evaluating again.
            has_trained = norm.training or counter._version != self._counts[index]
            self._counts[index] = counter._version
            if not has_trained:
                self._evaluated[index] = item
                continue
            evaluated = self._evaluated[index]
            if evaluated is not None and evaluated in in_flight:
                raise ValueError(
                    f"stage {self._stage_index}: layer {name} was evaluated in minibatch {evaluated[0]} and"
                    f" trained in minibatch {item[0]}, before the backward of minibatch {evaluated[0]}, which"
                    " would read running statistics that have moved: leave it in one mode, or give"
                    " schedule='flush' with microbatches=1"
                )
