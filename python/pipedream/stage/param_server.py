"""One replica's end of its stage's parameter server: its shard of the parameters, which it alone updates, and
its exchange with the shards of the others.

    round t, at each replica                       who                     what travels, chunk by chunk
    SEND push   by its last backward of t          with a microbatch in t  its gradient, to the shards' owners
    RECV push   before the update                  all                     the gradients of its own shard
    UPDATE      chunk by chunk: its mean over the round's minibatches, its version t + 1 of the optimizer
    SEND pull   with it                            all                     that, to the others
    RECV pull   before what reads version t + 1    all                     the others' shards of it

A chunk is updated, and leaves for the others, as soon as the gradients of all replicas are there, while the
next chunk's are on their way: both directions of a link are busy. Measuring norms waits for all of them.

Of a weight whose gradient is pushed as factors (factor_exchange.py) every replica makes the next version.

The program says when (transfers.h); here is what becomes of what others push, in shard_client.py what is
pushed and pulled. Gradients are added in the order of the replicas, so that a run gives the same numbers
however late one is. A round that nobody knows to be the last has all replicas; who learns that it has not
says so on the way of its pushes. Owned by the worker's compute thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipedream import _core
from pipedream.common.errors import PipelineError
from pipedream.model.layers import dtype_name
from pipedream.optim.master_weights import master_dtype
from pipedream.stage.gradients import GradientFigures, RunStep, figures_of
from pipedream.stage.pushes import bytes_of, send
from pipedream.stage.shard_client import EndOfData, ShardClient, own_piece
from pipedream.stage.shards import Chunk, Piece, ShardLayout, ShardPart, parts_of, piece_of
from pipedream.stage.weights import WeightVersions

__all__ = ["ParameterServer"]


@dataclass
class _Round:
    """What is there of a round that is not over."""

    index: int
    own: list[Tensor | None] | None = None
    """This replica's gradients by parameter, flat, where it has some; known when the update begins."""
    pushed_by: set[int] = field(default_factory=set)
    """The others whose gradients the program waits for, or has."""
    arrived: dict[int, list[list[Tensor]]] = field(default_factory=dict)
    """By replica: what has come of its chunks, in the order of sending."""
    num_summed: dict[int, int] = field(default_factory=dict)
    """By replica: microbatches that its gradient is the sum of."""
    num_minibatches: int = 0
    """Whose microbatches all of them have; known when the update begins."""


