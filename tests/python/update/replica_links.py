"""Replaces the core's channels and its ShardExchange by queues, for tests of one stage's replicas."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from pipedream import _core
from pipedream.links.replica_channels import ReplicaChannels
from torch import Tensor
from torch.utils.dlpack import from_dlpack

__all__ = ["QueuedExchange", "ReplicaLinks", "channels_of"]

_KINDS = ("push_to", "push_from", "factors_to", "factors_from", "pull_to", "pull_from")


class ReplicaLinks:
    """Replaces the core for all replicas. Holds the items that were sent and not received, by channel."""

    def __init__(self) -> None:
        self.queues: dict[str, deque[Any]] = {}
        self.known_end: int | None = None
        self.sent: list[str] = []

    def make_exchange(self, **spec: Any) -> Any:
        return QueuedExchange(self, **spec)

    def send_items(
        self, items: Sequence[tuple[str, list[Any]]], fields: _core.ItemFields | None = None
    ) -> None:
        for channel, capsules in items:
            tensors = [from_dlpack(capsule).clone() for capsule in capsules]  # type: ignore[no-untyped-call]
            self.send(channel, tensors, fields or _core.ItemFields())

    def send(self, channel: str, tensors: list[Tensor], fields: _core.ItemFields) -> None:
        self.put(channel, tensors, fields)
        self.sent.append(channel)

    def put(self, channel: str, tensors: list[Tensor], fields: _core.ItemFields) -> None:
        self.queues.setdefault(channel, deque()).append((tensors, fields))

    def receive(self, channel: str) -> Any:
        tensors, fields = self.queues[channel].popleft()
        return SimpleNamespace(fields=fields, take_tensors=lambda: tensors)

    def receive_any(self, channels: Any) -> Any:
        raise AssertionError("nobody serves here but the test")

    def stop_serving(self) -> None: ...

    def fail(self, why: str) -> None:
        raise AssertionError(why)

    def wait_until_sent(self, channel: str, num_left_max: int, timeout_s: float = 1e9) -> bool:
        return True

    def num_minibatches(self) -> int | None:
        return self.known_end

    def end_events(self) -> int:
        return 0

    def num_queued(self, channel: str) -> int:
        return len(self.queues.get(channel, ()))


class QueuedExchange:
    """Replaces the core's ShardExchange. It never waits, so the items must have arrived. It gives the parts
    of a gradient, but not their mean.
    """

    def __init__(self, links: ReplicaLinks, *, rounds: _core.Rounds, replica: int, **spec: Any) -> None:
        self.links, self.rounds, self.replica = links, rounds, replica
        (self.chunks, _), self.peers, self.slots = spec["shard"], spec["peers"], spec["own_slots"]
        self.num_push_calls = 0
        self.waits: list[int] = []
        """The argument of each wait_for_pushes()."""
        self.pushed: dict[int, tuple[int, list[Tensor] | None]] = {}
        """replica -> (microbatches, factors if any) that it has pushed for the next round."""
        self._given: dict[int, Tensor | None] = {}
        self._num_sent = dict.fromkeys(self.peers, 0)
        self._own_of_rounds: dict[int, tuple[list[Tensor | None], int]] = {}
        self._own: list[Tensor | None] | None = None
        self._newest = rounds.first_version
        self._newest_pulled = dict.fromkeys(self.peers, rounds.first_version)
        self._slot_of = dict(spec["slot_of"])
        self._contained: dict[int, tuple[int, int]] = {}
        self._write_slot = 0

    def _channel(self, other: int, kind: str) -> str:
        names: list[str] = self.peers[other][1]
        return names[_KINDS.index(kind)]

    def tell_end(self) -> None:
        fields = _core.ItemFields(num_minibatches=self.links.known_end or 0, is_end_of_data=True)
        for other in self.peers:
            self.links.put(self._channel(other, "push_to"), [], fields)

    def begin_push_from(self, other: int) -> None:
        """Does the instruction RECV push."""
        factors = self._channel(other, "factors_from")
        if factors:
            tensors, fields = self.links.queues[factors].popleft()
            self.pushed[other] = fields.num_minibatches, tensors
        else:
            _, fields = self.links.queues[self._channel(other, "push_from")][0]
            self.pushed[other] = fields.num_minibatches, None

    def push_ready(self, parameter: int, gradient: Tensor, num_summed: int) -> None:
        self.num_push_calls += 1
        self._given[parameter] = gradient
        self._send_complete(num_summed)

    def push_factors(self, factors: list[Tensor], num_summed: int) -> None:
        self.num_push_calls += 1
        for other in self.peers:
            channel, fields = self._channel(other, "factors_to"), _core.ItemFields(num_minibatches=num_summed)
            self.links.send(channel, [factor.clone() for factor in factors], fields)

    def push(self, round_index: int, gradients: list[Tensor | None], num_summed: int) -> None:
        self.num_push_calls += 1
        self._given = dict(enumerate(gradients)) | self._given
        self._send_complete(num_summed)
        self._own_of_rounds[round_index] = gradients, num_summed
        self._given = {}
        self._num_sent = dict.fromkeys(self.peers, 0)

    def _send_complete(self, num_summed: int) -> None:
        for other, ((chunks, dtype), *_) in self.peers.items():
            for _, num_bytes, _, pieces in chunks[self._num_sent[other] :]:
                if any(parameter not in self._given for parameter, *_ in pieces):
                    break
                found = [self._given[parameter] for parameter, *_ in pieces]
                content = torch.zeros(num_bytes, dtype=torch.uint8)
                for (_, first, count, begin_bytes, _), gradient in zip(pieces, found, strict=True):
                    if gradient is not None:
                        part = gradient[first : first + count].view(torch.uint8)
                        content[begin_bytes:][: part.numel()] = part
                flags = torch.tensor([gradient is not None for gradient in found], dtype=torch.uint8)
                fields = _core.ItemFields(num_minibatches=num_summed)
                tensors = [flags, content.view(getattr(torch, dtype))]
                self.links.send(self._channel(other, "push_to"), tensors, fields)
                self._num_sent[other] += 1

    def begin_update(self, round_index: int) -> Any:
        self._own, num_summed = self._own_of_rounds.pop(round_index, (None, 0))
        total = num_summed + sum(count for count, _ in self.pushed.values())
        factors = {other: tensors for other, (_, tensors) in self.pushed.items() if tensors is not None}
        return total // self.rounds.num_microbatches, factors

    def mean_of(self, chunk: int, num_threads: int = 1) -> list[tuple[list[Tensor], None]]:
        found = {
            other: self.links.queues[self._channel(other, "push_from")].popleft()[0] for other in self.pushed
        }
        return [
            ([part for _, part in sorted(self._parts(found, position, row))], None)
            for position, row in enumerate(self.chunks[chunk][3])
        ]

    def _parts(self, found: Mapping[int, list[Tensor]], position: int, row: Any) -> list[tuple[int, Tensor]]:
        parameter, first, count, begin_bytes, dtype_name = row
        dtype = getattr(torch, dtype_name)
        parts = [
            (other, content.view(torch.uint8)[begin_bytes:][: count * dtype.itemsize].view(dtype))
            for other, (flags, content) in found.items()
            if flags[position]
        ]
        own = None if self._own is None else self._own[parameter]
        return parts if own is None else [*parts, (self.replica, own[first : first + count])]

    def begin_version(self, slot: int) -> None:
        self._write_slot = slot

    def publish(self, chunk: int) -> None:
        begin_bytes, num_bytes, _, _ = self.chunks[chunk]
        content = torch.empty(num_bytes, dtype=torch.uint8)
        ctypes.memmove(content.data_ptr(), self.slots[self._write_slot] + begin_bytes, num_bytes)
        for other in self.peers:
            if channel := self._channel(other, "pull_to"):
                self.links.send(channel, [content], _core.ItemFields())

    def end_version(self) -> None:
        self.pushed, self._own = {}, None
        self.note_version(self._write_slot)

    def note_version(self, slot: int) -> None:
        self._newest += 1
        self._slot_of = {version: held for version, held in self._slot_of.items() if held != slot}
        self._slot_of[self._newest] = slot

    def wait_for_pushes(self, num_rounds_left: int) -> None:
        self.waits.append(num_rounds_left)

    def pull_from(self, other: int) -> None:
        version = self._newest_pulled[other] = self._newest_pulled[other] + 1
        for begin_bytes, num_bytes, _, _ in self.peers[other][0][0]:
            (content,), fields = self.links.queues[self._channel(other, "pull_from")].popleft()
            if version in self._slot_of:
                ctypes.memmove(
                    self.slots[self._slot_of[version]] + begin_bytes, content.data_ptr(), num_bytes
                )
            counts = *self._contained.get(version, ()), fields.num_minibatches
            self._contained[version] = min(counts), max(counts)

    def whole_version(self) -> int:
        return min([self._newest, *self._newest_pulled.values()])

    def contained(self) -> dict[int, tuple[int, int]]:
        return self._contained


def channels_of(replica: int, num_replicas: int) -> ReplicaChannels:
    """Returns the names of a replica's channels. "push 0 1" goes from replica 0 to replica 1."""

    def names(what: str, *, sends: bool) -> Mapping[int, str]:
        others = [other for other in range(num_replicas) if other != replica]
        return {o: f"{what} {replica} {o}" if sends else f"{what} {o} {replica}" for o in others}

    return ReplicaChannels(
        names("push", sends=True),
        names("push", sends=False),
        names("pull", sends=True),
        names("pull", sends=False),
    )
