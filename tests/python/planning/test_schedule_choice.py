"""Tests partition(schedule="auto"): the schedule and number of microbatches that it chooses, and the plan's
text.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from pipedream import _core
from pipedream.planning.item_cost import microbatch_counts
from pipedream.planning.layer_profile import LayerProfile, MicrobatchTimes, Profile
from pipedream.planning.limits import NothingFitsError
from pipedream.planning.partitioner import partition
from pipedream.planning.plan import Plan
from pipedream.planning.plan_schedule import (
    mean_delay,
    mean_delays,
    microbatches_min,
    schedule_of,
    schedule_to_run,
)


def make_profile(
    num_layers: int = 4,
    *,
    batch_size: int | None = 16,
    fixed_ms: float | None = 0.0,
    parameter_bytes: int = 1000,
) -> Profile:
    """Returns layers of 10 ms per minibatch. A microbatch takes its share of these, and fixed_ms more per
    layer. With fixed_ms None the profile has no times of microbatches.
    """
    times = None
    if fixed_ms is not None:
        times = tuple(
            MicrobatchTimes(m, fixed_ms / 4 + 2.5 / m, 3 * fixed_ms / 4 + 7.5 / m)
            for m in microbatch_counts(batch_size)[1:]
        )
    layer = LayerProfile("layer", 2.5, 7.5, 100, parameter_bytes, microbatch_ms=times)
    last = replace(layer, activation_bytes=0)
    return Profile((*[layer] * (num_layers - 1), last), batch_size=batch_size)


def choice_of(plan: Plan) -> tuple[str | None, int | None]:
    return plan.schedule, plan.microbatches


def row_of(plan: Plan, schedule: str, m: int) -> dict[str, Any]:
    (row,) = [
        row for row in plan.predicted["candidates"] if (row["schedule"], row["microbatches"]) == (schedule, m)
    ]
    return row


def auto(profile: Profile, num_workers: int = 4, **how: Any) -> Plan:
    return partition(profile, num_workers, 1e9, **{"schedule": "auto", "straight": True} | how)


def test_a_full_pipeline_is_chosen_with_the_least_delay_where_small_microbatches_cost_nothing() -> None:
    plan = auto(make_profile())
    assert choice_of(plan) == ("pipedream", 16)
    assert plan.bottleneck_ms == pytest.approx(10, rel=1e-2)
    row = row_of(plan, "pipedream", 16)
    assert (row["delay"], row["versions"], row["chosen"]) == (3 / 16, 2, True)
    assert row["bubble"] < 0.01
    assert row_of(plan, "unstashed", 16)["versions"] == 1
    assert sum(row["chosen"] for row in plan.predicted["candidates"]) == 1


def test_a_flush_of_m_microbatches_has_its_bubble_and_no_delay() -> None:
    row = row_of(auto(make_profile()), "flush", 8)
    assert (row["delay"], row["versions"]) == (0, 1)
    assert row["ms"] == pytest.approx(10 * 11 / 8, rel=1e-2)
    assert row["bubble"] == pytest.approx(3 / 11, abs=1e-2)
    assert row["samples_per_s"] == pytest.approx(16e3 / row["ms"])


def test_a_worker_that_waits_for_a_longer_stage_counts_in_the_bubble() -> None:
    """One worker has two layers of 10 ms, and the other has one layer. So the other worker waits for half of
    the time.
    """
    row = row_of(auto(make_profile(3), 2), "pipedream", 2)
    assert row["ms"] == pytest.approx(20, rel=1e-2)
    assert row["bubble"] == pytest.approx(0.25, abs=1e-2)


def test_microbatches_that_slow_the_device_are_not_chosen() -> None:
    """Each microbatch takes 0.02 ms more per layer of 10 ms. So two microbatches cost 0.4 % of the rate, four
    0.8 %, and eight 1.6 %. Rates within 1 % count as equal.
    """
    plan = auto(make_profile(fixed_ms=0.02), 2)
    assert choice_of(plan) == ("pipedream", 4)
    assert row_of(plan, "pipedream", 16)["ms"] == pytest.approx(20 + 2 * 16 * 0.02, rel=1e-2)


def test_without_measured_microbatches_times_scale_and_the_plan_says_so() -> None:
    told = "the profile has no microbatch_ms"
    plan = auto(make_profile(fixed_ms=None))
    assert choice_of(plan) == ("pipedream", 16)
    assert told in str(plan)
    assert told not in str(auto(make_profile()))


@pytest.mark.parametrize(
    ("delay_max", "chosen"),
    [(0, ("flush", 16)), (0.1, ("flush", 16)), (0.2, ("pipedream", 16)), (3, ("pipedream", 16))],
)
def test_what_is_later_than_delay_max_is_not_chosen(delay_max: float, chosen: tuple[str, int]) -> None:
    assert choice_of(auto(make_profile(), delay_max=delay_max)) == chosen


def test_one_schedule_has_its_microbatches_chosen() -> None:
    profile = make_profile(fixed_ms=0.02)
    assert choice_of(auto(profile, 2, schedule="flush", microbatches="auto")) == ("flush", 16)
    assert choice_of(auto(profile, 2, schedule="naive", microbatches="auto")) == ("unstashed", 4)


def test_given_microbatches_have_their_schedule_chosen() -> None:
    plan = auto(make_profile(), microbatches=2)
    assert choice_of(plan) == ("flush", 2)  # "pipedream" would be 3 / 2 updates late
    assert choice_of(auto(make_profile(), microbatches=2, delay_max=2)) == ("pipedream", 2)


def test_memory_for_one_version_alone_gets_a_schedule_that_keeps_one() -> None:
    profile = make_profile(parameter_bytes=10**9)
    roomy = auto(profile, 2, memory="1TiB")
    assert choice_of(roomy) == ("pipedream", 16)
    needed = row_of(roomy, "unstashed", 16)["memory_bytes"]
    assert needed < 0.9 * row_of(roomy, "pipedream", 16)["memory_bytes"]
    small = auto(profile, 2, memory=int(1.02 * needed), recompute=False)
    assert choice_of(small) == ("unstashed", 16)
    assert row_of(small, "pipedream", 16) == {"schedule": "pipedream", "microbatches": 16, "fits": False}
    assert "too much" in str(small)


def test_memory_that_no_candidate_keeps_to_is_refused_by_name() -> None:
    with pytest.raises(NothingFitsError, match=r"no plan has 4 workers, .*memory of 1\.00 KiB: .*is enough"):
        auto(make_profile(), memory="1KiB")


@pytest.mark.parametrize(
    ("batch_size", "counts"),
    [
        (None, [1, 2, 4, 8, 16, 32]),
        (1, [1]),
        (6, [1, 2, 3]),
        (24, [1, 2, 4, 8, 12]),
        (64, [1, 2, 4, 8, 16, 32]),
    ],
)
def test_a_minibatch_is_cut_into_no_more_than_it_has_samples(
    batch_size: int | None, counts: list[int]
) -> None:
    assert microbatch_counts(batch_size) == counts
    assert make_profile(batch_size=batch_size).microbatch_counts() == counts
    assert make_profile(batch_size=batch_size, fixed_ms=None).microbatch_counts() == counts


def test_many_workers_have_more_microbatches_to_choose_among() -> None:
    assert make_profile(batch_size=256).microbatch_counts(128)[-2:] == [64, 128]
    refused = make_profile(batch_size=256)
    layer = replace(refused.layers[0], microbatch_ms=(refused.layers[0].microbatch_ms or ())[:2])
    assert replace(refused, layers=(layer,)).microbatch_counts(128) == [1, 2, 4]


def test_a_minibatch_of_one_sample_has_one_microbatch() -> None:
    assert choice_of(auto(make_profile(batch_size=1), 2)) == ("pipedream", 1)
    assert choice_of(auto(make_profile(batch_size=1), 2, delay_max=0.5)) == ("flush", 1)


def test_a_model_of_one_layer_trains_as_it_would_alone() -> None:
    plan = auto(make_profile(1))
    assert (plan.num_stages, *choice_of(plan)) == (1, "flush", 1)


def test_replicas_share_the_microbatches_that_a_delay_counts_in() -> None:
    profile = make_profile(3, fixed_ms=None)
    plan = auto(profile, 3, straight=False, boundaries=[1], replicas=[2, 1], microbatches=4, delay_max=3)
    assert plan.in_flight[0] == 2
    assert row_of(plan, "pipedream", 4)["delay"] == 1 / 2  # each replica has two of the four microbatches
    assert mean_delay(schedule_of(plan, "vertical_sync", 4)) == 1 / 2
    assert mean_delay(schedule_of(plan, "2bw", 4)) == 1


@pytest.mark.parametrize("replicas", [(1, 1, 1), (3, 1, 2), (2, 3, 1), (4, 2, 2)])
@pytest.mark.parametrize("schedule", _core.schedule_names()[:7])
def test_a_stages_mean_delay_is_that_of_its_forwards(schedule: str, replicas: tuple[int, ...]) -> None:
    plan = Plan.replicated(3, replicas)
    fewest = microbatches_min(plan, schedule)
    for m in (fewest, fewest + 3):
        options = schedule_of(plan, schedule, m)
        for stage, mean in enumerate(mean_delays(options)):
            size = _core.rounds_of(options, stage).minibatches_per_round
            places = [
                (minibatch, q) for minibatch in range(120, 144) for q in range(m)
            ]  # whole rounds at every stage
            read = [_core.forward_version(options, stage, *place) for place in places]
            assert mean == pytest.approx(fmean(i // size - v for (i, _), v in zip(places, read, strict=True)))


def test_a_schedule_that_is_a_round_late_has_microbatches_for_what_is_in_flight() -> None:
    plan = Plan.replicated(3, (3, 2, 1))
    fewest = microbatches_min(plan, "2bw")
    schedule_of(plan, "2bw", fewest)
    for m in range(1, fewest):
        with pytest.raises(ValueError, match="keeps two versions"):
            schedule_of(plan, "2bw", m)
    assert fewest > 1 == microbatches_min(plan, "flush") == microbatches_min(plan, "naive")


def test_more_in_flight_for_a_slow_link_does_not_make_a_plan_too_late() -> None:
    """The link takes 10 ms and a stage 20 ms. One more microbatch in flight hides the link, but raises the
    delay. It is not added if the delay would exceed delay_max.
    """
    layers = (LayerProfile("a", 5, 15, 10**7, 8), LayerProfile("b", 5, 15, 0, 8))
    how: dict[str, Any] = {"schedule": "auto", "microbatches": 4, "straight": True}
    hidden = partition(Profile(layers, batch_size=4), 2, 1e9, **how)
    assert hidden.in_flight == (3, 1)
    assert row_of(hidden, "pipedream", 4)["delay"] == 2 / 4
    kept = partition(Profile(layers, batch_size=4), 2, 1e9, **how, delay_max=0.25)
    assert (kept.schedule, kept.in_flight) == ("pipedream", (2, 1))


def test_the_table_has_a_line_of_every_candidate() -> None:
    plan = auto(make_profile(batch_size=4), 2)
    lines = str(plan).splitlines()
    (heading,) = [i for i, line in enumerate(lines) if "bubble  versions" in line]
    rows = lines[heading + 1 : heading + 10]
    names = [line.replace("->", "").split()[:2] for line in rows]
    assert names == [[s, str(m)] for s in ("flush", "pipedream", "unstashed") for m in (1, 2, 4)]
    assert [line.split()[:4] for line in rows if line.startswith("->")] == [["->", "pipedream", "4", "1-1"]]
    assert rows[0].split()[:3] == ["flush", "1", "1"]  # one worker alone is as fast


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delay_max": -1}, "delay_max is -1: give updates, 0 or more"),
        ({"delay_max": float("nan")}, "delay_max is nan: give updates, 0 or more"),
        (
            {"schedule": "flush", "delay_max": 0.5},
            "delay_max is 0.5, and schedule and microbatches are",
        ),
        ({"schedule": "2bw", "microbatches": "auto"}, "microbatches is 'auto', and schedule is '2bw'"),
        ({"microbatches": "many"}, "microbatches is 'many': give at least 1, or leave it out"),
        ({"microbatches": 17}, "microbatches is 17, and the profile's minibatches have 16 samples"),
        ({"schedule": "automatic"}, "schedule is 'automatic': plans are made for auto, pipedream"),
        (
            {"schedule": "pipedream", "microbatches": "auto", "delay_max": 0},
            r"delay_max is 0, and every plan that was found is later, by 0\.188 updates or more",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        auto(make_profile(), **arguments)


def test_a_plan_says_what_it_was_made_for_where_that_is_no_default() -> None:
    profile = make_profile()
    assert choice_of(partition(profile, 2, 1e9, straight=True)) == (None, None)
    given = partition(profile, 2, 1e9, straight=True, microbatches=8)
    assert choice_of(given) == ("pipedream", 8)
    assert "for schedule 'pipedream' with microbatches=8, which run(schedule='auto') takes" in str(given)
    assert choice_of(partition(profile, 2, 1e9, straight=True, schedule="vertical_sync")) == (
        "vertical_sync",
        1,
    )


def test_a_run_by_the_plan_needs_a_plan_that_says_both() -> None:
    plan = replace(Plan.straight(4, 2), schedule="naive", microbatches=4)
    assert schedule_to_run(plan, "auto", 1) == ("unstashed", 4)
    assert schedule_to_run(plan, "auto", 4) == ("unstashed", 4)
    assert schedule_to_run(plan, "naive", 2) == ("unstashed", 2)
    with pytest.raises(ValueError, match="microbatches is 2, and schedule='auto' takes the plan's, 4: leave"):
        schedule_to_run(plan, "auto", 2)
    with pytest.raises(
        ValueError, match=r"plan has no schedule: make it by partition\(\.\.\., schedule='auto'"
    ):
        schedule_to_run(Plan.straight(4, 2), "auto", 1)
    with pytest.raises(ValueError, match="plan has no microbatches"):
        schedule_to_run(replace(plan, microbatches=None), "auto", 1)