class ParameterServer(ShardClient):
    """A replica's shard and its exchange with the others."""

    def __init__(self, *arguments: Any, layout: ShardLayout, **options: Any) -> None:
        super().__init__(*arguments, layout=layout, **options)
        own_chunks = self._chunks[self._replica]
        self._steps_by_element = not layout.whole_tensors  # by optimizers that keep no gradient
        own_pieces = layout.pieces_of(self._replica)
        self._parts = parts_of(own_chunks, own_pieces, at_once=layout.whole_tensors)
        self._shared = layout.shared
        self._arrivals = _core.ShardRounds(
            num_replicas=self._rounds.num_replicas,
            num_chunks=len(own_chunks) + len(self._shared),
            first_version=self._newest,
            num_rounds_max=1,  # a gradient is asked for when its round is the next
        )
        self._open: dict[int, _Round] = {}
        """By index, those that are not updated yet."""
        self._updated: _Round | None = None
        self.mean_peak_bytes = 0
        """Of means in memory of their own, the most that there were at once."""
        self._mean_bytes = 0
        self._poisons = _core.poisons_released_slots()
        self._holds_versions = layout.num_shards > self._rounds.num_replicas
        self._held: dict[int, list[Tensor]] = {}
        """By replica, chunks of the next version that wait for what is pushed there."""
        tied_pieces = layout.tied_pieces_of(self._replica)
        self._is_counted = [self._counts(piece) for piece in own_pieces]
        own_pieces = own_pieces[: len(own_pieces) - len(tied_pieces)]
        self._own_pieces = _pieces_in_slots(self._weights.own, own_pieces)
        tied = self._tied.owned
        self._tied_pieces = [[]] if tied is None else _pieces_in_slots(tied, tied_pieces)

    def expect(self, other: int, minibatch: int, write_slot: int | None = None) -> EndOfData | None:
        """Waits for the beginning of that replica's gradient; EndOfData where it has none of that round.
        write_slot: of the round's update, which nobody reads any more; None: not known yet."""
        round_index = self._rounds.round_of(minibatch)
        if write_slot is not None and round_index in self._own and not self._poisons:
            self._post_places(write_slot)  # there is an update, and others may be done with theirs before it
        entry = self._open.setdefault(round_index, _Round(round_index))
        entry.arrived[other] = []
        if self._factors is not None or self._chunks[self._replica]:
            channels = self._channels.push_from if self._factors is None else self._factors.channels_from
            first = self._receive(channels[other])
            if isinstance(first, EndOfData):
                return first
            entry.num_summed[other], tensors = first
            if self._factors is None:
                entry.arrived[other].append(tensors)
            else:
                self._factors.take_in(other, round_index, tensors)
        entry.pushed_by.add(other)
        return None

    # The shard's update.

    def take(self, minibatch: int, own_slot: int) -> None:
        """The next update is of the minibatch's round, whose gradients need not all be there yet."""
        round_index = self._rounds.round_of(minibatch)
        entry = self._updated = self._open.pop(round_index, _Round(round_index))
        entry.own = self._own.pop(round_index, None)
        # As those say who have them: how many minibatches there are need not be known here yet.
        num_summed = sum(entry.num_summed.values())
        if entry.own is not None:
            num_summed += self._num_own(entry.index)
        entry.num_minibatches = num_summed // self._rounds.num_microbatches

    def figures(self) -> GradientFigures:
        """Of this shard's mean gradients, once all have come."""
        entry = self._updated
        assert entry is not None
        self._mean_bytes = 0
        means = {part.first: self._means_of(entry, part) for part in self._parts}
        self._taken = [mean for first in sorted(means) for mean in means[first]]
        counted = zip(self._taken, self._is_counted, strict=True)
        return figures_of([mean for mean, is_counted in counted if is_counted])

    def _counts(self, piece: Piece) -> bool:
        """Whether in norms, which are sums over all replicas, the piece is this one's."""
        if piece.parameter not in self._shared:
            return True
        assert self._factors is not None
        return self._factors.counts(piece.parameter)

    def poison(self, freed_slot: int) -> None:
        """Not yet: another replica may still be reading this one's shard of the version."""

    def apply(self, read_slot: int, write_slot: int, gradient_scale: float, run: RunStep) -> None:
        entry = self._updated
        assert entry is not None

        def step(part: ShardPart, pieces: slice, read: Sequence[Tensor], write: Sequence[Tensor]) -> None:
            if not self._taken:
                self._mean_bytes = 0
            means = self._taken[pieces] if self._taken else self._means_of(entry, part, is_read=True)
            run(functools.partial(self._optimizer.step_some, part.first, read, write, means, gradient_scale))

        self._make_version(read_slot, write_slot, step)
        run(self._optimizer.end_step)

    def keep_version(self, slot: int) -> None:
        """The version in the slot becomes that of the parameters which the slots were made of."""
        self._weights.own.restore(slot)

    def skip(self, read_slot: int, write_slot: int) -> None:
        """All gradients have come, as they have been measured."""

        def copy(part: ShardPart, pieces: slice, read: Sequence[Tensor], write: Sequence[Tensor]) -> None:
            if read_slot != write_slot and read:
                with torch.no_grad():
                    torch._foreach_copy_([*write], [*read])

        self._make_version(read_slot, write_slot, copy)
        self._overflowed = True

    def _make_version(
        self,
        read_slot: int,
        write_slot: int,
        make: Callable[[ShardPart, slice, Sequence[Tensor], Sequence[Tensor]], None],
    ) -> None:
        """Sends the others each chunk of the next version as soon as it is made, from where it lies. make:
        makes a part, whose pieces are these of the shard's."""
        tied_read, tied_write = self._tied.begin_update()
        self._settle(write_slot, tied_write)
        poisons = self._poisons and read_slot != write_slot
        if not poisons:
            self._post_places(write_slot)
        self._wait_for_readers(write_slot)
        if poisons:
            self._weights.own.poison(write_slot)
            self._post_places(write_slot)
        self._posted_slot = None
        read = [*self._own_pieces[read_slot], *self._tied_pieces[tied_read]]
        write = [*self._own_pieces[write_slot], *self._tied_pieces[tied_write]]
        for part in self._parts:
            pieces = slice(part.first, part.first + len(part.pieces))
            make(part, pieces, read[pieces], write[pieces])
            for _, chunk in part.chunks:
                content = self._place_of(chunk, write_slot, tied_write)
                assert content is not None
                self._send_version(content)
        self._send_held()
        if self._factors is not None:
            assert self._updated is not None
            self._factors.end_round(self._updated.index)
        self._updated = None
        self._finish()
        self._note_version(write_slot)

    def _send_version(self, content: Tensor) -> None:
        """A chunk to all replicas. Where there are spares, to each after what is pushed to it: every channel
        that has something to send gets as much of this replica's link, and the spares', for whose shards all
        wait last, would get less of it."""
        for other, channel in self._channels.pull_to.items():
            if self._holds_versions:
                held = self._held.setdefault(other, [])
                held.append(content)
                if not self._has_left(other, timeout_s=0.0):
                    continue
                self._send_all(channel, held)
            else:
                send(self._core, channel, [content])

    def _send_held(self) -> None:
        for other, held in self._held.items():
            if held:
                self._has_left(other)
                self._send_all(self._channels.pull_to[other], held)

    def _send_all(self, channel: str, held: list[Tensor]) -> None:
        for content in held:
            send(self._core, channel, [content])
        held.clear()

    def _has_left(self, other: int, timeout_s: float = 1e9) -> bool:
        """What this replica pushes there in the round of the update, and in those before."""
        assert self._updated is not None
        pushed = self._channels.push_to.get(other)  # a spare has no gradients
        if pushed is None:
            return True
        num_later = max(0, self._num_pushed - 1 - self._updated.index) * len(self._chunks[other])
        return self._core.wait_until_sent(pushed, num_later, timeout_s)

    def _wait_for_readers(self, write_slot: int) -> None:
        """Until what is in the slot has left for the others. Who has read it in this round has had it; who
        has no minibatch in the last round need not."""
        versions = [version for version, slot in self._slot_of.items() if slot == write_slot]
        if self._tied.owned is not None:
            versions.append(self._newest + 1 - self._tied.owned.num_slots)
        for version in versions:
            num_later = (self._newest - version) * len(self._chunks[self._replica])
            for channel in self._channels.pull_to.values():
                self._core.wait_until_sent(channel, num_later)

    # Means.

    def _means_of(self, entry: _Round, part: ShardPart, *, is_read: bool = False) -> list[Tensor | None]:
        """is_read: by the optimizer's step, which scales none."""
        means: dict[Piece, Tensor | None] = {}
        for index, chunk in part.chunks:  # in the order in which they come
            means |= zip(chunk.pieces, self._means(entry, index, chunk, is_read=is_read), strict=True)
        for piece in part.pieces:
            if piece.parameter in self._shared:
                means[piece] = self._product(entry, piece)
        return [means[piece] for piece in part.pieces]

    def _product(self, entry: _Round, piece: Piece) -> Tensor | None:
        """The mean of a weight's gradients that are factors."""
        assert self._factors is not None
        index = len(self._chunks[self._replica]) + self._shared.index(piece.parameter)
        self._note_arrived(entry, index)
        return self._factors.mean_of(entry.index, piece.parameter, entry.num_minibatches)

    def _note_arrived(self, entry: _Round, index: int) -> list[int]:
        """The gradients of the index-th chunk, or after the chunks of a shared weight, are all there, and in
        this update alone. The replicas that have them."""
        members = sorted([*entry.pushed_by, *([] if entry.own is None else [self._replica])])
        for member in members:
            refused = self._arrivals.arrive(member, entry.index, index)
            if refused is not None:
                raise PipelineError(refused)
        self._arrivals.publish(index, members)
        return members

    def _means(self, entry: _Round, index: int, chunk: Chunk, *, is_read: bool) -> list[Tensor | None]:
        """The mean gradients of the chunk's pieces, over all who have a microbatch in the round."""
        parts = {other: self._chunk_from(entry, other, index) for other in sorted(entry.pushed_by)}
        members = self._note_arrived(entry, index)
        means = []
        for position, piece in enumerate(chunk.pieces):
            of_piece = {member: self._part(entry, parts, member, position, piece) for member in members}
            if is_read and entry.num_minibatches == 1 and len(members) == 1 and self._steps_by_element:
                (gradient,) = of_piece.values()  # the run's last round has one
                means.append(None if gradient is None else self._shaped(gradient, piece))
                continue
            room = [_bytes_in_item(content, piece) for _, content in parts.values()]
            means.append(self._mean(piece, of_piece, entry.num_minibatches, room))
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
        if member != self._replica:
            return self._piece_in_item(parts[member], position, piece)
        assert entry.own is not None
        return own_piece(entry.own, piece)

    def _mean(
        self, piece: Piece, found: Mapping[int, Tensor | None], num_minibatches: int, room: Sequence[Tensor]
    ) -> Tensor | None:
        """Of the members' gradients, by replica in their order; None where nobody has one. room: where the
        others' have been received, also one that has none. It lies there, unless the optimizer may keep it,
        and never in this replica's own: that may be memory of something else."""
        in_order = [part for part in found.values() if part is not None]
        if not in_order:
            return None
        if room and self._steps_by_element:
            mean = room[-1].view(in_order[0].dtype)
        else:
            mean = torch.empty_like(in_order[0])
            self._mean_bytes += mean.nbytes
            self.mean_peak_bytes = max(self.mean_peak_bytes, self._mean_bytes)
        if mean.device.type == "cpu" and mean.dtype in (torch.float32, torch.float64, torch.bfloat16):
            _core.aggregate(
                [part.data_ptr() for part in in_order],
                num_minibatches,
                mean.data_ptr(),
                mean.numel(),
                dtype=dtype_name(mean.dtype),
                num_threads=torch.get_num_threads(),
            )
        else:
            total = in_order[0].to(master_dtype(mean.dtype), copy=True)
            for part in in_order[1:]:
                total += part
            mean.copy_(total.div_(num_minibatches))
        return self._shaped(mean, piece)


def _bytes_in_item(content: Tensor, piece: Piece) -> Tensor:
    return bytes_of(content)[piece.begin_bytes : piece.begin_bytes + piece.num_bytes]


def _pieces_in_slots(versions: WeightVersions, pieces: Sequence[Piece]) -> list[list[Tensor]]:
    """By slot, as the optimizer has them. Of the leaves that view the slot: a layer may point them elsewhere
    later, and settle() points them back. pieces: counted as the parameters of these versions are."""
    slots = range(versions.num_slots)
    return [[piece_of(versions.leaves(slot)[piece.parameter], piece) for piece in pieces] for slot in slots]
