"""Handles the gradients of a stage from the last backward of a minibatch to the next weight version. They
are collected, measured, and clipped or unscaled. Then the optimizer uses them, unless they overflowed.

If the schedule drains every minibatch, a norm is taken over all stages. Otherwise it is taken per stage,
because a wider norm would make stages wait for each other. The norm is that of the mean gradient over a
round, the minibatches of one update. With shards each replica has only its own part of the mean gradient, so
the replicas add up their norms. After an all-reduce each replica has the whole mean gradient. Owned by the
worker's compute thread.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipedream import _core
from pipedream.budget.footprint import storage_bytes
from pipedream.common.regions import Region
from pipedream.model.layers import flat_view
from pipedream.model.stage_module import StageModule, Tie
from pipedream.optim.master_weights import has_master
from pipedream.update.stage_optimizer import StageOptimizer
from pipedream.update.tied import TiedParameters, ties_by_owner
from pipedream.update.weights import StageWeights, split_tied

__all__ = [
    "GradientFigures",
    "NormExchange",
    "RunStep",
    "StageGradients",
    "all_in_order",
    "clip_scale",
    "figures_of",
    "in_order",
    "updated_parameters",
]

RunStep = Callable[[Callable[[], None]], None]
"""Runs an optimizer's step, measures its time and memory, and reports its errors."""

_NORM_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_NORM_ELEMENTS_MAX = 1 << 20  # elements of a bfloat16 gradient that are widened at once


class GradientFigures(NamedTuple):
    """The squared norm and the overflow flags of some gradients. The figures of several parts or stages are
    added by `+`."""

    squared_norm: float = 0.0
    overflowed: bool = False
    told: bool = False
    """Whether activations of the round have reported an overflow upstream (loss_scale.py)."""

    def __add__(self, other: object) -> GradientFigures:  # `+` of tuples would concatenate them
        assert isinstance(other, GradientFigures)
        return GradientFigures(
            self.squared_norm + other.squared_norm,
            self.overflowed or other.overflowed,
            self.told or other.told,
        )


def clip_scale(squared_norm: float, max_norm: float | None) -> float:
    """Returns the factor that makes the gradients' norm at most max_norm."""
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (math.sqrt(squared_norm) + _NORM_EPSILON))


def figures_of(gradients: Sequence[Tensor | None]) -> GradientFigures:
    dense = [
        gradient.to_dense() if gradient.is_sparse else gradient
        for gradient in gradients
        if gradient is not None and gradient.numel() > 0
    ]
    if not dense:
        return GradientFigures()
    squared_norm = float(torch.stack([norm.double() for norm in _norms(dense)]).square().sum())
    return GradientFigures(squared_norm, not math.isfinite(squared_norm))


