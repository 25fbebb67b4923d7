"""Structure describes how tuples, lists, dicts and dataclasses hold values. taken_apart() separates a nested
value into its structure and its values. rebuilt() joins the two.

Any other object is one value, whatever is inside it. Structures can be pickled; any thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

__all__ = ["Structure", "paths", "rebuilt", "taken_apart"]


class Structure(NamedTuple):
    """One level of a nested value, or a single value (kind None)."""

    kind: type[Any] | None = None
    keys: tuple[Any, ...] = ()
    """The keys of a dict or a dataclass."""
    parts: tuple[Any, ...] = ()
    """The structures of the level's parts."""

    def __str__(self) -> str:
        if self.kind is None:
            return "*"
        parts = [str(part) for part in self.parts]
        if self.keys:
            parts = [f"{key}: {part}" for key, part in zip(self.keys, parts, strict=True)]
        return f"{self.kind.__name__}({', '.join(parts)})"


def taken_apart(value: Any) -> tuple[list[Any], Structure]:
    """Returns the values in order, and the structure that holds them."""
    values: list[Any] = []
    return values, _take_apart(value, values)


def rebuilt(structure: Structure, values: Iterable[Any]) -> Any:
    """Puts the values into the structure; the inverse of taken_apart()."""
    if structure.kind is None:
        return next(iter(values))
    return _rebuild(structure, iter(values))


def paths(structure: Structure) -> list[str]:
    """Returns the place of each value, such as ".logits[0]"; "" for a single value."""
    if structure.kind is None:
        return [""]
    if issubclass(structure.kind, dict):
        places = [f"[{key!r}]" for key in structure.keys]
    elif structure.keys:
        places = [f".{key}" for key in structure.keys]
    else:
        places = [f"[{index}]" for index in range(len(structure.parts))]
    return [place + path for place, part in zip(places, structure.parts, strict=True) for path in paths(part)]


def _take_apart(value: Any, values: list[Any]) -> Structure:
    kind = type(value)
    if isinstance(value, (tuple, list)):
        return Structure(kind, (), tuple(_take_apart(item, values) for item in value))
    if isinstance(value, dict):
        return Structure(kind, tuple(value), tuple(_take_apart(item, values) for item in value.values()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        return Structure(kind, names, tuple(_take_apart(getattr(value, name), values) for name in names))
    values.append(value)
    return Structure()


def _rebuild(structure: Structure, values: Iterator[Any]) -> Any:
    kind = structure.kind
    if kind is None:
        return next(values)
    parts = [_rebuild(part, values) for part in structure.parts]
    if issubclass(kind, tuple):
        return kind._make(parts) if hasattr(kind, "_make") else kind(parts)
    if issubclass(kind, list):
        return kind(parts)
    items = dict(zip(structure.keys, parts, strict=True))
    if not dataclasses.is_dataclass(kind):
        return kind(items)
    if issubclass(kind, dict):  # such as Hugging Face's ModelOutput: fields that are set are also items
        return kind(**items)
    made = object.__new__(kind)
    for name, item in items.items():
        object.__setattr__(made, name, item)
    return made
