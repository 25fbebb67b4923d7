"""Tests LinkProfile, its file form, and plans that are made for measured links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pipedream.common.document import write_value
from pipedream.common.errors import FileFormatError
from pipedream.planning.formulas import StageLinks
from pipedream.planning.layer_profile import LayerProfile, Profile
from pipedream.planning.link_profile import LinkProfile, MeasuredLink
from pipedream.planning.partitioner import partition
from pipedream.planning.plan import Stage
from pipedream.planning.runtime_costs import FREE, stage_costs


def make_links(num_workers: int, bytes_per_s: dict[tuple[int, int], float], otherwise: float) -> LinkProfile:
    ranks = range(num_workers)
    return LinkProfile(
        num_workers,
        tuple(
            MeasuredLink(a, b, bytes_per_s.get((a, b), otherwise), 10.0 * a + b)
            for a in ranks
            for b in ranks
            if a != b
        ),
    )


def two_machines(inside: float, between: float) -> LinkProfile:
    """Returns the links of two machines, with ranks 0 and 1 on one and ranks 2 and 3 on the other. `inside`
    and `between` are the bytes per second within a machine and between the two.
    """
    slow = {(a, b): between for a in range(4) for b in range(4) if a // 2 != b // 2}
    return make_links(4, slow, inside)


def make_profile(*layers: tuple[float, int, int]) -> Profile:
    """Returns layers from rows of (milliseconds, activation bytes, parameter bytes)."""
    return Profile(tuple(LayerProfile(f"layer{i}", ms, 0, a, w) for i, (ms, a, w) in enumerate(layers)))


def fields() -> dict[str, Any]:
    return make_links(2, {(0, 1): 1e9}, 2e9).to_dict()


def test_round_trip_keeps_every_field_and_the_unknown_ones(tmp_path: Path) -> None:
    exact = MeasuredLink(0, 1, 1e9, 12.5, 0.01, 0.02, "shared memory")
    links = LinkProfile(2, (MeasuredLink(1, 0, 2e9, 12.5), exact), {"date": "monday"})
    links.save(tmp_path / "links.json")
    loaded = LinkProfile.load(tmp_path / "links.json")
    assert loaded == links
    assert loaded.extra == {"date": "monday"}
    assert loaded.between(0, 1) == exact
    assert loaded.to_dict()["links"][1] == {
        "sender": 1,
        "receiver": 0,
        "bytes_per_s": 2e9,
        "latency_us": 12.5,
    }


def test_between_finds_each_link_of_its_ends() -> None:
    links = make_links(4, {}, 1e9)
    for link in links.links:
        assert links.between(link.sender, link.receiver) is link
    assert len(links.links) == 12


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "pipedream.links/2"}, "install a later one"),
        ({"num_workers": 1}, "num_workers is 1: it must be from 2"),
        ({"num_workers": 3}, "links lacks 0 to 2: both directions of every pair are needed"),
        ({"links": fields()["links"][:1]}, "links lacks 1 to 0"),
        ({"links": fields()["links"] * 2}, "links has 0 to 1 twice"),
        (
            {"links": [*fields()["links"], fields()["links"][0] | {"receiver": 2}]},
            "links has 0 to 2, but num_workers is 2",
        ),
        ({"links": [{"sender": 0}]}, "links[0].receiver is missing"),
        (
            {"links": [fields()["links"][0] | {"bytes_per_s": 0}]},
            "links[0].bytes_per_s is 0.0: it must be positive",
        ),
        ({"links": [fields()["links"][0] | {"receiver": 0}]}, "a worker has no link to itself"),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_its_field(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(FileFormatError) as raised:
        LinkProfile.from_dict(fields() | changed, source="links.json")
    assert str(raised.value).startswith("links.json: ")
    assert message in str(raised.value)


def test_the_table_says_how_well_each_figure_is_known() -> None:
    links = make_links(2, {(0, 1): 1.25e9}, 2.5e9)
    known = replace(links, links=(replace(links.links[0], bytes_per_s_error=0.031), links.links[1]))
    lines = str(known).splitlines()
    assert lines[0] == "links between 2 workers: 10 Gbit/s to 20 Gbit/s"
    assert lines[3].split() == ["0", "1", "10", "Gbit/s", "3.1", "%", "1.0", "us"]


def test_stages_use_the_slowest_link_of_their_ranks() -> None:
    links = make_links(4, {(0, 2): 3.0, (2, 1): 5.0, (1, 0): 7.0, (2, 3): 11.0}, 100.0)
    used = StageLinks.measured((Stage(0, 0, 2), Stage(1, 1), Stage(2, 2)), links)
    assert used.downstream == (3.0, 11.0)
    assert used.upstream == (5.0, 100.0)
    assert used.replicas == (7.0, float("inf"), float("inf"))
    assert used.latency_ms == (0.021, 0.032)  # from rank 2 to 1, and from rank 3 to 2
    assert used.replica_latency_ms == (0.01, 0.0, 0.0)  # from rank 1 to 0; a stage alone has none
    assert used.slowest(1.0) == 3.0
    assert StageLinks.measured((Stage(0, 2),), links).slowest(1.0) == 1.0


@pytest.mark.parametrize("straight", [False, True])
def test_equal_links_give_the_plan_of_one_bandwidth(straight: bool) -> None:
    profile = make_profile((3, 10_000, 4000), (5, 60_000, 0), (2, 500, 9000), (4, 0, 100))
    wanted = partition(profile, 4, 1e7, straight=straight)
    assert partition(profile, 4, make_links(4, {}, 1e7), straight=straight) == wanted


def test_the_prediction_is_of_the_links_that_are_used() -> None:
    profile = make_profile((4, 1000, 0), (4, 2000, 0), (4, 3000, 0), (4, 0, 0))
    plan = partition(profile, 4, two_machines(1e9, 1e6), straight=True)
    assert plan.num_stages == 4
    assert plan.predicted["boundary_ms"] == pytest.approx([0.002, 4.0, 0.006])
    assert plan.bandwidth_bytes_per_s == 1e6


def test_a_stage_is_replicated_where_its_ranks_share_a_machine() -> None:
    """Replicas share the fast links inside the machines. A plan for the slow bandwidth alone has no replicas.
    A plan for the fast bandwidth alone has four replicas of one stage.
    """
    profile = make_profile((10, 1000, 10_000_000), (10, 0, 10_000_000))
    links = two_machines(1e10, 1e6)
    assert partition(profile, 4, links).stages == (Stage(0, 0, 2), Stage(1, 1, 2))
    assert [stage.num_replicas for stage in partition(profile, 4, 1e6).stages] == [1, 1]
    assert [stage.num_replicas for stage in partition(profile, 4, 1e10).stages] == [4]
    assert partition(profile, 4, links).bottleneck_ms == pytest.approx(5.0)


def test_the_calibrated_model_takes_the_longer_latency() -> None:
    profile = replace(
        make_profile((4, 1000, 0), (4, 0, 0)), runtime=write_value(replace(FREE, latency_ms=0.005))
    )
    plan = partition(profile, 2, make_links(2, {}, 1e9), cost_model="calibrated", boundaries=[0])
    assert plan.predicted["links"] == [{"one_way_ms": 0.001, "latency_ms": 0.01}]
    # The calibrated model also counts latency between replicas. The paper's formulas know no latency.
    for model, latency_ms in (("calibrated", 0.01), ("paper", None)):
        shared = partition(profile, 2, make_links(2, {}, 1e9), cost_model=model, replicas=[2])
        costs = shared.predicted.get("stage_costs", [{}])
        assert costs[0].get("sync_latency_ms") == latency_ms
    for latency_ms in (0.001, 0.02):  # shorter and longer than the calibration's latency
        stages, runtime = (Stage(0, 1, 2),), replace(FREE, latency_ms=0.005)
        (cost,) = stage_costs(profile, runtime, stages, [1e9], latency_ms=[latency_ms])
        assert cost.sync_latency_ms == max(0.005, latency_ms)


def test_links_of_fewer_workers_than_planned_for_are_refused() -> None:
    profile = make_profile((1, 0, 0))
    with pytest.raises(ValueError, match="bandwidth has the links of 2 workers, but num_workers is 3"):
        partition(profile, 3, make_links(2, {}, 1e9))
    assert partition(profile, 1, make_links(2, {}, 1e9)).stages == (Stage(0, 0),)