def _norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns the norms of the gradients. A bfloat16 gradient is cut into parts with one norm each. Torch's
    norm of the whole tensor would be rounded to bfloat16, or would need a float32 copy of the tensor."""
    narrow = [
        part for g in gradients if has_master(g) for part in torch.split(flat_view(g), _NORM_ELEMENTS_MAX)
    ]
    others = [gradient for gradient in gradients if not has_master(gradient)]
    norms = [*torch._foreach_norm(others)] if others else []
    return [*norms, *torch._foreach_norm(narrow, dtype=torch.float32)] if narrow else norms


class StageGradients:
    """The gradients of the parameters that one stage updates: its untied parameters, then the tied parameters
    that it owns."""

    takes_means = False
    """Whether take() gives the mean of a round's gradients, without the loss scale. Otherwise it gives their
    sum, with the loss scale."""

    def __init__(self, weights: StageWeights, optimizer: StageOptimizer, tied: TiedParameters) -> None:
        self._weights = weights
        self._optimizer = optimizer
        self._tied = tied
        self._taken: list[Tensor | None] = []
        self._overflowed = False

    def num_bytes(self, own_slot: int) -> int:
        """Returns the bytes of the gradients that backwards have accumulated so far."""
        tied = self._weights.tied.values()
        leaves = [leaf for group in tied for slot in range(group.num_slots) for leaf in group.leaves(slot)]
        return storage_bytes([leaf.grad for leaf in (*self._weights.own.leaves(own_slot), *leaves)])

    @property
    def around_backward(self) -> Region | None:
        """The context in which a backward of the stage runs; None if it needs none."""
        return None

    def whole_slot(self, newest_slot: int) -> int:
        """Returns the slot of the newest version of which this worker has all parameters. newest_slot: the
        slot of the newest version of the parameters that it updates."""
        return newest_slot

    def begin_backward(self) -> None:
        """Prepares a backward. A subclass may wait here until there is memory for the new gradients."""

    def begin_last_backward(self, minibatch: int, loss_scale: float) -> None:
        """Prepares the last backward of the minibatch at this replica. loss_scale: the factor in the
        gradients (StageRunner.loss_scale)."""

    def separate_gradients(self, own_slot: int) -> None:
        """Gives each gradient its own memory. Call it after a backward if the next backward adds to its
        gradients. Autograd may give two parameters gradients in one memory, and each would then get the sum
        of both. own_slot: the slot that the backward read."""
        self._weights.own.separate_gradients(own_slot)
        self._tied.separate_gradients()

    def move(self, from_slot: int, to_slot: int) -> None:
        """Moves the round's gradients to the leaves of another slot, which the next backward reads."""
        self._weights.own.move_gradients(from_slot, to_slot)

    def rescale(self, own_slot: int, factor: float) -> None:
        """Multiplies the round's gradients by the factor, because the next backward's loss has a scale that
        is larger by this factor."""
        self._weights.own.scale_gradients(own_slot, factor)
        self._tied.rescale(factor)

    def take(self, minibatch: int, own_slot: int) -> None:
        """Collects the gradients of an update: those of this stage, and the gradients of tied parameters that
        other stages have sent. minibatch: a minibatch of the update's round.
        own_slot: the slot of the version that the last backward read."""
        self._taken = [*self._weights.own.take_gradients(own_slot), *self._tied.collect()]

    def figures(self) -> GradientFigures:
        return figures_of(self._taken)

    def apply(self, read_slot: int, write_slot: int, gradient_scale: float, run: RunStep) -> None:
        """Makes the next version of the parameters. gradient_scale: the optimizer uses the gradients times
        this factor. run: runs the optimizer's step."""
        tied_read, tied_write = self._tied.begin_update()
        read, write = self._leaves(read_slot, tied_read), self._leaves(write_slot, tied_write)
        run(functools.partial(self._optimizer.step, read, write, self._taken, gradient_scale))
        self._finish()

    def skip(self, read_slot: int, write_slot: int) -> None:
        """Skips an update after an overflow: the next version has the content of this one."""
        tied_read, tied_write = self._tied.begin_update()
        self._weights.own.copy_version(read_slot, write_slot)
        self._tied.copy_owned(tied_read, tied_write)
        self._overflowed = True
        self._finish()

    def running(self) -> AbstractContextManager[None]:
        """Returns a context for a segment of the run (worker/segment.py), from its first work item to
        finish(). Afterwards the user's modules are as they were."""
        return nullcontext()

    def finish(self, newest_slot: int, *, is_over: bool) -> None:
        """Ends a segment, a part of the run with one memory plan, after all updates. newest_slot: the slot of
        the last version. is_over: whether the run ends, too."""

    def take_overflow(self) -> bool:
        overflowed, self._overflowed = self._overflowed, False
        return overflowed

    def poison(self, freed_slot: int) -> None:
        """Fills a slot with NaN after the last backward that reads its version."""
        self._weights.own.poison(freed_slot)

    def _finish(self) -> None:
        self._taken = []
        self._tied.finish_update()

    def _leaves(self, own_slot: int, tied_slot: int) -> list[nn.Parameter]:
        leaves, tied_leaves = self._weights.own.leaves(own_slot), self._tied.owned_leaves(tied_slot)
        return [*leaves, *tied_leaves] if tied_leaves else leaves


