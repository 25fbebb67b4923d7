"""Tests gradients.py: a minibatch's gradients are measured, clipped, used or left unused."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from edge_replay import replay
from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream import Plan, _core
from pipedream.model.stage_module import Tie
from pipedream.splitting.splitter import split
from pipedream.stage.edge_transfers import EdgeTransfers
from pipedream.update.gradients import (
    GradientFigures,
    NormExchange,
    StageGradients,
    clip_scale,
    updated_parameters,
)
from pipedream.update.stage_optimizer import StageOptimizer
from pipedream.update.weights import StageWeights, WeightVersions, split_tied, weight_layout
from torch import Tensor, nn


@settings(max_examples=25)
@given(
    st.lists(st.floats(-100, 100), min_size=1, max_size=8),
    st.sampled_from([1e-3, 0.5, 1.0, 7.0, 1e6]),
)
def test_gradients_times_the_scale_are_those_that_torch_clips(values: list[float], max_norm: float) -> None:
    parameter = nn.Parameter(torch.zeros(len(values), dtype=torch.float64))
    gradient = torch.tensor(values, dtype=torch.float64)
    parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_([parameter], max_norm)
    scale = clip_scale(float(gradient.square().sum()), max_norm)
    torch.testing.assert_close(gradient * scale, parameter.grad, rtol=1e-12, atol=0)


def test_without_a_largest_norm_nothing_is_scaled() -> None:
    assert clip_scale(1e30, None) == 1.0
    assert clip_scale(0.0, 1.0) == 1.0


def test_figures_add_up() -> None:
    total = GradientFigures(9.0) + GradientFigures(16.0, True) + GradientFigures()
    assert total == GradientFigures(25.0, True)
    assert isinstance(total, GradientFigures)


class _Tied:
    """Stands in for the tied parameters of a stage. It counts updates, and has slots as if two versions were
    kept.
    """

    def __init__(self, versions: WeightVersions | None, received: list[Tensor | None]) -> None:
        self._versions = versions
        self._received = received
        self.num_updates = 0

    def owned_leaves(self, slot: int) -> list[nn.Parameter]:
        return [] if self._versions is None else self._versions.leaves(slot)

    def copy_owned(self, read_slot: int, write_slot: int) -> None:
        assert self._versions is not None
        self._versions.copy_version(read_slot, write_slot)

    def collect(self) -> list[Tensor | None]:
        return self._received

    def begin_update(self) -> tuple[int, int]:
        return self.num_updates % 2, (self.num_updates + 1) % 2

    def finish_update(self) -> None:
        self.num_updates += 1


class _Parts:
    """A stage of two linear layers. The weight of the second layer is tied, and this stage owns it."""

    def __init__(self, *, with_tie: bool = True) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        stage = split(model, Plan.straight(2, 1))[0]
        shared = [model[1].weight] if with_tie else []
        ties = [Tie(parameter, (0, 1), ("", "")) for parameter in shared]  # type: ignore[arg-type]
        own, tied = split_tied(stage, [tie.parameter for tie in ties])

        def slots(named: Any) -> list[Tensor]:
            return [torch.zeros(weight_layout(named)[0], dtype=torch.uint8) for _ in range(2)]

        of_ties = {0: ([tie.parameter for tie in ties], slots(tied))} if with_tie else {}
        self.weights = StageWeights(stage, slots(own), of_ties)
        received: list[Tensor | None] = [torch.full((2, 2), 3.0).double()] if with_tie else []
        self.tied = _Tied(self.weights.tied.get(0), received)
        factory = functools.partial(torch.optim.SGD, lr=1.0)
        step_lr = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
        optimizer = StageOptimizer(factory, updated_parameters(stage, ties), step_lr)
        self.gradients = StageGradients(self.weights, optimizer, self.tied)  # type: ignore[arg-type]

    def leave_gradients(self, slot: int, value: float) -> None:
        for leaf in self.weights.own.leaves(slot):
            leaf.grad = torch.full_like(leaf, value)

    def contents(self, slot: int) -> list[list[float]]:
        leaves = [*self.weights.own.leaves(slot), *self.tied.owned_leaves(slot)]
        return [sorted(set(leaf.flatten().tolist())) for leaf in leaves]


def test_the_optimizer_is_called_with_its_own_parameters_and_then_the_tied_ones_that_it_owns() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    stage = split(model, Plan.straight(3, 1))[0]
    theirs = Tie(model[1].weight, (-1, 0), ("", ""))  # type: ignore[arg-type]
    own = Tie(model[0].bias, (0, 1), ("", ""))  # type: ignore[arg-type]
    names = [name for name, _ in updated_parameters(stage, [theirs, own])]
    assert names == ["0.weight", "1.bias", "2.weight", "2.bias", "0.bias"]


def test_a_step_reads_one_version_writes_the_next_and_publishes_it() -> None:
    parts = _Parts()
    parts.leave_gradients(0, 2.0)
    parts.gradients.take(0, 0)
    assert all(leaf.grad is None for leaf in parts.weights.own.leaves(0))
    parts.gradients.apply(0, 1, 0.5, run=lambda step: step())
    # The stage's own weights become 1 - lr * 0.5 * 2, and the tied weight becomes 1 - lr * 0.5 * 3.
    assert parts.contents(1) == [[0.0], [0.0], [-0.5]]
    assert parts.contents(0) == [[1.0]] * 3
    assert parts.tied.num_updates == 1
    assert not parts.gradients.take_overflow()


def test_a_skipped_step_copies_the_version_and_leaves_optimizer_and_scheduler_alone() -> None:
    parts = _Parts()
    parts.leave_gradients(0, math.inf)
    parts.gradients.take(0, 0)
    parts.gradients.skip(0, 1)
    assert parts.contents(1) == parts.contents(0) == [[1.0]] * 3
    assert parts.tied.num_updates == 1
    assert parts.gradients.take_overflow()
    assert not parts.gradients.take_overflow()  # an overflow is reported once
    # The scheduler halves the rate after every step that is not skipped. This is the first such step.
    parts.leave_gradients(1, 1.0)
    parts.gradients.take(1, 1)
    parts.gradients.apply(1, 0, 1.0, run=lambda step: step())
    assert parts.contents(0) == [[0.0], [0.0], [-2.0]]


def test_the_gradients_of_one_minibatch_do_not_come_again_in_the_next() -> None:
    parts = _Parts(with_tie=False)
    parts.leave_gradients(0, 2.0)
    parts.gradients.take(0, 0)
    parts.gradients.apply(0, 1, 1.0, run=lambda step: step())
    parts.gradients.take(1, 1)  # the backwards of minibatch 1 reached no parameter
    parts.gradients.apply(1, 0, 1.0, run=lambda step: step())
    assert parts.contents(0) == parts.contents(1) == [[-1.0]] * 3


@pytest.mark.parametrize("spoil", [None, math.inf, math.nan])
def test_figures_are_of_own_and_tied_gradients_and_see_what_is_not_finite(spoil: float | None) -> None:
    parts = _Parts()
    parts.leave_gradients(0, 2.0)
    if spoil is not None:
        bias = parts.weights.own.leaves(0)[1]
        assert bias.grad is not None
        bias.grad[0] = spoil
    parts.gradients.take(0, 0)
    figures = parts.gradients.figures()
    assert figures.overflowed == (spoil is not None)
    if spoil is None:
        assert figures.squared_norm == pytest.approx(6 * 2.0**2 + 4 * 3.0**2)


def test_figures_take_sparse_missing_and_empty_gradients() -> None:
    parts = _Parts(with_tie=False)
    first, second, _ = parts.weights.own.leaves(0)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]).double(), (2, 2), check_invariants=True
    )
    first.grad = sparse  # not coalesced: two values add up to 3 at one place
    second.grad = None
    parts.gradients.take(0, 0)
    assert parts.gradients.figures() == GradientFigures(9.0)
    parts.gradients.take(1, 0)
    assert parts.gradients.figures() == GradientFigures()


def test_float32_norms_are_added_in_float64() -> None:
    parts = _Parts(with_tie=False)
    # The squares of all gradients together are too large for float32: 10 elements of 8e18. Those of each
    # single gradient are not.
    for leaf in parts.weights.own.leaves(0):
        leaf.data = leaf.data.float()
        leaf.grad = torch.full_like(leaf, 8e18)
    parts.gradients.take(0, 0)
    assert parts.gradients.figures().squared_norm == pytest.approx(10 * 64e36, rel=1e-6)
    assert not parts.gradients.figures().overflowed


def test_bytes_are_of_the_gradients_that_are_there() -> None:
    parts = _Parts(with_tie=False)
    assert parts.gradients.num_bytes(0) == 0
    parts.leave_gradients(0, 1.0)
    assert parts.gradients.num_bytes(0) == (4 + 2 + 4) * 8
    parts.gradients.take(0, 0)
    assert parts.gradients.num_bytes(0) == 0


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_every_worker_gets_the_sum_of_all_bit_for_bit(num_workers: int) -> None:
    in_flight = list(range(num_workers, 0, -1))
    options = _core.ScheduleOptions("flush", in_flight, 2, exchanges_norms=True)
    # The values are thirds, so that another order of additions would give other bits.
    given = [
        [GradientFigures((rank + step) / 3, rank == step) for rank in range(num_workers)] for step in range(3)
    ]
    exchanges = [
        NormExchange(
            functools.partial(lambda rank, minibatch: given[minibatch][rank], rank), is_first=rank == 0
        )
        for rank in range(num_workers)
    ]
    totals: list[list[GradientFigures]] = [[] for _ in range(num_workers)]

    def compute(instruction: _core.Instruction) -> None:
        if instruction.opcode == "UPDATE":
            totals[instruction.stage].append(exchanges[instruction.stage].total(instruction.minibatch))

    replay(options, 3, [EdgeTransfers(options, {}, exchange) for exchange in exchanges], compute)
    for step, figures in enumerate(given):
        expected = sum(figure.squared_norm for figure in figures)
        assert {of_rank[step] for of_rank in totals} == {totals[0][step]}
        assert totals[0][step].squared_norm == pytest.approx(expected)
        assert totals[0][step].overflowed == (step < num_workers)


def test_an_infinite_norm_crosses_as_it_is() -> None:
    exchange = NormExchange(lambda minibatch: GradientFigures(1.0), is_first=False)
    downstream, upstream = _core.Edge("norm", 0, 1), _core.Edge("norm", 1, 0)
    assert exchange.send(upstream, 0).tolist() == [1.0, 0.0, 0.0]
    exchange.receive(downstream, 0, torch.tensor([math.inf, 1.0, 0.0], dtype=torch.float64))
    assert exchange.total(0) == GradientFigures(math.inf, True)
