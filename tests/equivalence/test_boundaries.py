"""Tests that every stage and replica does its evaluations and snapshots between the same two updates."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
from farm import Farm
from pipedream.stage.boundaries import EVALUATE, SNAPSHOT, Planned
from pipedream.stage.stage_loop import WorkerLoop
from pipedream.stage.stage_runner import StageRunner
from training import Training, train_in_pipeline

_Event = tuple[str, int, int, int, int, int]


class _Recorder:
    """Records each call of begin() and reach(), with the stage's newest forward and its number of updates so
    far."""

    def __init__(self) -> None:
        self.events: list[_Event] = []
        self._forwards: dict[int, set[int]] = {}
        self._updates: dict[int, int] = {}

    def count_forward(self, stage: int, minibatch: int) -> None:
        self._forwards.setdefault(stage, set()).add(minibatch)

    def count_update(self, stage: int) -> None:
        self._updates[stage] = self._updates.get(stage, 0) + 1

    def begin(self, stage: int, minibatch: int, events: int) -> None:
        self._note("begin", stage, minibatch, events)

    def reach(self, stage: int, minibatch: int, events: int) -> None:
        self._note("reach", stage, minibatch, events)

    def _note(self, what: str, stage: int, minibatch: int, events: int) -> None:
        newest = max(self._forwards[stage], default=-1)
        self.events.append((what, stage, minibatch, events, newest, self._updates.get(stage, 0)))


def _train_recorded(training: Training, **options: Any) -> tuple[int, list[_Event]]:
    recorder = _Recorder()
    forward, update = StageRunner.forward, StageRunner.update

    def counted_forward(runner: StageRunner, work: Any) -> Any:
        made = forward(runner, work)
        if made is not None:
            recorder.count_forward(runner.stage_index, work.minibatch)
        return made

    def counted_update(runner: StageRunner, *arguments: Any) -> None:
        update(runner, *arguments)
        recorder.count_update(runner.stage_index)

    planned = [Planned(EVALUATE, "epoch"), Planned(SNAPSHOT, 4)]
    with (
        mock.patch.object(StageRunner, "forward", counted_forward),
        mock.patch.object(StageRunner, "update", counted_update),
        mock.patch.object(WorkerLoop, "_planned_events", lambda loop: planned),
        mock.patch.object(WorkerLoop, "_boundary_listeners", lambda loop: [recorder]),
    ):
        result, _ = train_in_pipeline(training, **options)
    return len(result.losses), recorder.events


def _expected(num_minibatches: int, epochs: int, group: int) -> dict[int, int]:
    """Returns the events that are due at each boundary, as bits. A boundary is named by the number of
    minibatches before it: a multiple of `group`, or the end."""
    due: dict[int, int] = {}
    total = epochs * num_minibatches
    for event, places in (
        (EVALUATE, range(num_minibatches, total + 1, num_minibatches)),
        (SNAPSHOT, range(4, total + 1, 4)),
    ):
        for place in places:
            boundary = -(-place // group) * group
            if boundary + group > total:  # no whole group follows
                boundary = total
            due[boundary] = due.get(boundary, 0) | event
    return due


@pytest.mark.parametrize(
    ("replicas", "how", "group"),
    [
        ((1, 1, 1), {}, 1),
        ((1, 1, 1), {"schedule": "flush", "microbatches": 2}, 1),
        ((2, 1), {}, 2),
        ((1, 2, 1), {"microbatches": 2}, 1),
        ((2, 3), {"schedule": "flush"}, 6),
        ((1, 2), {"sync": "allreduce"}, 2),
        ((2, 1), {"schedule": "2bw", "microbatches": 2}, 1),
    ],
    ids=["straight", "flush", "2-1", "1-2-1", "2-3", "allreduce", "2bw"],
)
def test_events_come_to_all_stages_between_the_updates_of_their_boundary(
    farm: Farm, replicas: tuple[int, ...], how: dict[str, Any], group: int
) -> None:
    training = Training(
        "mlp", len(replicas), replicas=replicas, epochs=3, num_minibatches=7, short_last=False, **how
    )
    total = 21
    expected = _expected(7, 3, group)
    for rank, (num_losses, events) in enumerate(
        farm.results(_train_recorded, training, num_ranks=training.num_workers)
    ):
        assert num_losses == total
        (stage,) = training.plan.stages_of(rank)
        for what in ("begin", "reach"):
            calls = [event[2:4] for event in events if event[0] == what]
            assert calls == sorted(expected.items()), (rank, what)
        m, has_common_rounds = training.microbatches, training.schedule == "flush"
        round_size = group if has_common_rounds else math.lcm(m, replicas[stage]) // m
        for what, at_stage, boundary, _, newest, num_updates in events:
            assert at_stage == stage
            if what == "begin":
                assert boundary == total or newest < boundary
            else:
                assert num_updates == math.ceil(boundary / round_size), (rank, boundary)
