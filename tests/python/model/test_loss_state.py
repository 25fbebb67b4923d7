"""Tests loss_state.py: the state of a loss comes back to the caller, except what belongs to the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipedream import Plan
from pipedream.model.loss_state import LossState, check_loss_buffers, joined_loss_states, set_loss_state
from pipedream.splitting.splitter import split
from torch import Tensor, nn


class _Counter:
    def __init__(self) -> None:
        self.steps = 0
        self.seen: Tensor | None = None


class _Centred(nn.Module):
    def __init__(self, norm: nn.BatchNorm1d | None = None) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("later", None)
        self.queue = torch.zeros(3, 2)
        self.constant = torch.ones(5)
        self.counter = _Counter()
        self.norm_mean = None if norm is None else norm.running_mean

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.counter.steps += 1
        self.counter.seen = outputs.detach().sum()
        self.centre.data[:] = outputs.detach().mean(0)
        self.later = outputs.detach().amax(0)
        self.queue[self.counter.steps % 3] = outputs.detach()[0]
        return (outputs - targets).square().mean()


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))


def test_what_a_loss_has_kept_is_the_callers_too() -> None:
    # The loss must begin the next run with the centre and the count of steps that this run has left.
    stages = split(_model(), Plan.straight(3, 2))
    there, here = _Centred(), _Centred()
    centre = here.centre
    kept = LossState(there, stages)
    for _ in range(2):
        there(torch.randn(4, 2), torch.zeros(4, 2))
    state = kept.changed()
    assert not any("constant" in key for key in state)
    set_loss_state(here, state)
    assert here.centre is centre
    assert here.state_dict().keys() == there.state_dict().keys() == {"centre", "later"}
    for one, other in ((here.centre, there.centre), (here.later, there.later), (here.queue, there.queue)):
        assert torch.equal(one, other)
    assert here.counter.steps == 2
    assert torch.equal(here.counter.seen, there.counter.seen)


def test_what_is_the_models_comes_back_with_the_model_alone() -> None:
    model = _model()
    loss = _Centred(model[1])  # type: ignore[arg-type]
    loss.layer = model[2]
    kept = LossState(loss, split(model, Plan.straight(3, 1)))
    model(torch.randn(4, 2))
    assert set(kept.changed()) == {"loss_fn:buffer:centre"}


def test_replicas_of_the_last_stage_have_the_mean_of_what_they_kept() -> None:
    states = [
        {"a": torch.tensor([1.0]), "n": torch.tensor(3)},
        {"a": torch.tensor([2.0]), "n": torch.tensor(4)},
    ]
    assert joined_loss_states(states) == {"a": torch.tensor([1.5]), "n": torch.tensor(3)}
    assert joined_loss_states([]) == {}


@pytest.mark.parametrize(
    ("num_stages", "trains", "is_refused"), [(1, True, False), (3, True, True), (3, False, False)]
)
def test_a_loss_that_reads_what_an_earlier_stage_changes_is_refused_by_name(
    num_stages: int, trains: bool, is_refused: bool
) -> None:
    model = _model()
    loss: Any = _Centred(model[1])  # type: ignore[arg-type]
    model[1].train(trains)
    stages = split(model, Plan.straight(3, num_stages))
    if not is_refused:
        check_loss_buffers(stages, loss)
        return
    with pytest.raises(ValueError, match=r"loss_fn.norm_mean is the buffer '1.running_mean' .* stage 1 may"):
        check_loss_buffers(stages, loss)
