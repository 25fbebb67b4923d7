"""Pushes one replica's gradients to the owners of the shards while a backward runs. The core gets each
gradient as soon as the gradient is complete. It sends a chunk as soon as it has all gradients of the chunk
(csrc/param_server/shard_pushes.h). Factors (factors.py) are sent together, once the backward has completed
all of them.

Owned by the worker's compute thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.dlpack import to_dlpack

from pipedream import _core
from pipedream.common.errors import PipelineError
from pipedream.model.boundary import exportable
from pipedream.update.gradients import in_order

__all__ = ["EarlyPushes", "item_of"]


class EarlyPushes:
    """Pushes gradients during the last backward of a round. Autograd hooks of the parameters call
    accumulated().

    A layer with activation checkpointing may add to a parameter's gradient several times in one backward.
    The last backward of the first round shows for which parameters this is so. Their gradients are pushed
    only after the backward, in every round."""

    def __init__(
        self,
        exchange: _core.ShardExchange,
        num_parameters: int,
        factored: Collection[int],
        push_factors: Callable[[int], None],
    ) -> None:
        """factored: the parameters whose gradients are pushed as factors.
        push_factors: pushes the factors of all these parameters. It is called with the number of microbatches
            whose gradients are summed.
        """
        self._exchange = exchange
        self._factored = frozenset(factored)
        self._push_factors = push_factors
        self.gradients: dict[int, Tensor] = {}
        """The gradients that the core already has, by parameter. They are flat and without the loss
        scale."""
        self._complete: set[int] = set()  # factored parameters that are complete in this backward
        self._num_accumulated = [0] * num_parameters  # additions to each gradient in this backward
        # By parameter, whether the first round's last backward added to its gradient once.
        self._once: list[bool] | None = None
        self._is_open = False
        self._loss_scale = 1.0
        self._num_summed = 1

    def begin(self, loss_scale: float, num_summed: int) -> None:
        """Begins the last backward of a round. loss_scale: the factor in the round's gradients
        (StageRunner.loss_scale). num_summed: the number of microbatches whose gradients the sum contains
        after this backward."""
        self._is_open = True
        self._loss_scale = loss_scale
        self._num_summed = num_summed

    def accumulated(self, parameter: int, leaf: Tensor) -> None:
        """Notes that a backward has added to the leaf's gradient, and pushes the gradient if it is
        complete."""
        if not self._is_open:
            return
        self._num_accumulated[parameter] += 1
        if parameter in self.gradients or parameter in self._complete:
            raise PipelineError(
                "a parameter's gradient was accumulated again after it had been pushed, which the first"
                " backward had not done: a layer that checkpoints itself must do so in every minibatch"
            )
        if self._once is None or not self._once[parameter]:
            return
        with _disable_current_modes():  # no meter shall count this work as part of the backward
            if parameter in self._factored:
                self._complete.add(parameter)
                if len(self._complete) == len(self._factored):
                    self._push_factors(self._num_summed)
            elif (gradient := in_order(leaf.grad, leaf, self._loss_scale)) is not None:
                self.gradients[parameter] = gradient
                if self._loss_scale != 1.0:  # in_order() has copied the gradient
                    leaf.grad = None
                self._exchange.push_ready(parameter, gradient, self._num_summed)

    def end(self) -> None:
        """Ends the round. Call it after the round's last backward."""
        self._is_open = False
        if self._once is None:
            self._once = [count == 1 for count in self._num_accumulated]
        self.gradients = {}
        self._complete = set()
        self._num_accumulated = [0] * len(self._num_accumulated)


def item_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Returns the DLPack capsules that pass the tensors of an item to the core."""
    return [to_dlpack(exportable(tensor)) for tensor in tensors]
