"""Shapes are the sizes of a minibatch's tensors, by the names of its entries.

    (inputs, targets)      "inputs", "targets"; nested ones "inputs[0]", "inputs.mask"
    a dict or dataclass    "input_ids", "labels"
    Microbatches           the largest size of each dimension over the microbatches

The profiler records the largest shapes that it sees. A plan carries these shapes to the workers. Each worker
plans enough memory for them. If some minibatches have few long texts and others many short ones, their shapes
are two kinds, and memory is planned for each kind. Pure; any thread; needs no torch: anything with a shape
counts as a tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipedream.common.document import check_list, check_object, check_whole
from pipedream.common.microbatches import Microbatches

__all__ = [
    "NUM_KINDS_MAX",
    "Shapes",
    "checked_shapes",
    "cover",
    "cover_sizes",
    "describe_shapes",
    "larger_of",
    "largest_in",
    "largest_of",
    "listed",
    "named_tensors",
    "next_kind",
    "shapes_of",
    "shapes_of_parts",
    "with_apart",
]

Shapes = dict[str, tuple[int, ...]]

NUM_KINDS_MAX = 16
"""The most kinds of shapes that a plan keeps apart. Before the training, workers run one minibatch of each
kind to measure its memory. They compare every minibatch with all pairs of kinds.
"""

_ROUNDED = 1e-9  # tolerance of a logarithm


def shapes_of(batch: Any) -> Shapes:
    """Returns the shapes of a minibatch, given in the form in which the data yield it."""
    if isinstance(batch, Microbatches):
        return largest_of(batch, {})
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(batch)}


def named_tensors(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, tensor) for the tensors of a minibatch, or of one batch of Microbatches."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        yield from (*_named("inputs", batch[0]), *_named("targets", batch[1]))
        return
    if dataclasses.is_dataclass(batch) and not isinstance(batch, (type, Mapping)):
        batch = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if isinstance(batch, Mapping):
        yield from (found for key in batch for found in _named(str(key), batch[key]))
    else:
        yield from _named("inputs", batch)


def shapes_of_parts(inputs: Any, targets: Any) -> Shapes:
    """Returns the shapes of a minibatch that is already split into inputs and targets. If both are the same
    object, returns shapes_of() of this object.
    """
    if isinstance(inputs, Microbatches):
        return functools.reduce(larger_of, map(shapes_of_parts, inputs, targets))
    return shapes_of(inputs if inputs is targets else (inputs, targets))


def larger_of(known: Mapping[str, tuple[int, ...]], others: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Returns the larger size in every dimension. If the numbers of dimensions differ, the known shape
    stays.
    """
    merged = dict(known)
    for name, shape in others.items():
        before = merged.get(name, shape)
        if len(before) == len(shape):
            merged[name] = tuple(map(max, before, shape))
    return merged


