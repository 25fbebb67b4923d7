"""One replica as a client of its stage's shards: it pushes its gradients to their owners, and pulls what
these make of them.

Gradients leave chunk by chunk, on the host during the backward that completes them (pushes.py); a version
arrives chunk by chunk in the slot that it is for. The program says when (transfers.h); what an owner makes of
gradients is param_server.py's. Owned by the worker's compute thread.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pipedream import _core
from pipedream.common.regions import Region
from pipedream.stage.factor_exchange import FactorExchange
from pipedream.stage.gradients import StageGradients, in_order
from pipedream.stage.pushes import ItemLinks, RoundPushes, bytes_of, send
from pipedream.stage.shards import Chunk, Piece, ShardLayout, in_leaving_order
from pipedream.stage.stage_optimizer import StageOptimizer
from pipedream.stage.tied import TiedParameters
from pipedream.stage.weights import StageWeights

__all__ = ["EndOfData", "Received", "ReplicaChannels", "ShardClient", "own_piece", "received_of"]

_Leaving = dict[int, tuple["weakref.ref[torch.UntypedStorage]", int]]
"""Gradients' storages that have been pushed, with their bytes, by the id of the reference."""


@dataclass(frozen=True)
class EndOfData:
    """In place of what an item made: there is no such minibatch."""

    num_minibatches: int
    boundary_events: int = 0


@dataclass(frozen=True)
class ReplicaChannels:
    """The names of the channels between one replica and the others, by the other's index."""

    push_to: Mapping[int, str]
    push_from: Mapping[int, str]
    pull_to: Mapping[int, str]
    pull_from: Mapping[int, str]
    posted_from: frozenset[int] = frozenset()
    """Those of pull_from whose versions land where post_items() says, which is where they are for."""

    @property
    def received(self) -> list[str]:
        """By which something comes."""
        return [*self.push_from.values(), *self.pull_from.values()]


class Received(NamedTuple):
    """An item of another replica."""

    num_summed: int
    """A push says of how many microbatches its gradient is the sum, and an asynchronous shard's answer how
    many gradients are in it."""
    tensors: list[Tensor]


