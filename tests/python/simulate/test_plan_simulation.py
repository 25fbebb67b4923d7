"""Tests simulations of plans with a profile's costs: by closed forms, and with plans that cannot be
simulated. A round is the minibatches of one update.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from pipedream.common.document import write_value
from pipedream.planning.item_cost import ItemCost
from pipedream.planning.layer_profile import LayerProfile, Profile, WeightFactors
from pipedream.planning.link_profile import LinkProfile, MeasuredLink
from pipedream.planning.partitioner import partition
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.runtime_costs import StageCosts
from pipedream.planning.synced_bytes import shares_of_a_shard
from pipedream.simulate import plan_simulation
from pipedream.simulate.plan_simulation import PlanSimulation, simulate_plan

_STAGES = 3


def _profile(*, activation_bytes: int = 1000) -> Profile:
    """Returns three layers of 3 ms each. The last one has no output."""
    layers = [LayerProfile(f"layer{i}", 1.0, 2.0, activation_bytes, 4000) for i in range(_STAGES - 1)]
    return Profile(layers=(*layers, LayerProfile("last", 1.0, 2.0, 0, 4000)), batch_size=8)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    Plan(tuple(Stage(i, i) for i in range(_STAGES)), bandwidth_bytes_per_s=1e9).save(path)
    return path


def _simulate(
    plan_file: Path, schedule: str, microbatches: int | None = None, **options: float
) -> PlanSimulation:
    bandwidth = options.get("bandwidth", 1e15)
    return simulate_plan(
        plan_file,
        _profile(),
        schedule=schedule,
        microbatches=microbatches,
        bandwidth_bytes_per_s=bandwidth,
    )


def test_a_stage_that_always_has_work_sets_the_rate(plan_file: Path) -> None:
    simulated = _simulate(plan_file, "pipedream")
    assert simulated.ms_per_minibatch == pytest.approx(3.0)
    assert simulated.samples_per_s == pytest.approx(8 / 3e-3)
    assert simulated.speed_up == pytest.approx(3.0)
    assert simulated.simulation.steady_bubble_share == pytest.approx(0.0, abs=1e-9)


def test_arguments_that_cannot_be_are_refused_by_value(plan_file: Path) -> None:
    with pytest.raises(ValueError, match=r"optimizer_copies is -1\.0: it must not be negative"):
        simulate_plan(plan_file, _profile(), bandwidth_bytes_per_s=1e9, optimizer_copies=-1.0)
    with pytest.raises(ValueError, match="microbatches is 9, and the profile's minibatches have 8 samples"):
        _simulate(plan_file, "flush", 9)


def test_of_many_replicas_fewer_rounds_are_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchanges of many replicas take long to simulate: 36 rounds of 200 replicas take minutes."""
    monkeypatch.setattr(plan_simulation, "_EXCHANGES_MAX", 4 * 10 * 9 * 12)
    path = tmp_path / "plan.json"
    counts = []
    for replicas in (2, 10, 20):
        Plan((Stage(0, 2, replicas),), bandwidth_bytes_per_s=1e9).save(path)
        simulated = simulate_plan(path, _profile(), schedule="data_parallel")
        counts.append(simulated.traced.num_minibatches // replicas)
        assert simulated.simulation.ms_per_minibatch is not None
    assert counts == [2 + 32, 2 + 10, 2 + 4]


@pytest.mark.parametrize("schedule", ["flush", "gpipe"])
@pytest.mark.parametrize("m", [3, 6])
def test_a_schedule_that_flushes_pays_its_bubble(plan_file: Path, schedule: str, m: int) -> None:
    simulated = _simulate(plan_file, schedule, m)
    assert simulated.simulation.bubble_share == pytest.approx((_STAGES - 1) / (m + _STAGES - 1))
    assert simulated.ms_per_minibatch == pytest.approx(3.0 * (m + _STAGES - 1) / m)


def test_a_link_slower_than_the_stages_sets_the_rate(plan_file: Path) -> None:
    # 1,000 bytes take 6 ms in each direction.
    simulated = _simulate(plan_file, "pipedream", bandwidth=1000 / 6e-3)
    assert simulated.ms_per_minibatch >= 6.0
    fields = simulated.to_dict()
    assert fields["boundaries"][0] == {
        "after_stage": 0,
        "bytes_per_minibatch": 2000,
        "one_way_ms": pytest.approx(6.0),
    }
    # 6 ms upstream and 6 ms downstream.
    assert fields["workers"][1]["link_ms_per_minibatch"] == pytest.approx(12.0)


def test_one_minibatch_at_a_time_takes_the_sum(plan_file: Path) -> None:
    simulated = _simulate(plan_file, "model_parallel")
    assert simulated.ms_per_minibatch == pytest.approx(9.0)
    assert simulated.speed_up == pytest.approx(1.0)


def test_the_plans_own_bandwidth_is_taken(plan_file: Path) -> None:
    assert simulate_plan(plan_file, _profile()).bandwidth_bytes_per_s == 1e9


def test_what_does_not_fit_together_is_refused(plan_file: Path, tmp_path: Path) -> None:
    short = Profile(layers=_profile().layers[1:], batch_size=8)
    with pytest.raises(ValueError, match="has 3 layers and the profile 2"):
        simulate_plan(plan_file, short)
    unknown = tmp_path / "unknown.json"
    Plan((Stage(0, 2),)).save(unknown)
    with pytest.raises(ValueError, match="does not say the links' bandwidth: give --bandwidth"):
        simulate_plan(unknown, _profile())


def test_the_table_has_a_row_for_each_worker(plan_file: Path) -> None:
    text = str(_simulate(plan_file, "pipedream"))
    assert "3.000 ms per minibatch" in text
    assert [line.split()[1] for line in text.splitlines()[3:6]] == ["0", "1", "2"]


def test_replicas_share_their_stages_minibatches_and_its_parameters(tmp_path: Path) -> None:
    path = tmp_path / "replicated.json"
    Plan((Stage(0, 1, 2), Stage(2, 2)), bandwidth_bytes_per_s=1e15).save(path)
    simulated = simulate_plan(path, _profile())
    assert simulated.ms_per_minibatch == pytest.approx(3.0)  # two replicas take 6 ms each, and one takes 3 ms
    workers = simulated.to_dict()["workers"]
    assert [worker["stages"] for worker in workers] == [[0], [0], [1]]
    assert [worker["busy_ms_per_minibatch"] for worker in workers] == pytest.approx([3.0] * 3)
    # In a round of two minibatches a replica sends one activation of 1,000 bytes, pushes a shard of 4,000
    # bytes, and sends a new version of its own shard, also 4,000 bytes.
    assert workers[0]["bytes_sent_per_minibatch"] == pytest.approx((1000 + 2 * 4000) / 2)


def test_a_worker_needs_what_its_stage_keeps_in_flight(plan_file: Path) -> None:
    simulated = _simulate(plan_file, "pipedream")
    # The first stage has three versions, the model, gradients and momentum. The profile has no saved bytes.
    # So a layer's output counts as saved, for each of three minibatches in flight.
    peaks = [worker["memory_peak_bytes"] for worker in simulated.to_dict()["workers"]]
    assert peaks == [round(max(use.num_bytes for use in row)) for row in simulated.memory]
    assert peaks[0] >= (3 + 3) * 4000 + 3 * 1000
    assert "memory" in str(simulated).splitlines()[2]


def test_a_plan_for_workers_of_different_speed_is_simulated_at_their_speeds(
    plan_file: Path, tmp_path: Path
) -> None:
    plan = partition(_profile(), 3, 1e15, speeds=[1.0, 0.5, 2.0], boundaries=[0, 1])
    assert plan.bottleneck_ms == pytest.approx(6.0)
    plan.save(plan_file)
    assert _simulate(plan_file, "pipedream").ms_per_minibatch == pytest.approx(6.0)
    assert _simulate(plan_file, "model_parallel").ms_per_minibatch == pytest.approx(3.0 + 6.0 + 1.5)
    replicated = tmp_path / "replicated.json"
    partition(_profile(), 3, 1e15, speeds=[1.0, 0.5, 2.0], boundaries=[1], replicas=[2, 1]).save(replicated)
    # Two replicas with 6 ms of work each, at half speed: 2 * 6 / 2.
    assert simulate_plan(replicated, _profile()).ms_per_minibatch == pytest.approx(6.0)
    spoilt = replace(plan, predicted=plan.predicted | {"speeds": [1.0]})
    spoilt.save(plan_file)
    with pytest.raises(ValueError, match=r"predicted\.speeds has 1 entries for 3 workers"):
        _simulate(plan_file, "pipedream")


def test_a_calibrated_plan_is_simulated_with_the_costs_that_it_carries(plan_file: Path) -> None:
    plan = Plan.load(plan_file)
    item = {"first_ms": 0.5, "later_ms": 0.5, "minibatch_ms": 1.0}
    costs = [
        {
            "forward": item,
            "backward": item,
            "update_ms": 0.25,
            "copy_ms": 0.0,
            "shard_ms": 0.0,
            "sync_latency_ms": 0.0,
        }
    ] * _STAGES
    # Not used, because the simulation is for another bandwidth.
    links = [{"one_way_ms": 7.0, "latency_ms": 0.0}] * (_STAGES - 1)
    replace(plan, predicted={"stage_costs": costs, "links": links}).save(plan_file)
    assert _simulate(plan_file, "pipedream").ms_per_minibatch == pytest.approx(3.25)
    assert _simulate(plan_file, "flush", 2).ms_per_minibatch == pytest.approx(2.0 * (2 + _STAGES - 1) + 0.25)


def _replicated(tmp_path: Path, factors: tuple[WeightFactors, ...] | None) -> tuple[Path, Profile]:
    path = tmp_path / "replicated.json"
    Plan((Stage(0, 0, 2),), bandwidth_bytes_per_s=1e6).save(path)
    return path, Profile((LayerProfile("fc", 1.0, 2.0, 0, 5000, factors=factors),))


def test_factors_are_what_replicas_send_where_they_are_smaller(tmp_path: Path) -> None:
    # With two replicas the second weight's factors are not smaller.
    weights = (WeightFactors(4000, 300), WeightFactors(500, 500))
    path, profile = _replicated(tmp_path, weights)
    sent = {
        factors: simulate_plan(path, profile, schedule="data_parallel", factors=factors).to_dict()["workers"]
        for factors in (False, True)
    }
    # In a round of two minibatches a replica pushes a shard of 2,500 bytes, and sends its own shard's new
    # version. With factors it pushes 300 bytes of factors, and shards have 500 bytes.
    assert [worker["bytes_sent_per_minibatch"] for worker in sent[False]] == [2500, 2500]
    assert [worker["bytes_sent_per_minibatch"] for worker in sent[True]] == [650, 650]


def _links(num_workers: int, latency_us: float = 0.0, **slower: float) -> LinkProfile:
    """Returns links of 1e9 bytes per second. `slower` gives the bytes per second of other links, such as
    from_1_0=1e5 for the link from rank 1 to rank 0.
    """
    pairs = itertools.permutations(range(num_workers), 2)
    return LinkProfile(
        num_workers, tuple(MeasuredLink(a, b, slower.get(f"from_{a}_{b}", 1e9), latency_us) for a, b in pairs)
    )


def test_measured_links_that_are_all_alike_are_one_bandwidth(plan_file: Path, tmp_path: Path) -> None:
    replicated = tmp_path / "replicated.json"
    Plan((Stage(0, 1, 2), Stage(2, 2))).save(replicated)
    for path in (plan_file, replicated):
        measured = simulate_plan(path, _profile(), links=_links(3))
        assert measured.to_dict() == simulate_plan(path, _profile(), bandwidth_bytes_per_s=1e9).to_dict()


def test_each_measured_link_takes_its_own_time(plan_file: Path) -> None:
    # The two slower links carry 1,000 bytes in 10 ms and in 4 ms, the others in 1 us. A stage computes for 3
    # ms.
    slow = _links(3, from_1_0=1e5, from_1_2=2.5e5)
    simulated = simulate_plan(plan_file, _profile(), links=slow)
    assert simulated.ms_per_minibatch == pytest.approx(10.0)
    workers = simulated.to_dict()["workers"]
    assert [worker["link_ms_per_minibatch"] for worker in workers] == pytest.approx([1e-3, 14.0, 1e-3])
    assert [worker["bytes_sent_per_minibatch"] for worker in workers] == [1000, 2000, 1000]
    assert simulated.bandwidth_bytes_per_s == 1e5
    late = simulate_plan(plan_file, _profile(), schedule="model_parallel", links=_links(3, 500.0))
    # Four transfers follow each other, because one microbatch is in flight.
    assert late.ms_per_minibatch == pytest.approx(9.0 + 4 * 0.501)


def test_a_replicas_slowest_measured_link_is_that_of_its_shard(tmp_path: Path) -> None:
    path, profile = _replicated(tmp_path, None)
    # In a round both replicas compute for 3 ms at the same time. Then each pushes 2,500 bytes and pulls 2,500
    # bytes.
    simulated = simulate_plan(path, profile, schedule="data_parallel", links=_links(2, from_1_0=5e5))
    assert simulated.ms_per_minibatch == pytest.approx((3.0 + 5.0 + 5.0) / 2)
    # The push and the pull each take 0.5 ms longer.
    late = simulate_plan(path, profile, schedule="data_parallel", links=_links(2, 500.0, from_1_0=5e5))
    assert late.ms_per_minibatch == pytest.approx((3.0 + 5.5 + 5.5) / 2)


def test_what_a_calibrated_plan_says_of_links_gives_way_to_measured_ones(tmp_path: Path) -> None:
    path, profile = _replicated(tmp_path, None)
    cost = StageCosts(ItemCost(minibatch_ms=1.0), ItemCost(minibatch_ms=2.0), 0.0, 0.0, shard_ms=2.5)
    costs = {"stage_costs": [write_value(cost)], "links": []}
    replace(Plan.load(path), predicted=costs).save(path)
    own = simulate_plan(path, profile, schedule="data_parallel")
    assert own.ms_per_minibatch == pytest.approx(4.0)
    measured = simulate_plan(path, profile, schedule="data_parallel", links=_links(2, from_1_0=5e5))
    assert measured.ms_per_minibatch == pytest.approx((3.0 + 5.0 + 5.0) / 2)
    late = simulate_plan(path, profile, schedule="data_parallel", links=_links(2, 500.0, from_1_0=5e5))
    assert late.ms_per_minibatch == pytest.approx((3.0 + 5.5 + 5.5) / 2)


def test_links_that_a_plan_cannot_be_simulated_with_are_refused(plan_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--links has the links of 2 workers, but the plan has 3"):
        simulate_plan(plan_file, _profile(), links=_links(2))
    with pytest.raises(ValueError, match="give --bandwidth, for example 10Gbit/s, or --links FILE: one"):
        simulate_plan(plan_file, _profile(), links=_links(3), bandwidth_bytes_per_s=1e9)
    spare = tmp_path / "spare.json"
    Plan((Stage(0, 2, 2, num_spare_shards=1),)).save(spare)
    with pytest.raises(
        ValueError,
        match="has spare shards, and --links is given",
    ):
        simulate_plan(spare, _profile(), schedule="data_parallel", links=_links(3))


def test_how_replicas_agree_says_what_they_wait_for(tmp_path: Path) -> None:
    path, profile = _replicated(tmp_path, None)
    simulated = {
        sync: simulate_plan(path, profile, schedule="data_parallel", sync=sync)
        for sync in ("bsp", "asp", "allreduce")
    }
    # In a round both replicas compute for 3 ms at the same time. Then a push and a pull take 2.5 ms each, or
    # an all-reduce takes 5 ms.
    times = {sync: of_sync.ms_per_minibatch for sync, of_sync in simulated.items()}
    assert times == dict.fromkeys(times, pytest.approx(4.0))
    peaks = {sync: simulated[sync].to_dict()["workers"][0]["memory_peak_bytes"] for sync in ("bsp", "asp")}
    # asp keeps a separate version of the replica's half of the parameters, and a copy of it for the other
    # replica.
    assert peaks["asp"] == peaks["bsp"] + 5000
    with pytest.raises(ValueError, match="sync is 'asp', and replicas push factors"):
        simulate_plan(path, profile, schedule="data_parallel", sync="asp", factors=True)


def test_factors_of_a_round_grow_with_its_minibatches() -> None:
    layers = [LayerProfile("fc", 1.0, 2.0, 0, 5000, factors=(WeightFactors(4000, 300),))]
    for replicas, minibatches, pushed, pulled in (
        (2, 1, 800, 500),
        (2, 13, 4400, 500),
        (2, 14, 2500, 2500),
        (4, 6, 250 + 1800, 250),
        (4, 7, 1250, 1250),
    ):
        shares = shares_of_a_shard(layers, replicas, minibatches=minibatches)
        assert [share * 5000 / replicas for share in shares] == pytest.approx([pushed, pulled])


def test_a_profile_without_factors_cannot_be_simulated_with_them(tmp_path: Path) -> None:
    path, profile = _replicated(tmp_path, None)
    with pytest.raises(ValueError, match="the profile has none: profile the model anew"):
        simulate_plan(path, profile, factors=True)
