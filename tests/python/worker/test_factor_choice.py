"""Tests that all replicas of a stage agree which weights are factored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pipedream import _core
from pipedream.budget.footprint import Footprint
from pipedream.planning.codec_choice import parse_codec
from pipedream.planning.plan import Plan, Stage
from pipedream.splitting.splitter import split
from pipedream.worker import factor_choice
from pipedream.worker.agreed_run import AgreedRun
from pipedream.worker.factor_choice import FactorChoice
from torch import nn


class _Store:
    """Stands in for the rendezvous of all ranks."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}

    def publish(self, key: str, value: Any) -> None:
        self.said[key] = value

    def wait_for(self, keys: list[str], _: float, __: Any, *, meanwhile: Any) -> list[Any]:
        # Lists in place of tuples, as JSON makes them.
        return [[list(row) for row in self.said[key]] for key in keys]


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))


def _choice(
    store: _Store,
    replica: int,
    *,
    rows: int = 31,
    codec: Any = "factors",
    autocast: torch.dtype | None = None,
    microbatches: int = 1,
) -> FactorChoice:
    plan = Plan((Stage(0, 1, 2),))
    stages = split(_model(), plan)
    schedule = _core.ScheduleOptions(
        schedule="flush", in_flight=[1], num_microbatches=microbatches, placement=plan.placement
    )
    options = SimpleNamespace(
        links=SimpleNamespace(codec=parse_codec({"pushes": codec})),
        autocast=autocast,
        microbatches=microbatches,
    )
    run = SimpleNamespace(
        place=SimpleNamespace(rendezvous=store),
        options=options,
        plan=plan,
        stages=stages,
        ties=[],
        rank=replica,
        own_stages=lambda: stages,
        schedule=lambda: schedule,
    )
    footprint = Footprint(0, 0, 0, 0, True, factor_rows={"0.weight": rows, "1.weight": rows})
    return FactorChoice(cast(AgreedRun, run), torch.device("cpu"), {0: footprint})


def _agreed(*choices: FactorChoice) -> tuple[list[str], str]:
    found = [choice.of_stage(0) for choice in choices]
    assert all(of_replica == found[0] for of_replica in found)
    return [layer.name for layer in found[0]], choices[0].describe(0, found[0])


def test_each_layer_is_decided_by_its_size_and_told() -> None:
    store = _Store()
    names, told = _agreed(*(_choice(store, replica) for replica in range(2)))
    assert names == ["0.weight"]
    assert told == (
        "; '0.weight' (15.50 KiB of 31 rows for 16.00 KiB) are pushed as factors,"
        " not '1.weight' (7.99 KiB of 31 rows for 512 B), whose factors are larger"
    )


@pytest.mark.parametrize(
    "how",
    [{"rows": 32}, {"rows": 16, "microbatches": 4}, {"codec": "factors:bf16"}],
    ids=["as large", "microbatches", "encoded"],
)
def test_where_factors_are_no_fewer_bytes_none_are_pushed(how: dict[str, Any]) -> None:
    store = _Store()
    assert _agreed(*(_choice(store, replica, **how) for replica in range(2)))[0] == []


def test_replicas_that_multiply_differently_push_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _Store()
    one = _choice(store, 0)
    plain = factor_choice.mean_product
    monkeypatch.setattr(
        factor_choice, "mean_product", lambda *given: torch.nextafter(plain(*given), torch.tensor(9.0))
    )
    names, told = _agreed(one, _choice(store, 1))
    assert names == []
    assert "none are pushed as factors, not '0.weight'" in told
    assert "which the replicas multiply differently" in told


def test_under_autocast_none_are_pushed() -> None:
    store = _Store()
    names, told = _agreed(*(_choice(store, r, autocast=torch.bfloat16) for r in range(2)))
    assert names == []
    assert told == "; none are pushed as factors, as autocast would round them"


def test_nobody_is_asked_where_factors_are_not_wanted() -> None:
    store = _Store()
    choice = _choice(store, 0, codec="bf16")
    assert _agreed(choice) == ([], "")
    assert store.said == {}
