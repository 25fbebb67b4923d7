"""Tests profile_links() between ranks, as torchrun starts them."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pipedream
import pytest
from farm import Farm
from pipedream.links.keys import write_key_file
from pipedream.planning.layer_profile import LayerProfile, Profile
from pipedream.planning.link_profile import LinkProfile

_measure = functools.partial(pipedream.profile_links, seconds=0.01, progress=False)


def _measure_own(by_rank: dict[int, dict[str, Any]]) -> Any:
    return _measure(**by_rank.get(int(os.environ["RANK"]), {}))


def test_every_rank_gets_the_links_of_all_pairs(farm: Farm, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    first, *others = farm.results(_measure, save=path, num_ranks=3)
    assert LinkProfile.load(path) == first
    assert all(other == first for other in others)
    assert [(link.sender, link.receiver) for link in first.links] == [
        (a, b) for a in range(3) for b in range(3) if a != b
    ]
    for link in first.links:
        assert link.transport == "shared memory"
        assert link.latency_us == first.between(link.receiver, link.sender).latency_us > 0
        assert link.bytes_per_s_error is not None and link.latency_error is not None
    profile = Profile((LayerProfile("a", 1, 1, 8, 0), LayerProfile("b", 1, 1, 0, 0)))
    plan = pipedream.partition(profile, 2, first, straight=True)
    assert plan.bandwidth_bytes_per_s == min(first.between(*ends).bytes_per_s for ends in ((0, 1), (1, 0)))


def test_the_transport_is_the_one_that_was_asked_for(farm: Farm) -> None:
    links, _ = farm.results(_measure, transport="tcp", num_ranks=2)
    assert {link.transport for link in links.links} == {"zmq/tcp"}


def test_links_are_measured_at_the_ports_that_were_given(farm: Farm) -> None:
    outcomes = farm.run(_measure, ports="29600-29600", num_ranks=2)
    assert all("ports 29600-29600 has 1" in str(outcome.error) for outcome in outcomes)


def test_one_rank_has_no_links(farm: Farm) -> None:
    (outcome,) = farm.run(_measure, num_ranks=1)
    assert isinstance(outcome.error, ValueError)
    assert str(outcome.error).startswith("WORLD_SIZE is 1: it takes 2 workers")


def test_a_mistake_of_one_rank_is_said_by_all(farm: Farm) -> None:
    outcomes = farm.run(_measure_own, {1: {"seconds": 0}}, num_ranks=3)
    assert all("seconds is 0: give a positive number" in str(outcome.error) for outcome in outcomes)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    farm: Farm, tmp_path: Path
) -> None:
    outcomes = farm.run(_measure, save=tmp_path / "gone" / "links.json", num_ranks=2)
    assert all("there is no folder" in str(outcome.error) for outcome in outcomes)


def test_links_with_keys_are_measured(farm: Farm, tmp_path: Path) -> None:
    write_key_file(tmp_path / "keys.json")
    links, _ = farm.results(_measure, keys=tmp_path / "keys.json", transport="tcp", num_ranks=2)
    assert len(links.links) == 2


def _measure_until_the_follower_dies() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipedream.launch.link_profiling.follow", lambda _: os._exit(9))
        return _measure()


def test_a_rank_that_dies_is_named_by_the_others(farm: Farm) -> None:
    leader, follower = farm.run(_measure_until_the_follower_dies, num_ranks=2)
    assert follower.exit_code == 9
    assert isinstance(leader.error, pipedream.PeerLost)
    assert "rank 1 is lost" in str(leader.error)


def test_ranks_with_different_options_are_refused(farm: Farm) -> None:
    outcomes = farm.run(_measure_own, {1: {"transport": "tcp"}}, num_ranks=2)
    for outcome in outcomes:
        assert isinstance(outcome.error, ValueError)
        assert "transport is 'tcp' at rank 1, but 'auto' at rank 0" in str(outcome.error)


def test_without_torchrun_it_says_how_to_start() -> None:
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2 -m pipedream profile-links"):
        _measure()
