"""Reads minibatch 0 before the run starts. For data that the caller forwards, it also makes the description
that workers get: minibatch 0, and the sizes for which the channels from the caller are planned.

Owned by the thread that calls run().
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from pipedream.common.microbatches import Microbatches
from pipedream.data.enlarged import enlarged, shaped
from pipedream.data.stream import (
    NUM_COUNT_TENSORS,
    ForwardedData,
    LargerMinibatch,
    describe_source,
    num_minibatches_of,
)
from pipedream.model.batches import parts_of
from pipedream.model.boundary import Boundary, map_tensors
from pipedream.model.data_copies import copy_of, generators_of_loader_kept, has_indices
from pipedream.model.seeding import RngState
from pipedream.planning.plan import Plan
from pipedream.planning.shapes import Shapes, next_kind, shapes_of_parts

__all__ = ["KeptMinibatch", "PeekedData", "describe_forwarded", "enlarge_forwarded", "first_of", "looked_at"]


class PeekedData:
    """Wraps data that may yield each minibatch only once, such as an iterator or an object over a queue.
    peek() returns the first minibatch. Iterating afterwards still starts with this minibatch. Both leave the
    random number generators in the state that they had just after the data had made the minibatch.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self.data = data
        self._begun: Iterator[Any] | None = None
        self._peeked: list[Any] = []
        self._generators: RngState | None = None

    def peek(self) -> Any | None:
        if self._generators is None:
            self._begun = iter(self.data)
            self._peeked = [item for item in [next(self._begun, None)] if item is not None]
            self._generators = RngState.capture()
        self._generators.restore()
        return self._peeked[0] if self._peeked else None

    def __iter__(self) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        if begun is None:
            return iter(self.data)
        return self._rest_of(begun)

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]  # raises TypeError if the data have no length

    def __reduce__(self) -> Any:
        raise TypeError("what gives each minibatch once stays with the caller")

    def _rest_of(self, begun: Iterator[Any]) -> Iterator[Any]:
        assert self._generators is not None
        self._generators.restore()
        while self._peeked:
            yield self._peeked.pop()
        yield from begun


@dataclass
class KeptMinibatch:
    """Minibatch 0, which was read before the run and is kept for the reader that needs it again."""

    parts: tuple[Any, Any] | None = None
    """(inputs, targets)."""
    copied: Iterable[Any] | None = None
    """A copy of the data that was never iterated, for first_of()."""

    def take(self) -> tuple[Any, Any] | None:
        parts, self.parts = self.parts, None
        return parts


def looked_at(data: Iterable[Any], kept: KeptMinibatch | None = None) -> Iterable[Any]:
    """Returns the data, wrapped in PeekedData if reading their first minibatch may use it up. kept: receives
    the copy for first_of().
    """
    if isinstance(data, PeekedData) or has_indices(data):
        return data
    copied = None if isinstance(data, Iterator) else copy_of(data)
    if kept is not None:
        kept.copied = copied
    return PeekedData(data) if copied is None else data


def first_of(data: Iterable[Any], kept: KeptMinibatch | None = None) -> Any:
    """Returns the first minibatch. Unless the data are PeekedData, the generators of a DataLoader are
    unchanged afterwards. If the data can be copied, so are epoch counters of the data, dataset and sampler.
    Raises ValueError if there is no minibatch.
    """
    if isinstance(data, PeekedData):
        first = data.peek()
    else:
        copied = None if kept is None else kept.copied
        copied = copy_of(data) if copied is None else copied
        if isinstance(copied, DataLoader):
            copied.num_workers, copied.timeout = 0, 0  # one minibatch is not worth starting processes
        with generators_of_loader_kept(data):
            first = next(iter(data if copied is None else copied), None)
    if kept is not None:
        kept.copied = None
    if first is None:
        raise ValueError("data yields no minibatch: check the dataset, batch_size and drop_last")
    return first


def describe_forwarded(data: Iterable[Any], plan: Plan, epochs: int, num_microbatches: int) -> ForwardedData:
    first = parts_of(first_of(data), 0)
    made = [enlarged(*first, plan.max_shapes), *(shaped(*first, shapes) for shapes in plan.shapes_apart)]
    boundaries = [_boundaries_of(*parts, num_microbatches) for parts in made]
    inputs, targets = (functools.reduce(Boundary.or_as, parts) for parts in zip(*boundaries, strict=True))
    return ForwardedData(
        first,
        inputs,
        targets,
        num_minibatches_of(data, epochs),
        describe_source(data.data if isinstance(data, PeekedData) else data),
        tuple(shapes_of_parts(*parts) for parts in made),
    )


def enlarge_forwarded(
    forwarded: ForwardedData, plan: Plan, larger: LargerMinibatch, num_microbatches: int
) -> ForwardedData:
    """Describes the forwarded data again, with sizes that have room for the larger minibatch."""
    are_apart = bool(plan.shapes_apart)
    shapes = next_kind(forwarded.kinds, larger.shapes, are_apart=are_apart)
    made = enlarged(larger.inputs, larger.targets, shapes)
    inputs, targets = _boundaries_of(*made, num_microbatches)
    before: tuple[Shapes, ...] = ()
    if are_apart:
        inputs, targets = forwarded.inputs.or_as(inputs), forwarded.targets.or_as(targets)
        before = forwarded.kinds
    kinds = (*before, shapes_of_parts(*made))
    return replace(forwarded, inputs=inputs, targets=targets, kinds=kinds, larger=larger)


def _boundaries_of(inputs: Any, targets: Any, num_microbatches: int) -> tuple[Boundary, Boundary]:
    """Returns the boundaries of inputs and targets. If the inputs or targets are Microbatches, there is room
    for as many microbatches as the run has, each as large as the first.
    """
    if isinstance(inputs, Microbatches):
        inputs, targets = (
            Microbatches(map_tensors(torch.clone, part[0]) for _ in range(num_microbatches))
            for part in (inputs, targets)
        )
    return (
        Boundary.of(inputs, name="the inputs", num_beside=NUM_COUNT_TENSORS),
        # A loss may need no targets.
        Boundary.of(targets, name="the targets", needs_tensor=False, num_beside=NUM_COUNT_TENSORS),
    )
