"""Tests tied.py: all uses of a tied parameter read one version, and one update has the gradients of all uses.

Stages run their real programs, with queues in place of the core's channels.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from edge_replay import replay
from pipedream import Plan, _core
from pipedream.model.stage_module import StageModule, Tie, find_ties, tie_pairs
from pipedream.splitting.splitter import split
from pipedream.stage.edge_transfers import EdgeTransfers
from pipedream.update.reduced import LocalSteps
from pipedream.update.stage_optimizer import StageOptimizer
from pipedream.update.tied import TiedParameters, ties_by_owner
from pipedream.update.weights import StageWeights, WeightVersions, split_tied
from stage_weights import slots_for
from torch import nn

_NUM_MINIBATCHES = 9
_SCHEDULES = ("pipedream", "vertical_sync", "naive", "2bw", "flush", "gpipe", "model_parallel")


class _Use(nn.Module):
    """Has the tied parameter and a parameter of its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.weight = weight


def _stages(num_stages: int, first_user: int = 0) -> tuple[list[StageModule], list[Tie]]:
    weight = nn.Parameter(torch.full((3,), 100.0, dtype=torch.float64))
    layers = [_Use(weight) if stage >= first_user else nn.Linear(2, 2) for stage in range(num_stages)]
    stages = split(nn.Sequential(*layers), Plan.straight(num_stages, num_stages))
    return stages, find_ties(stages)


def _gradient(minibatch: int, stage: int) -> float:
    return (minibatch + 1) * 10.0**stage


def _contents(first_user: int, num_stages: int, first_minibatch: int) -> list[float]:
    """Returns the tied parameter's value at the first version and after each update by gradient descent with
    rate 1.
    """
    contents = [100.0]
    for minibatch in range(first_minibatch, _NUM_MINIBATCHES):
        contents.append(
            contents[-1] - sum(_gradient(minibatch, stage) for stage in range(first_user, num_stages))
        )
    return contents


class _Stage:
    """Does one stage's reads and gradients of the tied parameter."""

    def __init__(
        self, options: _core.ScheduleOptions, stage: StageModule, ties: list[Tie], first_user: int
    ) -> None:
        self._options = options
        self._stage = stage.stage_index
        self.contents = _contents(first_user, options.num_stages, options.first_minibatch)
        parameter = ties[0].parameter
        named = [(name, p) for name, p in stage.trainable_parameters() if p is parameter]
        num_slots = _core.num_tied_versions_kept(options, first_user)
        num_bytes = _core.weight_layout([(named[0][0], "float64", parameter.numel())])[0]
        slots = [torch.full((num_bytes,), 0xFF, dtype=torch.uint8) for _ in range(num_slots)]
        self._versions = WeightVersions(stage, named, slots)
        self._owner = first_user
        self.tied = TiedParameters(options, self._stage, ties, {first_user: self._versions})

    @property
    def final(self) -> list[float]:
        content: list[float] = self._versions.leaves(self.tied.newest_slots[self._owner])[0].tolist()
        return content

    def do(self, instruction: _core.Instruction) -> None:
        minibatch = instruction.minibatch
        if instruction.opcode == "UPDATE":
            self._update(minibatch)
            return
        leaf = self._check_version(minibatch)
        if instruction.opcode == "BACKWARD":
            share = _gradient(minibatch, self._stage) / self._options.num_microbatches
            leaf.grad = torch.full_like(leaf, share) + (0 if leaf.grad is None else leaf.grad)

    def _check_version(self, minibatch: int) -> nn.Parameter:
        leaf = self._versions.leaves(self.tied.slots_read_by(minibatch)[self._owner])[0]
        version = _core.tied_version(self._options, self._owner, minibatch)
        wanted = self.contents[version - self._options.first_minibatch]
        assert leaf.tolist() == [wanted] * 3, f"stage {self._stage}, minibatch {minibatch}"
        return leaf

    def _update(self, minibatch: int) -> None:
        gradients = self.tied.collect()
        read, write = self.tied.begin_update()
        with torch.no_grad():
            for index, gradient in enumerate(gradients):
                assert gradient is not None
                updated = self.tied.owned_leaves(read)[index] - gradient
                self.tied.owned_leaves(write)[index].copy_(updated)
        self.tied.finish_update()


