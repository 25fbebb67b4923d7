"""Keeps exponential moving averages of a stage's weights, for callbacks.EMA.

    UPDATE v          the optimizer makes version v + 1, chunk by chunk
                      average = decay x average + (1 - decay) x (version v + 1)
    RECV version      the same formula, for a parameter that this stage uses and another stage updates

The weights after the first update are the first average, as in torch.optim.swa_utils.AveragedModel. Averages
lie in a slot of the pool, and in host memory while the memory is planned again. A replica with a shard
averages its own pieces. Owned by the worker's compute thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipedream.checkpoint.snapshot import on_host
from pipedream.checkpoint.stage_files import piece_in
from pipedream.model.factories import NamedParameters
from pipedream.model.layers import flat_view
from pipedream.optim.master_weights import master_dtype
from pipedream.update.shards import Piece, piece_of
from pipedream.update.weights import state_layout, view_like

__all__ = ["Averages"]

_OWN = (-1, 0)


class Averages:
    """The averages of the parameters that a stage updates, and of tied parameters that it uses and another
    stage updates. If the stage updates only pieces of parameters, each piece has an average."""

    def __init__(
        self, decay: float, updated: NamedParameters, used: Mapping[int, NamedParameters] | None = None
    ) -> None:
        """updated: the parameters that the stage updates, in the optimizer's order. used: parameters of
        other stages, by the stage that updates them.
        """
        self.decay = decay
        self._named = list(updated)
        self._num_updated = len(self._named)
        self._begin_of: dict[int, int] = {}
        for owner, named in (used or {}).items():
            self._begin_of[owner] = len(self._named)
            self._named += named
        # Before place() is called, the averages are the parameters themselves.
        self._tensors = [parameter.detach() for _, parameter in self._named]
        self._counts: dict[tuple[int, int], int] = {}
        """How many versions were averaged in this run, by the (owner stage, replica) that makes the
        versions."""
        self._count_before = 0
        """The number of versions averaged in the earlier run, if this run continues one."""
        self._is_mixed = any(master_dtype(p.dtype) != p.dtype for _, p in self._named)

    @property
    def slot_bytes(self) -> int:
        return state_layout(self._named)[0]

    def place(self, slot: Tensor) -> None:
        _, offsets = state_layout(self._named)
        placed = [
            view_like(slot, offset, parameter, master_dtype(parameter.dtype))
            for offset, (_, parameter) in zip(offsets, self._named, strict=True)
        ]
        for target, source in zip(placed, self._tensors, strict=True):
            target.copy_(source)
        self._tensors = placed

    def leave_slot(self) -> None:
        self._tensors = [on_host(tensor) for tensor in self._tensors]

    def add(self, first: int, leaves: Sequence[Tensor]) -> None:
        """Adds the leaves to the averages. They are parameters of the next version. In the optimizer's order
        the first of them has position `first`."""
        self._add(self._tensors[first : first + len(leaves)], leaves, _OWN)

    def end_version(self) -> None:
        """Ends a version. Call it after all of the version's parameters have been added."""
        self._counts[_OWN] = self._counts.get(_OWN, 0) + 1

    def add_used(self, owner: int, replica: int, pieces: Sequence[Piece], values: Sequence[Tensor]) -> None:
        """Adds pieces of the owner's next version to the averages. `replica` of the owner has made them."""
        begin = self._begin_of[owner]
        targets = [piece_of(self._tensors[begin + piece.parameter], piece) for piece in pieces]
        self._add(targets, values, (owner, replica))
        self._counts[owner, replica] = self._counts.get((owner, replica), 0) + 1

    @torch.no_grad()
    def _add(self, targets: list[Tensor], values: Sequence[Tensor], source: tuple[int, int]) -> None:
        if not targets:
            return
        if self._is_mixed:
            values = [value.to(target.dtype) for value, target in zip(values, targets, strict=True)]
        if self._counts.get(source, 0) + self._count_before == 0:
            torch._foreach_copy_(targets, [*values])
        else:
            torch._foreach_lerp_(targets, [*values], 1.0 - self.decay)

    def updated_values(self) -> list[Tensor]:
        """Returns the averages of the parameters that the stage updates, in the optimizer's order."""
        return self._tensors[: self._num_updated]

    def used_values(self, owner: int) -> list[Tensor]:
        begin = self._begin_of[owner]
        ends = [other for other in self._begin_of.values() if other > begin]
        return self._tensors[begin : min(ends, default=len(self._tensors))]

    # Checkpoints store the averages by name.

    def named_values(self, *, only_updated: bool = False) -> dict[str, Tensor]:
        """Returns the averages by name. A piece is flat, also if it is a whole parameter."""
        named = list(zip(self._named, self._tensors, strict=True))
        return {
            name: flat_view(tensor) if piece_in(name)[2] else tensor
            for (name, _), tensor in (named[: self._num_updated] if only_updated else named)
        }

    @property
    def count(self) -> int:
        """The number of versions of the stage's own parameters that were averaged."""
        return self._counts.get(_OWN, 0) + self._count_before

    def go_on(self, values: Mapping[str, Tensor], count: int) -> None:
        """Continues from averages over `count` versions. values: the averages by name. A piece takes the
        value with its own name, or its part of the whole parameter's value. If a value is missing or `count`
        is 0, the averages start with the next version."""
        found = [value for name, p in self._named if (value := _value_of(name, p, values)) is not None]
        if count > 0 and len(found) == len(self._named):
            self._tensors = found
            self._count_before = count


def _value_of(name: str, parameter: Tensor, values: Mapping[str, Tensor]) -> Tensor | None:
    whole, first, end = piece_in(name)
    if not end or (name not in values and whole not in values):
        return values.get(name)
    flat = values[name] if name in values else flat_view(values[whole])[first:end]
    return flat.as_strided(parameter.shape, parameter.stride())
