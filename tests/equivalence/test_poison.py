"""Tests PIPEDREAM_POISON=1, which fills memory that nobody may read with NaN. Correct runs give the same
numbers, and a use of released memory makes the loss NaN.

The tests put each bug below into the ranks. Without the poison some of the bugs are not noticed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from farm import Farm
from oracle import assert_equals_reference
from pipedream import NonFiniteLoss, RunResult
from pipedream.stage.stage_runner import StageRunner
from pipedream.update.gradients import RunStep, StageGradients
from pipedream.update.weights import StageWeights
from torch import Tensor
from training import State, Training, train_in_pipeline

_POISON = "PIPEDREAM_POISON"
Bug = Callable[[pytest.MonkeyPatch], None]


def _train(
    training: Training, poison: bool, bug: Bug | None = None, **options: Any
) -> tuple[RunResult, State]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_POISON, "1" if poison else "0")
        if bug is not None:
            bug(patch)
        return train_in_pipeline(training, **options)


def _train_poisoned(training: Training, **options: Any) -> tuple[RunResult, State]:
    return _train(training, True, **options)


@pytest.mark.parametrize(
    "schedule",
    ["pipedream", "vertical_sync", "naive", "2bw", "flush", "gpipe", "model_parallel", "interleaved"],
)
@pytest.mark.parametrize("case_name", ["cnn", "tied_apart"])
def test_a_right_run_gives_the_same_numbers(farm: Farm, case_name: str, schedule: str) -> None:
    microbatches = 4 if schedule == "2bw" else 2
    training = Training(
        case_name,
        4,
        schedule=schedule,
        microbatches=microbatches,
        short_last=microbatches <= 3,
        recompute=(1, 2),
        max_grad_norm=1.0,
    )
    assert_equals_reference(farm, training, train=_train_poisoned)


def _update_from_the_released_version(patch: pytest.MonkeyPatch) -> None:
    """Makes the update start from the version that its backward has just released, and not from the
    newest.
    """
    apply = StageGradients.apply

    def wrong(self: StageGradients, read_slot: int, write_slot: int, scale: float, run: RunStep) -> None:
        apply(self, write_slot, write_slot, scale, run)

    patch.setattr(StageGradients, "apply", wrong)


def _read_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    """Makes the forward bind the slot after the right one."""
    bind = StageWeights.bind

    def wrong(self: StageWeights, own_slot: int, tied_slot: int) -> None:
        bind(self, (own_slot + 1) % self.own.num_slots, tied_slot)

    patch.setattr(StageWeights, "bind", wrong)


def _use_activations_after_their_release(patch: pytest.MonkeyPatch) -> None:
    """Makes each forward read its inputs from their slot after the slot was released."""

    def alias_of(tensor: Tensor) -> Tensor:
        memory = (ctypes.c_byte * tensor.untyped_storage().nbytes()).from_address(tensor.data_ptr())
        return torch.frombuffer(memory, dtype=tensor.dtype)[: tensor.numel()].view(tensor.shape)

    forward = StageRunner.forward

    def wrong(runner: StageRunner, work: Any) -> list[Tensor] | None:
        work.tensors[:] = map(alias_of, work.tensors)
        return forward(runner, work)

    patch.setattr(StageRunner, "forward", wrong)


# For each bug: the error that a run without poison gives after the training, or None.
_BUGS = [
    (_update_from_the_released_version, None),
    (_read_before_it_is_written, "went to a weight version that its backward did not read"),
    (_use_activations_after_their_release, None),
]


@pytest.mark.parametrize(("bug", "told"), _BUGS)
def test_a_use_of_memory_that_nobody_may_read_is_caught_under_poison_at_once(
    farm: Farm, bug: Bug, told: str | None
) -> None:
    training = Training("mlp", 2, num_minibatches=10)
    for outcome in farm.run(_train, training, True, bug, num_ranks=2):
        assert isinstance(outcome.error, NonFiniteLoss), outcome
        assert "is nan" in str(outcome.error)
    # Without poison the run ends without an error, unless another check finds the bug. Its numbers are
    # finite, but may be wrong.
    for outcome in farm.run(_train, training, False, bug, num_ranks=2):
        if told is None:
            assert outcome.error is None
            assert len(outcome.value[0].losses) == 10
        else:
            assert told in str(outcome.error)
