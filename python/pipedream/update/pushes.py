"""The pushes of one replica while a backward runs. Gradients leave as soon as they are complete: the core
sends the chunks of which all gradients are there (csrc/param_server/shard_pushes.h). Gradients that are
pushed as factors leave once all of these are complete.

Owned by the worker's compute thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.dlpack import to_dlpack

from pipedream import _core
from pipedream.common.errors import PipelineError
from pipedream.model.boundary import exportable
from pipedream.update.gradients import in_order

__all__ = ["EarlyPushes", "ItemLinks", "bytes_of", "item_of"]


class ItemLinks(Protocol):
    """The part of the core that carries items between replicas."""

    def make_exchange(self, **spec: Any) -> _core.ShardExchange: ...
    def send_items(self, items: Sequence[tuple[str, list[Any]]], fields: _core.ItemFields = ...) -> None: ...
    def wait_until_sent(self, channel: str, num_left_max: int, timeout_s: float = ...) -> bool: ...
    def num_minibatches(self) -> int | None: ...
    def receive_any(self, channels: Sequence[str]) -> tuple[int, _core.ReceivedItem] | None: ...
    def stop_serving(self) -> None: ...
    def fail(self, why: str) -> None: ...


class EarlyPushes:
    """Pushes gradients during the last backward of a round. Hooks of the leaves call accumulated().

    A layer that checkpoints itself may accumulate a parameter's gradient several times in one backward. If
    that happens in the first backward, the parameter waits for the end of every later one."""

    def __init__(
        self,
        exchange: _core.ShardExchange,
        num_parameters: int,
        factored: Collection[int],
        push_factors: Callable[[int], None],
    ) -> None:
        """factored: the parameters whose gradients are pushed as factors.
        push_factors: pushes all of these, given the number of microbatches.
        """
        self._exchange = exchange
        self._factored = frozenset(factored)
        self._push_factors = push_factors
        self.gradients: dict[int, Tensor] = {}
        """Gradients, flat and unscaled, that the core has already; by parameter."""
        self._complete: set[int] = set()  # factored parameters that are complete in this backward
        self._num_accumulated = [0] * num_parameters  # in this backward
        self._once: list[bool] | None = None  # whether the first backward accumulated each parameter once
        self._is_open = False
        self._loss_scale = 1.0
        self._num_summed = 1

    def begin(self, loss_scale: float, num_summed: int) -> None:
        """Begins the last backward of a round. loss_scale: the factor of its loss. num_summed: how many
        microbatches' gradients are summed after it."""
        self._is_open = True
        self._loss_scale = loss_scale
        self._num_summed = num_summed

    def accumulated(self, parameter: int, leaf: Tensor) -> None:
        """Notes that a backward has added to the leaf's gradient, and pushes it if it is complete now."""
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
        with _disable_current_modes():  # a meter must not count this with the backward
            if parameter in self._factored:
                self._complete.add(parameter)
                if len(self._complete) == len(self._factored):
                    self._push_factors(self._num_summed)
            elif (gradient := in_order(leaf.grad, leaf, self._loss_scale)) is not None:
                self.gradients[parameter] = gradient
                self._exchange.push_ready(parameter, gradient, self._num_summed)

    def end(self) -> None:
        """Ends the round, whose last backward is over."""
        self._is_open = False
        if self._once is None:
            self._once = [count == 1 for count in self._num_accumulated]
        self.gradients = {}
        self._complete = set()
        self._num_accumulated = [0] * len(self._num_accumulated)


def item_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Returns the DLPack capsules that pass the tensors of an item to the core."""
    return [to_dlpack(exportable(tensor)) for tensor in tensors]


def bytes_of(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)
