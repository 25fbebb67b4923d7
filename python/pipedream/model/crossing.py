"""Crossing: what passes a cut in the middle of a model's forward, packed by the stage upstream of it and
unpacked by the one downstream.

At the cut some calls of modules are over: the frontier. The stage downstream runs the model's own forward and
gives back what those calls returned, without making them. Of that, the tensors which somebody downstream
still reads cross; the others have a filler of the same shape, for code that asks for no more. Their sizes,
and whole numbers that calls returned, may change with every minibatch, so they cross too:

    value = (tensor, ..., sizes)      sizes: int64, left out where there are none

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

from pipedream.model.structure import Structure, rebuilt, taken_apart
from pipedream.model.trace import CallKey

__all__ = ["Crossing", "Fillers", "FrontierCall", "PackedLeaf"]


@dataclass(frozen=True, slots=True)
class PackedLeaf:
    """One entry of what a frontier call returned."""

    crossing: int | None = None
    """Position among the tensors that cross; None: it has a filler, or is no tensor."""
    dtype: torch.dtype | None = None
    """None: no tensor."""
    num_dims: int = 0
    is_overwritten: bool = False
    """Somebody writes into its memory before the cut, or into the filler after it."""
    constant: Any = None
    """Of what is no tensor: None stands for an object that does not cross, as a cache."""

    @property
    def is_number(self) -> bool:
        """Whether it may change from minibatch to minibatch."""
        return self.dtype is None and type(self.constant) is int


@dataclass(frozen=True)
class FrontierCall:
    """A call that is over at the cut."""

    key: CallKey
    structure: Structure
    leaves: tuple[PackedLeaf, ...]
    calls_inside: Mapping[str, int]
    """Module -> how often it is called in it."""
    hooked: tuple[FrontierCall, ...] = ()
    """Calls in it whose outputs forward hooks put elsewhere, for code that runs downstream: there the hooks
    are called again."""
    is_hooked: bool = False
    """It is such a call itself."""

    def flatten(self, output: Any) -> list[Any]:
        """What it returned, as pack() takes it: as it is now, whoever overwrites it later."""
        if isinstance(output, Tensor) and self.structure.kind is None:  # as most return
            return [self._checked(self.leaves[0], output)]
        leaves, structure = taken_apart(output)
        if structure != self.structure:
            raise ValueError(
                f"{self.key} returned {structure}, and {self.structure} in the first minibatch: return the"
                " same structure in all minibatches, as stages behind a cut give back what they know"
            )
        return [self._checked(leaf, now) for leaf, now in zip(self.leaves, leaves, strict=True)]

    def _checked(self, leaf: PackedLeaf, now: Any) -> Any:
        if leaf.dtype is not None:
            if not isinstance(now, Tensor) or now.dim() != leaf.num_dims:
                raise ValueError(
                    f"{self.key} returned {_brief(now)}, and a tensor of {leaf.num_dims} dimensions in the"
                    " first minibatch: keep the number of dimensions in all minibatches"
                )
            return now.clone() if leaf.is_overwritten and leaf.crossing is not None else now
        if not leaf.is_number and leaf.constant is not None and now != leaf.constant:
            raise ValueError(
                f"{self.key} returned {_brief(now)}, and {leaf.constant!r} in the first minibatch: only"
                " tensors and whole numbers may change from minibatch to minibatch"
            )
        return now


_FILLERS_MAX = 1024  # of so many shapes


class Fillers:
    """Stand-ins for tensors that nobody reads. They share their memory, so that they cost none; those that
    look alike are one tensor. Floating-point ones are NaN: where somebody reads one, as nobody did in the
    first minibatch, the loss shows it."""

    def __init__(self) -> None:
        self._flat: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._made: dict[tuple[torch.dtype, torch.device, tuple[int, ...]], Tensor] = {}

    def make(self, leaf: PackedLeaf, shape: tuple[int, ...], device: torch.device) -> Tensor:
        assert leaf.dtype is not None
        if leaf.is_overwritten:
            return self._filled(leaf.dtype, math.prod(shape), device).view(shape)
        key = leaf.dtype, device, shape
        made = self._made.get(key)
        if made is None:
            if len(self._made) >= _FILLERS_MAX:
                self._made.clear()
            made = self._made[key] = self._part_of_flat(leaf.dtype, shape, device)
        return made

    def _part_of_flat(self, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Tensor:
        size = math.prod(shape)
        flat = self._flat.get((dtype, device))
        if flat is None or flat.numel() < size:
            flat = self._flat[dtype, device] = self._filled(dtype, size, device)
            self._made.clear()  # or the smaller memory would stay
        return flat[:size].view(shape)

    def _filled(self, dtype: torch.dtype, size: int, device: torch.device) -> Tensor:
        is_number = dtype.is_floating_point or dtype.is_complex
        return torch.full((size,), math.nan if is_number else 0, dtype=dtype, device=device)


@dataclass(frozen=True)
class Crossing:
    """What is over at a cut, and what of that crosses."""

    last: CallKey
    """The call whose end is the cut."""
    calls: tuple[FrontierCall, ...]
    """The inputs first, then in the order in which they end."""
    num_tensors: int

    @functools.cached_property
    def all_calls(self) -> tuple[FrontierCall, ...]:
        """With the hooked ones."""
        return tuple(found for call in self.calls for found in (*call.hooked, call))

    @property
    def num_sizes(self) -> int:
        return sum(
            leaf.num_dims if leaf.dtype is not None else int(leaf.is_number)
            for call in self.all_calls
            for leaf in call.leaves
            if leaf.crossing is None
        )

    def pack(self, outputs: Mapping[CallKey, Sequence[Any]]) -> tuple[Tensor, ...]:
        """The value that crosses. outputs: of each frontier call, as it was flattened when it was over."""
        tensors: dict[int, Tensor] = {}
        sizes: list[int] = []
        for call in self.all_calls:
            for leaf, now in zip(call.leaves, outputs[call.key], strict=True):
                if leaf.crossing is not None:
                    first = tensors.setdefault(leaf.crossing, now)
                    if not _is_same(first, now):
                        raise ValueError(
                            f"{call.key} returned a tensor that was also another one in the first minibatch,"
                            " and is not now, so it does not cross: put a minibatch first in which they"
                            " differ, as a longer one, or choose other cuts"
                        )
                elif leaf.dtype is not None:
                    sizes += now.shape
                elif leaf.is_number:
                    sizes.append(int(now))
        packed = [tensors[position] for position in range(self.num_tensors)]
        if sizes:
            packed.append(torch.tensor(sizes, dtype=torch.int64, device=packed[0].device))
        return tuple(packed)

    def unpack(self, value: Sequence[Tensor], fillers: Fillers) -> dict[CallKey, Any]:
        """What the frontier calls give back, and what the hooked ones in them gave."""
        take_size = iter(value[self.num_tensors].tolist() if len(value) > self.num_tensors else ()).__next__
        device = value[0].device

        def given(leaf: PackedLeaf) -> Any:
            if leaf.crossing is not None:
                return value[leaf.crossing]
            if leaf.dtype is not None:
                return fillers.make(leaf, tuple(take_size() for _ in range(leaf.num_dims)), device)
            return take_size() if leaf.is_number else leaf.constant

        return {call.key: rebuilt(call.structure, map(given, call.leaves)) for call in self.all_calls}


def _is_same(first: Tensor, now: Tensor) -> bool:
    """Whether one stands for both. Copies that were made as calls ended are compared by their values."""
    if first is now:
        return True
    in_one_place = first.data_ptr() == now.data_ptr() and first.stride() == now.stride()
    return first.shape == now.shape and (in_one_place or torch.equal(first, now))


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dim()} dimensions"
    return repr(value) if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
