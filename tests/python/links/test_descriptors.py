"""Tests descriptors.py: how many files a worker may open, and how many its links need."""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Iterator

import pytest
from pipedream import PipelineError, _core
from pipedream.links.channels import RunChannel, channels_of_run, tree_name
from pipedream.links.descriptors import DESCRIPTORS_PER_LINK, check_descriptors, descriptor_limit_raised
from pipedream.links.options import LinkOptions
from pipedream.planning.plan import Plan

_LIMIT = resource.RLIMIT_NOFILE


@pytest.fixture
def soft_limit() -> Iterator[int]:
    """Sets the soft limit below the hard one during a test, and yields it."""
    soft, hard = resource.getrlimit(_LIMIT)
    low = min(hard, 1024) - 1
    resource.setrlimit(_LIMIT, (low, hard))
    yield low
    resource.setrlimit(_LIMIT, (soft, hard))


def test_the_limit_is_raised_as_far_as_it_may_be_and_put_back(soft_limit: int) -> None:
    _, hard = resource.getrlimit(_LIMIT)
    with descriptor_limit_raised():
        assert resource.getrlimit(_LIMIT) == (hard, hard)
    assert resource.getrlimit(_LIMIT) == (soft_limit, hard)


def test_where_it_must_not_be_raised_it_stays(soft_limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr(resource, "setrlimit", refuse)
        with descriptor_limit_raised():
            assert resource.getrlimit(_LIMIT)[0] == soft_limit


def test_more_links_than_there_may_be_open_files_are_refused_before_any_is_opened(soft_limit: int) -> None:
    check_descriptors(0, 8)
    with pytest.raises(PipelineError) as caught:
        check_descriptors(0, soft_limit)
    assert str(caught.value).startswith("rank 0 needs up to ")
    for words in (f"its {soft_limit} links", f"may have {soft_limit}:", "ulimit -Hn", "LimitNOFILE="):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def _num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("item_bytes", [64, 1 << 20], ids=["by tcp", "by shared memory"])
def test_a_link_takes_no_more_descriptors_than_are_counted(item_bytes: int) -> None:
    num_links = 8
    ends = [_core.Worker(**LinkOptions().core_arguments(), run_id=1, plan_hash=2) for _ in range(2)]
    before = _num_open()
    for link in range(num_links):
        for sends, end in enumerate(ends):
            end.add_channel(
                name=f"link {link}",
                sends=bool(sends),
                peer="the other",
                channel_id=link,
                tensors=[("uint8", 1, item_bytes)],
                num_items=1,
                on_device=False,
            )
    for end in ends:
        end.seal()
    receiver, sender = ends
    sender.connect(receiver.listen())
    while not (sender.wait_open(0.1) and receiver.wait_open(0.1)):
        pass
    per_end = (_num_open() - before) / (2 * num_links)
    for end in ends:
        end.close(1.0)
    assert 4 <= per_end <= DESCRIPTORS_PER_LINK


@functools.cache
def _channels(num_ranks: int) -> list[RunChannel]:
    plan = Plan.straight(num_ranks, num_ranks)
    schedule = _core.ScheduleOptions(
        schedule="gpipe",
        in_flight=list(plan.in_flight),
        num_microbatches=1,
        placement=plan.placement,
        exchanges_norms=True,
    )
    return channels_of_run(plan, schedule, num_ranks, {}, [], None, codec={})


def _links(rank: int, num_ranks: int) -> list[str]:
    channels = _channels(num_ranks)
    return [channel.name for channel in channels if rank in (channel.sender, channel.receiver)]


@pytest.mark.parametrize("num_ranks", [9, 256, 1024])
def test_a_rank_has_no_more_links_however_many_ranks_there_are(num_ranks: int) -> None:
    # With two links to every other rank, rank 0 of 100 workers would need all of the usual 1,024 descriptors.
    to_neighbour = 4  # activations, gradients, and a norm in each direction
    assert len(_links(0, num_ranks)) == to_neighbour + 2 * 8
    for rank in (1, num_ranks // 9, num_ranks - 1):
        assert len(_links(rank, num_ranks)) <= 2 * to_neighbour + 2 * (1 + 8)


def test_a_rank_hands_on_to_those_below_it_in_the_tree() -> None:
    tree = {name for name in _links(1, 12) if name.startswith("weights and result, ")}
    pairs = [(0, 1), *((1, child) for child in (9, 10, 11))]
    assert tree == {tree_name(*ends) for pair in pairs for ends in (pair, pair[::-1])}
