"""Tests partition() against the best of all plans and against published optima."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from all_plans import enumerate_plans
from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream import _core
from pipedream.planning.layer_profile import LayerProfile, Profile
from pipedream.planning.partitioner import partition
from pipedream.planning.plan import Stage

SHARED_PROFILES = Path(__file__).resolve().parents[4] / "shared" / "profiles"
needs_published = pytest.mark.skipif(
    not SHARED_PROFILES.is_dir(), reason="the published profiles are not beside this tree"
)


def make_profile(*layers: tuple[float, int, int], batch_size: int | None = None) -> Profile:
    """Returns layers from rows of three figures: milliseconds of forward and backward together, activation
    bytes, and parameter bytes.
    """
    return Profile(
        tuple(
            LayerProfile(f"layer{i}", compute_ms / 4, compute_ms * 3 / 4, activation_bytes, parameter_bytes)
            for i, (compute_ms, activation_bytes, parameter_bytes) in enumerate(layers)
        ),
        batch_size=batch_size,
    )


def bottleneck_ms(profile: Profile, stages: tuple[Stage, ...], bytes_per_s: float) -> Fraction:
    """Returns the bottleneck by the cost model of csrc/planner/partition.h, in exact arithmetic."""
    times: list[Fraction] = []
    for stage_index, stage in enumerate(stages):
        layers = profile.layers[stage.first_layer : stage.last_layer + 1]
        m, bandwidth = stage.num_replicas, Fraction(bytes_per_s)
        compute = sum(
            (Fraction(layer.forward_ms) + Fraction(layer.backward_ms) for layer in layers), Fraction(0)
        )
        sync = Fraction(4000 * (m - 1) * sum(layer.parameter_bytes for layer in layers), m) / bandwidth
        times.append(max(compute, sync) / m)
        if stage_index + 1 < len(stages):
            times.append(Fraction(2000 * layers[-1].activation_bytes) / bandwidth)
    return max(times)


layers_strategy = st.lists(
    st.tuples(st.integers(0, 40).map(lambda q: q / 4), st.integers(0, 2000), st.integers(0, 2000)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150)
@given(layers_strategy, st.integers(1, 5), st.sampled_from([1e4, 1e5, 1e6, 1e7]), st.booleans())
def test_bottleneck_is_that_of_the_best_of_all_plans(
    layers: list[tuple[float, int, int]], num_workers: int, bytes_per_s: float, straight: bool
) -> None:
    profile = make_profile(*layers)
    plan = partition(profile, num_workers, bytes_per_s, straight=straight)
    best = min(
        bottleneck_ms(profile, stages, bytes_per_s)
        for stages in enumerate_plans(profile.num_layers, num_workers, straight)
    )
    assert plan.bottleneck_ms == pytest.approx(float(best), rel=1e-9)
    assert float(bottleneck_ms(profile, plan.stages, bytes_per_s)) == pytest.approx(float(best), rel=1e-9)
    assert plan.workers_used <= num_workers
    assert not (straight and any(stage.num_replicas > 1 for stage in plan.stages))


@settings(max_examples=50)
@given(layers_strategy, st.integers(1, 5), st.sampled_from([1e4, 1e6]))
def test_predicted_stage_and_boundary_times_explain_the_bottleneck(
    layers: list[tuple[float, int, int]], num_workers: int, bytes_per_s: float
) -> None:
    plan = partition(make_profile(*layers), num_workers, bytes_per_s)
    predicted = plan.predicted
    assert len(predicted["stage_ms"]) == plan.num_stages
    assert len(predicted["boundary_ms"]) == plan.num_stages - 1
    slowest = max(predicted["stage_ms"] + predicted["boundary_ms"])
    assert slowest == pytest.approx(plan.bottleneck_ms, rel=1e-9)


def test_plan_says_what_was_asked_for_and_what_is_predicted() -> None:
    profile = make_profile((10, 100, 8), (10, 0, 16), batch_size=32)
    plan = partition(profile, 2, "8Mbit/s", straight=True)
    assert plan.stages == (Stage(0, 0), Stage(1, 1))
    assert (plan.num_workers, plan.bandwidth_bytes_per_s, plan.cost_model) == (2, 1e6, "paper")
    assert plan.bottleneck_ms == pytest.approx(10)
    assert plan.predicted["samples_per_s"] == pytest.approx(3200)
    assert plan.predicted["memory_bytes"] is None
    assert plan.predicted["boundary_ms"] == [pytest.approx(0.2)]
    assert plan.predicted["stage_parameter_bytes"] == [8, 16]
    assert plan.predicted["stage_layers"] == [["layer0", "layer0"], ["layer1", "layer1"]]


def test_samples_per_s_needs_a_batch_size_and_a_time() -> None:
    assert partition(make_profile((10, 0, 0)), 1, 1e6).predicted["samples_per_s"] is None
    assert partition(make_profile((0, 0, 0), batch_size=4), 1, 1e6).predicted["samples_per_s"] is None
    # The time is so short that samples per second are infinite. The plan must be made nevertheless.
    assert partition(make_profile((1e-320, 0, 0), batch_size=4), 1, 1e6).predicted["samples_per_s"] is None


def test_ties_go_to_fewer_workers_then_to_fewer_stages() -> None:
    assert partition(make_profile((8, 0, 0), (8, 0, 0)), 2, 1e6).stages == (Stage(0, 1, 2),)
    # The second layer cannot be made faster, so the first one needs no replicas.
    plan = partition(make_profile((4, 0, 0), (8, 0, 10**9)), 8, 1e6)
    assert plan.stages == (Stage(0, 0), Stage(1, 1))


def test_workers_stay_idle_where_using_them_is_slower() -> None:
    plan = partition(make_profile((8, 0, 10**9)), 4, 1e6)
    assert (plan.num_workers, plan.workers_used, plan.noam) == (4, 1, 1)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_workers": 0}, ValueError, "num_workers is 0: give at least 1"),
        ({"num_workers": "4"}, TypeError, "num_workers is '4': give a whole number"),
        ({"num_workers": True}, TypeError, "num_workers is True"),
        ({"bandwidth": "10Gb"}, ValueError, "the unit 'Gb' is unknown"),
        ({"bandwidth": -1}, ValueError, "bandwidth is -1: it must be positive"),
        ({"memory": "16 apples"}, ValueError, "memory is '16 apples'|unit 'apples' is unknown"),
        ({"cost_model": "simple"}, ValueError, "cost_model is 'simple': it is one of paper, calibrated"),
        ({"cost_model": "calibrated"}, ValueError, "the profile has no runtime figures: pipedream.calibrate"),
        ({"workers_per_host": 0}, ValueError, "workers_per_host is 0: give at least 1"),
        ({"workers_per_host": 2}, ValueError, "workers_per_host is 2, and cost_model is 'paper'"),
        ({"profile": {"layers": []}}, TypeError, "profile is a dict: give a Profile"),
    ],
)
def test_argument_that_cannot_be_is_refused_by_value(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "profile": make_profile((1, 0, 0)),
        "num_workers": 1,
        "bandwidth": 1e6,
    } | changes
    with pytest.raises(error, match=message):
        partition(**arguments)


@cache
def load_published(model: str) -> Profile:
    return Profile.load(SHARED_PROFILES / f"{model}.json")


@pytest.mark.slow
@needs_published
def test_every_published_optimum_is_met() -> None:
    rows = json.loads((SHARED_PROFILES / "optima.json").read_text())["rows"]
    assert rows
    for row in rows:
        profile = load_published(row["model"])
        plan = partition(profile, row["num_workers"], row["bandwidth_bytes_per_s"])
        assert plan.bottleneck_ms == pytest.approx(row["bottleneck_ms"], rel=1e-9), row
        exact = bottleneck_ms(profile, plan.stages, row["bandwidth_bytes_per_s"])
        assert float(exact) == pytest.approx(row["bottleneck_ms"], rel=1e-9), row


@needs_published
def test_vgg16_on_sixteen_workers_is_fifteen_to_one() -> None:
    plan = partition(load_published("vgg16"), 16, "10Gbit/s")
    assert plan.stages == (Stage(0, 30, 15), Stage(31, 39, 1))
    assert plan.bottleneck_ms == pytest.approx(44.159, rel=1e-9)
    assert (plan.noam, plan.in_flight) == (2, (2, 1))
    assert plan.predicted["samples_per_s"] == pytest.approx(2898.6, abs=0.05)


def test_more_in_flight_hides_a_slow_link_where_that_pays() -> None:
    layers = ((10, 4_000_000, 8), (10, 0, 8))
    # The link takes 4 ms one way, and a stage 10 ms.
    slow = partition(make_profile(*layers), 2, 1e9, straight=True)
    assert slow.in_flight == (3, 1)
    gain = slow.predicted["hidden_links"]
    assert gain["after_ms"] == pytest.approx(10)
    assert gain["before_ms"] > 14
    assert "more in flight, at the price of memory and staleness, hide the links" in str(slow)
    fast = partition(make_profile(*layers), 2, 1e11, straight=True)
    assert fast.in_flight == (2, 1)
    assert "hidden_links" not in fast.predicted


def test_a_plan_is_compared_with_what_else_could_be_run() -> None:
    profile = make_profile((10, 1000, 8), (10, 0, 8))
    plan = partition(profile, 2, 1e9, straight=True)
    alternatives = plan.predicted["alternatives_ms"]
    assert alternatives["one_worker"] == pytest.approx(20)
    assert alternatives["data_parallel"] == pytest.approx(10)
    assert alternatives["model_parallel"] == pytest.approx(20.002)
    assert alternatives["straight"] == pytest.approx(10)
    assert "speed: 2.00 x one worker, 1.00 x data parallel, 2.00 x model parallel" in str(plan)
    assert "do not pipeline" not in str(plan)
    slow = partition(
        make_profile((10, 1000, 10**6), (10, 0, 8)), 2, 1e3
    )  # every stage would wait for the link
    assert "do not pipeline this model here: one worker alone is as fast" in str(slow)
    copies = partition(make_profile((10, 10**9, 8), (10, 0, 8)), 2, 1e9)
    assert "do not pipeline this model here: copies of the whole model are fastest" in str(copies)


def test_a_schedule_that_drains_is_planned_with_its_bubble_and_m_is_chosen() -> None:
    profile = make_profile(*[(10, 0, 0)] * 4, batch_size=8)
    plan = partition(profile, 2, 1e9, schedule="flush", straight=True)
    assert (plan.stages, plan.microbatches) == ((Stage(0, 1), Stage(2, 3)), 8)
    assert plan.bottleneck_ms == pytest.approx(20 * 9 / 8)
    assert "for schedule 'flush' with microbatches=8" in str(plan)
    assert partition(profile, 2, 1e9, schedule="gpipe", microbatches=2, straight=True).bottleneck_ms == (
        pytest.approx(20 * 3 / 2)
    )


def test_a_plan_for_a_schedule_that_drains_says_of_how_many_minibatches_an_update_is() -> None:
    profile = make_profile(*[(10, 0, 0)] * 4, batch_size=8)
    how: dict[str, Any] = {"schedule": "flush", "boundaries": [1], "replicas": [2, 3]}
    assert "an update is of" not in str(partition(profile, 5, 1e9, microbatches=6, **how))
    plan = partition(profile, 5, 1e9, microbatches=1, **how)
    assert "an update is of 6 minibatches, a round of all stages' replicas" in str(plan)
    assert "staleness" not in str(plan)
    asynchronous = partition(profile, 5, 1e9, boundaries=[1], replicas=[2, 3])
    assert "an update is of" not in str(asynchronous)
    assert "staleness=2" in str(asynchronous)


def test_stages_of_a_fraction_of_a_millisecond_are_warned_of() -> None:
    warned = [
        "which the formulas leave out" in str(partition(make_profile(*layers), 2, 1e12, straight=True))
        for layers in ([(0.75, 0, 8)] * 2, [(0.75, 0, 8)], [(1.25, 0, 8)] * 2)
    ]
    assert warned == [True, False, False]


def test_2bw_has_as_many_microbatches_as_are_in_flight_where_m_is_chosen() -> None:
    """A plan may have more than 32 microbatches in flight. "2bw" then gets as many microbatches per
    minibatch.
    """
    profile = make_profile(*[(10, 0, 0)] * 40, batch_size=64)
    plan = partition(profile, 40, 1e9, schedule="2bw", boundaries=range(39))
    assert (plan.num_stages, plan.microbatches) == (40, 39)
    few = partition(profile, 40, 1e9, schedule="2bw", microbatches=2, straight=True)
    assert few.num_stages == 3
    with pytest.raises(ValueError, match="microbatches is 8, and schedule '2bw' needs as many"):
        partition(profile, 40, 1e9, schedule="2bw", microbatches=8, boundaries=range(39))


def test_more_microbatches_than_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="microbatches is 8, and the profile's minibatches have 4 samples"):
        partition(make_profile((1, 0, 0), batch_size=4), 1, 1e9, schedule="flush", microbatches=8)


def test_the_planner_of_2bw_uses_all_workers() -> None:
    profile = make_profile(*[(10, 0, 0)] * 4, batch_size=32)
    plan = partition(profile, 4, 1e9, schedule="2bw")
    assert plan.workers_used == 4
    assert plan.bottleneck_ms == pytest.approx(10)


@settings(max_examples=40, deadline=None)
@given(
    costs=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 20)), min_size=1, max_size=3),
    num_workers=st.integers(1, 5),
    microbatches=st.integers(1, 6),
)
def test_with_microbatches_a_round_is_as_long_as_replicas_need_and_the_plan_is_the_best(
    costs: list[tuple[float, float, float]], num_workers: int, microbatches: int
) -> None:
    columns = [list(column) for column in zip(*costs, strict=True)]

    def time_s(first: int, last: int, replicas: int) -> float:
        compute_s, _, parameters = (sum(column[first : last + 1]) for column in columns)
        per_round = math.lcm(microbatches, replicas) // microbatches
        return max(compute_s / replicas, 4 * (replicas - 1) * parameters / replicas / per_round)

    def best_s(first: int, workers: int) -> float:
        whole = min(time_s(first, len(costs) - 1, r) for r in range(1, workers + 1))
        cuts = [
            max(time_s(first, last, r), 2 * columns[1][last], best_s(last + 1, workers - r))
            for last in range(first, len(costs) - 1)
            for r in range(1, workers)
        ]
        return min([whole, *cuts])

    _, found_s = _core.partition(*columns, num_workers, 1.0, num_microbatches=microbatches)
    assert found_s == pytest.approx(best_s(0, num_workers), rel=1e-9, abs=1e-12)