def _assert_all_uses_agree(
    schedule: str,
    in_flight: list[int],
    microbatches: int,
    placement: _core.Placement | None = None,
    *,
    first_user: int = 0,
    first_minibatch: int = 0,
) -> set[str]:
    """Runs the programs, and asserts that all uses read the same versions. `first_user` is the stage that
    owns the parameter, and all later stages use it. The programs begin with `first_minibatch`.
    """
    modules, ties = _stages(len(in_flight), first_user)
    options = _core.ScheduleOptions(
        schedule, in_flight, microbatches, placement, ties=tie_pairs(ties), first_minibatch=first_minibatch
    )
    stages = {
        module.stage_index: _Stage(options, module, ties, first_user) for module in modules[first_user:]
    }
    transfers = [
        EdgeTransfers(
            options, {i: stages[i].tied for i in options.placement.stages_at(rank) if i in stages}, None
        )
        for rank in range(options.num_workers)
    ]

    def compute(instruction: _core.Instruction) -> None:
        if instruction.stage in stages:
            stages[instruction.stage].do(instruction)

    travelled = replay(options, _NUM_MINIBATCHES, transfers, compute)
    for index, stage in stages.items():
        assert len(stage.tied.owned_leaves(0)) == (1 if index == first_user else 0)
        assert stage.final == [stage.contents[-1]] * 3
    return travelled


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_all_uses_read_one_version_and_one_update_has_all_their_gradients(
    schedule: str, num_stages: int, microbatches: int
) -> None:
    microbatches = max(microbatches, num_stages) if schedule == "2bw" else microbatches
    in_flight = list(range(num_stages, 0, -1))
    _assert_all_uses_agree(schedule, in_flight, microbatches)


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_a_parameter_first_used_downstream_reads_as_many_versions_back_as_the_input_stage(
    schedule: str,
) -> None:
    _assert_all_uses_agree(schedule, [4, 3, 2, 1], 4, first_user=1)


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_programs_that_begin_later_begin_with_the_version_that_is_there(schedule: str) -> None:
    _assert_all_uses_agree(schedule, [3, 2, 1], 3, first_minibatch=4)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_two_stages_of_one_worker_hand_over_without_a_channel(microbatches: int) -> None:
    placement = _core.Placement.at_ranks([0, 1, 0, 1])
    assert _assert_all_uses_agree("interleaved", [4, 3, 2, 1], microbatches, placement) == {
        text
        for user in (1, 3)
        for text in (f"tied_version stage 0 to stage {user}", f"tied_gradient stage {user} to stage 0")
    }


def _two_ties() -> tuple[list[StageModule], list[Tie]]:
    """Returns stages with two tied parameters. Stages 0 and 2 share the first one. Stages 1 and 2 share the
    second one, which has another shape.
    """
    first = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    second = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second = second
            self.first = first

    stages = split(nn.Sequential(_Use(first), _Use(second), Both()), Plan.straight(3, 3))
    return stages, find_ties(stages)


def _end(
    stage: StageModule, ties: list[Tie], num_slots: int = 1
) -> tuple[TiedParameters, dict[int, WeightVersions]]:
    versions = {}
    for owner, of_owner in ties_by_owner(stage.stage_index, ties).items():
        named = split_tied(stage, [tie.parameter for tie in of_owner])[1]
        num_bytes = _core.weight_layout([(name, "float64", p.numel()) for name, p in named])[0]
        slots = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(num_slots)]
        versions[owner] = WeightVersions(stage, named, slots)
    options = _core.ScheduleOptions("flush", [3, 2, 1], 1)
    return TiedParameters(options, stage.stage_index, ties, versions), versions


def test_a_stage_that_shares_with_two_owners_sends_each_its_own() -> None:
    stages, ties = _two_ties()
    (first, _), (second, _), (user, versions) = (_end(stage, ties) for stage in stages)
    assert [len(end.owned_leaves(0)) for end in (first, second, user)] == [1, 1, 0]
    (of_first,), (of_second,) = versions[0].leaves(0), versions[1].leaves(0)
    of_first.grad, of_second.grad = torch.full_like(of_first, 7.0), torch.full_like(of_second, 9.0)
    first.take_gradients_from(2, user.gradients_for(0))
    # The first one's gradient is released, and the second one's is still there.
    assert (of_first.grad, of_second.grad is None) == (None, False)
    second.take_gradients_from(2, user.gradients_for(1))
    assert of_second.grad is None
    assert [g.tolist() for g in first.collect() if g is not None] == [[7.0] * 2]
    assert [g.tolist() for g in second.collect() if g is not None] == [[9.0] * 4]


