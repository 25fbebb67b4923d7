"""Cuts the parameters of a stage into shards. The flat slot of the parameters is cut into chunks, and each
chunk belongs to a shard. Every replica and every spare owns one shard. keep_pieces() restricts an optimizer
to the parameters of one shard.

If the optimizer works element by element, a chunk may cut a tensor. Any other optimizer gets whole tensors.
A weight whose gradient is pushed as factors (factors.py) is in no chunk, because each replica updates the
whole weight itself. Pure; any thread.
"""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipedream import _core, optim
from pipedream.model.factories import NamedParameters, parameter_like
from pipedream.model.layers import dtype_name, flat_view

__all__ = [
    "Chunk",
    "Piece",
    "ShardLayout",
    "ShardPart",
    "keep_pieces",
    "parts_of",
    "piece_of",
    "whole_pieces",
    "works_by_element",
]

# Optimizers that work element by element. A subclass does not count, because its step may do more.
_BY_ELEMENT: tuple[type[torch.optim.Optimizer], ...] = (
    *optim.NATIVE_OPTIMIZERS,
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)


def works_by_element(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether the optimizer works element by element: updating a part of a tensor gives the part the same
    values as updating the whole tensor. An optimizer with hooks does not count, because hooks may look at
    whole tensors."""
    if optimizer is None:
        return True
    hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if isinstance(optimizer, optim.MasterWeights):
        return works_by_element(optimizer.inner) and not hooked
    return type(optimizer) in _BY_ELEMENT and not hooked


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a parameter, in the order in which they lie in memory."""

    parameter: int
    """The parameter's position among the stage's parameters."""
    first: int
    count: int
    is_whole: bool
    begin_bytes: int
    """Bytes from the beginning of the chunk to the piece."""
    num_bytes: int


@dataclass(frozen=True)
class Chunk:
    """A range of the flat slot that one shard owns and that is sent as one item."""

    shard: int
    begin_bytes: int
    end_bytes: int
    pieces: tuple[Piece, ...]
    is_tied: bool = False
    """Whether the chunk is in the slot of the tied parameters."""

    @property
    def num_bytes(self) -> int:
        return self.end_bytes - self.begin_bytes

    @property
    def position(self) -> tuple[bool, int]:
        """The chunk's sort key. Chunks of tied parameters come behind all others."""
        return self.is_tied, self.begin_bytes


class ShardLayout:
    """The chunks of a stage's parameters, in the order of the slot, and the shard that owns each. The layout
    is equal at all replicas. Tied parameters have slots of their own, but are cut as if they lay behind the
    other parameters. Parameters that every replica updates for itself are in no chunk."""

    def __init__(
        self,
        named: NamedParameters,
        num_replicas: int,
        *,
        whole_tensors: bool,
        num_tied: int = 0,
        shared: Collection[int] = (),
        num_spares: int = 0,
    ) -> None:
        """num_tied: number of tied parameters, which are the last ones.
        shared: positions of the untied parameters that each replica updates for itself.
        num_spares: number of spares. Their shards come after the replicas'."""
        self.whole_tensors = whole_tensors
        self.num_shards = num_replicas + num_spares
        self.num_own = len(named) - num_tied
        self.shared = sorted(shared)
        self._parameters = [parameter for _, parameter in named]
        rows = [(name, dtype_name(p.dtype), p.numel()) for name, p in named]
        _, self._offsets = _core.weight_layout(rows)
        self._tied_begin = self._offsets[self.num_own] if num_tied else 0
        dealt = [index for index in range(len(rows)) if index not in self.shared]
        _, begins = _core.weight_layout([rows[index] for index in dealt])
        self.chunks: list[Chunk] = []
        for shard, begin, end, pieces in _core.deal_shards(
            [rows[index] for index in dealt],
            num_replicas,
            whole_tensors=whole_tensors,
            num_spares=num_spares,
        ):
            for region, found in itertools.groupby(pieces, lambda row: self._region_of(dealt[row[0]])):
                of_region = list(found)
                first, after = of_region[0][0], of_region[-1][0] + 1
                if after < len(dealt) and self._region_of(dealt[after]) != region:
                    region_end = begins[after]
                else:
                    region_end = end
                # `_offsets` has room for shared parameters, but `begins` has none.
                shift = self._offsets[dealt[first]] - begins[first]
                self.chunks.append(
                    self._chunk(
                        shard,
                        max(begin, begins[first]) + shift,
                        min(end, region_end) + shift,
                        [(dealt[index], first_element, count) for index, first_element, count in of_region],
                    )
                )

    def _region_of(self, parameter: int) -> tuple[bool, int]:
        """Returns the number of a parameter's region. A region is a sequence of parameters in one slot. No
        parameter that every replica updates for itself lies between them. No chunk crosses a region's end."""
        return parameter >= self.num_own, bisect.bisect(self.shared, parameter)

    def _chunk(self, shard: int, begin: int, end: int, rows: Sequence[tuple[int, int, int]]) -> Chunk:
        """Makes the chunk of the bytes from `begin` to `end`. For tied parameters, too, these count from the
        beginning of the untied slot, as if the tied slot lay behind it. rows: (parameter, first element,
        count) of the pieces."""

        def piece(parameter: int, first: int, count: int) -> Piece:
            tensor = self._parameters[parameter]
            begin_bytes = self._offsets[parameter] + first * tensor.element_size() - begin
            is_whole = count == tensor.numel()
            return Piece(parameter, first, count, is_whole, begin_bytes, count * tensor.element_size())

        is_tied = rows[0][0] >= self.num_own
        offset = self._tied_begin if is_tied else 0
        pieces = tuple(piece(*row) for row in rows)
        return Chunk(shard, begin - offset, end - offset, pieces, is_tied=is_tied)

    def chunks_of(self, shard: int) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.shard == shard]

    def leaving_chunks_of(self, shard: int) -> list[Chunk]:
        """Returns the shard's chunks in the order in which a backward completes their gradients: the chunk at
        the end of the slot comes first. Chunks of tied parameters come last, because their gradients also
        have parts from other stages."""
        own, tied = ([c for c in self.chunks_of(shard) if c.is_tied == is_tied] for is_tied in (False, True))
        return [*own[::-1], *tied]

    def row_of(self, shard: int) -> tuple[list[Any], str]:
        """Returns the shard's chunks and dtype in the form that the core takes (shard_exchange_type.h)."""

        def row(piece: Piece) -> tuple[int, int, int, int, str]:
            dtype = dtype_name(self._parameters[piece.parameter].dtype)
            return piece.parameter, piece.first, piece.count, piece.begin_bytes, dtype

        chunks = [
            (chunk.begin_bytes, chunk.num_bytes, chunk.is_tied, [row(piece) for piece in chunk.pieces])
            for chunk in self.leaving_chunks_of(shard)
        ]
        return chunks, dtype_name(self.dtype_of(shard))

    def push_slot_bytes(self, replica: int, codec: str) -> int:
        """Returns the bytes that the replica's pushes of a round need in addition to its gradients."""
        others = [self.row_of(shard) for shard in range(self.num_shards) if shard != replica]
        return _core.push_slot_bytes(others, codec)

    def dtype_of(self, shard: int) -> torch.dtype:
        """Returns the dtype of the parameters in the shard's chunks; uint8 for several dtypes or none."""
        pieces = (piece for chunk in self.chunks_of(shard) for piece in chunk.pieces)
        dtypes = {self._parameters[piece.parameter].dtype for piece in pieces}
        return dtypes.pop() if len(dtypes) == 1 else torch.uint8

    def pieces_of(self, shard: int) -> list[Piece]:
        """Returns the pieces that the shard's replica updates, in the order of the parameters: the pieces of
        the shard, and the parameters that every replica updates for itself."""
        pieces = [piece for chunk in self.chunks_of(shard) for piece in chunk.pieces]
        return sorted([*pieces, *self.shared_pieces()], key=lambda piece: (piece.parameter, piece.first))

    def shared_pieces(self) -> list[Piece]:
        return [whole_piece(index, self._parameters[index]) for index in self.shared]

    def tied_pieces_of(self, shard: int) -> list[Piece]:
        """Returns the shard's pieces of tied parameters. Positions count from the first tied parameter on."""
        return [
            replace(piece, parameter=piece.parameter - self.num_own)
            for chunk in self.chunks_of(shard)
            if chunk.is_tied
            for piece in chunk.pieces
        ]

    def alone(self, shard: int) -> ShardLayout:
        """Returns the layout for a spare, which has memory for this shard only. In this layout each piece is
        a parameter, and the chunks lie one behind the other."""
        pieces = self.pieces_of(shard)
        position = {(piece.parameter, piece.first): index for index, piece in enumerate(pieces)}
        made = copy.copy(self)
        made.num_own, made.shared, made.chunks = len(pieces), [], []
        made._parameters = [
            nn.Parameter(piece_of(self._parameters[piece.parameter], piece)) for piece in pieces
        ]
        begin = 0
        for chunk in self.chunks_of(shard):
            own = tuple(
                replace(piece, parameter=position[piece.parameter, piece.first], first=0, is_whole=True)
                for piece in chunk.pieces
            )
            made.chunks.append(Chunk(shard, begin, begin + chunk.num_bytes, own))
            begin += chunk.num_bytes
        return made


