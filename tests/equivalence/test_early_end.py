"""Tests that a run that is stopped early returns the same model as a run that has only these minibatches."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from farm import Farm
from models import Batch
from oracle import assert_same_numbers
from pipedream import RunResult
from pipedream.worker import interrupts
from training import State, Training, train_by_reference, train_in_pipeline


class _Interrupted:
    """Minibatches. Each rank of `ranks` gets a Ctrl-C when it reads minibatch number `minibatch`. torchrun
    sends a Ctrl-C to all ranks.
    """

    def __init__(self, training: Training, minibatch: int, ranks: tuple[int, ...]) -> None:
        self._batches = list(training.data())
        self._minibatch = minibatch
        self._ranks = ranks

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        for minibatch, batch in enumerate(self._batches):
            if minibatch == self._minibatch and int(os.environ["RANK"]) in self._ranks:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch


def _train_interrupted(training: Training, minibatch: int, ranks: tuple[int, ...]) -> tuple[RunResult, State]:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return train_in_pipeline(training, data=_Interrupted(training, minibatch, ranks))
    finally:
        signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize(
    ("replicas", "how"),
    [
        ((1, 1, 1), {}),
        ((1, 1, 1), {"schedule": "flush", "microbatches": 2}),
        ((1, 2), {}),
        ((1, 2, 1), {"schedule": "vertical_sync"}),
        ((1,), {}),
        ((2, 1), {}),
        ((2, 2), {"schedule": "flush", "microbatches": 2}),
    ],
    ids=["straight", "flush", "1-2", "1-2-1", "one stage", "2-1", "2-2"],
)
def test_ctrl_c_at_ranks_returns_what_a_shorter_run_gives(
    farm: Farm, replicas: tuple[int, ...], how: dict[str, Any]
) -> None:
    training = Training("cnn", len(replicas), replicas=replicas, num_minibatches=24, short_last=False, **how)
    ranks = tuple(range(training.num_workers))
    outcomes = farm.results(_train_interrupted, training, 6, ranks, num_ranks=training.num_workers)
    result, state = outcomes[0]
    assert result.stopped_at is not None
    assert 6 <= result.stopped_at < (12 if replicas[0] == 1 else 20)
    assert {other.stopped_at for other, _ in outcomes} == {result.stopped_at}
    expected, expected_state = train_by_reference(replace(training, num_minibatches=result.stopped_at))
    assert_same_numbers(result.losses, state, expected.losses, expected_state, 1e-9)
    assert result.versions == expected.versions


def test_ctrl_c_at_rank_0_alone_ends_the_run_where_other_replicas_of_stage_0_do_not_hear_of_it(
    farm: Farm,
) -> None:
    training = Training("mlp", 2, replicas=(2, 1), num_minibatches=40)
    outcomes = farm.run(_train_alone, training, num_ranks=3)
    assert isinstance(outcomes[0].error, KeyboardInterrupt)
    assert all(outcome.error is not None for outcome in outcomes)


def _train_alone(training: Training) -> None:
    interrupts._HEARD_S = 0.0
    try:
        _train_interrupted(training, 6, (0,))
    finally:
        interrupts._HEARD_S = 10.0
