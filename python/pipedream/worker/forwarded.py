"""The stand-in, at the workers, for data that the caller iterates and forwards: minibatch 0, and the sizes
for which the channels from the caller are planned; later larger ones. Pure; any thread.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pipedream.data.first_minibatch import PeekedData, first_of
from pipedream.data.stream import (
    NUM_COUNT_TENSORS,
    ForwardedData,
    LargerMinibatch,
    describe_source,
    num_minibatches_of,
)
from pipedream.model.batches import parts_of
from pipedream.model.boundary import Boundary
from pipedream.model.enlarged import enlarged, shaped
from pipedream.planning.plan import Plan
from pipedream.planning.shapes import Shapes, next_kind, shapes_of_parts

__all__ = ["describe_forwarded", "enlarge_forwarded"]


def describe_forwarded(data: Iterable[Any], plan: Plan, epochs: int) -> ForwardedData:
    first = parts_of(first_of(data), 0)
    made = [enlarged(*first, plan.max_shapes), *(shaped(*first, shapes) for shapes in plan.shapes_apart)]
    boundaries = [_boundaries_of(*parts) for parts in made]
    inputs, targets = (functools.reduce(Boundary.or_as, parts) for parts in zip(*boundaries, strict=True))
    return ForwardedData(
        first,
        inputs,
        targets,
        num_minibatches_of(data, epochs),
        describe_source(data.data if isinstance(data, PeekedData) else data),
        tuple(shapes_of_parts(*parts) for parts in made),
    )


def enlarge_forwarded(forwarded: ForwardedData, plan: Plan, larger: LargerMinibatch) -> ForwardedData:
    """From that minibatch on."""
    are_apart = bool(plan.shapes_apart)
    shapes = next_kind(forwarded.kinds, larger.shapes, are_apart=are_apart)
    made = enlarged(larger.inputs, larger.targets, shapes)
    inputs, targets = _boundaries_of(*made)
    before: tuple[Shapes, ...] = ()
    if are_apart:
        inputs, targets = forwarded.inputs.or_as(inputs), forwarded.targets.or_as(targets)
        before = forwarded.kinds
    kinds = (*before, shapes_of_parts(*made))
    return replace(forwarded, inputs=inputs, targets=targets, kinds=kinds, larger=larger)


def _boundaries_of(inputs: Any, targets: Any) -> tuple[Boundary, Boundary]:
    return (
        Boundary.of(inputs, name="the inputs", num_beside=NUM_COUNT_TENSORS),
        # A loss may need none.
        Boundary.of(targets, name="the targets", needs_tensor=False, num_beside=NUM_COUNT_TENSORS),
    )
