"""Tests whole_optimizer.py: the optimizers and schedulers of all stages together act like one of the whole
model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipedream import optim
from pipedream.integrations.whole_optimizer import StageOptimizers, StageSchedulers
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR


def _model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def _warm_up(step: int) -> float:
    return min(1.0, step / 3)


@pytest.mark.parametrize(
    ("kind", "stage_kind"),
    [
        (functools.partial(torch.optim.AdamW, lr=0.1, fused=True), optim.AdamW),
        (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), optim.SGD),
        (functools.partial(torch.optim.RMSprop, lr=0.1), torch.optim.RMSprop),
    ],
    ids=["AdamW", "SGD", "RMSprop"],
)
@pytest.mark.parametrize("schedule", [functools.partial(LambdaLR, lr_lambda=_warm_up), None])
def test_stages_make_the_steps_of_the_whole_model(
    kind: Callable[..., torch.optim.Optimizer], stage_kind: type, schedule: Any
) -> None:
    whole_model, cut_model = _model(), _model()
    whole = kind(_groups(whole_model))
    scheduler = CosineAnnealingLR(whole, 5) if schedule is None else schedule(whole)
    make, make_scheduler = StageOptimizers(whole, whole_model), StageSchedulers(scheduler)
    named = [*cut_model.named_parameters()]
    stages = [make(named[:3]), make(named[3:4]), make(named[4:])]
    assert all(type(stage) is stage_kind for stage in stages)
    schedulers = [make_scheduler(stage) for stage in stages]
    for step in range(4):
        for model in (whole_model, cut_model):
            for index, p in enumerate(model.parameters()):
                p.grad = torch.full_like(p, 0.3 + step - index)
        for each in (whole, scheduler, *stages, *schedulers):
            each.step()
        assert [group["lr"] for group in stages[1].param_groups] == scheduler.get_last_lr()
    for found, expected in zip(cut_model.parameters(), whole_model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="the optimizer has parameters that are not the model's"):
        StageOptimizers(torch.optim.SGD(_model().parameters(), lr=0.1), _model())


def test_a_scheduler_that_is_made_of_others_is_refused() -> None:
    whole = torch.optim.SGD(_model().parameters(), lr=0.1)
    parts = [LambdaLR(whole, _warm_up), LambdaLR(whole, _warm_up)]
    with pytest.raises(ValueError, match="the scheduler is a SequentialLR, made of others: give a LambdaLR"):
        StageSchedulers(SequentialLR(whole, parts, [2]))


def test_stages_that_keep_the_class_begin_with_the_state_of_the_whole() -> None:
    whole_model, cut_model = _model(), _model()
    whole = torch.optim.AdamW(_groups(whole_model), lr=0.1)
    for p in whole_model.parameters():
        p.grad = torch.full_like(p, 0.3)
    whole.step()
    cut_model.load_state_dict(whole_model.state_dict())
    make = StageOptimizers(whole, whole_model, keeps_class=True)
    named = [*cut_model.named_parameters()]
    stages = [make(named[:3]), make(named[3:])]
    assert all(type(stage) is torch.optim.AdamW for stage in stages)
    for model in (whole_model, cut_model):
        for index, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, 0.2 - index)
    for each in (whole, *stages):
        each.step()
    for found, expected in zip(cut_model.parameters(), whole_model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_bfloat16_parameters_keep_the_class_of_the_whole_optimizer() -> None:
    """pipedream.optim would keep float32 masters, and so train otherwise than the library."""
    model = _model().to(torch.bfloat16)
    whole = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert type(StageOptimizers(whole, model)(model.named_parameters())) is torch.optim.AdamW
    model[0].float()  # float32 parameters, such as a frozen model's adapter, need no masters
    whole = torch.optim.AdamW(model[0].parameters(), lr=0.1)
    assert type(StageOptimizers(whole, model)(model.named_parameters())) is optim.AdamW
