"""Tests plans whose replicas push factors: two small matrices whose product is a weight's gradient. Small
plans are compared with the best of all possible plans. Other tests are about plan files, a plan's text and
simulations. A round is the minibatches of one update.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from all_plans import enumerate_plans
from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream import _core
from pipedream.common.document import write_value
from pipedream.common.errors import FileFormatError
from pipedream.planning.factor_rule import FACTOR_CODEC, are_smaller, factored_sum
from pipedream.planning.layer_profile import LayerProfile, Profile, WeightFactors
from pipedream.planning.partitioner import partition
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.prediction import predict_ms
from pipedream.planning.runtime_costs import FREE, stage_costs
from pipedream.simulate.plan_simulation import simulate_plan

_Row = tuple[float, int, int, list[tuple[int, int]], int]


def _profile(rows: list[_Row], *, saved: bool = False, product_share: float | None = None) -> Profile:
    """Returns a profile with one layer per row. A row has five figures:
    - milliseconds of forward and backward together
    - bytes of activations
    - bytes of parameters other than factorable weights
    - (bytes, factor bytes) of each factorable weight
    - bytes saved for the backward

    `saved` is whether the profile has the saved bytes. `product_share` is the measured time of each weight's
    product as a share of the layer's backward, or None if it was not measured.
    """
    layers = []
    for index, (ms, activation, others, weights, kept) in enumerate(rows):
        product_ms = None if product_share is None else product_share * 3 * ms / 4
        factors = tuple(WeightFactors(*weight, product_ms) for weight in weights)
        parameters = others + sum(weight for weight, _ in weights)
        layers.append(
            LayerProfile(
                f"layer{index}",
                ms / 4,
                3 * ms / 4,
                activation,
                parameters,
                saved_bytes=kept if saved else None,
                factors=factors,
            )
        )
    return Profile(tuple(layers), batch_size=4)


def _stage_ms(layers: tuple[LayerProfile, ...], r: int, bytes_per_s: float, extra_ms: float = 0.0) -> float:
    """Returns the milliseconds per minibatch of a stage with r replicas, computed weight by weight from the
    rules in docs/parameter-server.md.
    """
    compute_ms, sent_bytes = extra_ms, 0.0  # bytes in one direction in a round
    for layer in layers:
        compute_ms += layer.compute_ms
        dense_bytes = float(layer.parameter_bytes)
        measured_ms = sum(product_ms or 0.0 for _, _, product_ms in layer.factors or ())
        # The products' measured times are scaled down if their sum exceeds the layer's backward.
        part = min(1.0, layer.backward_ms / measured_ms) if measured_ms else 1.0
        for weight, factors, product_ms in layer.factors or ():
            if r > 1 and r * factors < 2 * weight:
                dense_bytes -= weight
                sent_bytes += (r - 1) * factors
                half_ms = layer.backward_ms / 2 * weight / layer.parameter_bytes
                compute_ms += (r - 1) * (half_ms if product_ms is None else part * product_ms)
        sent_bytes += 2 * (r - 1) / r * dense_bytes
    return max(compute_ms, 2e3 * sent_bytes / bytes_per_s) / r


def _bottleneck_ms(profile: Profile, stages: tuple[Stage, ...], bytes_per_s: float) -> float:
    times = []
    for index, stage in enumerate(stages):
        layers = profile.layers[stage.first_layer : stage.last_layer + 1]
        times.append(_stage_ms(layers, stage.num_replicas, bytes_per_s))
        if index + 1 < len(stages):
            times.append(2e3 * layers[-1].activation_bytes / bytes_per_s)
    return max(times)


_weights = st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 900)), max_size=2)
_rows = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 1000), st.integers(0, 300), _weights, st.integers(0, 1000)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(
    _rows,
    st.integers(1, 6),
    st.sampled_from([1e4, 1e5, 1e6]),
    st.sampled_from([None, 0.0, 0.1, 0.5, 1.0]),
)
def test_a_plan_by_factors_is_the_best_of_all_plans(
    rows: list[_Row], num_workers: int, bytes_per_s: float, product_share: float | None
) -> None:
    profile = _profile(rows, product_share=product_share)
    if not any(layer.factors for layer in profile.layers):
        return
    plan = partition(profile, num_workers, bytes_per_s, codec=FACTOR_CODEC, hides_links=False)
    best = min(
        _bottleneck_ms(profile, stages, bytes_per_s)
        for stages in enumerate_plans(profile.num_layers, num_workers)
    )
    assert plan.bottleneck_ms == pytest.approx(best, rel=1e-9)
    assert _bottleneck_ms(profile, plan.stages, bytes_per_s) == pytest.approx(best, rel=1e-9)
    slowest = max(plan.predicted["stage_ms"] + plan.predicted["boundary_ms"])
    assert slowest == pytest.approx(best, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    st.tuples(st.integers(0, 40), st.integers(0, 300), _weights),
    st.integers(2, 300),
    st.integers(1, 3000).map(lambda q: q / 100),
)
def test_the_fewest_replicas_within_a_bound_are_found_though_more_may_take_longer(
    layer: tuple[int, int, list[tuple[int, int]]], num_workers: int, wanted_ms: float
) -> None:
    """With every further replica factors take more time. From some number of replicas on, the gradient is
    pushed whole instead.
    """
    compute_ms, others, weights = layer
    profile = _profile([(compute_ms, 0, others, weights, 0), (round(wanted_ms), 0, 0, [(4, 4)], 0)])
    # The second layer has so many parameters that replicas would slow it down. So it gets one replica, and
    # the first layer gets the fewest replicas that keep up with it.
    profile = replace(
        profile, layers=(profile.layers[0], replace(profile.layers[1], parameter_bytes=1 << 40, factors=None))
    )
    if not profile.layers[0].factors:
        return
    plan = partition(profile, num_workers, 1e4, codec=FACTOR_CODEC, hides_links=False)
    best = min(
        _bottleneck_ms(profile, stages, 1e4)
        for r in range(1, num_workers + 1)
        for stages in ((Stage(0, 1, r),), *([(Stage(0, 0, r), Stage(1, 1))] if r < num_workers else []))
    )
    assert plan.bottleneck_ms == pytest.approx(best, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    _rows,
    st.integers(1, 4),
    st.sampled_from([1e4, 1e5]),
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=4, max_size=4),
    st.sampled_from([None, 0.1, 0.5]),
)
def test_speeds_and_factors_are_planned_for_together(
    rows: list[_Row], num_workers: int, bytes_per_s: float, speeds: list[float], product_share: float | None
) -> None:
    profile, speeds = _profile(rows, product_share=product_share), speeds[:num_workers]
    if not any(layer.factors for layer in profile.layers):
        return

    def slowest_ms(stages: tuple[Stage, ...]) -> float:
        rank, times = 0, []
        for index, stage in enumerate(stages):
            speed = min(speeds[rank : (rank := rank + stage.num_replicas)])
            # A lower speed lengthens all times of a layer alike.
            slower = [(row[0] / speed, *row[1:]) for row in rows]
            layers = _profile(slower, product_share=product_share).layers
            layers = layers[stage.first_layer : stage.last_layer + 1]
            times.append(_stage_ms(layers, stage.num_replicas, bytes_per_s))
            if index + 1 < len(stages):
                times.append(2e3 * layers[-1].activation_bytes / bytes_per_s)
        return max(times)

    best = min(map(slowest_ms, enumerate_plans(profile.num_layers, num_workers)))
    plan = partition(profile, num_workers, bytes_per_s, speeds=speeds, codec=FACTOR_CODEC, hides_links=False)
    assert plan.bottleneck_ms == pytest.approx(best, rel=1e-9)
    slowest = max(plan.predicted["stage_ms"] + plan.predicted["boundary_ms"])
    assert slowest == pytest.approx(best, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(_rows, st.integers(1, 3), st.integers(2000, 20000))
def test_memory_by_factors_is_kept_to_exactly(rows: list[_Row], num_workers: int, memory: int) -> None:
    profile = _profile(rows, saved=True)
    if not any(layer.factors for layer in profile.layers):
        return

    def fits(stages: tuple[Stage, ...]) -> bool:
        needed = _core.memory_of_plan(
            [float(layer.activation_bytes) for layer in profile.layers],
            [float(layer.parameter_bytes) for layer in profile.layers],
            saved_bytes=[float(layer.saved_bytes or 0) for layer in profile.layers],
            stages=[(stage.first_layer, stage.last_layer, stage.num_replicas) for stage in stages],
            in_flight=Plan(stages).in_flight,
            num_versions=Plan(stages).in_flight,
            own_per_round=[1] * len(stages),
            recompute=[False] * len(stages),
            costs=_core.MemoryCosts(state_copies=1.0, step_copies=1.0),
            factors=[
                [(float(weight), float(factors), 0.0) for weight, factors, _ in layer.factors or ()]
                for layer in profile.layers
            ],
        )
        return max(needed) <= memory

    times = [
        _bottleneck_ms(profile, one, 1e5) for one in enumerate_plans(len(rows), num_workers) if fits(one)
    ]
    asked: dict[str, Any] = {"memory": memory, "recompute": False, "codec": FACTOR_CODEC}
    if not times:
        with pytest.raises(ValueError, match="no plan has"):
            partition(profile, num_workers, 1e5, **asked)
        return
    assert partition(profile, num_workers, 1e5, **asked).bottleneck_ms == pytest.approx(min(times), rel=1e-9)


def test_memory_of_factored_weights_is_of_factors_and_whole_states() -> None:
    def needed(factors: list[tuple[float, float, float]]) -> float:
        (num_bytes,) = _core.memory_of_plan(
            [0.0],
            [1000.0],
            saved_bytes=[0.0],
            stages=[(0, 0, 4)],
            in_flight=[1],
            num_versions=[1],
            own_per_round=[1],
            recompute=[False],
            costs=_core.MemoryCosts(state_copies=1.0, step_copies=1.0),
            factors=[factors],
        )
        return num_bytes

    # The terms are, in order: a version, the model and the gradients; the momentum of a shard; copies of
    # gradients for the other replicas, slots for their pushes, and slots for pulls; a step's temporary
    # tensors.
    assert needed([]) == 3000 + 250 + 3 * 750 + 1000
    # `dense` is for the 200 bytes that are not factored: a version and the model; the momentum of a shard;
    # two rounds' gradients with copies; slots for pushes and for pulls. The factored weight has a version,
    # the model, its whole momentum, factors of two rounds, and slots for the factors of three other replicas.
    # A step also needs temporary tensors, a gradient, and the four factors from which it is computed.
    dense = 2 * 200 + 50 + 2 * (200 + 150) + 2 * 150
    assert needed([(800.0, 30.0, 0.0)]) == dense + 3 * 800 + (2 + 3) * 30 + 1000 + 800 + 4 * 30
    # Factors of half the weight's size are not smaller, so gradients are pushed whole.
    assert needed([(800.0, 400.0, 0.0)]) == needed([])


def test_the_rule_is_by_bytes_of_both_directions() -> None:
    assert are_smaller(49, 50, 2)
    assert not are_smaller(50, 50, 2)
    assert are_smaller(24, 50, 4)
    assert not are_smaller(25, 50, 4)
    assert not are_smaller(40, 50, 2, pushed_bytes=25)  # the encoded gradient has half of its bytes
    layers = _profile([(8, 0, 100, [(50, 24), (50, 26)], 0)]).layers
    assert factored_sum(layers, 1) == (0, 0, 0, 0)
    # The backward takes 6 ms. Half of it makes gradients of weights, and these weights are half of the
    # parameters.
    assert factored_sum(layers, 2) == (2, 100, 50, 1.5)
    assert factored_sum(layers, 4) == (1, 50, 24, 0.75)
    assert factored_sum(layers, 2, minibatches=2) == (1, 50, 48, 0.75)


def _wide() -> Profile:
    """Returns a profile of a small layer, and of a layer whose gradients are large and whose factors are
    small.
    """
    return _profile([(40, 1000, 8000, [], 0), (90, 0, 0, [(100_000, 500)], 0)])


def test_a_plan_by_factors_says_so_in_its_text_and_file(tmp_path: Path) -> None:
    plan = partition(_wide(), 2, 1e6, codec=FACTOR_CODEC, replicas=[2])
    assert plan.codec == {"pushes": "factors"}
    row = {"num_weights": 1, "weight_bytes": 100_000, "factor_bytes": 500}
    assert plan.predicted["factored"] == [row]
    assert "which run takes from the plan: stage 0 pushes 500 B in the place of 97.66 KiB" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    dense = partition(_wide(), 2, 1e6)
    assert dense.codec == {}
    assert "codec" not in dense.to_dict()
    assert "factored" not in dense.predicted


def test_a_plan_without_factors_says_how_much_faster_one_with_them_is() -> None:
    dense, by_factors = partition(_wide(), 3, 1e6), partition(_wide(), 3, 1e6, codec=FACTOR_CODEC)
    gain = (dense.bottleneck_ms or 0.0) / (by_factors.bottleneck_ms or 1.0)
    assert gain > 1.2
    assert f"{gain:.2f} x as fast is predicted of a plan for codec={FACTOR_CODEC}" in str(dense)
    assert "x as fast is predicted" not in str(by_factors)
    assert "x as fast is predicted" not in str(partition(_wide(), 2, 1e12))
    assert "with_factors_ms" not in partition(_wide().without_factors(), 2, 1e6).predicted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"codec": {"pushes": "bf16"}},
            r"codec is {'pushes': 'bf16'}: plans are made for {'pushes': 'factors'",
        ),
        ({"codec": {"activations": "bf16", "pushes": "factors"}}, "plans are made for"),
        ({"codec": FACTOR_CODEC, "profile": _wide().without_factors()}, "the profile has none"),
        ({"codec": FACTOR_CODEC, "spare_workers": 1}, "spare_workers is 1, and codec is"),
    ],
)
def test_codecs_that_cannot_be_planned_for_are_refused(changes: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"profile": _wide(), "num_workers": 2, "bandwidth": 1e6} | changes
    with pytest.raises(ValueError, match=message):
        partition(**asked)


@pytest.mark.parametrize("codec", [None, {}, {"pushes": None}, {"pushes": "none"}])
def test_no_codec_is_planned_as_ever(codec: Any) -> None:
    assert partition(_wide(), 2, 1e6, codec=codec) == partition(_wide(), 2, 1e6)


@pytest.mark.parametrize("codec", [{"pushes": "factor"}, {"push": "factors"}, {"activations": "bf16"}])
def test_a_plan_file_of_another_codec_is_refused(tmp_path: Path, codec: dict[str, str]) -> None:
    """Without the error, a plan with such a codec would be simulated as if its replicas pushed factors."""
    path = tmp_path / "plan.json"
    document = partition(_wide(), 2, 1e6, codec=FACTOR_CODEC, replicas=[2]).to_dict()
    path.write_text(json.dumps(document | {"codec": codec}))
    with pytest.raises(FileFormatError, match=re.escape(f"plan.json: codec is {codec}: plans are made for")):
        Plan.load(path)
    path.write_text(json.dumps(document | {"codec": {"pushes": "none"}}))
    assert Plan.load(path).codec == {}


def test_weights_that_are_more_than_their_layer_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    document = _wide().to_dict()
    document["layers"][1]["factors"] *= 2
    path.write_text(json.dumps(document))
    with pytest.raises(FileFormatError, match=r"layers\[1\].factors have 200000 bytes of weights, .* 100000"):
        Profile.load(path)


def test_products_that_were_measured_longer_than_the_backward_are_the_backward(tmp_path: Path) -> None:
    """Each product is measured separately, so the sum of their times may exceed the time of the backward.
    Then the products count as the whole backward.
    """
    factors = (WeightFactors(4000, 300, 3.0), WeightFactors(1000, 30, 1.0))
    layer = LayerProfile("fc", 1.0, 2.0, 0, 5000, factors=factors)
    assert factored_sum([layer], 2).product_ms == 2.0
    (cost,) = stage_costs(Profile((layer,)), FREE, (Stage(0, 0, 2),), (1e6,))
    assert cost.backward.first(1) == 0.0
    path, profile = tmp_path / "plan.json", Profile((layer,), batch_size=8)
    partition(profile, 2, 1e9, codec=FACTOR_CODEC, replicas=[2]).save(path)
    # A round has two minibatches. Each replica does one forward of 1 ms, and its update computes the products
    # of both replicas, 2 ms each.
    assert simulate_plan(path, profile).ms_per_minibatch == pytest.approx((1.0 + 2 * 2.0) / 2, rel=1e-3)


def test_a_calibration_with_shorter_backwards_shortens_their_products() -> None:
    """The calibration scales the backward of 2 ms to 0.02 ms. A product that was measured at 2 ms then counts
    as 0.02 ms.
    """
    positions = {name: replace(cost, backward_scale=0.01) for name, cost in FREE.positions.items()}
    layer = LayerProfile("fc", 0.0, 2.0, 0, 5000, factors=(WeightFactors(4000, 300, 2.0),))
    profile = Profile((layer,), batch_size=8, runtime=write_value(replace(FREE, positions=positions)))
    plan = partition(profile, 2, 1e13, cost_model="calibrated", codec=FACTOR_CODEC, replicas=[2])
    # A round has two minibatches. Its update computes the products of both replicas, 0.02 ms each.
    assert plan.bottleneck_ms == pytest.approx(2 * 0.02 / 2, rel=1e-2)


def test_an_old_profile_has_no_factors(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    _wide().save(path)
    assert Profile.load(path) == _wide()
    _wide().without_factors().save(path)
    assert '"factors"' not in path.read_text()
    assert all(layer.factors is None for layer in Profile.load(path).layers)


# Costs of a run, and simulations.


def _calibrated() -> Profile:
    """Returns a calibrated profile of one layer of 3 ms. Its weight of 4000 bytes has factors of 300 bytes.
    An update takes 1 us per byte, and 2 us more if it writes to a copy.
    """
    runtime = replace(FREE, update_ms_per_byte=0.001, copy_ms_per_byte=0.002, cut_bytes=1000)
    layer = LayerProfile("fc", 1.0, 2.0, 0, 5000, factors=(WeightFactors(4000, 300, 0.25),))
    return Profile((layer,), batch_size=8, runtime=write_value(runtime))


def test_each_replica_updates_the_whole_of_what_goes_as_factors() -> None:
    runtime = replace(FREE, update_ms_per_byte=0.001, copy_ms_per_byte=0.002)
    (cost,) = stage_costs(_calibrated(), runtime, (Stage(0, 0, 2),), (1e6,))
    assert cost.update_ms == pytest.approx((4000 + 1000 / 2) * 0.001 + 2 * 0.25)
    assert cost.copy_ms == pytest.approx((4000 + 1000 / 2) * 0.002)
    assert cost.backward.first(1) == pytest.approx(2.0 - 0.25)
    assert (cost.shard_ms, cost.push_ms) == (pytest.approx(0.5), pytest.approx(0.5 + 0.3))
    # In this plan each replica trains two minibatches in a round.
    (cost,) = stage_costs(_calibrated(), runtime, (Stage(0, 0, 2),), (1e6,), minibatches=[2])
    assert cost.update_ms == pytest.approx((4000 + 1000 / 2) * 0.001 + 2 * 2 * 0.25)
    assert cost.push_ms == pytest.approx(0.5 + 0.6)
    assert stage_costs(_calibrated(), runtime, (Stage(0, 0),), (1e6,))[0].push_ms is None


def test_a_calibrated_plan_by_factors_carries_what_its_run_takes(tmp_path: Path) -> None:
    profile = _calibrated()
    plan = partition(profile, 2, 1e6, cost_model="calibrated", codec=FACTOR_CODEC, replicas=[2])
    # The terms are the milliseconds of forward, backward, push, update and pull.
    round_ms = 1.0 + 1.75 + 0.8 + 5.0 + 0.5
    assert plan.bottleneck_ms == pytest.approx(round_ms / 2)
    dense = partition(profile, 2, 1e6, cost_model="calibrated", replicas=[2])
    assert dense.bottleneck_ms == pytest.approx((1.0 + 2.0 + 2.5 + 2.5 + 2.5) / 2)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    options = _core.ScheduleOptions("pipedream", list(plan.in_flight), 1, plan.placement)
    assert predict_ms(Plan.load(path), options) == pytest.approx(round_ms / 2)
    for asked in (None, 1e6):
        simulated = simulate_plan(path, profile, bandwidth_bytes_per_s=asked)
        assert simulated.ms_per_minibatch == pytest.approx(round_ms / 2)
    faster = simulate_plan(path, profile, bandwidth_bytes_per_s=2e6)
    assert faster.ms_per_minibatch == pytest.approx((1.0 + 1.75 + 0.4 + 5.0 + 0.25) / 2)
    with pytest.raises(ValueError, match=r"has calibrated costs of codec=.*: partition without"):
        simulate_plan(path, profile, factors=False)


def test_a_plan_is_simulated_as_it_was_made_unless_asked_otherwise(tmp_path: Path) -> None:
    path, profile = tmp_path / "plan.json", _calibrated()
    partition(profile, 2, 1e6, codec=FACTOR_CODEC, replicas=[2]).save(path)
    by_factors = simulate_plan(path, profile)
    assert by_factors.ms_per_minibatch == pytest.approx((1.0 + 1.75 + 0.8 + 0.5 + 0.5) / 2)
    dense = simulate_plan(path, profile, factors=False)
    assert dense.ms_per_minibatch == pytest.approx((3.0 + 2.5 + 2.5) / 2)
    # The terms are, in order: a version and the model; the momentum of the shard and of the factored weight;
    # two rounds of gradients, copies for the other replica, and factors; slots for the other replica's
    # gradients and factors; slots for pulls.
    peaks = [worker["memory_peak_bytes"] for worker in by_factors.to_dict()["workers"]]
    assert peaks == [2 * 5000 + (500 + 4000) + 2 * (1000 + 500 + 300) + (500 + 300) + 500] * 2
    peaks = [worker["memory_peak_bytes"] for worker in dense.to_dict()["workers"]]
    assert peaks == [3 * 5000 + 2500 * (1 + 3)] * 2


def test_a_schedule_that_drains_is_planned_with_the_factors_of_its_longer_rounds() -> None:
    layers = (
        LayerProfile("fc", 4.0, 8.0, 1000, 5000, factors=(WeightFactors(4000, 1500, 0.0),)),
        LayerProfile("last", 4.0, 8.0, 0, 1000),
    )
    asked: dict[str, Any] = {
        "codec": FACTOR_CODEC,
        "boundaries": [0],
        "memory": 1_000_000,
        "microbatches": 1,
    }

    def planned(replicas: list[int], schedule: str) -> Plan:
        return partition(
            Profile(layers, batch_size=8), sum(replicas), 1e6, replicas=replicas, schedule=schedule, **asked
        )

    # With 2-2 replicas and flush each replica trains one minibatch in a round. With 2-3, a replica of the
    # first stage trains three. The factors of three minibatches are too large, so gradients are pushed whole.
    sizes = [
        planned([2, n], schedule).predicted["factored"][0]["factor_bytes"]
        for n, schedule in ((2, "flush"), (3, "flush"), (3, "pipedream"))
    ]
    assert sizes == [1500, 0, 1500]
    dense, by_factors = (
        planned([2, 3], schedule).predicted["stage_memory_bytes"][0] for schedule in ("flush", "pipedream")
    )
    versions = Plan((Stage(0, 0, 2), Stage(1, 1, 3))).in_flight[0]
    # The terms are, in order: momentum; gradients with copies for the other replica; slots for pushes; slots
    # for pulls; a step's temporary tensors. The last term includes the mean of gradients, or a product and
    # both replicas' factors.
    of_dense = 2500 + (5000 + 2500) + 2500 + 2500 + (5000 + 2500)
    of_factors = (500 + 4000) + 2 * (1000 + 500 + 1500) + (500 + 1500) + 500 + (5000 + 4000 + 2 * 1500)
    assert by_factors - dense == (versions - 1) * 5000 + of_factors - of_dense


@pytest.mark.parametrize("planned_for", ["pipedream", "flush"])
def test_an_update_makes_the_products_of_all_minibatches_of_a_round(tmp_path: Path, planned_for: str) -> None:
    """With 2-3 replicas a round of flush has six minibatches, three for each replica of the first stage."""
    layers = (
        LayerProfile("fc", 4.0, 8.0, 0, 5000, factors=(WeightFactors(4000, 300, 2.0),)),
        LayerProfile("last", 4.0, 8.0, 0, 1000),
    )
    profile, path = Profile(layers, batch_size=8), tmp_path / "plan.json"
    asked: dict[str, Any] = {"codec": FACTOR_CODEC, "schedule": planned_for, "boundaries": [0]}
    partition(profile, 5, 1e9, replicas=[2, 3], **asked).save(path)
    simulated = simulate_plan(path, profile, schedule="flush", minibatches=12, microbatches=1)
    # A replica trains six of 12 minibatches, and makes two updates. Each update computes six products, for
    # three minibatches of both replicas.
    busy_ms = 6 * (4.0 + 8.0 - 2.0) + 2 * 6 * 2.0
    assert simulated.to_dict()["workers"][0]["busy_ms_per_minibatch"] == pytest.approx(busy_ms / 12)


@pytest.mark.parametrize("planned_for", ["pipedream", "flush"])
@pytest.mark.parametrize("run_with", ["pipedream", "flush", "gpipe"])
def test_a_calibrated_plan_by_factors_counts_the_rounds_of_the_schedule_that_is_run(
    tmp_path: Path, planned_for: str, run_with: str
) -> None:
    """Costs must follow the schedule that is run, not the one that the plan was made for. With 2-3 replicas
    each replica of the first stage trains one minibatch in a round of pipedream, and three in a round of
    flush.
    """
    runtime = replace(FREE, update_ms_per_byte=0.001, cut_bytes=1000)
    layers = (
        LayerProfile("fc", 4.0, 8.0, 1000, 5000, factors=(WeightFactors(4000, 300, 2.0),)),
        LayerProfile("last", 4.0, 8.0, 0, 1000),
    )
    profile, path = Profile(layers, batch_size=8, runtime=write_value(runtime)), tmp_path / "plan.json"
    asked: dict[str, Any] = {"codec": FACTOR_CODEC, "schedule": planned_for, "boundaries": [0]}
    partition(profile, 5, 1e9, cost_model="calibrated", replicas=[2, 3], **asked).save(path)
    plan = Plan.load(path)
    options = _core.ScheduleOptions(run_with, list(plan.in_flight), 1, plan.placement)
    # An update computes a product for each minibatch that a replica has trained since its last update. The
    # run's list of instructions shows their number.
    busy_ms, own, products = 0.0, 0, []
    for step in _core.make_program(options, 0, 12):
        if step.opcode in ("FORWARD", "BACKWARD"):
            busy_ms += 4.0 if step.opcode == "FORWARD" else 8.0 - 2.0
            own += step.opcode == "BACKWARD"
        elif step.opcode == "UPDATE":
            busy_ms += 0.001 * (4000 + 1000 / 2) + 2 * own * 2.0
            products.append(own)
            own = 0
    assert sum(products) == 6
    assert products[0] == (1 if run_with == "pipedream" else 3)
    simulated = simulate_plan(path, profile, schedule=run_with, minibatches=12, microbatches=1)
    assert simulated.to_dict()["workers"][0]["busy_ms_per_minibatch"] == pytest.approx(busy_ms / 12)
    # Over slow links a push takes longer. It has 500 bytes of gradients, and 300 bytes of factors for each
    # minibatch of the round.
    slower = simulate_plan(
        path, profile, schedule=run_with, minibatches=12, microbatches=1, bandwidth_bytes_per_s=1e6
    )
    pushes = [one for one in slower.simulation.transfers if one.what == "push" and one.from_worker == 0]
    pushed_ms = 1000 / 2 / 1e3 + products[0] * 300 / 1e3
    assert pushes[0].end_ms - pushes[0].begin_ms == pytest.approx(pushed_ms)


def test_products_of_slow_workers_are_simulated_at_their_speed(tmp_path: Path) -> None:
    path, profile = tmp_path / "plan.json", _calibrated()
    partition(profile, 2, 1e6, codec=FACTOR_CODEC, replicas=[2], speeds=[0.5, 0.5]).save(path)
    computing_ms = 2 * (1.0 + 1.75 + 2 * 0.25)
    simulated = simulate_plan(path, profile)
    assert simulated.to_dict()["workers"][0]["busy_ms_per_minibatch"] == pytest.approx(computing_ms / 2)
