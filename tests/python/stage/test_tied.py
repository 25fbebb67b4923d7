"""tied.py: every use of a tied parameter reads one version, and one update has the gradients of all uses.

Stages run their real programs on threads, with queues in the place of the core's channels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipedream import Plan, _core
from pipedream.model.splitter import StageModule, Tie, find_ties, split
from pipedream.stage.tied import TiedParameters, TieLinks
from pipedream.stage.weights import WeightVersions
from thread_core import DEADLINE_S, ThreadCore
from torch import nn

_NUM_MINIBATCHES = 9
_SCHEDULES = ("pipedream", "vertical_sync", "naive", "2bw", "flush", "gpipe", "model_parallel")


class _Use(nn.Module):
    """A layer that has the tied parameter, and one of its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.weight = weight


def _stages(num_stages: int) -> tuple[list[StageModule], list[Tie]]:
    weight = nn.Parameter(torch.full((3,), 100.0, dtype=torch.float64))
    stages = split(
        nn.Sequential(*(_Use(weight) for _ in range(num_stages))), Plan.straight(num_stages, num_stages)
    )
    return stages, find_ties(stages)


def _gradient(minibatch: int, stage: int) -> float:
    return (minibatch + 1) * 10.0**stage


def _contents(num_stages: int) -> list[float]:
    """Of versions 0, 1, ...: a step of plain descent at rate 1 each."""
    contents = [100.0]
    for minibatch in range(_NUM_MINIBATCHES):
        contents.append(contents[-1] - sum(_gradient(minibatch, stage) for stage in range(num_stages)))
    return contents


class _Stage:
    """One stage's work items. Activations and gradients are tokens that keep the workers' order."""

    def __init__(
        self,
        core: ThreadCore,
        links: TieLinks,
        options: _core.ScheduleOptions,
        stage: StageModule,
        ties: list[Tie],
    ) -> None:
        self._core = core
        self._options = options
        self._stage = stage.stage_index
        self._contents = _contents(options.num_stages)
        parameter = ties[0].parameter
        named = [(name, p) for name, p in stage.trainable_parameters() if p is parameter]
        num_slots = _core.num_tied_versions_kept(options)
        num_bytes = _core.weight_layout([(named[0][0], "float64", parameter.numel())])[0]
        slots = [torch.full((num_bytes,), 0xFF, dtype=torch.uint8) for _ in range(num_slots)]
        self._versions = WeightVersions(stage, named, slots)
        self.tied = TiedParameters(links, options, self._stage, ties, self._versions)

    @property
    def final(self) -> list[float]:
        content: list[float] = self._versions.leaves(self.tied.newest_slot)[0].tolist()
        return content

    def do(self, instruction: Any) -> None:
        work: dict[str, Callable[[Any], None]] = {
            "FORWARD": self._forward,
            "BACKWARD": self._backward,
            "UPDATE": self._update,
        }
        work[instruction.opcode](instruction)

    def _check_version(self, minibatch: int) -> nn.Parameter:
        leaf = self._versions.leaves(self.tied.slot_read_by(minibatch))[0]
        wanted = self._contents[_core.tied_version(self._options, minibatch)]
        assert leaf.tolist() == [wanted] * 3, f"stage {self._stage}, minibatch {minibatch}"
        return leaf

    def _forward(self, instruction: Any) -> None:
        if self._stage > 0:
            self._core.channel(f"activations {self._stage}").get(timeout=DEADLINE_S)
        if instruction.microbatch == 0:
            self.tied.pull_for(instruction.minibatch)
        self._check_version(instruction.minibatch)
        self._core.channel(f"activations {self._stage + 1}").put([])

    def _backward(self, instruction: Any) -> None:
        if self._stage + 1 < self._options.num_stages:
            self._core.channel(f"gradients {self._stage}").get(timeout=DEADLINE_S)
        leaf = self._check_version(instruction.minibatch)
        share = _gradient(instruction.minibatch, self._stage) / self._options.num_microbatches
        leaf.grad = torch.full_like(leaf, share) + (0 if leaf.grad is None else leaf.grad)
        if instruction.microbatch + 1 == self._options.num_microbatches:
            self.tied.push(instruction.minibatch)
        self._core.channel(f"gradients {self._stage - 1}").put([])

    def _update(self, instruction: Any) -> None:
        gradients = self.tied.collect(instruction.minibatch)
        read, write = self.tied.begin_update()
        with torch.no_grad():
            for index, gradient in zip(self.tied.owned, gradients, strict=True):
                assert gradient is not None
                updated = self._versions.leaves(read)[index] - gradient
                self._versions.leaves(write)[index].copy_(updated)
        self.tied.publish()


class _WorkerThread(threading.Thread):
    """Runs a worker's program with its stages."""

    def __init__(
        self,
        core: ThreadCore,
        options: _core.ScheduleOptions,
        worker: int,
        stages: list[StageModule],
        ties: list[Tie],
    ) -> None:
        super().__init__(daemon=True)
        self._options = options
        self._worker = worker
        links = TieLinks(core, options)  # type: ignore[arg-type]
        indices = options.placement.stages_at(worker)
        self.stages = {index: _Stage(core, links, options, stages[index], ties) for index in indices}
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for instruction in _core.make_program(self._options, self._worker, _NUM_MINIBATCHES):
                if instruction.edge is None:  # the stages call what exchanges their items themselves
                    self.stages[instruction.stage].do(instruction)
            for stage in self.stages.values():
                stage.tied.pull_last(_NUM_MINIBATCHES)
        except BaseException as error:
            self.error = error


