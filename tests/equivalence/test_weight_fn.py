"""Tests weight_fn. Microbatches then count by something other than their samples, and together they give the
minibatch's loss.
"""

from __future__ import annotations

import functools
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from models import straight_plan
from pipedream import RunResult, reference
from torch import nn
from training import State, assert_close_losses, assert_close_state, state_of

_IGNORED = -100
_SGD = functools.partial(torch.optim.SGD, lr=0.3, momentum=0.5)
_PLAN = straight_plan(3, (1,))
_RELATIVE = 1e-9  # allows for another order of float64 additions


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def _data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns minibatches of 6 samples. The three microbatches of the first one have 1, 2 and 0 valid
    targets. In the second all targets are valid, and in the third only one is.
    """
    generator = torch.Generator().manual_seed(4)
    data = []
    for valid in ([0, 2, 3], range(6), [5]):
        targets = torch.full((6,), _IGNORED)
        targets[list(valid)] = torch.randint(4, (len(list(valid)),), generator=generator)
        data.append((torch.rand(6, 5, generator=generator, dtype=torch.float64), targets))
    return data


def _num_valid(targets: torch.Tensor) -> torch.Tensor:
    return (targets != _IGNORED).sum()


def _train(**options: Any) -> tuple[RunResult, State]:
    model = _model()
    options = {"microbatches": 3, "weight_fn": _num_valid, "data": _data(), "schedule": "flush"} | options
    result = pipedream.run(
        model, _PLAN, loss_fn=nn.functional.cross_entropy, optimizer=_SGD, progress=False, **options
    )
    return result, state_of(model)


@pytest.mark.parametrize("options", [{}, {"schedule": "gpipe", "recompute": True}], ids=str)
def test_loss_and_weights_are_those_of_whole_minibatches(farm: Farm, options: dict[str, Any]) -> None:
    result, state = farm.results(_train, num_ranks=2, **options)[0]
    model = _model()
    optimizer, losses = _SGD(model.parameters()), []
    for inputs, targets in _data():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert_close_losses(result.losses, losses, _RELATIVE)
    assert_close_state(state, state_of(model), _RELATIVE)


def test_an_asynchronous_schedule_gives_the_oracles_numbers(farm: Farm) -> None:
    result, state = farm.results(_train, num_ranks=2, schedule="pipedream")[0]
    model = _model()
    expected = reference.run(
        model,
        _PLAN,
        data=_data(),
        loss_fn=nn.functional.cross_entropy,
        optimizer=_SGD,
        microbatches=3,
        weight_fn=_num_valid,
    )
    assert_close_losses(result.losses, expected.losses, _RELATIVE)
    assert_close_state(state, state_of(model), _RELATIVE)


def _minus_one(targets: torch.Tensor) -> int:
    return -1


def _divides_by_zero(targets: torch.Tensor) -> float:
    return 1 / 0


@pytest.mark.parametrize(
    ("weight_fn", "why"),
    [
        (_minus_one, "weight_fn gives -1.0 for a microbatch of minibatch 0: it must give what"),
        (_divides_by_zero, "failed at minibatch 0 in weight_fn: ZeroDivisionError"),
    ],
)
def test_what_is_no_count_is_refused(farm: Farm, weight_fn: Any, why: str) -> None:
    errors = [outcome.error for outcome in farm.run(_train, num_ranks=2, weight_fn=weight_fn)]
    assert any(why in str(error) for error in errors), errors