class ShardClient(StageGradients):
    """A replica's exchange with the shards of the others."""

    takes_means = True

    def __init__(
        self,
        weights: StageWeights,
        optimizer: StageOptimizer,
        tied: TiedParameters,
        *,
        core: ItemLinks,
        layout: ShardLayout,
        rounds: _core.Rounds,
        replica: int,
        channels: ReplicaChannels,
        push_codec: str = "none",
        factors: FactorExchange | None = None,
        num_rounds_kept: int = 1,
        slot_of: Mapping[int, int] | None = None,
    ) -> None:
        """optimizer: which keeps the pieces of this replica's shard. push_codec: of the channels. factors: of
        what the layout has as shared. num_rounds_kept: of which there may be gradients at once. slot_of: by
        version, what is in the slots; None: the newest alone."""
        super().__init__(weights, optimizer, tied)
        self._core = core
        self._rounds = rounds
        self._replica = replica
        self._channels = channels
        self._factors = factors
        self._others = sorted(channels.push_to)
        self._chunks = {
            shard: in_leaving_order(layout.chunks_of(shard)) for shard in range(layout.num_shards)
        }
        self._dtypes = {shard: layout.dtype_of(shard) for shard in range(layout.num_shards)}
        first = rounds.first_version
        self._loss_scale = 1.0  # of the latest backward; where minibatches of a round add up, of all of them
        self._own: dict[int, list[Tensor | None]] = {}
        """By round, this replica's gradients by parameter, flat: from its push to its update."""
        self._pushed: list[weakref.ref[torch.UntypedStorage]] = []  # of gradients
        self._late: _Leaving = {}
        """Those that were there when the round's last backward began: pushing also lets go of some."""
        self._num_rounds_waiting = num_rounds_kept - 1
        self._has_pushed = False  # since it was last known what has left
        self.before_sending: Callable[[Tensor | None], None] | None = None
        """As RoundPushes has it."""
        self._slot_of = dict(slot_of or {first: 0})  # by version, of those in the slots
        self._newest = first
        self._newest_pulled = dict.fromkeys(self._others, first)
        self._places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """By slot and owner, (address, bytes) of the owner's chunks in the slot."""
        self._posted_slot: int | None = None
        """For the next version, which is not there yet."""
        self._num_pushed = first  # rounds
        self._has_told_end = False
        self._pushes = RoundPushes(
            core,
            channels.push_to,
            self._chunks,
            self._dtypes,
            len(self._leaves(0, 0)),
            feeds_back=push_codec.startswith("topk"),
            factored=() if factors is None else factors.parameters,
            # Weakly: the leaves' hooks have the pushes, and this has the leaves.
            push_factors=functools.partial(type(self)._push_factors, weakref.proxy(self)),
            before_sending=functools.partial(type(self)._before_chunk, weakref.proxy(self)),
        )
        # On a device backwards run on other threads, and the core has one owner.
        self._pushes_early = weights.own.slots[0].device.type == "cpu"
        if self._pushes_early:
            for slot in range(weights.own.num_slots):
                for parameter, leaf in enumerate(weights.own.leaves(slot)):
                    hook = functools.partial(self._pushes.accumulated, parameter)
                    leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def around_backward(self) -> Region | None:
        return None if self._factors is None else self._factors.around_backward

    @property
    def received_channels(self) -> list[str]:
        """By which the others' gradients and versions have come."""
        of_factors = () if self._factors is None else self._factors.channels_from.values()
        return [*self._channels.received, *of_factors]

    def running(self) -> AbstractContextManager[None]:
        return super().running() if self._factors is None else self._factors.running()

    # Pushing.

    def begin_backward(self) -> None:
        """Waits until older rounds have left than may wait. Where links are as fast as they are at the others
        they have, as those others have sent what the update before took."""
        if not self._has_pushed:
            return
        self._has_pushed = False
        for other, channel in self._channels.push_to.items():
            self._core.wait_until_sent(channel, self._num_rounds_waiting * len(self._chunks[other]))

    def begin_last_backward(self, minibatch: int, loss_scale: float) -> None:
        self._loss_scale = loss_scale
        num_minibatches = self._core.num_minibatches()
        if self._pushes_early and self._rounds.is_over_after(self._replica, minibatch, num_minibatches):
            self._late = self._leaving()
            self._pushes.begin(loss_scale, self._num_own(self._rounds.round_of(minibatch)))

    def push(self, other: int, minibatch: int, own_slot: int) -> None:
        """Sends that replica what its shard needs of this one's gradient of the minibatch's round and has
        not left during the backward. own_slot: of the version that the round's last backward read."""
        round_index = self._rounds.round_of(minibatch)
        own = self._own.get(round_index)
        if own is None:
            own = self._own[round_index] = self._take_gradients(own_slot)
            self._note_pushed(own)
            if self._factors is not None:
                if not self._factors.has_pushed:
                    self._push_factors(self._num_own(round_index))
                self._factors.end_push(round_index)
        self._pushes.send_rest(other, own, self._num_own(round_index))
        if other == self._others[-1]:
            self._pushes.finish()
            self._late = {}
            self._has_pushed = True
            self._num_pushed = round_index + 1
            self.tell_end()

    def _push_factors(self, num_summed: int) -> None:
        """When all of a round are complete."""
        assert self._factors is not None
        self._note_pushed(self._factors.push(num_summed))

    def _note_pushed(self, tensors: Sequence[Tensor | None]) -> None:
        self._pushed = [ref for ref in self._pushed if ref() is not None]
        self._pushed += [weakref.ref(part.untyped_storage()) for part in tensors if part is not None]

    def _before_chunk(self, copied: Tensor | None) -> None:
        self._note_pushed([copied])
        if self.before_sending is not None:
            self.before_sending(copied)

    def tell_end(self) -> None:
        """Says on the way of the pushes how many minibatches there are, once that is known and all have left:
        another may wait for one that does not exist."""
        if self._has_told_end:
            return
        num_minibatches = self._core.num_minibatches()
        if num_minibatches is None:
            return
        if self._num_pushed < self._rounds.num_begun(self._replica, num_minibatches):
            return
        self._has_told_end = True
        fields = _core.ItemFields(
            num_minibatches=num_minibatches, is_end_of_data=True, boundary_events=self._core.end_events()
        )
        if self._factors is not None:  # whose item is the first of a round
            self._factors.push_end(fields)
            return
        flags = torch.empty(0, dtype=torch.uint8, device=self._weights.own.slots[0].device)
        for other, channel in self._channels.push_to.items():
            send(self._core, channel, [flags, flags.view(self._dtypes[other])], fields)

    def num_bytes(self, own_slot: int) -> int:
        """With what has been pushed and not left, or had not when the backward began that measures: that may
        have been there beside all that this one pushes."""
        left_bytes = 0 if self._factors is None else self._factors.num_bytes
        pushed = self._late | self._leaving()
        return super().num_bytes(own_slot) + left_bytes + sum(num_bytes for _, num_bytes in pushed.values())

    def _leaving(self) -> _Leaving:
        return {id(ref): (ref, storage.nbytes()) for ref in self._pushed if (storage := ref()) is not None}

    def _num_own(self, round_index: int) -> int:
        return self._rounds.num_own_in(self._replica, round_index, self._core.num_minibatches())

    def _take_gradients(self, own_slot: int) -> list[Tensor | None]:
        """By parameter, flat, unscaled and in the order in which the parameters lie in memory."""
        leaves = self._leaves(own_slot, self._tied.owned_gradient_slot)
        gradients = [*self._weights.own.take_gradients(own_slot), *self._tied.collect()]
        early = self._pushes.gradients
        if self._factors is not None:
            self._factors.check(gradients)
        return [
            in_order(gradient, leaf, self._loss_scale) if index not in early else early[index]
            for index, (gradient, leaf) in enumerate(zip(gradients, leaves, strict=True))
        ]

    # Pulling.

    def pull_from(self, other: int) -> None:
        """Receives the next version of that replica's shard."""
        self._newest_pulled[other] += 1
        slot_index = self._slot_of.get(self._newest_pulled[other])  # None: nobody reads it any more
        self._take_in(other, slot_index, self._tied.owned_slot_of(self._newest_pulled[other]))
        self._tied.pulled_from(other)

    def _take_in(self, other: int, slot_index: int | None, tied_slot: int) -> list[int]:
        """Receives the next version of that replica's shard, all its chunks. Returns how many gradients each
        chunk says that are in it."""
        if other in self._channels.posted_from:  # it is where it was to land
            for _ in self._chunks[other]:
                self._core.receive_item(self._channels.pull_from[other])
            return []
        self._settle(slot_index, tied_slot)
        num_gradients = []
        for chunk in self._chunks[other]:
            received = self._receive(self._channels.pull_from[other])
            assert not isinstance(received, EndOfData)
            place = self._place_of(chunk, slot_index, tied_slot)
            if place is not None:
                place.copy_(received.tensors[0])
            num_gradients.append(received.num_summed)
        return num_gradients

    def _post_places(self, write_slot: int) -> None:
        """From now on the others' shards of the next version may land in the slot, which nobody reads."""
        if not self._channels.posted_from or self._posted_slot == write_slot:
            return
        assert self._posted_slot is None, f"slot {write_slot} after slot {self._posted_slot}"
        self._posted_slot = write_slot
        self._weights.own.settle(write_slot)  # which would write over what has landed there
        for other in self._channels.posted_from:
            if (write_slot, other) not in self._places:
                places = [self._place_of(chunk, write_slot, 0) for chunk in self._chunks[other]]
                self._places[write_slot, other] = [
                    (place.data_ptr(), place.nbytes) for place in places if place is not None
                ]
            self._core.post_items(self._channels.pull_from[other], self._places[write_slot, other])

    def _note_version(self, write_slot: int) -> None:
        """The slot gets the next version: this replica's shard of it is there."""
        self._newest += 1
        self._slot_of = {v: slot for v, slot in self._slot_of.items() if slot != write_slot}
        self._slot_of[self._newest] = write_slot

    def whole_slot(self, newest_slot: int) -> int:
        """Of the newest version whose shards have all been pulled."""
        whole = min([self._newest, *self._newest_pulled.values()])
        return self._slot_of.get(whole, newest_slot)

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

    def _piece_in_item(self, tensors: Sequence[Tensor], position: int, piece: Piece) -> Tensor | None:
        """The gradient of the piece, which is the one at this position of the chunk that the item is."""
        flags, content = tensors
        if not flags[position]:
            return None
        part = bytes_of(content)[piece.begin_bytes : piece.begin_bytes + piece.num_bytes]
        return part.view(self._leaves(0, 0)[piece.parameter].dtype)

    def _shaped(self, gradient: Tensor, piece: Piece) -> Tensor:
        """As the optimizer takes it: flat, or of a whole parameter like that."""
        leaf = self._leaves(0, 0)[piece.parameter]
        return gradient.as_strided(leaf.shape, leaf.stride()) if piece.is_whole else gradient

    def _receive(self, channel: str) -> Received | EndOfData:
        item = self._core.receive_item(channel)
        assert item is not None  # there is no time-out
        return received_of(item)


def own_piece(gradients: Sequence[Tensor | None], piece: Piece) -> Tensor | None:
    """gradients: by parameter, flat."""
    gradient = gradients[piece.parameter]
    return None if gradient is None else gradient[piece.first : piece.first + piece.count]


def received_of(item: _core.ReceivedItem) -> Received | EndOfData:
    if item.fields.is_end_of_data:
        return EndOfData(item.fields.num_minibatches, item.fields.boundary_events)
    return Received(item.fields.num_minibatches, [from_dlpack(capsule) for capsule in item.take_tensors()])
