"""Tests hooks that switch batch norms between training and evaluation. The numbers are then right, or the run
is refused in one line.
"""

from __future__ import annotations

import functools
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from pipedream import Plan, reference
from torch import nn

_ARGUMENTS: dict[str, Any] = {
    "loss_fn": nn.functional.mse_loss,
    "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
}


def _switch(norm: nn.Module, inputs: Any) -> None:
    """Puts a norm into eval mode for the second of every three minibatches."""
    norm.calls = getattr(norm, "calls", 0) + 1
    norm.train(norm.calls % 3 != 2)


def _freeze(norm: nn.Module, inputs: Any) -> None:
    norm.eval()


def _model(hook: Any) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8)
    norm.register_forward_pre_hook(hook)
    return nn.Sequential(
        nn.Linear(8, 8), norm, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)
    ).double()


def _data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    inputs, targets = (torch.randn(9, 6, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    return list(zip(inputs, targets, strict=True))


def _run(hook: Any, plan: Plan, schedule: str) -> list[float]:
    result = pipedream.run(_model(hook), plan, data=_data(), schedule=schedule, progress=False, **_ARGUMENTS)
    return result.losses


@pytest.mark.parametrize("schedule", ["pipedream", "vertical_sync"])
def test_a_norm_switched_with_minibatches_in_flight_is_refused(farm: Farm, schedule: str) -> None:
    """torch reads running statistics again in the backward. Without the error the gradient would silently be
    wrong.
    """
    first, *_ = farm.run(_run, _switch, Plan.straight(6, 2), schedule, num_ranks=2)
    assert isinstance(first.error, ValueError), first
    assert "layer 1 was evaluated in minibatch 1 and trained in minibatch 2" in str(first.error)
    assert "\n" not in str(first.error)


@pytest.mark.parametrize(
    ("hook", "cut", "schedule"),
    [
        (_switch, 2, "flush"),
        (_switch, 2, "model_parallel"),
        (_switch, 0, "pipedream"),
        (_freeze, 2, "pipedream"),
    ],
)
def test_a_norm_in_one_mode_or_alone_in_flight_gives_the_references_losses(
    farm: Farm, hook: Any, cut: int, schedule: str
) -> None:
    plan = Plan((pipedream.Stage(0, cut), pipedream.Stage(cut + 1, 5)))
    losses = farm.results(_run, hook, plan, schedule, num_ranks=2)[0]
    wanted = reference.run(_model(hook), plan, data=_data(), schedule=schedule, **_ARGUMENTS)
    torch.testing.assert_close(losses, wanted.losses, rtol=1e-9, atol=1e-9)