def _assert_all_uses_agree(options: _core.ScheduleOptions) -> ThreadCore:
    core = ThreadCore()
    stages, ties = _stages(options.num_stages)
    threads = [_WorkerThread(core, options, worker, stages, ties) for worker in range(options.num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
        assert thread.error is None, thread.error
    for thread in threads:
        for index, stage in thread.stages.items():
            assert stage.tied.owned == ([0] if index == 0 else [])
            assert stage.final == [_contents(options.num_stages)[-1]] * 3
    left = [name for name, channel in core.channels.items() if "tied" in name and not channel.empty()]
    assert not left
    return core


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_all_uses_read_one_version_and_one_update_has_all_their_gradients(
    schedule: str, num_stages: int, microbatches: int
) -> None:
    microbatches = max(microbatches, num_stages) if schedule == "2bw" else microbatches
    in_flight = list(range(num_stages, 0, -1))
    _assert_all_uses_agree(_core.ScheduleOptions(schedule, in_flight, microbatches))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_two_stages_of_one_worker_hand_over_without_a_channel(microbatches: int) -> None:
    options = _core.ScheduleOptions(
        "interleaved", [4, 3, 2, 1], microbatches, _core.Placement.at_ranks([0, 1, 0, 1])
    )
    core = _assert_all_uses_agree(options)
    assert {name for name in core.channels if name.startswith("tied")} == {
        f"tied {what}"
        for user in (1, 3)
        for what in (f"weights of stage 0 to stage {user}", f"gradients of stage {user} to stage 0")
    }


def _two_ties() -> tuple[list[StageModule], list[Tie]]:
    """First: stages 0 and 2. Second: stages 1 and 2, of another shape."""
    first = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    second = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second = second
            self.first = first

    stages = split(nn.Sequential(_Use(first), _Use(second), Both()), Plan.straight(3, 3))
    return stages, find_ties(stages)


def _end(core: ThreadCore, stage: StageModule, ties: list[Tie]) -> tuple[TiedParameters, WeightVersions]:
    mine = [tie for tie in ties if stage.stage_index in tie.stages]
    names = {id(p): name for name, p in stage.trainable_parameters()}
    named = [(names[id(tie.parameter)], tie.parameter) for tie in mine]
    num_bytes = _core.weight_layout([(name, "float64", p.numel()) for name, p in named])[0]
    versions = WeightVersions(stage, named, [torch.zeros(num_bytes, dtype=torch.uint8)])
    options = _core.ScheduleOptions("flush", [3, 2, 1], 1)
    links = TieLinks(core, options)  # type: ignore[arg-type]
    return TiedParameters(links, options, stage.stage_index, mine, versions), versions


def test_a_stage_that_shares_with_two_owners_sends_each_its_own() -> None:
    core = ThreadCore()
    stages, ties = _two_ties()
    (first, _), (second, _), (user, versions) = (_end(core, stage, ties) for stage in stages)
    assert (first.owned, second.owned, user.owned) == ([0], [0], [])
    of_first, of_second = versions.leaves(0)
    of_first.grad, of_second.grad = torch.full_like(of_first, 7.0), torch.full_like(of_second, 9.0)
    user.push(0)
    assert [leaf.grad for leaf in versions.leaves(0)] == [None, None]  # given up
    assert [g.tolist() for g in first.collect(0) if g is not None] == [[7.0] * 2]
    assert [g.tolist() for g in second.collect(0) if g is not None] == [[9.0] * 4]


def test_gradients_that_are_missing_or_sparse_are_summed_too() -> None:
    core = ThreadCore()
    stages, ties = _stages(3)
    (owner, versions), (first_user, first_versions), (second_user, _) = (
        _end(core, stage, ties) for stage in stages
    )
    leaf = versions.leaves(0)[0]
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.tensor([5.0], dtype=torch.float64), (3,), check_invariants=True
    )
    leaf.grad = sparse.coalesce()
    first_leaf = first_versions.leaves(0)[0]
    first_leaf.grad = torch.ones_like(first_leaf)
    first_user.push(0)
    second_user.push(0)  # its backward did not reach the parameter
    (total,) = owner.collect(0)
    assert total is not None
    assert total.tolist() == [1.0, 6.0, 1.0]


def test_a_stage_without_ties_does_nothing() -> None:
    stages, _ = _stages(2)
    versions = WeightVersions(stages[0], [], [torch.zeros(0, dtype=torch.uint8)])
    options = _core.ScheduleOptions("pipedream", [2, 1])
    nobody: Any = None  # any call of it would fail
    tied = TiedParameters(nobody, options, 0, [], versions)
    assert not tied
    assert (tied.newest_slot, tied.slot_read_by(5)) == (0, 0)
    tied.pull_for(3)
    tied.push(3)
    assert tied.collect(3) == []
    tied.publish()
    tied.pull_last(7)
