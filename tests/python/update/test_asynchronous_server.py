"""Tests replicas of asynchronous shards in one thread, under random delays. Each gradient is applied once, in
the order of arrival. The oracle, pipedream.reference, computes the same numbers from that order. Also tests
how old a version may be with "bsp", "ssp" and "asp".
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream.reference.asynchronous import AsynchronousWeights
from pipedream.reference.updates import Updater
from pipedream.reference.versions import Versions
from shard_replay import ShardReplay
from torch import Tensor

_PLANS = [(2,), (3,), (2, 1), (3, 1), (2, 3)]


def _power_of_two(minibatch: int, leaf: Tensor) -> Tensor:
    return torch.full_like(leaf, float(1 << minibatch))


def _random(minibatch: int, leaf: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * minibatch + leaf.numel())
    return torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator)


def _elements(content: list[Tensor]) -> set[float]:
    return {x for tensor in content for x in tensor.flatten().tolist()}


@pytest.mark.parametrize("num_replicas", _PLANS, ids=str)
@settings(max_examples=8, deadline=None)
@given(chosen=st.randoms(use_true_random=False), num_more=st.integers(0, 5))
def test_each_gradient_is_in_every_part_once_and_what_is_read_says_how_many_are(
    num_replicas: tuple[int, ...], chosen: random.Random, num_more: int
) -> None:
    r = num_replicas[0]
    replay = ShardReplay(num_replicas, 2 * r + num_more, _power_of_two, sync="asp")
    replay.run(chosen.randrange)
    everything = (1 << (2 * r + num_more)) - 1
    for replica in replay.replicas:
        assert _elements(replica.server._pieces) == {-float(everything)}
        for minibatch, read in replica.reads.items():
            own_before = sum(1 << i for i in range(replica.replica, read.version * r, r))
            own = sum(1 << i for i in range(replica.replica, 2 * r + num_more, r))
            counts = set()
            for element in _elements(read.content):
                made_of = round(-element)
                assert made_of & own == own_before, f"minibatch {minibatch}"
                counts.add(made_of.bit_count())
            assert read.contained == (min(counts), max(counts))


@pytest.mark.parametrize(
    ("seed", "width"), [(0, 50), (1, 50), (2, 50), (3, 150_000)], ids=["0", "1", "2", "two chunks"]
)
def test_the_oracle_computes_the_same_from_the_order_of_arrival(seed: int, width: int) -> None:
    generator = random.Random(seed)
    num_replicas = generator.choice(_PLANS) if width == 50 else (2, 1)
    num_minibatches = 3 * num_replicas[0] + generator.randrange(num_replicas[0])
    replay = ShardReplay(num_replicas, num_minibatches, _random, sync="asp", width=width)
    replay.run(generator.randrange)
    records = [replica.server.record() for replica in replay.replicas]
    if width > 50:
        assert [len(record["parts"]) for record in records] == [2, 2]
    oracle = AsynchronousWeights(
        [(name, torch.nn.Parameter(p.detach().clone())) for name, p in replay.replicas[0].named],
        lambda owned: Updater(owned, lambda parameters: torch.optim.SGD(parameters, lr=1.0), None),
        Versions("pipedream", [1] * len(num_replicas), num_replicas, 0),
        0,
        [SimpleNamespace(parts=record["parts"], replicas=record["order"]) for record in records],
        num_minibatches,
    )
    # The oracle may get the minibatches in any order, because the last stage may finish a later one first.
    for minibatch in generator.sample(range(num_minibatches), num_minibatches):
        named = replay.replicas[minibatch % num_replicas[0]].named
        oracle.add(minibatch, {name: _random(minibatch, parameter) for name, parameter in named}, 1.0)
    for replica, replayed in enumerate(replay.replicas):
        for read in replayed.reads.values():
            expected = oracle.find(replica, read.version)
            assert expected is not None
            for name, tensor in zip(oracle.names, read.content, strict=True):
                assert torch.equal(tensor, expected[name])


def test_another_order_gives_other_numbers() -> None:
    contents = []
    for late in (0, 1):
        replay = ShardReplay((2,), 6, _random, sync="asp")

        def choose(count: int, late: int = late) -> int:
            return 0 if late else count - 1

        replay.run(choose)
        contents.append(replay.replicas[0].reads[4].content)
    assert not all(torch.equal(one, other) for one, other in zip(*contents, strict=True))


def test_an_optimizer_that_needs_whole_tensors_has_a_shards_gradient_at_once() -> None:
    replay = ShardReplay((2, 1), 7, _power_of_two, sync="asp", whole_tensors=True)
    replay.run(random.Random(3).randrange)
    for replica in replay.replicas:
        assert len(replica.server._parts) == 1
        assert _elements(replica.server._pieces) == {-127.0}


def _decoded(read: Any, round_of: int, num_minibatches: int) -> set[int]:
    """Returns the versions of the elements. The gradients are such that each version has its own value."""
    contents = {0.0: 0}
    total = 0.0
    for version in range(1, -(-num_minibatches // round_of) + 1):
        members = range((version - 1) * round_of, min(num_minibatches, version * round_of))
        total -= sum(float(1 << minibatch) for minibatch in members) / len(members)
        contents[total] = version
    return {contents[element] for element in _elements(read.content)}


@pytest.mark.parametrize(("sync", "staleness"), [("bsp", 0), ("ssp", 1), ("ssp", 2), ("ssp", 3), ("asp", 0)])
@pytest.mark.parametrize("num_replicas", [(2,), (2, 1), (2, 3)], ids=str)
@settings(max_examples=6, deadline=None)
@given(chosen=st.randoms(use_true_random=False), num_more=st.integers(0, 9))
def test_no_version_is_older_than_its_bound_under_random_delays(
    num_replicas: tuple[int, ...], sync: str, staleness: int, chosen: random.Random, num_more: int
) -> None:
    if staleness and len(num_replicas) == 1:
        return  # data_parallel drains
    r, num_minibatches = num_replicas[0], 2 * num_replicas[0] + num_more
    replay = ShardReplay(num_replicas, num_minibatches, _power_of_two, sync=sync, staleness=staleness)
    replay.run(chosen.randrange)
    in_flight = replay.options.in_flight[0]
    assert {i for replica in replay.replicas for i in replica.reads} == set(range(num_minibatches))
    for replica in replay.replicas:
        for minibatch, read in replica.reads.items():
            oldest = max(0, minibatch // r - in_flight + 1 - staleness)
            assert read.version == oldest
            if sync != "asp":  # without "asp" all elements have the same version
                assert _decoded(read, r, num_minibatches) == {read.version}
