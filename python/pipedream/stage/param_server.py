"""One replica's end of its stage's parameter server: its shard of the parameters, which it alone updates, and
its exchange with the shards of the others.

    round t, at each replica                       who                     what travels, chunk by chunk
    SEND push   by its last backward of t          with a minibatch in t   its gradient, to the shards' owners
    RECV push   before the update                  all                     the gradients of its own shard
    UPDATE      chunk by chunk: its mean over the round's minibatches, its version t + 1 of the optimizer
    SEND pull   with it                            all                     that, to the others
    RECV pull   before what reads version t + 1    all                     the others' shards of it

A chunk is updated, and leaves for the others, as soon as the gradients of all replicas are there, while the
next chunk's are on their way: both directions of a link are busy. Measuring norms waits for all of them.

The program says when (transfers.h); here is what is sent, and what becomes of what is received. Gradients are
added in the order of the replicas, so that a run gives the same numbers however late one is. A round that
nobody knows to be the last has all replicas; who learns that it has not says so on the way of its pushes.
Owned by the worker's compute thread.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pipedream import _core
from pipedream.common.errors import PipelineError
from pipedream.stage.gradients import GradientFigures, RunStep, StageGradients, in_order
from pipedream.stage.pushes import ItemLinks, RoundPushes, bytes_of, send
from pipedream.stage.round_rule import RoundRule
from pipedream.stage.shards import Chunk, Piece, ShardLayout, in_leaving_order, piece_of
from pipedream.stage.stage_optimizer import StageOptimizer
from pipedream.stage.tied import TiedParameters
from pipedream.stage.weights import StageWeights, WeightVersions

__all__ = ["EndOfData", "ParameterServer", "ReplicaChannels"]


@dataclass(frozen=True)
class EndOfData:
    """In place of what an item made: there is no such minibatch."""

    num_minibatches: int


@dataclass(frozen=True)
class ReplicaChannels:
    """The names of the channels between one replica and the others, by the other's index."""

    push_to: Mapping[int, str]
    push_from: Mapping[int, str]
    pull_to: Mapping[int, str]
    pull_from: Mapping[int, str]


class _Received(NamedTuple):
    """An item of another replica."""

    num_summed: int
    """Of a push: minibatches that the gradient is the sum of."""
    tensors: list[Tensor]


@dataclass(frozen=True)
class _Part:
    """What of a shard the optimizer updates at once."""

    chunks: Sequence[tuple[int, Chunk]]
    """Each with its position among the shard's, in the order in which they leave."""
    pieces: Sequence[Piece]
    """Those of the chunks, consecutive ones of the shard."""
    first: int
    """Of the pieces, among the shard's."""


def _parts_of(chunks: Sequence[Chunk], *, at_once: bool) -> list[_Part]:
    """Of a shard with these chunks, as they leave. at_once: one part, also of no chunks."""
    in_slots = sorted(chunks, key=lambda chunk: chunk.position)
    if at_once or not chunks:
        return [_Part(list(enumerate(chunks)), [piece for chunk in in_slots for piece in chunk.pieces], 0)]
    lengths = itertools.accumulate((len(chunk.pieces) for chunk in in_slots), initial=0)
    begins = {chunk.position: begin for chunk, begin in zip(in_slots, lengths, strict=False)}
    return [_Part([entry], entry[1].pieces, begins[entry[1].position]) for entry in enumerate(chunks)]


@dataclass
class _Round:
    """What is there of a round that is not over."""

    index: int
    own: list[Tensor | None] | None = None
    """This replica's gradients by parameter, flat; None while it has pushed none."""
    pushed_by: set[int] = field(default_factory=set)
    """The others whose gradients the program waits for, or has."""
    arrived: dict[int, list[list[Tensor]]] = field(default_factory=dict)
    """By replica: what has come of its chunks, in the order of sending."""
    num_summed: dict[int, int] = field(default_factory=dict)
    """By replica: minibatches that its gradient is the sum of."""
    num_members: int = 0
    """Minibatches that all of them have; known when the update begins."""


