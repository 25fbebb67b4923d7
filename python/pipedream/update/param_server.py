"""Runs one replica's part of its stage's parameter server. The replica owns a shard of the parameters, which
no other worker updates.

    round t, at each replica                       who                     what travels, chunk by chunk
    SEND push   with its last backward of t        with a microbatch in t  its gradient, to the shards' owners
    RECV push   before the update                  all                     the gradients of its own shard
    UPDATE      chunk by chunk: the mean over the round's minibatches, then version t + 1 of the shard
    SEND pull   with the update                    all                     version t + 1, to the others
    RECV pull   before version t + 1 is read       all                     version t + 1 of the other shards

A round is the minibatches of one update: with 2 replicas and 1 microbatch per minibatch, 2 minibatches. A
chunk is updated and sent to the other replicas as soon as the chunk's gradients of all replicas are there.
Meanwhile the gradients of the next chunk are sent, so both directions of a link are busy. If norms are
measured, the update waits for all gradients.

The core sends, receives and makes the means (csrc/param_server/shard_exchange.h). This module makes the
optimizer's steps. It also multiplies the factors of weights whose gradients are pushed as factors
(factors.py). Every replica makes the next version of these weights. An owner waits for a push of every
replica in each round, unless it knows that the round is the run's last. A replica that learns that the data
are over sends the owners this message in place of a push. Owned by the worker's compute thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipedream import _core
from pipedream.model.layers import dtype_name
from pipedream.optim.master_weights import master_dtype
from pipedream.update.gradients import GradientFigures, RunStep, figures_of
from pipedream.update.shard_client import ShardClient
from pipedream.update.shards import Piece, ShardLayout, ShardPart, parts_of, piece_of
from pipedream.update.weights import WeightVersions

__all__ = ["ParameterServer"]


class ParameterServer(ShardClient):
    """Owns one replica's shard: makes the shard's next version and sends it to the other replicas."""

    def __init__(self, *arguments: Any, layout: ShardLayout, **options: Any) -> None:
        super().__init__(*arguments, layout=layout, **options)
        own_pieces = layout.pieces_of(self._replica)
        self._parts = parts_of(self._own_chunks, own_pieces, at_once=layout.whole_tensors)
        self._shared = layout.shared
        self._round = self._rounds.first_version - 1
        """The round of the latest update, which may still be in progress."""
        self._num_minibatches = 0
        """The number of minibatches in the mean of that round."""
        self.mean_peak_bytes = 0
        """The most bytes that mean gradients have taken at once, without means that were computed in the
        memory of a gradient."""
        self._mean_bytes = 0
        tied_pieces = layout.tied_pieces_of(self._replica)
        self._is_counted = [self._counts(piece) for piece in own_pieces]
        own_pieces = own_pieces[: len(own_pieces) - len(tied_pieces)]
        self._own_pieces = _pieces_in_slots(self._weights.own, own_pieces)
        tied = self._tied.owned
        self._tied_pieces = [[]] if tied is None else _pieces_in_slots(tied, tied_pieces)

    # The shard's update.

    def take(self, minibatch: int, own_slot: int) -> None:
        """Begins the update of the minibatch's round. Some of the gradients may not have arrived yet."""
        self._round = self._rounds.round_of(minibatch)
        self._num_minibatches, factors = self._exchange.begin_update(self._round)
        for other, tensors in factors.items():
            assert self._factors is not None
            self._factors.take_in(other, self._round, tensors)

    def figures(self) -> GradientFigures:
        """Waits for all gradients of the round, and returns the figures of this shard's mean gradients."""
        self._mean_bytes = 0
        means = {part.first: self._means_of(part) for part in self._parts}
        self._taken = [mean for first in sorted(means) for mean in means[first]]
        counted = zip(self._taken, self._is_counted, strict=True)
        return figures_of([mean for mean, is_counted in counted if is_counted])

    def _counts(self, piece: Piece) -> bool:
        """Whether this replica counts the piece in norms, which are sums over all replicas."""
        if piece.parameter not in self._shared:
            return True
        assert self._factors is not None
        return self._factors.counts(piece.parameter)

    def poison(self, freed_slot: int) -> None:
        """Does nothing, because another replica may still be reading this shard of the version.
        _make_version() fills the slot later."""

    def apply(self, read_slot: int, write_slot: int, gradient_scale: float, run: RunStep) -> None:
        def step(part: ShardPart, pieces: slice, read: Sequence[Tensor], write: Sequence[Tensor]) -> None:
            if not self._taken:
                self._mean_bytes = 0
            means = self._taken[pieces] if self._taken else self._means_of(part, is_read=True)
            run(functools.partial(self._optimizer.step_some, part.first, read, write, means, gradient_scale))

        self._make_version(read_slot, write_slot, step)
        run(self._optimizer.end_step)

    def keep_version(self, slot: int) -> None:
        """Copies the version in the slot into the stage's original parameters."""
        self._weights.own.restore(slot)

    def skip(self, read_slot: int, write_slot: int) -> None:
        """Copies the version unchanged into the next slot. An update is skipped only after its gradients were
        measured, so all of them have been received."""

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
        """Makes a version part by part (ShardPart). Each chunk is sent from its slot as soon as its part is
        made. make: called to make one part, with the part, the positions of its pieces, and the tensors to
        read and to write."""
        tied_read, tied_write = self._tied.begin_update()
        self._weights.own.show(write_slot)
        if self._tied.owned is not None:
            self._tied.owned.show(tied_write)
        if self._poisons and read_slot != write_slot:
            self._exchange.wait_for_readers(write_slot)
            self._weights.own.poison(write_slot)
        self._exchange.begin_version(write_slot)
        read = [*self._own_pieces[read_slot], *self._tied_pieces[tied_read]]
        write = [*self._own_pieces[write_slot], *self._tied_pieces[tied_write]]
        for part in self._parts:
            pieces = slice(part.first, part.first + len(part.pieces))
            make(part, pieces, read[pieces], write[pieces])
            for index, _ in part.chunks:
                self._exchange.publish(index)
        self._exchange.end_version()
        if self._factors is not None:
            self._factors.end_round(self._round)
        self._finish()

    # Means.

    def _means_of(self, part: ShardPart, *, is_read: bool = False) -> list[Tensor | None]:
        """Returns the means of a part's pieces. is_read: whether the optimizer only reads the means, and does
        not scale them in place."""
        means: dict[Piece, Tensor | None] = {}
        for index, chunk in part.chunks:  # the chunks are in the order in which gradients come
            found = self._exchange.mean_of(index, torch.get_num_threads())
            for piece, of_piece in zip(chunk.pieces, found, strict=True):
                means[piece] = self._mean(piece, of_piece, is_read=is_read)
        for piece in part.pieces:
            if piece.parameter in self._shared:
                assert self._factors is not None
                means[piece] = self._factors.mean_of(self._round, piece.parameter, self._num_minibatches)
        return [means[piece] for piece in part.pieces]

    def _mean(
        self, piece: Piece, found: Tensor | tuple[list[Tensor], Tensor | None], *, is_read: bool
    ) -> Tensor | None:
        """Returns the mean of a piece; None if no replica has a gradient. found: the result of
        ShardExchange.mean_of() for the piece. The mean is never written over this replica's own gradient,
        whose memory may have another use."""
        if isinstance(found, Tensor):
            return self._shaped(found, piece)
        parts, mean = found
        if not parts:
            return None
        if is_read and self._num_minibatches == 1 and len(parts) == 1 and self._steps_by_element:
            # The run's last round may be short. If it has one minibatch, the mean is that minibatch's
            # gradient.
            return self._shaped(parts[0], piece)
        if mean is None:
            mean = torch.empty_like(parts[0])
            self._mean_bytes += mean.nbytes
            self.mean_peak_bytes = max(self.mean_peak_bytes, self._mean_bytes)
        if mean.device.type == "cpu" and mean.dtype in (torch.float32, torch.float64, torch.bfloat16):
            _core.aggregate(
                [part.data_ptr() for part in parts],
                self._num_minibatches,
                mean.data_ptr(),
                mean.numel(),
                dtype=dtype_name(mean.dtype),
                num_threads=torch.get_num_threads(),
            )
        else:
            total = parts[0].to(master_dtype(mean.dtype), copy=True)
            for part in parts[1:]:
                total += part
            mean.copy_(total.div_(self._num_minibatches))
        return self._shaped(mean, piece)


def _pieces_in_slots(versions: WeightVersions, pieces: Sequence[Piece]) -> list[list[Tensor]]:
    """Returns, for each slot, the views of its leaves that the optimizer gets as pieces. pieces: their
    `parameter` is an index into the parameters of these versions. A layer may later point a leaf at other
    memory, so WeightVersions.show() points it back before the slot is written."""
    slots = range(versions.num_slots)
    return [[piece_of(versions.leaves(slot)[piece.parameter], piece) for piece in pieces] for slot in slots]
