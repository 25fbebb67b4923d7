"""Tests the calibrated cost model: costs of stages, predictions for each schedule, and files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from all_plans import make_plan
from pipedream import _core
from pipedream.common.document import read_value, write_value
from pipedream.planning import plan_search
from pipedream.planning.item_cost import ItemCost
from pipedream.planning.layer_profile import LayerProfile, Profile, WeightFactors
from pipedream.planning.partitioner import partition
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.prediction import predict_ms, predict_ms_of_run, simulate_programs
from pipedream.planning.runtime_costs import (
    FREE,
    POSITIONS,
    PositionCosts,
    RuntimeCosts,
    StageCosts,
    SyncCost,
    costs_of,
    runtime_of,
    stage_costs,
)

_COSTS_NOTHING = FREE.positions["only"]


def _runtime(**changes: Any) -> RuntimeCosts:
    """Returns costs of a runtime that takes no time, with these fields changed."""
    return replace(FREE, **({"cut_bytes": 1000, "num_cores": 2} | changes))


def _profile(num_layers: int = 4, **changes: Any) -> Profile:
    """Returns layers of 1 ms forward and 2 ms backward, each with 1,000 bytes of parameters. All but the last
    have 1,000 bytes of outputs.
    """
    layers = [LayerProfile(f"layer{i}", 1.0, 2.0, 1000, 1000) for i in range(num_layers - 1)]
    last = LayerProfile("last", 1.0, 2.0, 0, 1000)
    return Profile((*layers, last), batch_size=8, runtime=write_value(_runtime(**changes)))


def _predicted_ms(plan: Plan, schedule: str = "pipedream", m: int = 1) -> float:
    options = _core.ScheduleOptions(schedule, list(plan.in_flight), m, plan.placement)
    predicted_ms = predict_ms(plan, options)
    assert predicted_ms is not None
    return predicted_ms


def _straight(profile: Profile, **options: Any) -> Plan:
    return make_plan(profile, (Stage(0, 1), Stage(2, 3)), 1e15, cost_model="calibrated", **options)


def test_a_runtime_that_costs_nothing_leaves_the_profile_s_times() -> None:
    plan = _straight(_profile())
    assert plan.bottleneck_ms == pytest.approx(6.0)
    assert _predicted_ms(plan) == pytest.approx(6.0)
    assert plan.predicted["samples_per_s"] == pytest.approx(8e3 / 6)


@pytest.mark.parametrize("schedule", ["flush", "gpipe"])
@pytest.mark.parametrize("m", [2, 8])
def test_a_schedule_that_drains_is_predicted_with_its_bubble(schedule: str, m: int) -> None:
    assert _predicted_ms(_straight(_profile()), schedule, m) == pytest.approx(6.0 * (m + 1) / m)


def test_each_term_counts_where_the_run_has_it() -> None:
    position = PositionCosts(ItemCost(0.25, 0.125, 0.5), ItemCost(0.125, 0.375, 0.25), 0.0625, 2.0, 1.0)
    profile = _profile(
        positions=dict.fromkeys(POSITIONS, position),
        backward_share=ItemCost(0.5, 0.25, 0.5),
        update_ms=1.0,
        update_ms_per_byte=0.001,
        copy_ms_per_byte=0.002,
    )
    runtime = runtime_of(profile)
    assert runtime is not None
    first, last = stage_costs(profile, runtime, (Stage(0, 1), Stage(2, 3)), (1e9, 1e9))
    assert first.forward == ItemCost(0.25, 0.125, 4.5)
    assert first.backward == ItemCost(2.125, 1.375, 2.25)
    assert (first.update_ms, first.copy_ms) == (pytest.approx(1.0625 + 2.0), pytest.approx(4.0))
    assert first == last
    # The last stage keeps one version and updates it in place. The first stage keeps two, so its update
    # writes to a copy, which takes copy_ms.
    plan = _straight(profile)
    assert _predicted_ms(plan) == pytest.approx(0.25 + 4.5 + 2.125 + 2.25 + 3.0625 + 4.0)
    # The second microbatch of a minibatch costs less, because the first one has bound the version and made
    # the gradients.
    halves = (0.25 + 0.125 + 4.5) + (2.125 + 1.375 + 2.25)
    assert _predicted_ms(plan, "2bw", 2) == pytest.approx(halves + 3.0625 + 4.0)


def test_what_is_sent_costs_by_its_bytes() -> None:
    position = PositionCosts(ItemCost(0.25, 0.25, 0.5), ItemCost(), 0.0)
    profile = _profile(positions=dict.fromkeys(POSITIONS, position), cut_bytes=500)
    runtime = runtime_of(profile)
    assert runtime is not None
    first, last = stage_costs(profile, runtime, (Stage(0, 1), Stage(2, 3)), (1e9, 1e9))
    assert first.forward.minibatch_ms == pytest.approx(2.0 + 2 * 0.5)  # twice as many bytes as were measured
    assert last.forward.minibatch_ms == pytest.approx(2.0 + 0.5)  # the last stage sends nothing


def test_replicas_share_an_update_and_pay_for_what_they_exchange() -> None:
    sync = {"FORWARD": SyncCost(0.25), "BACKWARD": SyncCost(0.0, 0.001), "UPDATE": SyncCost(0.5, 0.01)}
    profile = _profile(update_ms_per_byte=0.001, sync=sync, latency_ms=0.125)
    runtime = runtime_of(profile)
    assert runtime is not None
    (alone,) = stage_costs(profile, runtime, (Stage(0, 3),), (1e6,))
    (stage,) = stage_costs(profile, runtime, (Stage(0, 3, 2),), (1e6,))
    assert stage.update_ms == pytest.approx(4000 * 0.001 / 2 + 0.5 + 4000 * 0.01 / 2)
    assert stage.forward.first(1) - alone.forward.first(1) == pytest.approx(0.25)
    assert stage.backward.first(1) - alone.backward.first(1) == pytest.approx(4000 * 0.001 / 2)
    assert stage.shard_ms == pytest.approx(2.0)
    assert (stage.sync_latency_ms, alone.sync_latency_ms) == (0.125, 0.0)


@pytest.mark.parametrize(
    ("schedule", "m", "minibatches_per_round"),
    [("pipedream", 1, 2), ("pipedream", 4, 1), ("pipedream", 3, 2), ("flush", 4, 1)],
)
def test_a_stage_updates_once_in_a_round(schedule: str, m: int, minibatches_per_round: int) -> None:
    profile = _profile(update_ms=1.5)
    stages = (Stage(0, 1, 2), Stage(2, 3))
    plan = make_plan(profile, stages, 1e12, cost_model="calibrated", schedule=schedule, microbatches=m)
    first, last = plan.predicted["stage_ms"]
    assert last - first == pytest.approx(3.0 + 1.5 - 1.5 / minibatches_per_round)


def test_shards_travel_in_the_chunks_that_the_core_deals_and_leave_as_layers_are_done() -> None:
    quarter = 1 << 18  # of a MiB
    layers = [LayerProfile(f"layer{i}", 1.0, 1.0 + i, 1000, 5 * quarter) for i in range(4)]
    profile = Profile(tuple(layers), batch_size=8, device="cpu, 1 thread", runtime=write_value(_runtime()))
    runtime = runtime_of(profile)
    assert runtime is not None
    (stage,) = stage_costs(profile, runtime, (Stage(0, 3, 2),), (1e6,))
    dealt = _core.deal_shards([("weight", "float32", 5 * quarter)], 2, whole_tensors=False)
    assert stage.num_chunks == len(dealt) // 2 == 3
    # The two owners get six chunks alternately. The first owner's last chunk is the fifth one, which begins
    # in the third layer. It can be pushed when 3 ms of the backward's 10 ms remain.
    assert stage.push_leads == ((3 / 10, 0.0), (6 / 10, 0.0))
    assert read_value("costs", write_value(stage), StageCosts) == stage
    (alone,) = stage_costs(profile, runtime, (Stage(0, 3),), (1e6,))
    assert (alone.num_chunks, alone.push_leads) == (None, ())
    (of_device,) = stage_costs(replace(profile, device="cuda"), runtime, (Stage(0, 3, 2),), (1e6,))
    # On a device chunks leave after the backward.
    assert (of_device.num_chunks, of_device.push_leads) == (3, ())
    spoilt = replace(stage, push_leads=stage.push_leads[:1])
    plan = make_plan(profile, (Stage(0, 3, 2),), 1e6, cost_model="calibrated")
    for row, wrong in (([0.5], "has 1 entries"), ([0.25, 0.5], "is"), ([1.5, 0.5], r"is \[1.5, 0.5\]: give")):
        with pytest.raises(ValueError, match=rf"costs.push_leads\[0\] {wrong}"):
            read_value("costs", write_value(stage) | {"push_leads": [row]}, StageCosts)
    with pytest.raises(
        ValueError, match="stage 0 has 1 push_leads for 2 replicas: give one for each, or none"
    ):
        _predicted_ms(replace(plan, predicted=plan.predicted | {"stage_costs": [write_value(spoilt)]}))


def test_replicas_that_reduce_together_pay_for_a_ring_and_a_whole_update() -> None:
    profile = _profile(update_ms=0.5, update_ms_per_byte=0.001)
    plan = make_plan(profile, (Stage(0, 3, 2),), 1e6, cost_model="calibrated")
    options = _core.ScheduleOptions(
        "data_parallel", list(plan.in_flight), 1, plan.placement, uses_allreduce=True
    )
    # The ring carries 2 (2 - 1) / 2 of 4,000 bytes, at 1,000 bytes per millisecond.
    assert predict_ms(plan, options) == pytest.approx((12.0 + 0.5 + 4.0 + 4.0) / 2)


def test_latency_is_paid_where_a_worker_waits_for_it() -> None:
    plan = _straight(_profile(latency_ms=0.5))
    assert _predicted_ms(plan, "model_parallel") == pytest.approx(12.0 + 2 * 0.5)
    assert _predicted_ms(plan, "flush", 2) == pytest.approx(6.0 * 3 / 2 + 2 * 0.5)


def test_workers_count_as_having_a_core_each_and_the_plan_says_so_where_they_have_not() -> None:
    line = "2 workers of a host share 1 core: the predicted time assumes a core for each"
    crowded, roomy = (_straight(_profile(num_cores=n), workers_per_host=2) for n in (1, 2))
    assert crowded.bottleneck_ms == roomy.bottleneck_ms == pytest.approx(6.0)
    assert line in str(crowded).splitlines()
    assert "share" not in str(roomy)


def test_a_worker_with_a_machine_of_its_own_is_as_fast_as_it_is_alone() -> None:
    profile = _profile(num_cores=2, alone_speed=1.5)
    assert _straight(profile, workers_per_host=2).bottleneck_ms == pytest.approx(6.0)
    assert _straight(profile, workers_per_host=1).bottleneck_ms == pytest.approx(6.0 / 1.5)
    assert _straight(profile).bottleneck_ms == pytest.approx(6.0 / 1.5)


def test_figures_that_are_no_longer_known_are_kept_and_change_nothing(tmp_path: Path) -> None:
    profile = _profile()
    older = replace(profile, runtime={**(profile.runtime or {}), "crowded_speed": 0.5})
    plan = _straight(older, workers_per_host=2)
    assert _predicted_ms(plan) == _predicted_ms(_straight(profile, workers_per_host=2))
    host = {**plan.predicted["host"], "crowded_speed": 0.5}
    crowded = replace(plan, predicted={**plan.predicted, "host": host})
    crowded.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.predicted["host"] == host
    assert _predicted_ms(loaded) == _predicted_ms(plan)


def test_a_plan_that_leaves_workers_idle_shares_cores_among_the_others_alone() -> None:
    profile = _profile(num_cores=3, alone_speed=1.5)
    plan = _straight(profile, workers_per_host=3)
    assert plan.workers_used == 2
    assert plan.predicted["host"]["num_workers"] == 2
    assert plan.bottleneck_ms == pytest.approx(6.0 / (1.5 / 1.25))


def test_one_worker_is_taken_where_waiting_for_what_varies_makes_two_as_slow() -> None:
    """The search compares mean times, by which two workers are better. With the spread of the times of items,
    one worker is faster.
    """
    spread = dict.fromkeys(("FORWARD", "BACKWARD"), (0.25, 1.0, 1.75))
    costly = PositionCosts(ItemCost(2.4, 2.4), ItemCost(2.4, 2.4), 0.0)
    positions = {"only": _COSTS_NOTHING, "first": costly, "middle": costly, "last": costly}
    means, varying = (
        partition(_profile(positions=positions, **how), 2, 1e15, cost_model="calibrated", straight=True)
        for how in ({}, {"spread": spread})
    )
    assert (means.num_stages, varying.num_stages) == (2, 1)
    assert varying.bottleneck_ms == pytest.approx(12.0, rel=0.02)
    assert varying.predicted["search"]["found_ms"] < 12.0
    fixed = partition(
        _profile(positions=positions, spread=spread),
        2,
        1e15,
        cost_model="calibrated",
        boundaries=[1],
    )
    assert fixed.num_stages == 2  # the number of stages was given


def test_items_that_vary_cost_time_where_workers_wait_for_each_other_and_nowhere_else() -> None:
    spread = dict.fromkeys(("FORWARD", "BACKWARD"), (0.5, 1.0, 1.5))
    plan = _straight(_profile(spread=spread))
    assert plan.bottleneck_ms is not None
    assert 6.0 * 1.02 < plan.bottleneck_ms < 6.0 * 1.5
    assert _predicted_ms(plan) == pytest.approx(plan.bottleneck_ms)
    # One worker computes at a time, so only the mean counts.
    assert _predicted_ms(plan, "model_parallel") == pytest.approx(12.0, rel=0.02)
    alone = make_plan(_profile(spread=spread), (Stage(0, 3),), 1e15, cost_model="calibrated")
    assert alone.bottleneck_ms == pytest.approx(12.0, rel=0.02)
    # Plans are compared without the spread. Otherwise the search would prefer a plan for which short times
    # happened to be drawn.
    found = partition(_profile(spread=spread), 2, 1e15, cost_model="calibrated", straight=True)
    assert found.stages == plan.stages
    assert found.predicted["search"]["found_ms"] == pytest.approx(6.0)


def test_small_stages_are_not_pipelined_where_the_runtime_costs_more_than_it_saves() -> None:
    costly = PositionCosts(ItemCost(5.0, 5.0), ItemCost(5.0, 5.0), 0.0)
    positions = {"only": _COSTS_NOTHING, "first": costly, "middle": costly, "last": costly}
    plan = partition(_profile(positions=positions), 2, 1e9, cost_model="calibrated", straight=True)
    assert plan.num_stages == 1
    assert partition(_profile(), 2, 1e9, cost_model="calibrated", straight=True).num_stages == 2


def test_the_search_says_what_it_looked_at_and_is_never_behind_the_formulas() -> None:
    plan = partition(_profile(6), 3, 1e15, cost_model="calibrated")
    found = plan.predicted["search"]
    assert found["plans"] > 10
    assert plan.bottleneck_ms == pytest.approx(found["found_ms"])
    # If both are equally fast, the smaller plan is chosen.
    assert found["found_ms"] <= found["formulas_ms"] * (1 + 1e-8)
    assert plan.bottleneck_ms == pytest.approx(6.0)  # three stages take 6 ms each


def test_a_calibrated_plan_hides_slow_links_as_the_paper_s_does() -> None:
    profile = _profile()  # 1,000 bytes take 4 ms one way at 250 kB/s, and a stage takes 6 ms.
    plan = partition(profile, 2, 250e3, cost_model="calibrated", boundaries=[1], replicas=[1, 1])
    assert plan.in_flight == (4, 1)
    assert plan.bottleneck_ms == pytest.approx(6.0)
    assert plan.predicted["samples_per_s"] == pytest.approx(8e3 / 6)
    assert plan.predicted["hidden_links"]["after_ms"] == pytest.approx(6.0)
    assert plan.predicted["hidden_links"]["before_ms"] > 9
    assert _predicted_ms(plan) == pytest.approx(6.0)
    kept = partition(
        profile, 2, 250e3, cost_model="calibrated", boundaries=[1], replicas=[1, 1], hides_links=False
    )
    assert kept.in_flight == (2, 1)
    assert plan.predicted["memory_bytes"] > kept.predicted["memory_bytes"]


def test_runtime_figures_of_another_form_are_to_be_measured_anew() -> None:
    profile = replace(_profile(), runtime={"positions": {}})
    with pytest.raises(ValueError, match=r"the profile's runtime\.\w+ is missing: calibrate it anew"):
        partition(profile, 2, 1e9, cost_model="calibrated")


def test_a_plan_predicts_the_same_from_its_file(tmp_path: Path) -> None:
    plan = _straight(_profile(latency_ms=0.25), workers_per_host=2)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert _predicted_ms(loaded, "flush", 4) == pytest.approx(_predicted_ms(plan, "flush", 4))


def test_a_calibrated_profile_is_the_same_from_its_file(tmp_path: Path) -> None:
    profile = _profile(latency_ms=0.25)
    profile.save(tmp_path / "profile.json")
    loaded = Profile.load(tmp_path / "profile.json")
    assert loaded == profile
    assert runtime_of(loaded) == _runtime(latency_ms=0.25)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latency_ms": -1.0}, "runtime.latency_ms is -1.0"),
        ({"forward_share": {"first_ms": 0, "later_ms": 0}}, "runtime.forward_share.minibatch_ms is missing"),
        ({"spread": {"UPDATE": [1.0, -0.5]}}, r"runtime.spread.UPDATE\[1\] is -0.5"),
        ({"positions": {}}, "runtime.positions.only is missing"),
        ({"num_cores": 0}, "runtime.num_cores is 0"),
    ],
)
def test_runtime_figures_that_cannot_be_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_value("runtime", write_value(_runtime()) | changes, RuntimeCosts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage_costs": []}, "predicted.stage_costs has 0 entries for 2 stages"),
        ({"stage_costs": [{}, {}]}, r"predicted.stage_costs\[0\].forward is missing"),
        ({"links": []}, "predicted.links has 0 entries for 1 boundaries"),
        ({"host": {"num_workers": 2}}, "predicted.host.num_cores is missing"),
        ({"spread": {"FORWARD": 1.0}}, "predicted.spread.FORWARD is 1.0"),
        (
            {"waking": [{"after_ms": 1.0, "shares": {}}]},
            "stage 0 has 0 waking_ms for 1 in predicted",
        ),
        ({"waking": 0}, "predicted.waking is 0"),
        ({"waking": [{"after_ms": "1", "shares": {}}]}, r"predicted.waking\[0\].after_ms is '1'"),
    ],
)
def test_a_plan_s_costs_that_cannot_be_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    plan = _straight(_profile())
    with pytest.raises(ValueError, match=message):
        _predicted_ms(replace(plan, predicted=plan.predicted | changes))
    options = _core.ScheduleOptions("pipedream", list(plan.in_flight), 1, plan.placement)
    spoilt = replace(plan, predicted=plan.predicted | changes)
    # A wrong figure must not spoil the result of a finished run.
    assert predict_ms_of_run(spoilt, options) == plan.bottleneck_ms


def test_factors_that_a_profile_has_are_in_no_plan_without_a_codec() -> None:
    """Replicas push factors only with a codec. Without one, the costs must be those of whole gradients."""
    dense = _profile(update_ms_per_byte=0.001)
    factored = replace(dense.layers[0], factors=(WeightFactors(1000, 10),))
    profile = replace(dense, layers=(factored, *dense.layers[1:]))
    stages = (Stage(0, 3, 2),)
    plans = [make_plan(one, stages, 1e15, cost_model="calibrated") for one in (dense, profile)]
    assert costs_of(plans[1]) == costs_of(plans[0])
    assert plans[1].bottleneck_ms == plans[0].bottleneck_ms


def test_spares_and_replicas_update_their_own_shares() -> None:
    """The plan's costs are for a replica that owns 1/3 of the parameters. With one spare a replica owns 1/5,
    and the spare owns 2/5. A spare owns a shard and computes no minibatches.
    """
    profile = _profile(update_ms=0.5, update_ms_per_byte=0.001, copy_ms_per_byte=0.0005)
    plan = make_plan(profile, (Stage(0, 3, 3),), 1e15, cost_model="calibrated")
    costs = costs_of(plan)
    assert costs is not None
    assert costs[0].shard_update_ms == pytest.approx(4000 * 0.001 / 3)
    spared = plan.with_spare_shards([1])
    options = _core.ScheduleOptions("pipedream", list(spared.in_flight), 1, spared.placement)
    programs = [_core.make_program(options, rank, 6) for rank in range(4)]
    simulation = simulate_programs(spared, options, programs, costs, [])

    def updates_ms(worker: int) -> list[float]:
        row = simulation.timeline[worker]
        return [end_ms - begin_ms for step, begin_ms, end_ms in row if step.opcode == "UPDATE"]

    assert updates_ms(0) == [pytest.approx(0.5 + 4.0 / 5)] * 2
    assert updates_ms(3) == [pytest.approx(0.5 + 4.0 * 2 / 5)] * 2


def test_of_many_workers_a_search_begins_at_some_counts_of_them() -> None:
    """A search for 1,024 workers must not begin with every count. Otherwise it would solve the formulas 2,048
    times before it scores its first plan.
    """
    counts = plan_search._some_counts
    assert counts(5) == [1, 2, 3, 4, 5]
    assert counts(64) == list(range(1, 65))
    assert len(counts(1_000)) == len(set(counts(1_000))) == 64
    assert counts(1_000)[-1] == 1_000