@dataclass(frozen=True)
class ShardPart:
    """A part of a shard, which the optimizer updates in one call."""

    chunks: Sequence[tuple[int, Chunk]]
    """(position among the shard's chunks, chunk), in the order in which the chunks are sent."""
    pieces: Sequence[Piece]
    """Consecutive pieces of the shard. Some may be in no chunk."""
    first: int
    """The position of the first piece among the shard's pieces."""


def parts_of(chunks: Sequence[Chunk], pieces: Sequence[Piece], *, at_once: bool) -> list[ShardPart]:
    """Returns the parts of a shard: one for each chunk, then one for each piece that is in no chunk. chunks:
    in the order in which they are sent. at_once: whether the whole shard is one part instead."""
    if not pieces:
        return []
    if at_once:
        return [ShardPart(list(enumerate(chunks)), pieces, 0)]
    positions = {(piece.parameter, piece.first): position for position, piece in enumerate(pieces)}
    parts = []
    for entry in enumerate(chunks):
        of_chunk = entry[1].pieces
        parts.append(ShardPart([entry], of_chunk, positions[of_chunk[0].parameter, of_chunk[0].first]))
    in_chunks = {position for part in parts for position in range(part.first, part.first + len(part.pieces))}
    alone = [position for position in range(len(pieces)) if position not in in_chunks]
    return [*parts, *(ShardPart([], [pieces[position]], position) for position in alone)]


