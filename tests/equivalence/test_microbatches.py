"""Tests that a run gives the oracle's numbers with any number of microbatches, with replicas or without.

The unit in flight is the microbatch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pipedream
import pytest
import torch
from covering import parametrize_pairs
from farm import Farm
from oracle import assert_equals_reference, assert_memory_as_predicted
from pipedream import Microbatches, RunResult, reference
from pipedream.data.batch_reader import ValidationReader
from torch import nn
from training import (
    State,
    Training,
    assert_close_losses,
    assert_close_state,
    assert_equal_state,
    state_of,
    train_in_pipeline,
)

_PLANS = {"2-1": (2, 1), "1-2": (1, 2), "3-1": (3, 1), "2-2": (2, 2), "2-3": (2, 3)}


@parametrize_pairs(
    plan=tuple(_PLANS),
    schedule=("pipedream", "unstashed", "vertical_sync", "flush", "gpipe"),
    microbatches=(2, 3, 4, 6),
    case_name=("cnn", "dropout"),
    sync=("bsp", "allreduce", "ssp"),
)
def test_a_replicated_plan_gives_the_references_result(
    farm: Farm, plan: str, schedule: str, microbatches: int, case_name: str, sync: str
) -> None:
    how: dict[str, Any] = {"sync": sync}
    if sync == "ssp":
        schedule, how["staleness"] = "pipedream", 1
    replicas = _PLANS[plan]
    training = Training(
        case_name, len(replicas), replicas=replicas, schedule=schedule, microbatches=microbatches, **how
    )
    assert_equals_reference(farm, training)


class _Given:
    """Minibatches that come as microbatches of different sizes. They are in no list, so run() cannot look at
    all of them before the training.
    """

    def __init__(self, training: Training, *minibatches: Sequence[int]) -> None:
        self._case = training.case
        self._minibatches = minibatches

    def __iter__(self) -> Iterator[Microbatches]:
        generator = torch.Generator().manual_seed(5)
        for sizes in self._minibatches:
            yield Microbatches(self._case.make_batch(generator, torch.float64, size) for size in sizes)


_SIZES = ((3, 2, 3), (1, 3, 2), (2, 3), (3, 1, 4), (2, 2, 2), (3,))
"""The samples of the microbatches of each minibatch. Minibatch 3 has the largest microbatch."""


def _assert_equals_reference_on_given(
    training: Training, result: RunResult, state: State, drained_at: Sequence[int]
) -> None:
    assert result.drained_at == drained_at
    model = training.model()
    options = training.options() | {"data": _Given(training, *_SIZES)}
    expected = reference.run(model, training.plan, **options, drained_at=drained_at)
    assert_close_losses(result.losses, expected.losses, 1e-9)
    assert_close_state(state, state_of(model), 1e-9)
    assert result.versions == expected.versions
    assert_memory_as_predicted(result)


@pytest.mark.parametrize(
    ("replicas", "schedule"),
    [((1, 1), "flush"), ((1, 1, 1), "pipedream"), ((2, 1), "unstashed"), ((1, 3), "gpipe")],
    ids=str,
)
def test_microbatches_that_the_data_have_made_are_taken_uncut(
    farm: Farm, replicas: tuple[int, ...], schedule: str
) -> None:
    training = Training("transformer", len(replicas), replicas=replicas, schedule=schedule, microbatches=3)
    ranks = training.num_workers
    data = _Given(training, *_SIZES)
    result, state = farm.results(train_in_pipeline, training, num_ranks=ranks, data=data)[0]
    group = math.lcm(3, *replicas) // 3
    _assert_equals_reference_on_given(training, result, state, [3 // group * group])


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1)], ids=str)
def test_microbatches_that_the_caller_forwards_are_taken_uncut(replicas: tuple[int, ...]) -> None:
    training = Training("transformer", 2, replicas=replicas, microbatches=3)
    result, state = train_in_pipeline(training, data=iter(_Given(training, *_SIZES)))
    assert "forwarded" in result.data_sources[0]
    _assert_equals_reference_on_given(training, result, state, [3 // replicas[0] * replicas[0]])


def test_given_microbatches_accumulate_gradients_as_a_plain_loop_does(farm: Farm) -> None:
    training = Training("lstm", 2, schedule="flush", microbatches=3)
    data = [*_Given(training, *_SIZES)]
    result, state = farm.results(train_in_pipeline, training, num_ranks=2, data=data)[0]
    assert result.drained_at == []  # the largest minibatch of a list is known beforehand
    losses, expected = _accumulate(training, data)
    assert_close_losses(result.losses, losses, 1e-9)
    assert_close_state(state, expected, 1e-9)


def _accumulate(training: Training, data: Iterable[Microbatches]) -> tuple[list[float], State]:
    """Trains in a plain loop that runs the microbatches one by one and adds up their gradients."""
    model = training.model()
    optimizer, losses = training.optimizer(model.parameters()), []
    for minibatch in data:
        optimizer.zero_grad()
        count = sum(len(targets) for _, targets in minibatch)
        parts = []
        for inputs, targets in minibatch:
            loss = training.case.loss_fn(model(inputs), targets)
            (loss * (len(targets) / count)).backward()
            parts.append(loss.item() * (len(targets) / count))
        optimizer.step()
        losses.append(sum(parts))
    return losses, state_of(model)


@dataclass(frozen=True)
class _Cumulative(Training):
    """A training whose batch norms average over all minibatches alike."""

    def model(self) -> nn.Sequential:
        model = super().model()
        for layer in model:
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = None
        return model


_NORM_SIZES = ((3, 2, 3), (2, 3, 2), (2, 3), (3, 2, 4), (2,))


@pytest.mark.parametrize("kind", [Training, _Cumulative])
@pytest.mark.parametrize(
    ("num_stages", "how"),
    [
        (1, {"schedule": "flush"}),
        (1, {"schedule": "pipedream"}),
        (2, {"schedule": "flush"}),
        (3, {"schedule": "gpipe", "recompute": True}),
        (4, {"schedule": "interleaved"}),
    ],
    ids=str,
)
def test_given_batches_step_batch_norm_one_by_one_as_in_a_plain_loop(
    farm: Farm, num_stages: int, how: dict[str, Any], kind: type[Training]
) -> None:
    training = kind("cnn", num_stages, microbatches=3, **how)
    data, ranks = _Given(training, *_NORM_SIZES), training.num_workers
    result, state = farm.results(train_in_pipeline, training, num_ranks=ranks, data=data)[0]
    losses, expected = _accumulate(training, data)
    assert result.losses == losses
    assert_equal_state(state, expected)
    assert_memory_as_predicted(result)


@pytest.mark.parametrize(
    ("replicas", "how"),
    [
        ((1, 1, 1), {"schedule": "pipedream"}),
        ((1, 1), {"schedule": "unstashed", "recompute": True}),
        ((2, 1), {"schedule": "flush"}),
        ((1, 3), {"schedule": "pipedream"}),
    ],
    ids=str,
)
def test_given_batches_step_batch_norm_as_in_the_reference(
    farm: Farm, replicas: tuple[int, ...], how: dict[str, Any]
) -> None:
    training = Training("cnn", len(replicas), replicas=replicas, microbatches=3, **how)
    data = [*_Given(training, *_NORM_SIZES)]
    ranks = training.num_workers
    result, state = farm.results(train_in_pipeline, training, num_ranks=ranks, data=data)[0]
    model = training.model()
    expected = reference.run(model, training.plan, **training.options() | {"data": data})
    assert_close_losses(result.losses, expected.losses, 1e-9)
    assert_close_state(state, state_of(model), 1e-9)
    dealt = [3 * minibatch + index for minibatch, given in enumerate(data) for index in range(len(given))]
    assert state["1.num_batches_tracked"] == sum(number % replicas[0] == 0 for number in dealt)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (((2, 2, 2, 2),), r"minibatch 0 is Microbatches of 4 batches, more than microbatches=3: give run as"),
        (((2, 2), (2, 2, 2, 2)), r"minibatch 1 is Microbatches of 4 batches, more than microbatches=3"),
        (((),), r"minibatch 0 of the data is Microbatches of no batch: give one or more"),
    ],
)
def test_microbatches_that_a_run_cannot_take_are_refused(
    farm: Farm, sizes: tuple[tuple[int, ...], ...], message: str
) -> None:
    training = Training("mlp", 2, microbatches=3)
    outcomes = farm.run(train_in_pipeline, training, num_ranks=2, data=[*_Given(training, *sizes)])
    assert any(re.search(message, str(outcome.error)) for outcome in outcomes)


def test_data_that_yield_microbatches_at_times_are_refused(farm: Farm) -> None:
    training = Training("mlp", 2, microbatches=3)
    data = [*_Given(training, (2, 2)), *training.data()]
    outcomes = farm.run(train_in_pipeline, training, num_ranks=2, data=data)
    message = "minibatch 1 of the data is no Microbatches, unlike those before it"
    assert any(message in str(outcome.error) for outcome in outcomes)


def test_a_profile_and_a_validation_refuse_them() -> None:
    training = Training("mlp", 2)
    with pytest.raises(ValueError, match="batches yields Microbatches, and whole minibatches are timed"):
        pipedream.profile(training.model(), [*_Given(training, (2, 2))], training.case.loss_fn)
    reader = ValidationReader([*_Given(training, (2, 2))], 0)
    reader.begin(0)
    with pytest.raises(ValueError, match="validation: data yielded Microbatches"):
        reader.next()
