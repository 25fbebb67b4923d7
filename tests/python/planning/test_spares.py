"""Tests spares in plans: the load of links, when spares make a plan faster, and how they are shown. A spare
owns a shard of a stage's parameters, but computes no minibatches. A round is the minibatches of one update.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pipedream import _core
from pipedream.planning.layer_profile import LayerProfile, Profile
from pipedream.planning.partitioner import partition, with_spares
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.simulator import simulate
from pipedream.planning.synced_bytes import round_ms, shard_shares
from pipedream.simulate.plan_simulation import PlanSimulation, simulate_plan
from pipedream.simulate.schedule_picture import draw_text

_BYTES_PER_S = 1e9


def _profile(compute_ms: float, *parameter_bytes: int) -> Profile:
    """Returns layers that differ only in their parameters. All but the last have an output of 1 byte."""
    last = len(parameter_bytes) - 1
    layers = [
        LayerProfile(f"layer{i}", compute_ms / 3, 2 * compute_ms / 3, int(i < last), num_bytes)
        for i, num_bytes in enumerate(parameter_bytes)
    ]
    return Profile(layers=tuple(layers), batch_size=8)


@pytest.mark.parametrize("num_replicas", [2, 3, 5, 15])
def test_shares_are_the_cores_and_a_round_takes_what_flows_that_share_links_do(num_replicas: int) -> None:
    num_bytes = 1 << 40  # so large that a single chunk takes no time in comparison
    for num_spares in range(num_replicas + 1):
        dealt = _core.shard_shares(num_replicas, num_spares)
        of_replica, of_spare = shard_shares(num_replicas, num_spares)
        assert dealt[0] / sum(dealt) == pytest.approx(of_replica)
        if num_spares:
            assert dealt[-1] / sum(dealt) == pytest.approx(of_spare)
        carried_ms = 1e3 * (1 + (num_replicas - 2) * of_replica) * num_bytes / _BYTES_PER_S
        if of_replica == 0.0:  # the spares' links carry more than the replicas'
            carried_ms *= num_replicas / num_spares
        found_ms = round_ms(num_bytes, num_replicas, num_spares, _BYTES_PER_S)
        assert found_ms == pytest.approx(carried_ms, rel=1e-4)
    assert round_ms(num_bytes, num_replicas, num_replicas, _BYTES_PER_S) == pytest.approx(
        1e3 * num_bytes / _BYTES_PER_S, rel=1e-4
    )


def test_the_last_chunks_of_a_spare_count() -> None:
    """A spare of 3 replicas has 26 chunks here. It sends nothing to the replicas until its first chunk has
    arrived.
    """
    num_bytes, bytes_per_s = 64 << 20, 25e6
    chunk_ms = 0.4 * 1e3 * num_bytes / bytes_per_s / 26
    carried_ms = 1.2 * 1e3 * num_bytes / bytes_per_s
    assert round_ms(num_bytes, 3, 1, bytes_per_s) == pytest.approx(carried_ms + 3 * chunk_ms)
    # So small a shard is a single chunk. The spare sends it only after all replicas have pushed it. So the
    # spare makes the round longer.
    without_ms = round_ms(1 << 20, 3, 0, bytes_per_s)
    assert round_ms(1 << 20, 3, 1, bytes_per_s) > without_ms
    small = partition(_profile(3.0, 1 << 20), 3, bytes_per_s, replicas=[3], spare_workers=1)
    assert small.num_spares == 0
    large = partition(_profile(3.0, num_bytes), 3, bytes_per_s, replicas=[3], spare_workers=1)
    assert large.num_spares == 1


def _simulated(tmp_path: Path, stage: Stage, profile: Profile) -> PlanSimulation:
    path = tmp_path / "plan.json"
    Plan((stage,)).save(path)
    return simulate_plan(path, profile, schedule="data_parallel", bandwidth_bytes_per_s=_BYTES_PER_S)


@pytest.mark.parametrize(("num_replicas", "num_spares"), [(2, 1), (3, 0), (3, 1), (3, 3), (5, 2)])
def test_what_nothing_hides_takes_the_bound_when_simulated(
    tmp_path: Path, num_replicas: int, num_spares: int
) -> None:
    profile = _profile(1e-6, 40_000_000)
    simulated = _simulated(tmp_path, Stage(0, 0, num_replicas, num_spare_shards=num_spares), profile)
    expected_ms = round_ms(40_000_000, num_replicas, num_spares, _BYTES_PER_S) / num_replicas
    assert simulated.ms_per_minibatch == pytest.approx(expected_ms, rel=1e-3)


def test_a_simulated_spare_has_a_row_its_bytes_and_its_memory(tmp_path: Path) -> None:
    profile = _profile(1.0, 40_000_000)
    simulated = _simulated(tmp_path, Stage(0, 0, 3, num_spare_shards=1), profile)
    rows = simulated.to_dict()["workers"]
    assert [row["stages"] for row in rows] == [[0], [0], [0], []]
    # In a round of 3 minibatches the spare sends two fifths of the parameters to each of 3 replicas.
    assert rows[3]["bytes_sent_per_minibatch"] == pytest.approx(0.4 * 40_000_000)
    # The spare has one version, the optimizer's copy, and slots for four chunks from each of 3 replicas.
    assert rows[3]["memory_peak_bytes"] == pytest.approx(2 * 0.4 * 40_000_000 + 3 * (4 << 20))
    assert "stage 0 spare 0 (rank 3)" in str(simulated)


def test_a_spare_is_named_in_pictures() -> None:
    options = _core.ScheduleOptions(in_flight=[2, 1], placement=_core.Placement.in_order([2, 1], [1, 0]))
    programs = [_core.make_program(options, worker, 4) for worker in range(4)]
    times = _core.StageDurations(2, 4, pull_ms=1.0, num_replicas=2, spare_push_ms=2.0, spare_pull_ms=0.5)
    rows = draw_text(simulate(programs, times), "title").splitlines()
    assert [row.split("  ")[0] for row in rows[2:6]] == [
        "stage 0 replica 0",
        "stage 0 replica 1",
        "stage 1",
        "stage 0 spare 0",
    ]
    assert "*" in rows[5]


def test_spares_are_planned_where_the_exchange_is_slowest() -> None:
    profile = _profile(3.0, 40_000_000)
    straight = partition(profile, 3, _BYTES_PER_S, replicas=[3])
    plan = partition(profile, 3, _BYTES_PER_S, replicas=[3], spare_workers=2)
    assert plan.stages == (Stage(0, 0, 3, num_spare_shards=2),)
    assert (plan.num_workers, plan.workers_used) == (3, 5)
    # The paper's formula adds both directions, so a round counts twice.
    assert plan.bottleneck_ms == pytest.approx(2 * round_ms(40_000_000, 3, 2, _BYTES_PER_S) / 3)
    assert plan.predicted["spare_shards"]["without_ms"] == straight.bottleneck_ms
    assert plan.predicted["samples_per_s"] == pytest.approx(8e3 / plan.bottleneck_ms)
    assert "2 of 2 spare workers serve as shards" in str(plan)
    assert Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize(
    ("spare_workers", "used"), [(1, (0, 0)), (2, (1, 1)), (3, (1, 1)), (4, (2, 2)), (7, (3, 3))]
)
def test_stages_that_are_as_slow_as_each_other_get_spares_together(
    spare_workers: int, used: tuple[int, int]
) -> None:
    """The first spare speeds up one of two equally slow stages, which does not make the plan faster. The
    search must still try a second one.
    """
    how: dict[str, Any] = {"replicas": [3, 3], "boundaries": [0], "spare_workers": spare_workers}
    plan = partition(_profile(3.0, 40_000_000, 40_000_000), 6, _BYTES_PER_S, **how)
    assert tuple(stage.num_spare_shards for stage in plan.stages) == used
    # The paper's formula adds both directions, so a round counts twice.
    assert plan.bottleneck_ms == pytest.approx(2 * round_ms(40_000_000, 3, used[0], _BYTES_PER_S) / 3)
    too_few = "other stages are as slow, and there are too few spare workers for all"
    assert plan.predicted["spare_shards"]["why"] == ("" if used[0] else too_few)


@pytest.mark.parametrize(
    ("profile", "replicas", "why"),
    [
        (
            _profile(3.0, 40_000_000),
            [2],
            "stage 0 has 2 replicas, whose links carry as much with spares as without",
        ),
        (_profile(300.0, 400), [3], "the slowest stage would not be faster"),
        (_profile(3.0, 0, 0), [1, 1], "stage 0, the slowest, has no replicas"),
    ],
)
def test_a_plan_says_why_spares_would_not_pay(profile: Profile, replicas: list[int], why: str) -> None:
    boundaries = [0] if len(replicas) > 1 else None
    plan = partition(
        profile, sum(replicas), _BYTES_PER_S, replicas=replicas, boundaries=boundaries, spare_workers=1
    )
    assert plan.num_spares == 0
    assert plan.predicted["spare_shards"]["why"] == why
    assert f"spare shards would not pay: {why}" in str(plan)


def test_spares_whose_gain_the_simulator_does_not_see_are_left_out() -> None:
    plan = partition(_profile(3.0, 40_000_000), 3, _BYTES_PER_S, replicas=[3])

    def figures_of(stages: tuple[Stage, ...]) -> dict[str, Any]:
        return {"stage_ms": [10.0 - stages[0].num_spare_shards], "boundary_ms": []}

    hidden = with_spares(plan, 2, figures_of, lambda _: 10.0)
    assert hidden.stages == plan.stages
    assert "the replicas' exchange hides behind what they compute" in str(hidden)
    seen = with_spares(plan, 2, figures_of, lambda plan: 10.0 - plan.num_spares)
    assert (seen.num_spares, seen.bottleneck_ms) == (2, 8.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spare_workers": -1}, "spare_workers is -1: give a number of workers, 0 or more"),
        (
            {"spare_workers": 1, "schedule": "flush"},
            "spare_workers is 1, and schedule is 'flush': the paper's formulas",
        ),
    ],
)
def test_spare_workers_that_cannot_be_planned_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(_profile(3.0, 40_000_000), 3, _BYTES_PER_S, **options)