class NormExchange:
    """Adds up the figures of all workers along the ranks, and sends the sum back to each worker. If the
    schedule does not drain every minibatch, only the workers of one stage take part.

        rank 0 <-- rank 1 <-- rank 2        partial sums, upstream
        rank 0 --> rank 1 --> rank 2        the total, downstream
    """

    def __init__(self, measure: Callable[[int], GradientFigures], *, is_first: bool) -> None:
        """measure: returns this worker's own figures of an update, given its minibatch. It is called once
            per update.
        is_first: whether this is the first of these workers. It computes the total, from the sums that arrive
            from downstream.
        """
        self._measure = measure
        self._is_first = is_first
        self._minibatch = -1
        self._sum = GradientFigures()  # figures of this worker and of those downstream
        self._total: GradientFigures | None = None

    def send(self, edge: _core.Edge, minibatch: int) -> Tensor:
        self._begin(minibatch)
        figures = self._sum if _goes_upstream(edge) else self.total(minibatch)
        return torch.tensor([*map(float, figures)], dtype=torch.float64)

    def receive(self, edge: _core.Edge, minibatch: int, content: Tensor) -> None:
        self._begin(minibatch)
        squared_norm, overflowed, told = content.tolist()
        figures = GradientFigures(squared_norm, bool(overflowed), bool(told))
        if _goes_upstream(edge):
            self._sum += figures
        else:
            self._total = figures

    def total(self, minibatch: int) -> GradientFigures:
        """Returns the figures of all workers. Call it after the exchange for the minibatch."""
        self._begin(minibatch)
        if self._is_first:
            return self._sum
        assert self._total is not None, f"the total of minibatch {minibatch} has not come"
        return self._total

    def _begin(self, minibatch: int) -> None:
        if minibatch != self._minibatch:
            self._minibatch, self._sum, self._total = minibatch, self._measure(minibatch), None


def _goes_upstream(edge: _core.Edge) -> bool:
    return (edge.to_stage, edge.to_replica) < (edge.from_stage, edge.from_replica)


def in_order(gradient: Tensor | None, leaf: Tensor, loss_scale: float) -> Tensor | None:
    """Returns the gradient flat, in the leaf's order in memory, and without the loss scale. A gradient with a
    loss scale is copied and not divided in place, because its memory may have another user. If the model uses
    a view such as p.view(2, -1), the rest of the backward, or another parameter's gradient, still uses the
    memory."""
    if gradient is None:
        return None
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    gradient = gradient.detach()
    if gradient.stride() != leaf.stride() or loss_scale != 1.0:
        gradient = torch.mul(gradient, 1.0 / loss_scale, out=torch.empty_like(leaf, requires_grad=False))
    return flat_view(gradient)


def all_in_order(
    gradients: list[Tensor | None], leaves: Sequence[Tensor], loss_scale: float
) -> list[Tensor | None]:
    """Returns in_order() of each gradient. Removes a gradient from `gradients` once its result exists, so at
    most one gradient exists twice."""
    flats = []
    for index, leaf in enumerate(leaves):
        flats.append(in_order(gradients[index], leaf, loss_scale))
        gradients[index] = None
    return flats


def updated_parameters(stage: StageModule, ties: Sequence[Tie]) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters that the stage's optimizer gets: the stage's untied parameters, then the tied
    parameters that it owns. This is the order in StageGradients."""
    own, _ = split_tied(stage, [tie.parameter for tie in ties])
    owned = ties_by_owner(stage.stage_index, ties).get(stage.stage_index, [])
    return [*own, *split_tied(stage, [tie.parameter for tie in owned])[1]]