class ParameterServer(StageGradients):
    """A replica's shard and its exchange with the others."""

    takes_means = True

    def __init__(
        self,
        weights: StageWeights,
        optimizer: StageOptimizer,
        tied: TiedParameters,
        *,
        core: ItemLinks,
        layout: ShardLayout,
        rule: RoundRule,
        channels: ReplicaChannels,
        push_codec: str = "none",
    ) -> None:
        """optimizer: which keeps the pieces of this replica's shard. push_codec: of the channels."""
        super().__init__(weights, optimizer, tied)
        self._core = core
        self._rule = rule
        self._channels = channels
        self._others = sorted(channels.push_to)
        self._chunks = {
            shard: in_leaving_order(layout.chunks_of(shard)) for shard in range(rule.num_replicas)
        }
        own_chunks = self._chunks[rule.replica]
        self._steps_by_element = not layout.whole_tensors  # by optimizers that keep no gradient
        self._parts = _parts_of(own_chunks, at_once=layout.whole_tensors)
        first = rule.round_of(rule.first_minibatch)
        self._arrivals = _core.ShardRounds(
            num_replicas=rule.num_replicas,
            num_chunks=len(own_chunks),
            first_version=first,
            num_rounds_max=1,  # a gradient is asked for when its round is the next
        )
        self._rounds: dict[int, _Round] = {}
        self._updated: _Round | None = None
        self._loss_scale = 1.0  # of the latest backward; where minibatches of a round add up, of all of them
        self._pushed: list[weakref.ref[torch.UntypedStorage]] = []  # of gradients
        self._left_late_bytes = 0
        self._slot_of = {first: 0}  # by version, of those in the slots
        self._newest = first
        self._newest_pulled = dict.fromkeys(self._others, first)
        self._num_pushed = first  # rounds
        self._has_told_end = False
        self._dtypes = {shard: layout.dtype_of(shard) for shard in range(rule.num_replicas)}
        self._pushes = RoundPushes(
            core,
            channels.push_to,
            self._chunks,
            self._dtypes,
            len(self._leaves(0, 0)),
            feeds_back=push_codec.startswith("topk"),
        )
        # On a device backwards run on other threads, and the core has one owner.
        self._pushes_early = weights.own.slots[0].device.type == "cpu"
        if self._pushes_early:
            for slot in range(weights.own.num_slots):
                for parameter, leaf in enumerate(weights.own.leaves(slot)):
                    hook = functools.partial(self._pushes.accumulated, parameter)
                    leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._poisons = _core.poisons_released_slots()
        tied_pieces = layout.tied_pieces_of(rule.replica)
        own_pieces = layout.pieces_of(rule.replica)
        own_pieces = own_pieces[: len(own_pieces) - len(tied_pieces)]
        self._own_pieces = _pieces_in_slots(weights.own, own_pieces)
        self._tied_pieces = [[]] if tied.owned is None else _pieces_in_slots(tied.owned, tied_pieces)

    # Pushing.

    def begin_last_backward(self, minibatch: int, loss_scale: float) -> None:
        self._loss_scale = loss_scale
        if self._pushes_early and self._rule.is_last_own(minibatch, self._core.num_minibatches()):
            self._left_late_bytes = self._leaving_bytes()  # to push is also to let go of what has left
            self._pushes.begin(loss_scale, self._num_own(self._rule.round_of(minibatch)))

    def push(self, other: int, minibatch: int, own_slot: int) -> None:
        """Sends that replica what its shard needs of this one's gradient of the minibatch's round and has
        not left during the backward. own_slot: of the version that the round's last backward read."""
        round_index = self._rule.round_of(minibatch)
        entry = self._rounds.setdefault(round_index, _Round(round_index))
        if entry.own is None:
            entry.own = self._take_gradients(own_slot, minibatch)
            self._pushed = [ref for ref in self._pushed if ref() is not None]
            self._pushed += [weakref.ref(part.untyped_storage()) for part in entry.own if part is not None]
        self._pushes.send_rest(other, entry.own, self._num_own(round_index))
        if other == self._others[-1]:
            self._pushes.finish()
            self._left_late_bytes = 0
            self._num_pushed = round_index + 1
            self.tell_end()

    def tell_end(self) -> None:
        """Says on the way of the pushes how many minibatches there are, once that is known and all have left:
        another may wait for one that does not exist."""
        if self._has_told_end:
            return
        num_minibatches = self._core.num_minibatches()
        if num_minibatches is None or self._num_pushed < self._rule.num_pushed(num_minibatches):
            return
        self._has_told_end = True
        flags = torch.empty(0, dtype=torch.uint8, device=self._weights.own.slots[0].device)
        fields = _core.ItemFields(num_minibatches=num_minibatches, is_end_of_data=True)
        for other, channel in self._channels.push_to.items():
            send(self._core, channel, [flags, flags.view(self._dtypes[other])], fields)

    def expect(self, other: int, minibatch: int) -> EndOfData | None:
        """Waits for the beginning of that replica's gradient; EndOfData where it has none of that round."""
        round_index = self._rule.round_of(minibatch)
        entry = self._rounds.setdefault(round_index, _Round(round_index))
        if self._chunks[self._rule.replica]:
            first = self._receive(self._channels.push_from[other])
            if isinstance(first, EndOfData):
                return first
            entry.num_summed[other], tensors = first
            entry.arrived[other] = [tensors]
        entry.pushed_by.add(other)
        return None

    # The shard's update.

    def num_bytes(self, own_slot: int) -> int:
        """Those too that have been pushed and not left, or had not when the backward began that measures."""
        return super().num_bytes(own_slot) + max(self._leaving_bytes(), self._left_late_bytes)

    def _leaving_bytes(self) -> int:
        held = {id(storage): storage.nbytes() for ref in self._pushed if (storage := ref()) is not None}
        return sum(held.values())

    def take(self, minibatch: int, own_slot: int) -> None:
        """The next update is of the minibatch's round, whose gradients need not all be there yet."""
        entry = self._updated = self._rounds.pop(self._rule.round_of(minibatch))
        # As those say who have them: how many minibatches there are need not be known here yet.
        entry.num_members = sum(entry.num_summed.values())
        if entry.own is not None:
            entry.num_members += self._num_own(entry.index)

    def figures(self) -> GradientFigures:
        """Of this shard's mean gradients, once all have come."""
        entry = self._updated
        assert entry is not None
        means = {part.first: self._means_of(entry, part) for part in self._parts}
        self._taken = [mean for first in sorted(means) for mean in means[first]]
        return super().figures()

    def _num_own(self, round_index: int) -> int:
        return self._rule.num_own(round_index, self._core.num_minibatches())

    def poison(self, freed_slot: int) -> None:
        """Not yet: another replica may still be reading this one's shard of the version."""

    def apply(self, read_slot: int, write_slot: int, gradient_scale: float, run: RunStep) -> None:
        entry = self._updated
        assert entry is not None

        def step(part: _Part, pieces: slice, read: Sequence[Tensor], write: Sequence[Tensor]) -> None:
            means = self._taken[pieces] if self._taken else self._means_of(entry, part)
            run(functools.partial(self._optimizer.step_some, part.first, read, write, means, gradient_scale))

        self._make_version(read_slot, write_slot, step)
        run(self._optimizer.end_step)

    def skip(self, read_slot: int, write_slot: int) -> None:
        """All gradients have come, as they have been measured."""

        def copy(part: _Part, pieces: slice, read: Sequence[Tensor], write: Sequence[Tensor]) -> None:
            if read_slot != write_slot and read:
                with torch.no_grad():
                    torch._foreach_copy_([*write], [*read])

        self._make_version(read_slot, write_slot, copy)
        self._overflowed = True

    def _make_version(
        self,
        read_slot: int,
        write_slot: int,
        make: Callable[[_Part, slice, Sequence[Tensor], Sequence[Tensor]], None],
    ) -> None:
        """Sends the others each chunk of the next version as soon as it is made, from where it lies. make:
        makes a part, whose pieces are these of the shard's."""
        tied_read, tied_write = self._tied.begin_update()
        self._settle(write_slot, tied_write)
        self._wait_for_readers(write_slot)
        if self._poisons and read_slot != write_slot:
            self._weights.own.poison(write_slot)
        read = [*self._own_pieces[read_slot], *self._tied_pieces[tied_read]]
        write = [*self._own_pieces[write_slot], *self._tied_pieces[tied_write]]
        for part in self._parts:
            pieces = slice(part.first, part.first + len(part.pieces))
            make(part, pieces, read[pieces], write[pieces])
            for _, chunk in part.chunks:
                content = self._place_of(chunk, write_slot, tied_write)
                assert content is not None
                for channel in self._channels.pull_to.values():
                    send(self._core, channel, [content])
        self._updated = None
        self._finish()
        self._newest += 1
        self._slot_of = {v: slot for v, slot in self._slot_of.items() if slot != write_slot}
        self._slot_of[self._newest] = write_slot

    def _wait_for_readers(self, write_slot: int) -> None:
        """Until what is in the slot has left for the others. Who has read it in this round has had it; who
        has no minibatch in the last round need not."""
        versions = [version for version, slot in self._slot_of.items() if slot == write_slot]
        if self._tied.owned is not None:
            versions.append(self._newest + 1 - self._tied.owned.num_slots)
        for version in versions:
            num_later = (self._newest - version) * len(self._chunks[self._rule.replica])
            for channel in self._channels.pull_to.values():
                self._core.wait_until_sent(channel, num_later)

    # Pulling.

    def pull_from(self, other: int) -> None:
        """Receives the next version of that replica's shard."""
        self._newest_pulled[other] += 1
        slot_index = self._slot_of.get(self._newest_pulled[other])  # None: nobody reads it any more
        tied_slot = self._tied.owned_slot_of(self._newest_pulled[other])
        self._settle(slot_index, tied_slot)
        for chunk in self._chunks[other]:
            received = self._receive(self._channels.pull_from[other])
            assert not isinstance(received, EndOfData)
            place = self._place_of(chunk, slot_index, tied_slot)
            if place is not None:
                place.copy_(received.tensors[0])
        self._tied.pulled_from(other)

    # Parts.

    def _settle(self, own_slot: int | None, tied_slot: int) -> None:
        """What is in these slots lies there."""
        if own_slot is not None:
            self._weights.own.settle(own_slot)
        if self._tied.owned is not None:
            self._tied.owned.settle(tied_slot)

    def _place_of(self, chunk: Chunk, own_slot: int | None, tied_slot: int) -> Tensor | None:
        """Where the chunk lies, of the version in these slots."""
        if chunk.is_tied:
            assert self._tied.owned is not None
            return self._tied.owned.slots[tied_slot][chunk.begin_bytes : chunk.end_bytes]
        if own_slot is None:
            return None
        return self._weights.own.slots[own_slot][chunk.begin_bytes : chunk.end_bytes]

    def _take_gradients(self, own_slot: int, minibatch: int) -> list[Tensor | None]:
        """By parameter, flat, unscaled and in the order in which the parameters lie in memory."""
        leaves = self._leaves(own_slot, self._tied.owned_slot_read_by(minibatch))
        gradients = [*self._weights.own.take_gradients(own_slot), *self._tied.collect(minibatch)]
        early = self._pushes.gradients
        return [
            in_order(gradient, leaf, self._loss_scale) if index not in early else early[index]
            for index, (gradient, leaf) in enumerate(zip(gradients, leaves, strict=True))
        ]

    def _means_of(self, entry: _Round, part: _Part) -> list[Tensor | None]:
        # In the order in which they come.
        means = [(chunk, self._means(entry, index, chunk)) for index, chunk in part.chunks]
        means.sort(key=lambda of_chunk: of_chunk[0].position)
        return [mean for _, of_chunk in means for mean in of_chunk]

    def _means(self, entry: _Round, index: int, chunk: Chunk) -> list[Tensor | None]:
        """Of the chunk's pieces, once it has come from all who have a minibatch in the round."""
        parts = {other: self._chunk_from(entry, other, index) for other in sorted(entry.pushed_by)}
        members = sorted([*parts, *([] if entry.own is None else [self._rule.replica])])
        for member in members:
            refused = self._arrivals.arrive(member, entry.index, index)
            if refused is not None:
                raise PipelineError(refused)
        self._arrivals.publish(index, members)
        means = []
        for position, piece in enumerate(chunk.pieces):
            of_piece = {member: self._part(entry, parts, member, position, piece) for member in members}
            means.append(self._mean(piece, of_piece, entry.num_members))
        return means

    def _chunk_from(self, entry: _Round, other: int, index: int) -> list[Tensor]:
        """(flags, content) of the chunk, once it has come."""
        arrived = entry.arrived[other]
        if index == len(arrived):
            received = self._receive(self._channels.push_from[other])
            assert not isinstance(received, EndOfData)
            arrived.append(received.tensors)
        found, arrived[index] = arrived[index], []  # its memory goes back when it has been added
        return found

    def _part(
        self, entry: _Round, parts: Mapping[int, list[Tensor]], member: int, position: int, piece: Piece
    ) -> Tensor | None:
        """The member's gradient of the piece."""
        if member == self._rule.replica:
            assert entry.own is not None
            own = entry.own[piece.parameter]
            return None if own is None else own[piece.first : piece.first + piece.count]
        flags, content = parts[member]
        if not flags[position]:
            return None
        part = bytes_of(content)[piece.begin_bytes : piece.begin_bytes + piece.num_bytes]
        return part.view(self._leaves(0, 0)[piece.parameter].dtype)

    def _mean(self, piece: Piece, found: Mapping[int, Tensor | None], num_members: int) -> Tensor | None:
        """Of the members' gradients, by replica in their order; None where nobody has one. It lies where one
        has been received, unless the optimizer may keep it, and never in this replica's own: that may be
        memory of something else."""
        parts = {member: part for member, part in found.items() if part is not None}
        if not parts:
            return None
        in_order = list(parts.values())
        received = [part for member, part in parts.items() if member != self._rule.replica]
        mean = received[-1] if received and self._steps_by_element else torch.empty_like(in_order[0])
        if mean.device.type == "cpu" and mean.dtype in (torch.float32, torch.float64):
            _core.aggregate(
                [part.data_ptr() for part in in_order],
                num_members,
                mean.data_ptr(),
                mean.numel(),
                dtype=str(mean.dtype).removeprefix("torch."),
                num_threads=torch.get_num_threads(),
            )
        else:
            total = in_order[0].clone()
            for part in in_order[1:]:
                total += part
            mean.copy_(total.div_(num_members))
        leaf = self._leaves(0, 0)[piece.parameter]
        return mean.as_strided(leaf.shape, leaf.stride()) if piece.is_whole else mean

    # Items.

    def _receive(self, channel: str) -> _Received | EndOfData:
        item = self._core.receive_item(channel)
        assert item is not None  # there is no time-out
        if item.fields.is_end_of_data:
            return EndOfData(item.fields.num_minibatches)
        tensors = [from_dlpack(capsule) for capsule in item.take_tensors()]
        return _Received(item.fields.num_minibatches, tensors)


def _pieces_in_slots(versions: WeightVersions, pieces: Sequence[Piece]) -> list[list[Tensor]]:
    """By slot, as the optimizer has them. Of the leaves that view the slot: a layer may point them elsewhere
    later, and settle() points them back. pieces: counted as the parameters of these versions are."""
    slots = range(versions.num_slots)
    return [[piece_of(versions.leaves(slot)[piece.parameter], piece) for piece in pieces] for slot in slots]
