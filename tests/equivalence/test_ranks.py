"""Tests that a run under torchrun returns its result and its weights at the ranks that `gather` names."""

from __future__ import annotations

import functools
import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from pipedream import Plan, RunResult, reference
from pipedream.common import rank_tree
from pipedream.splitting.splitter import split
from pipedream.stage.job import WorkerPlace
from rehearsing import boundaries_of
from torch import nn
from training import (
    State,
    Training,
    assert_close_losses,
    assert_close_state,
    is_rank_0,
    train_by_reference,
    train_in_pipeline,
)

_TRAINING = Training("cnn", 2)


def _train_and_tell_pid(training: Training, **options: Any) -> tuple[int, RunResult, State]:
    return os.getpid(), *train_in_pipeline(training, **options)


def _train_in_a_region(training: Training) -> tuple[RunResult, bool]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cpu", torch.bfloat16):
        result, _ = train_in_pipeline(training)
        return result, torch.is_autocast_enabled("cpu")


def test_a_run_in_a_region_of_autocast_is_one_with_autocast(farm: Farm) -> None:
    """Local workers must not ignore the region. Ranks must not use their first casts of the weights to
    bfloat16 for the whole run.
    """
    training = Training("cnn", 2, torch.float32, num_minibatches=4)
    inside = farm.results(_train_in_a_region, training, num_ranks=2)
    results = farm.results(train_in_pipeline, replace(training, autocast="bfloat16"), num_ranks=2)
    assert inside[0][0].losses == results[0][0].losses
    assert all(is_on for _, is_on in inside)
    local, _ = _train_in_a_region(training)
    assert_close_losses(local.losses, results[0][0].losses, 1e-6)


