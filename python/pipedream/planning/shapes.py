"""Shapes: the largest that the tensors of a minibatch have, by the names of its entries.

    (inputs, targets)      "inputs", "targets"; inside of them "inputs[0]", "inputs.mask"
    a dict or dataclass    "input_ids", "labels"

The profiler notes what it sees, a plan carries it to the workers, and these plan their memory for it. Pure;
any thread; needs no torch: a tensor is what has a shape.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pipedream.common.document import check_list, check_object, check_whole

__all__ = [
    "Shapes",
    "checked_shapes",
    "describe_shapes",
    "larger_of",
    "largest_of",
    "shapes_of",
    "shapes_of_parts",
]

Shapes = dict[str, tuple[int, ...]]


def shapes_of(batch: Any) -> Shapes:
    """Of a minibatch as the data yield it."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return dict([*_named("inputs", batch[0]), *_named("targets", batch[1])])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, (type, Mapping)):
        batch = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if isinstance(batch, Mapping):
        return {name: shape for key in batch for name, shape in _named(str(key), batch[key])}
    return dict(_named("inputs", batch))


def shapes_of_parts(inputs: Any, targets: Any) -> Shapes:
    """Of a minibatch as model and loss take it; of one that both take by name the parts are one object."""
    return shapes_of(inputs if inputs is targets else (inputs, targets))


def larger_of(known: Mapping[str, tuple[int, ...]], others: Mapping[str, tuple[int, ...]]) -> Shapes:
    """In every dimension the larger size; the known one where the numbers of dimensions differ."""
    merged = dict(known)
    for name, shape in others.items():
        before = merged.get(name, shape)
        if len(before) == len(shape):
            merged[name] = tuple(map(max, before, shape))
    return merged


def largest_of(batches: Iterable[Any], known: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Of what is known and all of these."""
    return functools.reduce(larger_of, map(shapes_of, batches), dict(known))


def checked_shapes(field: str, value: object) -> Shapes:
    """Of a file. Raises ValueError naming the field for what are no shapes."""
    return {
        name: tuple(check_whole(f"{field}.{name}", size) for size in check_list(f"{field}.{name}", shape))
        for name, shape in check_object(field, value).items()
    }


def describe_shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """ "input_ids (8, 128), labels (8, 128)"."""
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def _named(name: str, value: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _named(f"{name}[{index}]", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(f"{name}.{key}", item)
    elif hasattr(value, "shape"):
        yield name, tuple(value.shape)
