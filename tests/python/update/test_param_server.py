"""Tests replicas in one thread, with queues in place of the core's channels. Whichever replica is late, each
gradient is in exactly one update, and every replica gets every version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import cast

import pytest
import torch
from pipedream import _core
from pipedream.common.errors import PipelineError
from pipedream.model.factored import factorable
from pipedream.planning.plan import Plan
from pipedream.splitting.splitter import split
from pipedream.update.factors import FactorExchange, FactorLayer
from pipedream.update.param_server import ParameterServer
from pipedream.update.shards import ShardLayout
from pipedream.update.stage_optimizer import StageOptimizer
from pipedream.update.tied import TiedParameters
from pipedream.update.weights import StageWeights, weight_layout
from replica_links import QueuedExchange, ReplicaLinks, channels_of
from torch import Tensor, nn

_NUM_SLOTS = 2


class _Replica:
    """A replica whose weights are all equal. SGD has a learning rate of 1, so version v + 1 is version v less
    the mean gradient of round v. A round is the minibatches of one update.
    """

    def __init__(
        self,
        links: ReplicaLinks,
        replica: int,
        num_replicas: int,
        *,
        width: int = 50,
        minibatches_per_round: int | None = None,
        num_rounds_kept: int = 1,
    ) -> None:
        self.links, self.replica, self.num_replicas = links, replica, num_replicas
        model = nn.Sequential(nn.Linear(40, 3), nn.Linear(3, width, bias=False)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        stage = split(model, Plan.straight(2, 1))[0]
        named = stage.trainable_parameters()
        num_bytes = weight_layout(named)[0]
        slots = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(_NUM_SLOTS)]
        self.weights = StageWeights(stage, slots)
        layout = ShardLayout(named, num_replicas, whole_tensors=False)
        optimizer = StageOptimizer(functools.partial(torch.optim.SGD, lr=1.0), named)
        optimizer.keep(layout.pieces_of(replica))
        schedule = _core.ScheduleOptions(in_flight=[1])
        self.server = ParameterServer(
            self.weights,
            optimizer,
            TiedParameters(schedule, 0, [], self.weights.tied),
            core=links,
            layout=layout,
            rounds=_core.Rounds(
                num_replicas=num_replicas, minibatches_per_round=minibatches_per_round or num_replicas
            ),
            replica=replica,
            channels=channels_of(replica, num_replicas),
            push_slots=[torch.empty(0)] * num_rounds_kept,
        )
        self.slot = 0

    @property
    def others(self) -> list[int]:
        return [other for other in range(self.num_replicas) if other != self.replica]

    def backward(self, minibatch: int, value: float) -> None:
        """Gives every parameter the gradient `value`, by autograd, so that its hooks are called."""
        self.server.begin_last_backward(minibatch, 1.0)
        loss = sum((leaf * value).sum() for leaf in self.weights.own.leaves(self.slot))
        assert isinstance(loss, Tensor)
        loss.backward()  # type: ignore[no-untyped-call]

    @property
    def exchange(self) -> QueuedExchange:
        return cast(QueuedExchange, self.server._exchange)

    def update(self, round_index: int) -> None:
        """Makes the update of a round whose gradients all replicas have pushed."""
        for other in self.others:
            self.exchange.begin_push_from(other)
        self.server.take(round_index * self.num_replicas, self.slot)
        write = (self.slot + 1) % _NUM_SLOTS
        self.server.apply(self.slot, write, 1.0, lambda step: step())
        self.slot = write

    def pull(self) -> None:
        for other in self.others:
            self.exchange.pull_from(other)

    def contents(self) -> set[float]:
        return {x for leaf in self.weights.own.leaves(self.slot) for x in leaf.flatten().tolist()}


def _run_round(replicas: list[_Replica], round_index: int) -> None:
    for replica in replicas:
        minibatch = round_index * replica.num_replicas + replica.replica
        replica.backward(minibatch, float(1 << minibatch))
        replica.server.push(minibatch, replica.slot)
    for replica in replicas:
        replica.update(round_index)
    for replica in replicas:
        replica.pull()


def test_a_version_is_that_before_less_the_mean_gradient_of_all() -> None:
    links = ReplicaLinks()
    replicas = [_Replica(links, replica, 3) for replica in range(3)]
    for round_index in range(2):
        _run_round(replicas, round_index)
    for replica in replicas:
        (content,) = replica.contents()
        assert content == pytest.approx(-(1 + 2 + 4) / 3 - (8 + 16 + 32) / 3, rel=1e-12)


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_pushes_cross_into_the_core_by_parameters_and_not_by_chunks_or_replicas(num_replicas: int) -> None:
    links = ReplicaLinks()
    replicas = [_Replica(links, index, num_replicas, width=800_000) for index in range(num_replicas)]
    _run_round(replicas, 0)
    links.sent.clear()
    replicas[0].exchange.num_push_calls = 0
    replicas[0].backward(num_replicas, 1.0)
    replicas[0].server.push(num_replicas, replicas[0].slot)
    assert len(links.sent) >= 3
    assert replicas[0].exchange.num_push_calls == len(replicas[0].weights.own.names) + 1


def test_from_the_second_round_on_chunks_leave_during_the_backward() -> None:
    links = ReplicaLinks()
    replicas = [_Replica(links, replica, 2) for replica in range(2)]
    _run_round(replicas, 0)
    links.sent.clear()
    replicas[0].backward(2, 1.0)
    assert links.sent == ["push 0 1"]
    replicas[0].server.push(2, replicas[0].slot)
    assert links.sent == ["push 0 1"]


@pytest.mark.parametrize(("num_minibatches", "last"), [(8, 6), (7, 6), (6, 4), (None, 6)])
def test_of_several_minibatches_in_a_round_the_last_one_pushes_the_sum(
    num_minibatches: int | None, last: int
) -> None:
    """Rounds have 4 minibatches. Replica 0 of 2 has minibatches 4 and 6 of the second round."""
    links = ReplicaLinks()
    replica = _Replica(links, 0, 2, minibatches_per_round=4)
    links.known_end = num_minibatches
    for minibatch in (0, 2):
        replica.backward(minibatch, 1.0)
    assert links.sent == []  # the first round tells how many gradients add up, and pushes nothing yet
    replica.server.push(0, replica.slot)
    links.queues.clear()
    for minibatch in range(4, last, 2):
        replica.backward(minibatch, 2.0)
    assert not links.queues
    replica.backward(last, 8.0)
    ((_, content), fields) = links.queues["push 0 1"].popleft()
    assert fields.num_minibatches == 1 + (last - 4) // 2
    # Zeros fill the gaps between parameters.
    assert set(content.tolist()) - {0.0} == ({8.0} if last == 4 else {10.0})


def test_a_gradient_that_grows_after_it_has_left_is_refused() -> None:
    links = ReplicaLinks()
    replicas = [_Replica(links, replica, 2) for replica in range(2)]
    _run_round(replicas, 0)
    replicas[0].backward(2, 1.0)
    with pytest.raises(PipelineError, match="accumulated again after it had been pushed"):
        replicas[0].weights.own.leaves(replicas[0].slot)[0].sum().backward()  # type: ignore[no-untyped-call]


class _FactoredReplica:
    """A replica with two fully connected layers. One weight is pushed as factors, and the other is not. SGD
    has a learning rate of 1.
    """

    def __init__(self, links: ReplicaLinks, replica: int, num_replicas: int) -> None:
        self.links, self.replica, self.num_replicas = links, replica, num_replicas
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 2)).double()
        stage = split(self.model, Plan.straight(3, 1))[0]
        named = stage.trainable_parameters()
        slots = [torch.zeros(weight_layout(named)[0], dtype=torch.uint8) for _ in range(_NUM_SLOTS)]
        weights = [FactorLayer("0.weight", 0, 4, 30, 40, torch.float64)]
        layers = factorable(stage, named)
        self.weights = StageWeights(stage, slots)
        layout = ShardLayout(named, num_replicas, whole_tensors=False, shared=[0])
        optimizer = StageOptimizer(functools.partial(torch.optim.SGD, lr=1.0), named)
        optimizer.keep(layout.pieces_of(replica))
        channels = channels_of(replica, num_replicas)
        to, from_ = (
            {other: name.replace("push", "factors") for other, name in names.items()}
            for names in (channels.push_to, channels.push_from)
        )
        channels = dataclasses.replace(channels, factors_to=to, factors_from=from_)
        self.server = ParameterServer(
            self.weights,
            optimizer,
            TiedParameters(_core.ScheduleOptions(in_flight=[1]), 0, [], self.weights.tied),
            core=links,
            layout=layout,
            rounds=_core.Rounds(num_replicas=num_replicas, minibatches_per_round=num_replicas),
            replica=replica,
            channels=channels,
            push_slots=[torch.empty(0)],
            factors=FactorExchange(
                weights,
                {"0.weight": layers["0.weight"]},
                replica=replica,
                num_replicas=num_replicas,
                device=torch.device("cpu"),
            ),
        )
        self._around = contextlib.ExitStack()  # entered for as long as this replica exists
        self._around.enter_context(self.server.running())
        self.slot = 0

    def backward(self, minibatch: int, *, uses_weight: bool = False) -> None:
        """Does a backward. With uses_weight the loss also reads the weight directly."""
        self.weights.bind(self.slot, {})
        loss = _loss_of(self.model, minibatch)
        if uses_weight:
            loss = loss + cast(nn.Linear, self.model[0]).weight.sum()
        self.server.begin_last_backward(minibatch, 1.0)
        assert self.server.around_backward is not None
        with self.server.around_backward():
            loss.backward()  # type: ignore[no-untyped-call]

    @property
    def others(self) -> list[int]:
        return [other for other in range(self.num_replicas) if other != self.replica]

    @property
    def exchange(self) -> QueuedExchange:
        return cast(QueuedExchange, self.server._exchange)

    def update(self, round_index: int, num_minibatches: int) -> None:
        first = round_index * self.num_replicas
        for other in self.others:
            if first + other < num_minibatches:
                self.exchange.begin_push_from(other)
        self.server.take(first, self.slot)
        write = (self.slot + 1) % _NUM_SLOTS
        self.server.apply(self.slot, write, 1.0, lambda step: step())
        self.slot = write


def _loss_of(model: nn.Module, minibatch: int) -> Tensor:
    inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(minibatch), dtype=torch.float64)
    loss: Tensor = model(inputs).square().sum() / 10
    return loss


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_factored_weights_are_updated_by_every_replica_to_the_same_bits_and_never_pulled(
    num_replicas: int,
) -> None:
    links = ReplicaLinks()
    replicas = [_FactoredReplica(links, replica, num_replicas) for replica in range(num_replicas)]
    plain = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 2)).double()
    plain.load_state_dict(replicas[0].model.state_dict())
    num_minibatches = 2 * num_replicas + 1  # the last round has one minibatch
    for round_index in range(3):
        members = range(num_replicas * round_index, num_minibatches)[:num_replicas]
        for minibatch in members:
            replica = replicas[minibatch % num_replicas]
            replica.backward(minibatch)
            replica.server.push(minibatch, replica.slot)
        for replica in replicas:
            replica.update(round_index, num_minibatches)
        pulled = [tensors for name, queue in links.queues.items() if "pull" in name for tensors, _ in queue]
        assert sum(content.nbytes for (content,) in pulled) < 30 * 40 * 8
        for replica in replicas:
            for other in replica.others:
                replica.exchange.pull_from(other)
        mean = sum(_loss_of(plain, minibatch) for minibatch in members) / len(members)
        assert isinstance(mean, Tensor)
        plain.zero_grad()
        mean.backward()  # type: ignore[no-untyped-call]
        torch.optim.SGD(plain.parameters(), lr=1.0).step()
    for replica in replicas:
        leaves = replica.weights.own.leaves(replica.slot)
        assert all(map(torch.equal, leaves, replicas[0].weights.own.leaves(replicas[0].slot)))
        torch.testing.assert_close(leaves, list(plain.parameters()), rtol=1e-10, atol=1e-12)
    assert not any(links.queues.values())


def test_factors_leave_during_the_backward_from_the_second_round_on() -> None:
    links = ReplicaLinks()
    replica, other = (_FactoredReplica(links, index, 2) for index in range(2))
    replica.backward(0)
    assert links.sent == []
    replica.server.push(0, 0)
    other.backward(1)
    other.server.push(1, 0)
    replica.update(0, 4)
    links.sent.clear()
    replica.backward(2)
    assert links.sent.count("factors 0 1") == 1
    replica.server.push(2, replica.slot)
    assert links.sent.count("factors 0 1") == 1


def test_a_gradient_of_a_factored_weight_from_elsewhere_is_refused() -> None:
    replica = _FactoredReplica(ReplicaLinks(), 0, 2)
    replica.backward(0, uses_weight=True)
    with pytest.raises(PipelineError, match=r"'0\.weight' has a gradient besides that of its layer"):
        replica.server.push(0, 0)


def test_norms_count_factored_weights_once() -> None:
    links = ReplicaLinks()
    replicas = [_FactoredReplica(links, replica, 2) for replica in range(2)]
    plain = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 2)).double()
    plain.load_state_dict(replicas[0].model.state_dict())
    for replica in replicas:
        replica.backward(replica.replica)
        replica.server.push(replica.replica, 0)
    total = 0.0
    for replica in replicas:
        replica.exchange.begin_push_from(1 - replica.replica)
        replica.server.take(0, 0)
        total += replica.server.figures().squared_norm
    ((_loss_of(plain, 0) + _loss_of(plain, 1)) / 2).backward()  # type: ignore[no-untyped-call]
    expected = sum(float(p.grad.square().sum()) for p in plain.parameters() if p.grad is not None)
    assert total == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("num_rounds_kept", [1, 2])
def test_before_the_first_backward_of_a_round_older_ones_have_left(num_rounds_kept: int) -> None:
    # Gradients of too many rounds must not wait for a slow link. Memory is planned for num_rounds_kept only.
    links = ReplicaLinks()
    replica = _Replica(links, 0, 3, num_rounds_kept=num_rounds_kept)
    replica.server.begin_backward()
    assert not replica.exchange.waits
    replica.backward(0, 1.0)
    replica.server.push(0, replica.slot)
    replica.server.begin_backward()
    assert replica.exchange.waits == [num_rounds_kept - 1]
    replica.server.begin_backward()  # the backward of the next microbatch
    assert len(replica.exchange.waits) == 1


def test_what_leaves_during_a_backward_counts_beside_what_it_pushes() -> None:
    """This memory exists at the same time as all gradients of the round, so it must be added to theirs."""
    server = _Replica(ReplicaLinks(), 0, 2).server
    before = server.num_bytes(0)
    late: torch.Tensor | None = torch.empty(100, dtype=torch.uint8)
    server._note_pushed([late])
    server.begin_last_backward(0, 1.0)
    late = None
    pushed = torch.empty(30, dtype=torch.uint8)
    server._note_pushed([pushed])
    assert server.num_bytes(0) == before + 100 + 30
