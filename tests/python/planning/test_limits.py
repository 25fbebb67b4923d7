"""Tests partition() with limits: compares it with an enumeration of all plans, and tests requests that it
refuses. A round is the minibatches of one update.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from all_plans import enumerate_plans, make_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream.planning.layer_profile import LayerProfile, Profile
from pipedream.planning.limits import NothingFitsError
from pipedream.planning.partitioner import partition
from pipedream.planning.plan import Plan, Stage

_OPTIMIZER_COPIES = 1.0
_BESIDE = 0.1  # extra bytes, so that no plan needs exactly the limit, where rounding would decide


def _profile(layers: list[tuple[int, int, int, int]], frozen: Sequence[int] = ()) -> Profile:
    """Returns layers from rows of four figures: milliseconds of forward and backward together, activation
    bytes, parameter bytes, and bytes saved for the backward.
    """
    return Profile(
        tuple(
            LayerProfile(
                f"layer{i}",
                ms / 4,
                3 * ms / 4,
                activation,
                parameters,
                saved_bytes=saved,
                frozen_bytes=frozen[i] if frozen else 0,
            )
            for i, (ms, activation, parameters, saved) in enumerate(layers)
        )
    )


def _needed_bytes(profile: Profile, stages: tuple[Stage, ...], index: int, *, recompute: bool) -> float:
    """Returns the bytes that a replica of the stage needs, by the definition of each term."""
    stage, in_flight = stages[index], Plan(stages).in_flight
    layers = profile.layers[stage.first_layer : stage.last_layer + 1]
    r, n, is_last = stage.num_replicas, in_flight[index], index + 1 == len(stages)
    weights = sum(layer.parameter_bytes for layer in layers)
    saved = sum(layer.saved_bytes or 0 for layer in layers)
    crossing = [0, *(profile.layers[one.last_layer].activation_bytes for one in stages[:-1]), 0]
    given_, made = crossing[index], crossing[index + 1]
    # Gradients copied for other replicas, slots for their pushes, slots for pulls.
    exchanged = 3 * (r - 1) / r
    widest = max(given_, *(layer.activation_bytes for layer in layers))
    largest = _OPTIMIZER_COPIES * max(layer.parameter_bytes for layer in layers)
    needed = (n + 2 + _OPTIMIZER_COPIES / r + exchanged) * weights + max(2 * widest, largest)
    # Frozen weights exist once, whatever the schedule is.
    needed += sum(layer.frozen_bytes for layer in layers)
    minibatches = range(2 * r * max(one.num_replicas for one in stages))
    if not is_last:
        below = {i % stages[index + 1].num_replicas for i in minibatches if i % r == 0}
        needed += 2 * len(below) * made
    upstream = 0
    if index:
        above = stages[index - 1].num_replicas
        edges = len({i % above for i in minibatches if i % r == 0})
        # Number of replicas here to which one replica upstream sends.
        ours = len({i % r for i in minibatches if i % above == 0})
        upstream = edges * math.ceil(in_flight[index - 1] / ours)
        needed += (edges * (math.ceil(n / edges) + 1) + 1) * given_
    if recompute:
        return needed + saved + given_ + upstream * given_ + (0 if is_last else n + 2) * made
    here = range(n + 1)
    return needed + max(k * (saved + made) + (upstream - k) * given_ * (index > 0) for k in here)


def _time_ms(
    profile: Profile,
    stages: tuple[Stage, ...],
    bytes_per_s: float,
    speeds: list[float],
    memory: list[float] | None,
    recompute: bool,
) -> float:
    """Returns the milliseconds of the slowest stage or boundary, or inf if a worker's memory cannot hold its
    stage.
    """
    rank, times = 0, []
    for index, stage in enumerate(stages):
        layers = profile.layers[stage.first_layer : stage.last_layer + 1]
        ranks = range(rank, rank := rank + stage.num_replicas)
        r = stage.num_replicas
        weights = sum(layer.parameter_bytes for layer in layers)
        compute_ms = sum(layer.compute_ms for layer in layers)
        if memory is not None:
            limit = min(memory[one] for one in ranks)
            if _needed_bytes(profile, stages, index, recompute=False) > limit:
                if not recompute or _needed_bytes(profile, stages, index, recompute=True) > limit:
                    return math.inf
                compute_ms += sum(layer.forward_ms for layer in layers)
        sync_ms = 4e3 * (r - 1) * weights / (r * bytes_per_s)
        times.append(max(compute_ms / min(speeds[one] for one in ranks), sync_ms) / r)
        if index + 1 < len(stages):
            times.append(2e3 * layers[-1].activation_bytes / bytes_per_s)
    return max(times)


_layers = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(
    _layers,
    st.integers(1, 4),
    st.sampled_from([1e4, 1e5, 1e6]),
    st.one_of(st.none(), st.integers(3000, 30000)),
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=4, max_size=4),
    st.booleans(),
    st.lists(st.sampled_from([0, 0, 500, 5000]), min_size=4, max_size=4),
)
def test_within_memory_and_speeds_it_is_the_best_of_all_plans(
    layers: list[tuple[int, int, int, int]],
    num_workers: int,
    bytes_per_s: float,
    memory: int | None,
    speeds: list[float],
    recompute: bool,
    frozen: list[int],
) -> None:
    profile, speeds = _profile(layers, frozen), speeds[:num_workers]
    limits = None if memory is None else [memory + _BESIDE + 500 * rank for rank in range(num_workers)]
    best = min(
        _time_ms(profile, stages, bytes_per_s, speeds, limits, recompute)
        for stages in enumerate_plans(len(layers), num_workers)
    )
    asked: dict[str, Any] = {"speeds": speeds, "memory": limits, "recompute": recompute}
    if best == math.inf:
        with pytest.raises(NothingFitsError, match="no plan has"):
            partition(profile, num_workers, bytes_per_s, **asked)
        return
    plan = partition(profile, num_workers, bytes_per_s, **asked)
    assert plan.bottleneck_ms == pytest.approx(best, rel=1e-9)
    mine = _time_ms(profile, plan.stages, bytes_per_s, speeds, limits, recompute)
    assert mine == pytest.approx(best, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(_layers, st.integers(1, 4), st.integers(3000, 20000))
def test_equal_workers_are_planned_for_as_one_by_one(
    layers: list[tuple[int, int, int, int]], num_workers: int, whole_bytes: int
) -> None:
    memory = whole_bytes + _BESIDE
    # In seconds the sums of times are exact, and all times are rounded in the same way. So plans that are
    # equally fast have exactly equal times, and the rule for ties chooses among them.
    profile = _profile([(1000 * ms, *figures) for ms, *figures in layers])  # type: ignore[arg-type]
    bytes_per_s = 1024.0
    times = [
        (_time_ms(profile, stages, bytes_per_s, [1.0] * num_workers, [memory] * num_workers, True), stages)
        for stages in enumerate_plans(len(layers), num_workers)
    ]
    best = min(time for time, _ in times)
    if best == math.inf:
        with pytest.raises(NothingFitsError):
            partition(profile, num_workers, bytes_per_s, memory=memory)
        return
    plan = partition(profile, num_workers, bytes_per_s, memory=memory)
    assert plan.bottleneck_ms == pytest.approx(best, rel=1e-9)
    equal = [stages for time, stages in times if time <= best * (1 + 1e-9)]
    fewest = min((sum(stage.num_replicas for stage in stages), len(stages)) for stages in equal)
    assert (plan.workers_used, plan.num_stages) == fewest


@settings(max_examples=100, deadline=None)
@given(_layers, st.integers(1, 4), st.data())
def test_boundaries_and_replicas_that_are_given_are_kept(
    layers: list[tuple[int, int, int, int]], num_workers: int, data: st.DataObject
) -> None:
    profile = _profile(layers)
    given_ = data.draw(st.sampled_from(list(enumerate_plans(len(layers), num_workers))))
    boundaries = [stage.last_layer for stage in given_[:-1]]
    counts = [stage.num_replicas for stage in given_]
    assert partition(profile, num_workers, 1e5, boundaries=boundaries, replicas=counts).stages == given_
    for asked, key in (({"boundaries": boundaries}, boundaries), ({"replicas": counts}, counts)):
        best = min(
            _time_ms(profile, stages, 1e5, [1.0] * num_workers, None, False)
            for stages in enumerate_plans(len(layers), num_workers)
            if key
            == (
                [stage.last_layer for stage in stages[:-1]]
                if "boundaries" in asked
                else [stage.num_replicas for stage in stages]
            )
        )
        plan = partition(profile, num_workers, 1e5, **asked)  # type: ignore[arg-type]
        assert plan.bottleneck_ms == pytest.approx(best, rel=1e-9)


def test_a_plan_says_what_its_workers_need_and_where_forwards_run_again() -> None:
    profile = _profile([(10, 100, 1000, 4000), (10, 0, 1000, 4000)])
    free = partition(profile, 2, 1e9, memory=20_000, straight=True)
    # The first stage has two minibatches in flight, with a version and saved tensors for each. It also needs
    # the model, gradients and momentum, two outputs, two slots for their gradients, and a step's temporary
    # tensors.
    assert free.predicted["memory_bytes"] == 2 * 5000 + 3000 + 4 * 100 + 1000
    assert "recompute" not in free.predicted
    tight = partition(profile, 2, 1e9, memory=11_000, straight=True)
    assert tight.predicted["recompute"] == [0]
    assert tight.bottleneck_ms == pytest.approx(10 + 2.5)
    assert "memory at most 10.35 KiB per worker, with recompute at stages [0]" in str(tight)
    with pytest.raises(
        NothingFitsError, match=r"2 workers, one replica per stage, memory of .*: give more memory"
    ):
        partition(profile, 2, 1e9, memory=4000, straight=True)


def test_on_a_host_every_worker_has_the_whole_model_and_what_weights_travel_in() -> None:
    layers = [(10, 0, 1 << 20, 0)] * 3
    host = replace(_profile(layers), device="x86_64, 2 threads")
    asked: dict[str, Any] = {"boundaries": [0, 1], "memory": "64MiB"}
    device = partition(replace(host, device="NVIDIA H200"), 3, 1e9, **asked).predicted
    ours = partition(host, 3, 1e9, **asked).predicted
    more = [
        (mine - theirs) / 2**20
        for mine, theirs in zip(ours["stage_memory_bytes"], device["stage_memory_bytes"], strict=True)
    ]
    # Each worker also has the other two layers, 2 MiB, and 1 / 16 MiB of slack. For each neighbour in the
    # tree through which weights are sent it has 4 MiB of buffers. The first rank has two neighbours, the
    # others have one.
    assert more == pytest.approx([2 + 8 + 1 / 16, 2 + 4 + 1 / 16, 2 + 4 + 1 / 16])
    with pytest.raises(NothingFitsError):
        partition(host, 3, 1e9, memory="11MiB")


@pytest.mark.parametrize("device", [None, "CPU, 2 threads"])
def test_what_codecs_keep_of_what_crosses_is_in_the_memory(device: str | None) -> None:
    # Encoded tensors and the residuals of codecs must count. Otherwise a worker would need more memory than
    # planned.
    profile = replace(_profile([(10, 1 << 20, 100, 100), (10, 0, 100, 100)]), device=device)
    asked: dict[str, Any] = {"boundaries": [0], "replicas": [1, 1], "memory": "1GiB"}

    def needed(codec: Any) -> list[float]:
        plan = partition(profile, 2, 1e6, codec=codec, **asked)
        assert plan.codec == {}
        return [num_bytes / (1 << 20) for num_bytes in plan.predicted["stage_memory_bytes"]]

    without = needed(None)
    both = [a - b for a, b in zip(needed("bf16"), without, strict=True)]
    gradients = [a - b for a, b in zip(needed({"gradients": "bf16"}), without, strict=True)]
    # counts as a GPU, where each end of a channel encodes one item at a time in extra memory
    if device is None:
        assert both == pytest.approx([1.0, 1.0])
        assert gradients == pytest.approx([0.5, 0.5])
    else:
        assert both == pytest.approx([(8 + 2) / 2, (2 + 8) / 2])
        assert gradients == pytest.approx([2 / 2, 8 / 2])
    with pytest.raises(NothingFitsError):
        partition(profile, 2, 1e6, codec="bf16", **(asked | {"memory": int(max(without) * (1 << 20)) + 1}))


@pytest.mark.parametrize("codec", [{(0, 1): "bf16"}, {"pushes": "bf16"}])
def test_a_codec_for_which_no_room_is_planned_is_refused(codec: Any) -> None:
    profile = _profile([(10, 100, 100, 100)])
    with pytest.raises(ValueError, match=r"with memory=\.\.\. for the room that one of activations and"):
        partition(profile, 2, 1e6, codec=codec, memory="1GiB")


def test_data_are_in_the_memory_of_who_reads_them() -> None:
    profile = replace(_profile([(10, 0, 0, 0)] * 2), max_shapes={"inputs": (4, 8), "targets": (4,)})
    plan = partition(profile, 2, 1e9, boundaries=[0], memory="1GiB")
    batch = 8 * (32 + 4)  # of the widest type
    assert plan.predicted["stage_memory_bytes"] == [2 * batch, batch]


def test_a_slow_worker_gets_less_to_do() -> None:
    profile = _profile([(10, 0, 0, 0)] * 4)
    plan = partition(profile, 2, 1e9, speeds=[3.0, 1.0], straight=True)
    assert plan.stages == (Stage(0, 2), Stage(3, 3))
    assert plan.bottleneck_ms == pytest.approx(10)


def test_a_slow_worker_is_in_all_figures_and_one_worker_alone_is_the_fastest() -> None:
    profile = _profile([(10, 10**6, 0, 0)] * 4)
    plan = partition(profile, 2, 1e9, speeds=[0.5, 1.0], boundaries=[0])
    assert plan.predicted["stage_ms"] == pytest.approx([20, 30])
    assert plan.bottleneck_ms == pytest.approx(30)
    assert plan.predicted["alternatives_ms"] == pytest.approx(
        {"one_worker": 40, "data_parallel": 40, "model_parallel": 52, "straight": 30}
    )


def test_links_are_hidden_beside_stages_at_their_workers_speed() -> None:
    profile = _profile([(10, 4 * 10**6, 8, 1000), (10, 0, 8, 1000)])  # 4 ms one way
    assert partition(profile, 2, 1e9, replicas=[1, 1], speeds=[1.0, 1.0]).in_flight == (3, 1)
    assert partition(profile, 2, 1e9, replicas=[1, 1], speeds=[1.0, 0.1]).in_flight == (2, 1)


def test_what_is_in_flight_for_slow_links_is_in_the_memory() -> None:
    plan = partition(_profile([(10, 4 * 10**6, 8, 1000), (10, 0, 8, 500)]), 2, 1e9, replicas=[1, 1])
    assert plan.in_flight == (3, 1)
    cut = 4 * 10**6  # A backward makes and drops twice these bytes.
    # The second 3 counts the model as given, gradients and momentum.
    first = (3 + 3) * 8 + 3 * 1000 + (3 + 2) * cut + 2 * cut
    # Three microbatches are in flight at the first stage, so gradients of all three may wait here. They take
    # more memory than the tensors that this stage saves for one microbatch.
    last = (1 + 3) * 8 + 2 * cut + (3 + 1) * cut + 2 * cut
    assert plan.predicted["stage_memory_bytes"] == [first, last]


def test_one_worker_is_not_advised_where_it_has_no_room() -> None:
    profile = _profile([(10, 10**7, 1000, 4000), (10, 0, 1000, 4000)])  # 20 ms both ways
    free = partition(profile, 2, 1e9, straight=True, memory="1GiB", boundaries=[0])
    assert free.predicted["without_room"] == []
    assert "do not pipeline this model here: one worker alone is as fast" in str(free)
    profile = _profile([(10, 10**7, 10**8, 4000), (10, 0, 10**8, 4000)])
    tight = partition(profile, 2, 1e9, straight=True, memory=[7 * 10**8] * 2)
    assert tight.num_stages == 2
    assert tight.predicted["without_room"] == ["one_worker", "data_parallel"]
    assert "the memory has no room for one worker, data parallel" in str(tight)
    assert "do not pipeline" not in str(tight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speeds": 2.0}, "speeds is 2.0: give a list of numbers"),
        ({"boundaries": 1}, "boundaries is 1: give a list of numbers"),
        ({"replicas": 2}, "replicas is 2: give a list of numbers"),
    ],
)
def test_one_number_in_the_place_of_several_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        partition(_profile([(10, 0, 0, 0)] * 2), 2, 1e9, **changes)


def test_bytes_may_be_a_fraction() -> None:
    assert partition(_profile([(10, 0, 0, 0)]), 1, 1e9, memory=1e9).predicted["memory_bytes"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": "16Gb"}, "the unit 'Gb' is unknown"),
        ({"memory": ["1GiB"]}, "memory has 1 entries for 2 workers"),
        ({"speeds": [1.0]}, "speeds has 1 entries for 2 workers"),
        ({"speeds": [1.0, 0]}, r"speeds\[1\] is 0: it must be positive"),
        ({"boundaries": [1]}, r"boundaries is \[1\]: give the last layer"),
        ({"boundaries": [0, 0]}, r"boundaries is \[0, 0\]: give the last layer"),
        ({"replicas": [2, 1]}, r"replicas is \[2, 1\], more than num_workers, 2"),
        ({"replicas": [1], "boundaries": [0]}, r"replicas is \[1\], of 1 stages, but boundaries makes 2"),
        ({"replicas": [1, 0]}, r"replicas\[1\] is 0"),
        ({"schedule": "fast"}, "schedule is 'fast': plans are made for"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"schedule": "flush", "speeds": [1.0, 1.0]}, "speeds are given, and schedule is 'flush'"),
    ],
)
def test_limits_that_cannot_be_are_refused_by_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(_profile([(10, 0, 0, 0)] * 2), 2, 1e9, **changes)


def test_2bw_is_planned_with_other_replicas_at_every_stage() -> None:
    plan = partition(_profile([(10, 0, 0, 0)] * 2), 3, 1e9, schedule="2bw", replicas=[2, 1])
    assert [stage.num_replicas for stage in plan.stages] == [2, 1]


@pytest.mark.parametrize(
    ("schedule", "versions"),
    [("vertical_sync", (3, 3, 3)), ("2bw", (2, 2, 2)), ("flush", (1, 1, 1)), ("naive", (1, 1, 1))],
)
def test_a_schedules_own_versions_are_in_the_memory(schedule: str, versions: tuple[int, ...]) -> None:
    profile = _profile([(10, 0, 1000, 0)] * 3)
    asked: dict[str, Any] = {"schedule": schedule, "boundaries": [0, 1]}
    # The 4 counts the model as given, gradients, momentum and a step's temporary tensors.
    needed = (max(versions) + 4) * 1000
    plan = partition(profile, 3, 1e9, memory=needed, **asked)
    assert plan.predicted["stage_memory_bytes"] == [(kept + 4) * 1000 for kept in versions]
    with pytest.raises(NothingFitsError, match="no plan has 3 workers, memory of"):
        partition(profile, 3, 1e9, memory=needed - 1, **asked)


@pytest.mark.parametrize("schedule", ["2bw", "flush", "gpipe"])
@settings(max_examples=12, deadline=None)
@given(layers=_layers, num_workers=st.integers(1, 3), bytes_per_s=st.sampled_from([1e4, 1e5, 1e6]))
def test_another_schedules_plan_is_the_best_of_all_by_the_simulator(
    schedule: str, layers: list[tuple[int, int, int, int]], num_workers: int, bytes_per_s: float
) -> None:
    profile = replace(_profile(layers), batch_size=4)  # m may be 1, 2 or 4
    plans = [
        stages
        for stages in enumerate_plans(len(layers), num_workers)
        if schedule != "2bw" or len({stage.num_replicas for stage in stages}) == 1
    ]
    times = [make_plan(profile, stages, bytes_per_s, schedule=schedule).bottleneck_ms for stages in plans]
    found = partition(profile, num_workers, bytes_per_s, schedule=schedule)
    assert found.bottleneck_ms == pytest.approx(min(time for time in times if time is not None), rel=1e-9)


def test_how_replicas_agree_is_in_the_memory() -> None:
    profile = _profile([(10, 0, 1000, 0)])
    asked: dict[str, dict[str, Any]] = {
        "bsp": {},
        "ssp": {"staleness": 3},
        "asp": {},
        "allreduce": {},
        "whole": {"sync": "bsp", "whole_tensors": True},
    }
    needed = {}
    for name, how in asked.items():
        plan = partition(profile, 2, 1e9, memory=1_000_000, optimizer_copies=2, **({"sync": name} | how))
        assert plan.stages == (Stage(0, 0, 2),)
        needed[name] = plan.predicted["memory_bytes"]
    # The terms are, in order: a version, the model and the gradients; copies of gradients for the other
    # replica, slots for its pushes, and slots for pulls; the optimizer's state of a shard; a step's temporary
    # tensors.
    assert needed["bsp"] == 3000 + 3 * 500 + 2 * 500 + 2 * 1000
    # Staleness 3 adds three versions, and the gradients of two rounds with their copies.
    assert needed["ssp"] == needed["bsp"] + 3000 + 2 * 1500
    # asp adds a separate version of the shard, a copy of it for the other replica, and the temporary tensors
    # of a second step.
    assert needed["asp"] == needed["bsp"] + 1000 + 2 * 1000
    # The terms with allreduce are: a version, the model and the gradients of two rounds; the whole optimizer
    # state; a step's temporary tensors.
    assert needed["allreduce"] == 4000 + 2 * 1000 + 2 * 1000
    # Either replica may own the only tensor. So copies, slots for pushes, slots for pulls, state and mean
    # have its whole size.
    assert needed["whole"] == 3000 + 1000 + 2000 + 1000 + 2 * 1000 + 2 * 1000 + 1000
    tight: dict[str, Any] = {"memory": int(needed["bsp"]), "optimizer_copies": 2}
    assert partition(profile, 2, 1e9, **tight).workers_used == 2
    for name in ("asp", "allreduce"):
        assert partition(profile, 2, 1e9, sync=name, **tight).workers_used == 1


def test_on_a_host_replicas_have_no_slots_for_what_they_pull() -> None:
    host = replace(_profile([(10, 0, 1 << 20, 0)]), device="x86_64, 2 threads")
    asked: dict[str, Any] = {"replicas": [2], "memory": "64MiB"}
    device = partition(replace(host, device="NVIDIA H200"), 2, 1e9, **asked).predicted["memory_bytes"]
    tree_bytes = (4 << 20) + (64 << 10)
    assert partition(host, 2, 1e9, **asked).predicted["memory_bytes"] == device + tree_bytes - (1 << 19)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sync": "sometimes"}, "sync is 'sometimes': it is one of bsp, ssp, asp, allreduce"),
        ({"sync": "allreduce", "spare_workers": 1}, "spare_workers is 1, and sync is 'allreduce'"),
        ({"staleness": 1}, "staleness is 1, and sync is 'bsp'"),
        ({"sync": "ssp", "staleness": -1}, "staleness is -1: give a number of rounds, 0 or more"),
        ({"sync": "asp", "schedule": "flush"}, "sync is 'asp', and schedule is 'flush'"),
        ({"sync": "asp", "spare_workers": 1}, "spare_workers is 1, and sync is 'asp'"),
    ],
)
def test_how_replicas_agree_is_refused_where_it_cannot_be_planned(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        partition(_profile([(10, 0, 1000, 0)]), 2, 1e9, **changes)


@pytest.mark.parametrize("memory", ["1KiB", ["1KiB", "2KiB", "3KiB"]])
def test_where_nothing_fits_it_is_said_how_much_would_be_enough(memory: str | list[str]) -> None:
    layers = tuple(LayerProfile(f"layer{i}", 1.0, 2.0, 3_000_000, 5_000_000 * (1 + i)) for i in range(5))
    profile = Profile(layers, batch_size=8)
    with pytest.raises(NothingFitsError, match=r"give more memory.*; \S+ MiB each is enough") as refused:
        partition(profile, 3, 1e9, memory=memory)
    said = re.findall(r"; (\S+) MiB each", str(refused.value))[0]
    assert partition(profile, 3, 1e9, memory=f"{said}MiB").predicted["memory_bytes"] > 0
    with pytest.raises(NothingFitsError):
        partition(profile, 3, 1e9, memory=f"{0.97 * float(said)}MiB")


def test_memory_is_not_named_as_the_remedy_where_it_is_none() -> None:
    profile = Profile((LayerProfile("layer", 1.0, 2.0, 0, 1000),) * 2)
    with pytest.raises(NothingFitsError, match=r"smaller minibatches$"):
        partition(profile, 2, 1e9, memory="1GiB", replicas=[2], straight=True)
