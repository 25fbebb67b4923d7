"""Tests run(schedule="auto"), which uses the schedule and the number of microbatches of the plan. If it
cannot or does not, it says so.
"""

from __future__ import annotations

import functools
import logging
import warnings
from dataclasses import replace
from typing import Any

import pipedream
import pytest
import torch
from launches import Launched
from pipedream import reference
from pipedream.planning.plan import Plan
from pipedream.stage.job import JobOptions
from torch import nn

_PLAN = replace(Plan.straight(2, 2), schedule="naive", microbatches=2)


def _arguments(**how: Any) -> dict[str, Any]:
    return {
        "model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        "plan": _PLAN,
        "data": [(torch.ones(2, 2), torch.ones(2, 2))] * 2,
        "loss_fn": nn.functional.mse_loss,
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
    } | how


def _run(**how: Any) -> None:
    with pytest.raises(Launched):
        pipedream.run(**_arguments(**how))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_run_takes_the_plans_schedule_and_microbatches_and_logs_them(
    launched: list[JobOptions], caplog: pytest.LogCaptureFixture, microbatches: int
) -> None:
    with caplog.at_level(logging.INFO, "pipedream"), warnings.catch_warnings(action="error"):
        _run(schedule="auto", microbatches=microbatches)
    assert (launched[0].schedule, launched[0].microbatches) == ("unstashed", 2)
    assert "schedule='unstashed', microbatches=2, as the plan was made for them" in caplog.text


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"plan": Plan.straight(2, 2)}, r"has no schedule: make it by partition\(\.\.\., schedule='auto'\)"),
        ({"microbatches": 4}, "microbatches is 4, and schedule='auto' takes the plan's, 2: leave"),
        ({"microbatches": "auto"}, "microbatches is 'auto': leave it out, and schedule='auto' takes it"),
        ({"plan": replace(_PLAN, microbatches=4)}, "minibatches of 2 samples, fewer than microbatches=4"),
    ],
)
def test_a_plan_that_cannot_be_run_so_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipedream.run(**_arguments(schedule="auto", **how))


@pytest.mark.parametrize(
    ("plan", "how", "told"),
    [
        (_PLAN, {}, "schedule 'unstashed' with microbatches=2, and this run has 'pipedream' with 1"),
        (_PLAN, {"schedule": "unstashed"}, "with microbatches=2, and this run has 'unstashed' with 1"),
        (_PLAN, {"schedule": "naive", "microbatches": 2}, None),
        (replace(_PLAN, microbatches=None), {"schedule": "naive"}, None),
        (Plan.straight(2, 2), {"schedule": "flush", "microbatches": 2}, None),
    ],
)
def test_a_run_with_another_schedule_than_the_plans_is_told(
    launched: list[JobOptions], plan: Plan, how: dict[str, Any], told: str | None
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _run(plan=plan, **how)
    assert [told in str(warning.message) for warning in caught] == ([] if told is None else [True])
    assert all(warning.filename == __file__ for warning in caught)


def test_the_oracle_takes_the_plans_schedule_too() -> None:
    torch.manual_seed(0)
    arguments = _arguments(data=[(torch.randn(4, 2), torch.randn(4, 2)) for _ in range(3)])
    model = arguments.pop("model")
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    by_plan = reference.run(model, **arguments, schedule="auto")
    model.load_state_dict(start)
    assert by_plan.losses == reference.run(model, **arguments, schedule="unstashed", microbatches=2).losses
    with pytest.raises(
        ValueError, match="schedule is 'auto' with microbatches 4, and the plan has 'unstashed'"
    ):
        reference.run(model, **arguments, schedule="auto", microbatches=4)
