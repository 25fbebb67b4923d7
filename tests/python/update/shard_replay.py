"""Replays the programs of one stage's replicas in one thread. A test chooses which replica does its next
instruction, so it can try any delays. The weights that each forward reads are recorded.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from pipedream import _core
from pipedream.planning.plan import Plan
from pipedream.splitting.splitter import split
from pipedream.update.asynchronous_server import AsynchronousServer
from pipedream.update.param_server import ParameterServer
from pipedream.update.shards import ShardLayout
from pipedream.update.stage_optimizer import StageOptimizer
from pipedream.update.tied import TiedParameters
from pipedream.update.weights import StageWeights, weight_layout
from replica_links import QueuedExchange, ReplicaLinks, channels_of
from torch import Tensor, nn

__all__ = ["ReplayedReplica", "ShardReplay", "options_of"]

MakeGradient = Callable[[int, Tensor], Tensor]


def options_of(num_replicas: tuple[int, ...], sync: str, staleness: int = 0) -> _core.ScheduleOptions:
    return _core.ScheduleOptions(
        schedule="data_parallel" if len(num_replicas) == 1 else "pipedream",
        in_flight=_core.derive_in_flight(num_replicas),
        placement=_core.Placement.in_order(num_replicas),
        staleness=staleness,
        asynchronous=sync == "asp",
    )


@dataclass
class Read:
    """The weights that one forward has read."""

    version: int
    content: list[Tensor]
    contained: tuple[int, int] | None
    """The updates in these weights, as in RunResult.updates_read; None unless shards are asynchronous."""


class ReplayedReplica:
    """One replica of the first stage. Its weights begin as zeros, and SGD has a learning rate of 1."""

    def __init__(
        self,
        links: ReplicaLinks,
        options: _core.ScheduleOptions,
        replica: int,
        num_minibatches: int,
        *,
        width: int,
        make_gradient: MakeGradient,
        whole_tensors: bool,
    ) -> None:
        self.replica, self.links, self._make_gradient = replica, links, make_gradient
        self.num_replicas = options.placement.num_replicas(0)
        model = nn.Sequential(nn.Linear(40, 3), nn.Linear(3, width, bias=False)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        stage = split(model, Plan.straight(2, 1))[0]
        named = stage.trainable_parameters()
        self.named = named
        self._num_slots = _core.num_versions_kept(options, 0)
        slots = [torch.zeros(weight_layout(named)[0], dtype=torch.uint8) for _ in range(self._num_slots)]
        self.weights = StageWeights(stage, slots)
        layout = ShardLayout(named, self.num_replicas, whole_tensors=whole_tensors)
        optimizer = StageOptimizer(functools.partial(torch.optim.SGD, lr=1.0), named)
        optimizer.keep(layout.pieces_of(replica))
        shard_bytes = sum(chunk.num_bytes for chunk in layout.chunks_of(replica))
        others = [other for other in range(self.num_replicas) if other != replica]
        make: Any = ParameterServer
        if options.asynchronous:
            make = functools.partial(
                AsynchronousServer,
                master=torch.empty(shard_bytes, dtype=torch.uint8),
                answers={other: torch.empty(shard_bytes, dtype=torch.uint8) for other in others},
                names=[name for name, _ in named],
                where=f"replica {replica}",
            )
        self.server = make(
            self.weights,
            optimizer,
            TiedParameters(_core.ScheduleOptions(), 0, [], self.weights.tied),
            core=links,
            layout=layout,
            rounds=_core.rounds_of(options, 0),
            replica=replica,
            channels=channels_of(replica, self.num_replicas),
            push_slots=[torch.empty(0)],
        )
        self.exchange = cast(QueuedExchange, self.server._exchange)
        self._pushed = -1
        self.program = deque(_core.make_program(options, replica, num_minibatches))
        self.reads: dict[int, Read] = {}
        self.newest = 0
        self._num_chunks = [len(layout.chunks_of(shard)) for shard in range(self.num_replicas)]
        self._gradient_slot = 0
        self._awaits_end = set(others) if options.asynchronous else set()

    def slot_of(self, version: int) -> int:
        return version % self._num_slots

    def content(self, version: int) -> list[Tensor]:
        return [leaf.detach().clone() for leaf in self.weights.own.leaves(self.slot_of(version))]

    def may_go_on(self) -> bool:
        """Returns whether the replica can do its next instruction without a wait."""
        if not self.program:
            return False
        instruction, edge = self.program[0], self.program[0].edge
        if instruction.opcode == "UPDATE" and isinstance(self.server, ParameterServer):
            waiting, needed = self.exchange.pushed, self._num_chunks[self.replica]
            return all(self.links.num_queued(f"push {other} {self.replica}") >= needed for other in waiting)
        if instruction.opcode != "RECV" or edge is None or edge.from_stage != edge.to_stage:
            return True
        queued = self.links.num_queued(f"{edge.kind} {edge.from_replica} {self.replica}")
        needed = 1 if edge.kind == "push" else self._num_chunks[edge.from_replica]
        return queued >= min(needed, self._num_chunks[edge.from_replica])

    def go_on(self) -> None:
        instruction = self.program.popleft()
        edge, minibatch = instruction.edge, instruction.minibatch
        if instruction.opcode == "FORWARD":
            contained = None
            if isinstance(self.server, AsynchronousServer):
                contained = self._contained(self.server, instruction.version)
            self.reads[minibatch] = Read(instruction.version, self.content(instruction.version), contained)
        elif instruction.opcode == "BACKWARD":
            self._backward(minibatch, instruction.version)
        elif instruction.opcode == "UPDATE":
            self.server.take(minibatch, self._gradient_slot)
            read, write = self.slot_of(self.newest), self.slot_of(self.newest + 1)
            self.server.apply(read, write, 1.0, lambda step: step())
            self.newest += 1
        elif edge is not None and edge.kind == "push" and instruction.opcode == "SEND":
            if minibatch != self._pushed:  # one push() sends to all other replicas
                self.server.push(minibatch, self._gradient_slot)
            self._pushed = minibatch
        elif edge is not None and edge.kind == "push":
            self.exchange.begin_push_from(edge.from_replica)
        elif edge is not None and edge.kind == "pull" and instruction.opcode == "RECV":
            self.exchange.pull_from(edge.from_replica)
        if not self.program:
            self.exchange.tell_end()

    def clients_waiting(self) -> list[int]:
        """Returns the replicas whose pushes this replica's asynchronous shard can serve now."""
        return [q for q in self._awaits_end if self.links.num_queued(f"push {q} {self.replica}")]

    def serve(self, other: int) -> None:
        item = self.links.receive(f"push {other} {self.replica}")
        if item.fields.is_end_of_data:
            self._awaits_end.remove(other)
        self.server.serve(other, item)

    def _contained(self, server: AsynchronousServer, version: int) -> tuple[int, int]:
        """Returns the fewest and the most updates that a shard of this version contains so far."""
        own, others = (found.get(version, ()) for found in (server._contained, self.exchange.contained()))
        return min(*own, *others), max(*own, *others)

    def _backward(self, minibatch: int, version: int) -> None:
        """Computes the gradients by autograd, because hooks must be called."""
        self._gradient_slot = self.slot_of(version)
        self.server.begin_last_backward(minibatch, 1.0)
        leaves = self.weights.own.leaves(self._gradient_slot)
        loss = sum((leaf * self._make_gradient(minibatch, leaf)).sum() for leaf in leaves)
        assert isinstance(loss, Tensor)
        loss.backward()  # type: ignore[no-untyped-call]


class ShardReplay:
    """All replicas of the first stage of a plan."""

    def __init__(
        self,
        num_replicas: tuple[int, ...],
        num_minibatches: int,
        make_gradient: MakeGradient,
        *,
        sync: str,
        staleness: int = 0,
        width: int = 50,
        whole_tensors: bool = False,
    ) -> None:
        self.options = options_of(num_replicas, sync, staleness)
        self.links = ReplicaLinks()
        self.links.known_end = num_minibatches
        self.replicas = [
            ReplayedReplica(
                self.links,
                self.options,
                replica,
                num_minibatches,
                width=width,
                make_gradient=make_gradient,
                whole_tensors=whole_tensors,
            )
            for replica in range(num_replicas[0])
        ]

    def run(self, choose: Callable[[int], int]) -> None:
        """Runs until no replica can go on. `choose` gets the number of possible moves and returns the index
        of one.
        """
        while True:
            moves: list[Callable[[], None]] = [r.go_on for r in self.replicas if r.may_go_on()]
            moves += [
                functools.partial(r.serve, client) for r in self.replicas for client in r.clients_waiting()
            ]
            if not moves:
                break
            moves[choose(len(moves))]()
        assert not any(replica.program for replica in self.replicas), "deadlock"
