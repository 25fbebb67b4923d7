"""Tests that an exception in the user's own code reaches every rank. The error names stage and minibatch."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from farm import Farm
from mishaps import (
    FailingSGD,
    Stubborn,
    failing_loss,
    model_with,
    raise_error,
    run,
    run_while_the_device_fails,
)
from pipedream import PipelineError, Plan


def _messages(farm: Farm, num_ranks: int, *args: Any, **kwargs: Any) -> list[str]:
    outcomes = farm.run(run, *args, num_ranks=num_ranks, **kwargs)
    for outcome in outcomes:
        assert type(outcome.error) is PipelineError, outcome
    messages = [str(outcome.error) for outcome in outcomes]
    assert all("\n" not in message for message in messages)
    return messages


@pytest.mark.parametrize("at", [0, 7], ids=["warm-up", "steady"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_error_in_a_forward(farm: Farm, stage: int, at: int) -> None:
    messages = _messages(farm, 3, model_with(raise_error, stage=stage, at=at))
    where = f"stage {stage} (rank {stage}) failed at minibatch {at} in forward"
    if at == 0 and stage < 2:  # the last stage's rehearsal leaves the error to the minibatch
        where = f"the first minibatch does not pass stage {stage} (rank {stage})"
    assert set(messages) == {f"{where}: RuntimeError: the layer gave up"}


@pytest.mark.parametrize("stage", [0, 1])
def test_a_layer_that_ends_its_process_is_named_with_its_place(farm: Farm, stage: int) -> None:
    outcomes = farm.run(run, model_with(sys.exit, stages=2, stage=stage, at=7), num_ranks=2)
    assert isinstance(outcomes[stage].error, SystemExit)
    where = f"stage {stage} (rank {stage}) ended at minibatch 7"
    assert str(outcomes[1 - stage].error) == f"{where}: SystemExit: SystemExit"


@pytest.mark.parametrize(
    ("replicas", "stage", "at", "where"),
    [
        ((1, 2), 1, 9, "stage 1 replica 1 (rank 2) failed at minibatch 9 in forward"),
        ((2, 1), 0, 0, "the first minibatch does not pass stage 0 replica 1 (rank 1)"),
    ],
    ids=["steady", "rehearsal"],
)
def test_an_error_of_one_replica_names_it(
    farm: Farm, replicas: tuple[int, ...], stage: int, at: int, where: str
) -> None:
    model = model_with(raise_error, stages=2, stage=stage, at=at, rank=1 if stage == 0 else 2)
    messages = _messages(farm, 3, model, plan=Plan.replicated(2, replicas))
    assert set(messages) == {f"{where}: RuntimeError: the layer gave up"}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_error_in_a_backward_names_the_backwards_minibatch(farm: Farm, stage: int) -> None:
    messages = _messages(farm, 3, model_with(raise_error, stage=stage, at=5, in_backward=True))
    assert set(messages) == {
        f"stage {stage} (rank {stage}) failed at minibatch 5 in backward: RuntimeError: the layer gave up"
    }


def test_an_error_in_the_loss(farm: Farm) -> None:
    messages = _messages(farm, 2, model_with(None, stages=2), loss_fn=failing_loss)
    assert set(messages) == {"stage 1 (rank 1) failed at minibatch 4 in loss_fn: LookupError: no such label"}


def test_an_error_in_the_optimizer_names_the_updates_minibatch(farm: Farm) -> None:
    # Every stage's step fails at minibatch 5, and any of them may be the first.
    for message in _messages(farm, 3, model_with(None), optimizer=FailingSGD):
        stage = message[len("stage ")]
        assert message == (
            f"stage {stage} (rank {stage}) failed at minibatch 5 in optimizer:"
            " ArithmeticError: the step is too long"
        )


@pytest.mark.parametrize("at", [1, 6])
def test_an_error_in_the_data(farm: Farm, at: int) -> None:
    messages = _messages(farm, 2, model_with(None, stages=2), data=Stubborn(at))
    for message in messages:
        assert f"failed at minibatch {at} in reading data: OSError: the disk is full" in message
        assert message.startswith("stage ")


def test_the_cause_is_the_users_exception_where_it_was_raised(farm: Farm) -> None:
    outcomes = farm.run(run, model_with(raise_error, stages=2, stage=1, at=3), num_ranks=2)
    assert "raise_error" in outcomes[1].trace
    assert "RuntimeError: the layer gave up" in outcomes[1].trace


def _fail_then_run() -> tuple[str, list[float]]:
    message = ""
    try:
        run(model_with(raise_error, stages=2, stage=1, at=3))
    except PipelineError as error:
        message = str(error)
    return message, run(model_with(None, stages=2)).losses


def test_a_script_may_run_again_after_a_run_that_failed(farm: Farm) -> None:
    for message, losses in farm.results(_fail_then_run, num_ranks=2):
        assert "failed at minibatch 3" in message
        assert losses == [float(i * i) for i in range(12)]


def test_an_error_of_the_device_is_told_with_its_place_though_cleaning_up_fails_too(farm: Farm) -> None:
    outcomes = farm.run(run_while_the_device_fails, model_with(None, stages=2), 5, num_ranks=2)
    assert {(type(outcome.error), str(outcome.error)) for outcome in outcomes} == {
        (
            PipelineError,
            "stage 1 (rank 1) failed at minibatch 5 in the work around the model:"
            " RuntimeError: CUDA error: device-side assert triggered",
        )
    }
