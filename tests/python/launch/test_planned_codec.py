"""Tests that run() uses the codec for which a plan was made. If it cannot or does not, it says so."""

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
from pipedream.planning.factor_rule import FACTOR_CODEC
from pipedream.planning.plan import Plan, Stage
from pipedream.stage.job import JobOptions
from torch import nn

_PLAN = Plan((Stage(0, 0, 2), Stage(1, 1)), codec=FACTOR_CODEC)


def _run(**how: Any) -> None:
    pipedream.run(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        **{"plan": _PLAN} | how,
        data=[(torch.ones(2, 2), torch.ones(2, 2))] * 2,
        loss_fn=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    )


def test_a_run_takes_the_plans_codec_and_logs_it(
    launched: list[JobOptions], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "pipedream"),
        warnings.catch_warnings(action="error"),
        pytest.raises(Launched),
    ):
        _run()
    assert launched[0].links.codec == {"pushes": "factors"}
    assert "codec={'pushes': 'factors'}, as the plan was made for it" in caplog.text


def test_a_run_under_autocast_is_told_that_nothing_goes_as_factors(launched: list[JobOptions]) -> None:
    with pytest.warns(UserWarning, match="under autocast nothing goes as factors"), pytest.raises(Launched):
        _run(autocast="bfloat16")
    with warnings.catch_warnings(action="error"), pytest.raises(Launched):
        _run(autocast="bfloat16", plan=replace(_PLAN, codec={}))


def test_a_codec_of_the_runs_own_is_taken(launched: list[JobOptions]) -> None:
    own = {"activations": "bf16", "pushes": "factors:bf16"}
    with warnings.catch_warnings(action="error"), pytest.raises(Launched):
        _run(codec=own)
    assert launched[0].links.codec == own


@pytest.mark.parametrize("codec", [{}, "bf16", {"pushes": "int8"}])
def test_a_run_without_the_plans_factors_is_told(launched: list[JobOptions], codec: Any) -> None:
    with pytest.warns(UserWarning, match="and this run has another, without"), pytest.raises(Launched):
        _run(codec=codec)
    assert "factors" not in launched[0].links.codec.values()


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"sync": "asp"}, "sync is 'asp'"),
        ({"sync": "allreduce"}, "sync is 'allreduce'"),
        ({"sync": "allreduce", "sync_every": 2}, "sync_every is 2"),
        ({"sync_every": 2}, "sync_every is 2"),
    ],
)
def test_a_run_that_pushes_no_factors_does_not_take_such_a_plan(
    launched: list[JobOptions], how: dict[str, Any], named: str
) -> None:
    said = rf"{named}, and the plan was made for codec={{'pushes': 'factors'}}: .*\(codec={{}} is none\)"
    with pytest.raises(ValueError, match=said):
        _run(**how)
    with pytest.warns(UserWarning, match="this run has another"), pytest.raises(Launched):
        _run(**how, codec={})
    assert launched[0].links.codec == {}
