"""Tests that a run with one stage equals plain PyTorch training bit for bit, including its random numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from farm import Farm
from models import CASES
from training import (
    OPTIMIZERS,
    State,
    Training,
    assert_equal_state,
    train_in_pipeline,
    train_plainly,
)


def _train_and_draw(training: Training) -> tuple[list[float], State, torch.Tensor]:
    result, state = train_in_pipeline(training)
    return result.losses, state, torch.rand(3)


# test_reference.py compares the reference bit for bit too, with every model and optimizer.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("case_name", "optimizer"), [*zip(CASES, itertools.cycle(OPTIMIZERS))])
def test_one_stage_equals_a_plain_loop_bit_for_bit(
    farm: Farm, case_name: str, dtype: torch.dtype, optimizer: str
) -> None:
    training = Training(case_name, 1, dtype, OPTIMIZERS[optimizer], num_minibatches=4, epochs=2)
    losses, state, drawn = farm.results(_train_and_draw, training, num_ranks=1)[0]
    plain_losses, plain_state = train_plainly(training)
    assert losses == plain_losses
    assert_equal_state(state, plain_state)
    torch.manual_seed(0)  # the farm seeds rank 0 with 0, and a run leaves the generators unchanged
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize("seed", [None, 9])
def test_one_stage_shuffles_and_drops_out_as_a_plain_loop_does(farm: Farm, seed: int | None) -> None:
    training = Training("dropout", 1, shuffled=True, short_last=False, epochs=3, seed=seed)
    losses, state, _ = farm.results(_train_and_draw, training, num_ranks=1)[0]
    torch.manual_seed(0)  # the farm seeds rank 0 with 0
    plain_losses, plain_state = train_plainly(training)
    assert losses == plain_losses
    assert_equal_state(state, plain_state)
