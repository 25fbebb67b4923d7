"""Crossing describes the values that cross a cut in the middle of a model's forward. The stage upstream of
the cut packs these values, and the stage downstream unpacks them.

The calls of modules that have ended at the cut are its frontier. The stage downstream runs the model's own
forward, but does not make the calls of the frontier. It returns their outputs from the received values. Of
these outputs, only tensors that downstream code still reads cross. Each other tensor is replaced by a filler
of the same shape, for code that asks for the shape only. The fillers' sizes, and integers that calls
returned, may change with every minibatch, so they cross as well:

    value = (tensor, ..., sizes)      sizes: int64, left out if there are none

A tensor of the first minibatch may be None in a later minibatch. A tensor that crosses is then None in the
value. For a tensor with a filler, the filler's sizes are then -1.

Pure values, and functions of them; any thread.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipedream.model.stand_ins import poison
from pipedream.model.structure import Structure, paths, rebuilt, taken_apart
from pipedream.model.tensor_spec import DimOrder, as_used
from pipedream.model.trace import INPUTS, CallKey, Opaque

__all__ = ["NOT_CALLED", "Crossing", "Fillers", "FrontierCall", "PackedLeaf"]


class _NotCalled:
    """The mark that unpack() returns as the output of a call that the first minibatch made and this minibatch
    did not make.
    """


NOT_CALLED = _NotCalled()
_NO_SIZE = -(1 << 63)  # replaces every size of a call that was not made

_SIZE_OF_NONE = -1


@dataclass(frozen=True, slots=True)
class PackedLeaf:
    """One entry of a frontier call's output."""

    crossing: int | None = None
    """Position among the tensors that cross. None: the entry has a filler, or is no tensor."""
    dtype: torch.dtype | None = None
    """None: it is no tensor."""
    num_dims: int = 0
    order: DimOrder = ()
    """The order of its dimensions in memory."""
    is_overwritten: bool = False
    """Whether code overwrites the tensor's memory before the cut, or its filler after the cut."""
    constant: Any = None
    """The entry's value, if it is no tensor. Opaque stands for an object that does not cross."""

    @property
    def is_number(self) -> bool:
        """Whether the entry is an integer, which may change from minibatch to minibatch."""
        return self.dtype is None and type(self.constant) is int


@dataclass(frozen=True)
class FrontierCall:
    """A call of the frontier, which is a call that has ended at the cut, with its output as it is sent."""

    key: CallKey
    structure: Structure
    leaves: tuple[PackedLeaf, ...]
    calls_inside: Mapping[str, int]
    """Module -> how often the call calls it."""
    hooked: tuple[FrontierCall, ...] = ()
    """Calls inside this call whose outputs forward hooks stored for code that runs downstream. The hooks are
    called again downstream.
    """
    is_hooked: bool = False
    """Whether this call itself is such a call."""

    @functools.cached_property
    def crosses(self) -> bool:
        """Whether a tensor of its output crosses."""
        return any(leaf.crossing is not None for leaf in self.leaves)

    @functools.cached_property
    def num_sizes(self) -> int:
        """Number of integers that cross for the output: the sizes of its fillers, and its entries that are
        integers.
        """
        return sum(
            leaf.num_dims if leaf.dtype is not None else int(leaf.is_number)
            for leaf in self.leaves
            if leaf.crossing is None
        )

    def flatten(self, output: Any) -> list[Any]:
        """Returns the call's output as a flat list for pack(). Tensors that cross and will be overwritten are
        cloned. Raises ValueError if the output differs from the first minibatch's so that it cannot cross.
        """
        if isinstance(output, Tensor) and self.structure.kind is None:  # most calls return one tensor
            return [self._checked(0, output)]
        leaves, structure = taken_apart(output)
        if structure != self.structure:
            raise ValueError(
                f"{self.key} {self._verb} {structure}, and {self.structure} in the first minibatch: keep the"
                " same structure in all minibatches, as stages behind a cut give back what they know"
            )
        return [self._checked(position, now) for position, now in enumerate(leaves)]

    def _checked(self, position: int, now: Any) -> Any:
        """Returns `now`, the entry at `position` of the call's flat output, or a clone of it if it will be
        overwritten. Raises ValueError if `now` differs from the first minibatch's entry so that it cannot
        cross the cut.
        """
        leaf = self.leaves[position]
        if leaf.dtype is not None:
            if isinstance(now, Tensor) and now.dim() == leaf.num_dims:
                return now.clone() if leaf.is_overwritten and leaf.crossing is not None else now
            if now is None and leaf.num_dims > 0:
                return None
            raise self._differs(position, now, f"a tensor of {leaf.num_dims} dimensions", _KEEP_DIMENSIONS)
        first = leaf.constant
        if first is None and now is not None:
            raise self._differs(position, now, "None", _BEGIN_WITH_IT)
        if first is Opaque:
            if isinstance(now, (Tensor, bool, int, float, str)):
                raise self._differs(position, now, "an object that cannot cross a cut", _KEEP_KIND)
        elif type(now) is not type(first) or not (leaf.is_number or now == first):
            raise self._differs(position, now, repr(first), _KEEP_KIND)
        return now

    def _differs(self, position: int, now: Any, first: str, remedy: str) -> ValueError:
        place = paths(self.structure)[position]
        now_there = f"{_brief(now)} at {place}" if place else _brief(now)
        return ValueError(
            f"{self.key} {self._verb} {now_there}, and {first} in the first minibatch: {remedy}"
        )

    @property
    def _verb(self) -> str:
        return "have" if self.key == INPUTS else "returned"


