"""Tests asked_plan.py: the meaning of a front end's arguments plan, workers and bandwidth."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipedream import Plan, Profile
from pipedream.integrations.asked_plan import AskedPlan
from pipedream.planning.layer_profile import LayerProfile

_PROFILE = Profile(tuple(LayerProfile(f"layer{i}", ms, ms, 4, 4) for i, ms in enumerate((3.0, 1.0, 1.0))))


def test_the_replicas_of_every_stage_are_planned_for_with_the_best_boundaries() -> None:
    alone = AskedPlan.of(None, 2, "10Gbit/s").make(_PROFILE, "flush", 1)
    assert alone.workers_used == 1  # with one microbatch a second stage would only wait
    asked = AskedPlan.of("1-1", None, "10Gbit/s")
    plan = asked.make(_PROFILE, "flush", 1)
    assert [(stage.first_layer, stage.last_layer) for stage in plan.stages] == [(0, 0), (1, 2)]
    assert asked.describe(plan) == str(plan)
    replicated = AskedPlan.of("2-1", 2, "10Gbit/s").make(_PROFILE, "flush", 2)
    assert [stage.num_replicas for stage in replicated.stages] == [2, 1]


def test_a_plan_that_leaves_workers_out_names_the_one_that_uses_all() -> None:
    asked = AskedPlan.of(None, 2, "10Gbit/s")
    told = asked.describe(asked.make(_PROFILE, "flush", 1))
    assert told.endswith(
        "\n1 of 2 workers train, because more are not predicted to be faster: plan='1-1' uses 2"
    )
    many = AskedPlan.of(None, 8, "10Gbit/s")
    # The model has three layers.
    assert "plan='1-1-1' uses 3" in many.describe(many.make(_PROFILE, "flush", 1))


def test_under_torchrun_the_ranks_are_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert AskedPlan.of(None, 2, "10Gbit/s").num_workers == 3


def test_a_plan_may_be_a_file_and_what_is_neither_is_refused(tmp_path: Path) -> None:
    plan = Plan.straight(3, 2)
    plan.save(tmp_path / "plan.json")
    for given in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        assert AskedPlan.of(given, None, "10Gbit/s").given == plan
    with pytest.raises(FileNotFoundError, match="neither a file nor the replicas of each stage, such as 2-1"):
        AskedPlan.of("one stage each", 2, "10Gbit/s")
    with pytest.raises(ValueError, match=r"plan is '2\+1-1': give a pipedream.Plan, or leave out the spares"):
        AskedPlan.of("2+1-1", 2, "10Gbit/s")