def test_what_comes_of_each_owner_is_counted_by_itself() -> None:
    stages, ties = _two_ties()
    user, versions = _end(stages[2], ties, num_slots=2)
    user.take_version_from(1, 0, [torch.full((4,), 5.0, dtype=torch.float64)])
    assert user.newest_slots == {0: 0, 1: 1}
    user.take_version_from(0, 0, [torch.full((2,), 3.0, dtype=torch.float64)])
    assert user.newest_slots == {0: 1, 1: 1}
    assert [versions[owner].leaves(1)[0].tolist() for owner in (0, 1)] == [[3.0] * 2, [5.0] * 4]


def test_gradients_of_several_minibatches_of_a_round_are_summed() -> None:
    stages, ties = _stages(2)
    (owner, versions), (user, of_user) = (_end(stage, ties) for stage in stages)
    for value in (1.0, 2.0, 4.0):
        for leaf in (versions[0].leaves(0)[0], of_user[0].leaves(0)[0]):
            leaf.grad = torch.full_like(leaf, value) + (0 if leaf.grad is None else leaf.grad)
        owner.take_gradients_from(1, user.gradients_for(0))
    assert [g.tolist() for g in owner.collect() if g is not None] == [[14.0] * 3]
    assert owner.collect() == [None], "there was no minibatch"


def test_gradients_that_are_missing_or_sparse_are_summed_too() -> None:
    stages, ties = _stages(3)
    (owner, versions), (first_user, first_versions), (second_user, _) = (
        _end(stage, ties) for stage in stages
    )
    leaf = versions[0].leaves(0)[0]
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.tensor([5.0], dtype=torch.float64), (3,), check_invariants=True
    )
    leaf.grad = sparse.coalesce()
    first_leaf = first_versions[0].leaves(0)[0]
    first_leaf.grad = torch.ones_like(first_leaf)
    owner.take_gradients_from(1, first_user.gradients_for(0))
    # The second user's backward did not reach the parameter.
    owner.take_gradients_from(2, second_user.gradients_for(0))
    (total,) = owner.collect()
    assert total is not None
    assert total.tolist() == [1.0, 6.0, 1.0]


def test_what_no_use_has_a_gradient_of_has_none() -> None:
    stages, ties = _stages(3)
    (owner, _), (first_user, _), (second_user, of_second) = (_end(stage, ties) for stage in stages)
    for _ in range(2):
        owner.take_gradients_from(1, first_user.gradients_for(0))
        owner.take_gradients_from(2, second_user.gradients_for(0))
    assert owner.collect() == [None], "an optimizer would take zeros for a gradient: momentum, weight decay"
    for gradient in (None, torch.full_like(of_second[0].leaves(0)[0], 3.0)):
        of_second[0].leaves(0)[0].grad = gradient
        owner.take_gradients_from(2, second_user.gradients_for(0))
    assert [g.tolist() for g in owner.collect() if g is not None] == [[3.0] * 3]


def test_a_stage_without_ties_has_nothing_to_do() -> None:
    tied = TiedParameters(_core.ScheduleOptions("pipedream", [2, 1]), 0, [], {})
    assert not tied
    assert (tied.newest_slots, tied.slots_read_by(5)) == ({}, {})
    assert tied.collect() == []


def test_the_last_mean_is_made_after_the_last_version_has_been_sent() -> None:
    """The owner makes the mean of its replicas in its own memory, from which the last version is still being
    sent.
    """
    stages, ties = _stages(2)
    shared = [ties[0].parameter]
    own, tied_named = split_tied(stages[0], shared)
    weights = StageWeights(stages[0], slots_for(own, 1), {0: (shared, slots_for(tied_named, 2))})
    options = _core.ScheduleOptions(in_flight=[2, 1], ties=tie_pairs(ties), first_minibatch=1)
    events: list[str] = []

    def wait_until_sent(user: int, num_left_max: int) -> None:
        events.append(f"stage {user} has all but {num_left_max}")

    group: Any = SimpleNamespace(num_replicas=1, all_reduce=lambda tensors: events.append("reduced"))
    steps = LocalSteps(
        weights,
        StageOptimizer(functools.partial(torch.optim.SGD, lr=1.0), [*own, *tied_named]),
        TiedParameters(options, 0, ties, weights.tied, wait_until_sent=wait_until_sent),
        group=group,
        rounds=_core.rounds_of(options, 0),
        replica=0,
        num_minibatches=lambda: None,
        sync_every=2,
    )
    steps.finish(0, is_over=True)
    assert events == ["stage 1 has all but 0", "reduced", "reduced"]