_KEEP_DIMENSIONS = "keep the number of dimensions in all minibatches"
_BEGIN_WITH_IT = (
    "put a minibatch first that has it, as what stages behind a cut are sent is planned from that"
)
_KEEP_KIND = "give it as a tensor, as only tensors and whole numbers may change from minibatch to minibatch"

_FILLERS_MAX = 1024  # the most shapes for which fillers are kept


class Fillers:
    """Makes fillers for tensors that no code should read. Fillers of one dtype and device share memory, so
    they take almost none, and equal ones are one tensor. A filler that code overwrites has its own memory.
    The values are poison, because no code read them in the first minibatch. If code reads one later, it fails
    on an index, or the loss becomes NaN.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._made: dict[tuple[torch.dtype, torch.device, tuple[int, ...], DimOrder], Tensor] = {}
        self._dtypes: dict[int, torch.dtype] = {}  # by the leaf's id(), from note()

    def note(self, leaf: PackedLeaf, tensor: Tensor) -> None:
        """Makes this leaf's fillers have the tensor's dtype from now on, because a check may run in another
        precision than the trace.
        """
        self._dtypes[id(leaf)] = tensor.dtype

    def make(self, leaf: PackedLeaf, shape: tuple[int, ...], device: torch.device) -> Tensor:
        assert leaf.dtype is not None
        dtype = self._dtypes.get(id(leaf), leaf.dtype)
        if leaf.is_overwritten:
            return _shaped(poison(math.prod(shape), dtype, device), shape, leaf.order)
        key = dtype, device, shape, leaf.order
        made = self._made.get(key)
        if made is None:
            if len(self._made) >= _FILLERS_MAX:
                self._made.clear()
            flat = self._part_of_flat(dtype, math.prod(shape), device)
            made = self._made[key] = _shaped(flat, shape, leaf.order)
        return made

    def _part_of_flat(self, dtype: torch.dtype, size: int, device: torch.device) -> Tensor:
        flat = self._flat.get((dtype, device))
        if flat is None or flat.numel() < size:
            flat = self._flat[dtype, device] = poison(size, dtype, device)
            self._made.clear()  # these tensors would keep the smaller memory alive
        return flat[:size]


def _shaped(flat: Tensor, shape: tuple[int, ...], order: DimOrder) -> Tensor:
    return as_used(flat.view([shape[dim] for dim in order]), order) if order else flat.view(shape)


@dataclass(frozen=True)
class Crossing:
    """The calls that have ended at a cut, and which of their outputs cross."""

    last: CallKey
    """The call whose end is the cut."""
    calls: tuple[FrontierCall, ...]
    """The inputs first, then the calls in the order in which they end."""
    num_tensors: int

    @functools.cached_property
    def all_calls(self) -> tuple[FrontierCall, ...]:
        """All calls, including the hooked ones."""
        return tuple(found for call in self.calls for found in (*call.hooked, call))

    @property
    def num_sizes(self) -> int:
        return sum(call.num_sizes for call in self.all_calls)

    def pack(
        self, outputs: Mapping[CallKey, Sequence[Any]], fillers: Fillers | None = None
    ) -> tuple[Tensor | None, ...]:
        """Returns the value that crosses.

        outputs: the output of each frontier call, flattened when the call ended. A call may be missing
        because it was not made, if no tensor of its output crosses. fillers: the fillers of the next stage,
        if that stage is in this process. Raises ValueError if tensors differ that were one tensor in the
        first minibatch.
        """
        values: dict[int, Tensor | None] = {}
        sizes: list[int] = []
        for call in self.all_calls:
            flat = outputs.get(call.key)
            if flat is None:
                sizes += [_NO_SIZE] * call.num_sizes
                continue
            for leaf, now in zip(call.leaves, flat, strict=True):
                if leaf.crossing is not None:
                    first = values.setdefault(leaf.crossing, now)
                    if first is not now and not _is_same(first, now):
                        raise ValueError(
                            f"{call.key} returned a tensor that was also another one in the first minibatch,"
                            " and is not now, so it does not cross: put a minibatch first in which they"
                            " differ, as a longer one, or choose other cuts"
                        )
                elif leaf.dtype is not None:
                    sizes += [_SIZE_OF_NONE] * leaf.num_dims if now is None else now.shape
                    if fillers is not None and now is not None:
                        fillers.note(leaf, now)
                elif leaf.is_number:
                    sizes.append(now)
        packed = [values[position] for position in range(self.num_tensors)]
        if sizes:
            device = next((value.device for value in packed if value is not None), None)
            packed.append(torch.tensor(sizes, dtype=torch.int64, device=device))
        return tuple(packed)

    def unpack(self, value: Sequence[Any], fillers: Fillers) -> dict[CallKey, Any]:
        """Returns the outputs of the frontier calls, and of the hooked calls inside them."""
        sizes = value[self.num_tensors].tolist() if len(value) > self.num_tensors else []
        taken = 0
        device = next(tensor.device for tensor in value if tensor is not None)

        def given(leaf: PackedLeaf) -> Any:
            nonlocal taken
            if leaf.crossing is not None:
                return value[leaf.crossing]
            begin = taken
            if leaf.dtype is not None:
                taken += leaf.num_dims
                shape = tuple(sizes[begin:taken])
                return None if _SIZE_OF_NONE in shape else fillers.make(leaf, shape, device)
            if leaf.is_number:
                taken += 1
                return sizes[begin]
            return None if leaf.constant is Opaque else leaf.constant

        found: dict[CallKey, Any] = {}
        for call in self.all_calls:
            if call.num_sizes and sizes[taken] == _NO_SIZE:
                taken += call.num_sizes
                found[call.key] = NOT_CALLED
            else:
                found[call.key] = rebuilt(call.structure, map(given, call.leaves))
        return found


def _is_same(first: Tensor | None, now: Tensor | None) -> bool:
    """Whether the tensors are equal, so that one of them can be sent for both. Values are compared if the
    memory differs, because outputs may have been cloned when their calls ended.
    """
    if first is None or now is None:
        return first is now
    in_one_place = first.data_ptr() == now.data_ptr() and first.stride() == now.stride()
    return first.shape == now.shape and (in_one_place or torch.equal(first, now))


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dim()} dimensions"
    is_constant = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if is_constant else f"a {type(value).__name__}"