@pytest.mark.parametrize("transport", ["tcp", "zmq"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_losses_crossed_between_processes_over_zmq(farm: Farm, num_stages: int, transport: str) -> None:
    training = Training("transformer", num_stages, num_minibatches=6, short_last=False)
    outcomes = farm.results(_train_and_tell_pid, training, transport=transport, num_ranks=num_stages)
    pids = [pid for pid, _, _ in outcomes]
    _, result, _ = outcomes[0]
    assert result.worker_pids == pids
    assert len({*pids, os.getpid()}) == num_stages + 1
    links = [(s, s + 1) for s in range(num_stages - 1)]
    wanted = {f"{a}->{b}" for a, b in links} | {f"{b}->{a}" for a, b in links}
    assert set(result.transports) == wanted
    assert all("tcp" in name for name in result.transports.values())
    (inputs, _), *_ = training.data()
    boundaries = boundaries_of(split(training.model(), training.plan), inputs)
    # Each tensor crosses once as an activation, and its gradient crosses back.
    payload_bytes = 6 * 2 * sum(boundary.num_bytes for boundary in boundaries)
    assert payload_bytes < result.bytes_sent < 2 * payload_bytes
    assert_close_losses(result.losses, train_by_reference(training)[0].losses, 1e-9)


def test_one_stage_sends_nothing(farm: Farm) -> None:
    result, _ = farm.results(train_in_pipeline, Training("mlp", 1), num_ranks=1)[0]
    assert result.bytes_sent == 0
    assert result.transports == {}


def test_every_rank_has_the_same_result_but_for_the_times_that_rank_0_keeps(farm: Farm) -> None:
    outcomes = farm.results(train_in_pipeline, Training("mlp", 3), num_ranks=3)
    results = [result for result, _ in outcomes]
    for result in results[1:]:
        assert result.spans == result.transfers == []
        assert replace(result, spans=results[0].spans, transfers=results[0].transfers) == results[0]
    assert len(results[0].memory) == len(results[0].overhead_us) == len(results[0].spans) == 3
    assert results[0].samples_per_s > 0
    assert results[0].measured_ms > 0
    assert 0 <= results[0].bubble_share <= 1


class _PullsToTheStart(torch.optim.SGD):
    """Decays towards the values that the parameters had when the optimizer was made, as in fine-tuning."""

    num_made = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05)
        _PullsToTheStart.num_made += 1
        self._start = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter, start in zip(parameters, self._start, strict=True):
            parameter.lerp_(start, 0.3)
        return loss


def _train_and_count_optimizers(training: Training) -> tuple[RunResult, State, int]:
    _PullsToTheStart.num_made = 0
    result, state = train_in_pipeline(training)
    return result, state, _PullsToTheStart.num_made


@pytest.mark.parametrize("case_name", ["cnn", "tied_apart"])
def test_an_optimizer_is_made_once_and_finds_rank_0s_initial_weights(farm: Farm, case_name: str) -> None:
    # The other ranks start with weights of their own, which are zeros here.
    training = Training(case_name, 3, optimizer=_PullsToTheStart)
    outcomes = farm.results(_train_and_count_optimizers, training, num_ranks=3)
    result, state, _ = outcomes[0]
    expected, expected_state = train_by_reference(training)
    assert_close_losses(result.losses, expected.losses, 1e-9)
    assert_close_state(state, expected_state, 1e-9)
    assert [num_made for _, _, num_made in outcomes] == [1, 1, 1]


def _own_names(training: Training, stage_index: int) -> set[str]:
    stage = split(training.model(), training.plan)[stage_index]
    named = [*stage.trainable_parameters(), *stage.frozen_parameters(), *stage.stage_buffers()]
    return {name for name, _ in named}


def _train_in_a_line(training: Training, gather: str) -> tuple[RunResult, State]:
    """Trains with ranks in a line: each passes on the weights and results of all ranks behind it."""
    kept, rank_tree.NUM_CHILDREN_MAX = rank_tree.NUM_CHILDREN_MAX, 1
    try:
        assert list(rank_tree.children_of(0, 4)) == [1]
        return train_in_pipeline(training, gather=gather)
    finally:
        rank_tree.NUM_CHILDREN_MAX = kept


@pytest.mark.parametrize("gather", ["rank0", "all", "none"])
def test_weights_and_results_are_handed_on_by_ranks_in_between(farm: Farm, gather: str) -> None:
    training = Training("cnn", 3)
    outcomes = farm.results(_train_in_a_line, training, gather, num_ranks=4)  # the last rank has no stage
    expected, expected_state = train_by_reference(training)
    for rank, (result, state) in enumerate(outcomes):
        assert_close_losses(result.losses, expected.losses, 1e-9)
        mine = _own_names(training, rank) if rank < 3 else set()
        if gather == "all" or (gather == "rank0" and rank == 0):
            mine = set(expected_state)
        assert_close_state(
            {name: state[name] for name in mine}, {name: expected_state[name] for name in mine}, 1e-9
        )
        left = {
            name
            for name in expected_state.keys() - mine
            if not torch.equal(state[name], expected_state[name])
        }
        if gather != "all" and rank > 0:
            # This rank only passes trained weights on. So its model keeps the initial weights of other
            # stages.
            assert left
    assert [replace(r, spans=[], transfers=[]) for r, _ in outcomes[1:]] == [
        replace(outcomes[0][0], spans=[], transfers=[])
    ] * 3


def test_gather_all_gives_every_rank_the_whole_model(farm: Farm) -> None:
    outcomes = farm.results(train_in_pipeline, _TRAINING, gather="all", num_ranks=2)
    _, expected = train_by_reference(_TRAINING)
    for _, state in outcomes:
        assert_close_state(state, expected, 1e-9)


def test_gather_none_leaves_every_rank_with_its_own_stage_alone(farm: Farm) -> None:
    outcomes = farm.results(train_in_pipeline, _TRAINING, gather="none", num_ranks=2)
    _, expected = train_by_reference(_TRAINING)
    initial = _TRAINING.model().state_dict()
    for rank, (_, state) in enumerate(outcomes):
        own = _own_names(_TRAINING, rank)
        assert own and own != expected.keys()
        assert_close_state({n: state[n] for n in own}, {n: expected[n] for n in own}, 1e-9)
        for name in expected.keys() - own:
            untrained = initial[name] if rank == 0 else torch.zeros_like(initial[name])
            assert torch.equal(state[name], untrained), f"rank {rank}: {name}"


def test_gather_rank0_leaves_the_others_without_the_stages_of_others(farm: Farm) -> None:
    outcomes = farm.results(train_in_pipeline, _TRAINING, num_ranks=2)
    for name in _own_names(_TRAINING, 0):
        assert not outcomes[1][1][name].any(), name


@pytest.mark.parametrize("gather", ["rank0", "all", "none"])
def test_ranks_that_the_plan_does_not_use_wait_for_the_result(farm: Farm, gather: str) -> None:
    outcomes = farm.results(_train_and_tell_pid, _TRAINING, gather=gather, num_ranks=4)
    pids = [pid for pid, _, _ in outcomes]
    expected, expected_state = train_by_reference(_TRAINING)
    for _, result, _ in outcomes:
        assert_close_losses(result.losses, expected.losses, 1e-9)
        assert result.worker_pids == pids[:2]
    if gather == "all":
        assert_close_state(outcomes[3][2], expected_state, 1e-9)


def _train_twice(training: Training) -> tuple[list[float], list[float], State]:
    model = training.model()
    first = pipedream.run(model, training.plan, progress=False, gather="all", **training.options())
    second = pipedream.run(model, training.plan, progress=False, **training.options())
    return first.losses, second.losses, model.state_dict()


def test_a_script_may_run_several_times(farm: Farm) -> None:
    training = Training("cnn", 3)
    first, second, state = farm.results(_train_twice, training, num_ranks=3)[0]
    model = training.model()
    assert_close_losses(first, reference.run(model, training.plan, **training.options()).losses, 1e-9)
    assert_close_losses(second, reference.run(model, training.plan, **training.options()).losses, 1e-9)
    assert_close_state(state, model.state_dict(), 1e-9)


def test_runs_are_counted_per_script_not_per_process(farm: Farm) -> None:
    # Rank 1 takes no part in this run. It still meets rank 0 in the next script.
    farm.results(train_in_pipeline, Training("mlp", 1), num_ranks=1)
    for _ in range(2):
        farm.results(train_in_pipeline, _TRAINING, num_ranks=2, torchrun_id="one-script-in-two-parts")


def _train_other_plan(training: Training) -> tuple[RunResult, State]:
    """Trains with another plan at rank 0 than at other ranks, as if each rank had profiled for itself."""
    model = training.model()
    plan = training.plan if is_rank_0() else Training(training.case_name, 3).plan
    result = pipedream.run(model, plan, progress=False, **training.options())
    return result, model.state_dict()


def test_rank_0s_plan_is_everybodys(farm: Farm) -> None:
    result, state = farm.results(_train_other_plan, _TRAINING, num_ranks=2)[0]
    expected, expected_state = train_by_reference(_TRAINING)
    assert_close_losses(result.losses, expected.losses, 1e-9)
    assert_close_state(state, expected_state, 1e-9)


def _train_and_trace(training: Training, path: str) -> None:
    train_in_pipeline(training, trace=path)


def test_a_trace_shows_every_work_item_of_every_worker(farm: Farm, tmp_path: Any) -> None:
    path = tmp_path / "trace.json"
    farm.results(_train_and_trace, _TRAINING, str(path), num_ranks=2)
    events = json.loads(path.read_text(encoding="utf-8"))
    events = events["traceEvents"] if isinstance(events, dict) else events
    names = [event["name"] for event in events if event.get("ph") == "X"]
    for minibatch in range(7):
        assert names.count(f"F{minibatch}") == names.count(f"B{minibatch}") == 2


class _CountsItsMoves(nn.Linear):
    num_moves = 0

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.num_moves += 1
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def _train_and_count_moves(folder: Path | None) -> int:
    layer = _CountsItsMoves(2, 2)
    with pytest.MonkeyPatch.context() as patch:
        place = functools.partial(WorkerPlace, folder=folder)
        patch.setattr("pipedream.launch.torchrun.WorkerPlace", place)
        pipedream.run(
            nn.Sequential(layer),
            Plan.straight(1, 1),
            data=[(torch.zeros(2, 2), torch.zeros(2, 2))],
            loss_fn=nn.MSELoss(),
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            progress=False,
        )
    return layer.num_moves


@pytest.mark.parametrize(("is_users", "num_moves"), [(True, 2), (False, 1)])
def test_a_model_moves_back_only_where_its_user_has_it(
    farm: Farm, is_users: bool, num_moves: int, tmp_path: Path
) -> None:
    # A local worker has only a copy of the model, and writes its weights to a folder for the caller. So the
    # copy is not moved back.
    folder = None if is_users else tmp_path
    assert farm.results(_train_and_count_moves, folder, num_ranks=1) == [num_moves]
    assert (
        [path.name for path in tmp_path.iterdir()] == [] if is_users else ["model-00001-of-00001.safetensors"]
    )


def _train_as_planned(training: Training, plan: Plan, **options: Any) -> tuple[RunResult, State]:
    """Trains. Only rank 0 has the plan, as if only rank 0 had profiled."""
    model = training.model()
    plan = plan if is_rank_0() else Plan.straight(plan.num_layers, 1)
    result = pipedream.run(model, plan, **training.options() | {"progress": False} | options)
    return result, model.state_dict()


def test_ranks_take_schedule_and_microbatches_of_rank_0s_plan(farm: Farm) -> None:
    training = Training("cnn", 2, schedule="flush", microbatches=2, num_minibatches=4, short_last=False)
    plan = replace(training.plan, schedule="flush", microbatches=2)
    how = {"schedule": "auto", "microbatches": 1}
    result, state = farm.results(_train_as_planned, training, plan, **how, num_ranks=2)[0]
    expected, expected_state = train_by_reference(training)
    assert_close_losses(result.losses, expected.losses, 1e-9)
    assert_close_state(state, expected_state, 1e-9)
    refused = farm.run(_train_as_planned, training, training.plan, **how, num_ranks=2)
    assert all("the plan has no schedule" in str(outcome.error) for outcome in refused)


def _train_with_warnings(training: Training) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_in_pipeline(training)
    return [str(warning.message) for warning in caught if "late" in str(warning.message)]


def test_rank_0_tells_of_late_gradients_once(farm: Farm) -> None:
    training = Training("mlp", 3, num_minibatches=2, short_last=False)
    told = farm.results(_train_with_warnings, training, num_ranks=3)
    assert [len(of_rank) for of_rank in told] == [1, 0, 0]
    assert told[0][0].startswith("gradients are 2 updates late in the mean (schedule 'pipedream'")