def piece_of(leaf: Tensor, piece: Piece) -> Tensor:
    """Returns the piece of the leaf without a copy: the leaf itself if the piece is whole, otherwise a flat
    view of the piece's elements."""
    return leaf.data if piece.is_whole else flat_view(leaf.data)[piece.first : piece.first + piece.count]


def whole_piece(index: int, parameter: Tensor) -> Piece:
    """Returns a whole parameter as a piece. The piece lies in no chunk."""
    return Piece(index, 0, parameter.numel(), True, 0, parameter.nbytes)


def whole_pieces(parameters: Sequence[Tensor]) -> list[Piece]:
    return [whole_piece(index, parameter) for index, parameter in enumerate(parameters)]


@torch.no_grad()
def keep_pieces(
    optimizer: torch.optim.Optimizer | None, masters: Sequence[nn.Parameter], pieces: Sequence[Piece]
) -> list[nn.Parameter]:
    """Replaces the optimizer's parameters, the masters, by pieces of them. Each piece goes to the group of
    its parameter, with its part of the parameter's state. For a whole piece the master itself stays. Returns
    the new parameters in the order of the pieces."""
    made: dict[int, list[nn.Parameter]] = {id(master): [] for master in masters}
    state = {} if optimizer is None else optimizer.state
    for piece in pieces:
        master = masters[piece.parameter]
        parameter = master
        if not piece.is_whole:
            parameter = parameter_like(master, _part_of(master.data, master, piece))
        made[id(master)].append(parameter)
        if parameter is not master and master in state:
            state[parameter] = {key: _cut_state(v, master, piece) for key, v in state[master].items()}
    for master in masters:
        if not any(parameter is master for parameter in made[id(master)]):
            state.pop(master, None)
    for group in [] if optimizer is None else optimizer.param_groups:
        if "param_names" in group:
            pairs = zip(group["params"], group["param_names"], strict=True)
            group["param_names"] = [name for p, name in pairs for _ in made[id(p)]]
        group["params"] = [part for p in group["params"] for part in made[id(p)]]
    taken = {key: iter(parts) for key, parts in made.items()}
    return [next(taken[id(masters[piece.parameter])]) for piece in pieces]


def _part_of(value: Tensor, master: nn.Parameter, piece: Piece) -> Tensor:
    """Returns a copy of the piece's part of a tensor that is shaped like the master."""
    in_order = torch.empty_like(master, dtype=value.dtype, memory_format=torch.preserve_format).copy_(value)
    return flat_view(in_order)[piece.first : piece.first + piece.count].clone()


def _cut_state(value: object, master: nn.Parameter, piece: Piece) -> object:
    if not isinstance(value, Tensor):
        return value
    return _part_of(value, master, piece) if value.shape == master.shape else value.clone()