def largest_of(batches: Iterable[Any], known: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Returns the largest sizes of the known shapes and of these minibatches."""
    return functools.reduce(larger_of, map(shapes_of, batches), dict(known))


def largest_in(batches: Sequence[Any]) -> dict[str, int]:
    """Returns, for each entry, the index of the last minibatch in which a size of that entry is larger than
    in all earlier minibatches. Entries that are largest in the first minibatch are left out.
    """
    found: dict[str, int] = {}
    known: Shapes = {}
    for minibatch, shapes in enumerate(map(shapes_of, batches)):
        larger = larger_of(known, shapes)
        found |= {name: minibatch for name in shapes if known and larger[name] != known.get(name)}
        known = larger
    return found


def cover(kinds: Iterable[Shapes], shapes: Shapes) -> bool:
    """Whether memory that is planned for these kinds is enough for a minibatch of these shapes."""
    known = [
        [size for name in shapes for size in kind[name]]
        for kind in kinds
        if all(len(kind.get(name, ())) == len(shape) for name, shape in shapes.items())
    ]
    return cover_sizes(known, [size for shape in shapes.values() for size in shape])


def cover_sizes(kinds: Sequence[Sequence[int]], sizes: Sequence[int]) -> bool:
    """Whether memory that is planned for these kinds is enough for a minibatch of these sizes.

    It is enough if all sizes are at most those of one kind, or at most those of a point between two kinds.
    The reason: the memory of a minibatch is a sum of products of powers of its sizes, such as batch x
    length^2 for an attention. That sum is convex in the logarithms of the sizes. So between two kinds it
    never exceeds the larger of the two kinds' sums.
    """
    logs = [math.log(max(size, 1)) for size in sizes]
    of_kinds = [[math.log(max(size, 1)) for size in kind] for kind in kinds]
    pairs = itertools.combinations_with_replacement(of_kinds, 2)
    return any(_is_between(logs, one, other) for one, other in pairs)


def _is_between(sizes: Sequence[float], one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether for some t in [0, 1] no size is above its point one + t (other - one)."""
    least, most = 0.0, 1.0
    for size, begin, end in zip(sizes, one, other, strict=True):
        missing, rise = size - begin - _ROUNDED, end - begin
        if rise > 0:
            least = max(least, missing / rise)
        elif rise < 0:
            most = min(most, missing / rise)
        elif missing > 0:
            return False
    return least <= most


def with_apart(known: Iterable[Shapes], batches: Iterable[Any]) -> tuple[Shapes, ...]:
    """Returns the known kinds and the kinds of these batches, without any kind that another kind covers. If
    there are more than NUM_KINDS_MAX, two kinds are replaced by the larger of their sizes. These are the two
    for which the result is smallest.
    """
    found = list(known)
    for shapes in map(shapes_of, batches):
        if not cover(found, shapes):
            found = _with_kind(found, shapes)
            while len(found) > NUM_KINDS_MAX:
                closest = _smallest_together(itertools.combinations(found, 2))
                if closest is None:  # no two kinds have the same structure
                    break
                found = _with_kind(found, larger_of(*closest))
    return tuple(found)


def next_kind(kinds: Sequence[Shapes], shapes: Shapes, *, are_apart: bool) -> Shapes:
    """Returns the shapes for which to plan memory if minibatches of `shapes` come in addition to the known
    kinds.

    are_apart: False returns the largest sizes of all kinds and of `shapes`. True returns `shapes`, as one
    more kind. But if there are NUM_KINDS_MAX kinds already, it returns sizes that also cover one of them.
    """
    if not are_apart:
        return functools.reduce(larger_of, (*kinds, shapes))
    closest = None
    if len(kinds) >= NUM_KINDS_MAX:
        closest = _smallest_together((kind, shapes) for kind in kinds)
    return shapes if closest is None else larger_of(*closest)


def _with_kind(kinds: Iterable[Shapes], shapes: Shapes) -> list[Shapes]:
    return [*(kind for kind in kinds if not cover([shapes], kind)), shapes]


def _smallest_together(pairs: Iterable[tuple[Shapes, Shapes]]) -> tuple[Shapes, Shapes] | None:
    """Returns the two kinds that are best joined: the joined kind, which has the larger size in each
    dimension, has the fewest elements. Pairs are left out whose joined kind does not cover both.
    """
    can_be = [pair for pair in pairs if all(cover([larger_of(*pair)], kind) for kind in pair)]
    return min(can_be, key=lambda pair: _num_elements(larger_of(*pair)), default=None)


def _num_elements(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def checked_shapes(field: str, value: object) -> Shapes:
    """Reads shapes from a field of a file. Raises ValueError naming the field if its value is no shapes."""
    return {
        name: tuple(check_whole(f"{field}.{name}", size) for size in check_list(f"{field}.{name}", shape))
        for name, shape in check_object(field, value).items()
    }


def listed(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """Returns the shapes as lists, for a file."""
    return {name: list(shape) for name, shape in shapes.items()}


def describe_shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Returns the shapes as text: "input_ids (8, 128), labels (8, 128)"."""
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def _named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _named(f"{name}[{index}]", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(f"{name}.{key}", item)
    elif hasattr(value, "shape"):
        yield name, value
