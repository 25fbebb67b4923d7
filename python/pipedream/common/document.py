"""Reads and writes pipedream's JSON files, and checks their fields.

A check raises ValueError with a message that starts with the field. The reader of the file puts the file's
name in front and raises FileFormatError. A user then sees "plan.json: stages[1].last_layer ...".
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from pipedream.common.checks import WHOLE_MAX
from pipedream.common.errors import FileFormatError


def read_document(path: str | os.PathLike[str], kind: str, version: int) -> dict[str, Any]:
    """Returns the JSON object in the file. Its "format" must be `pipedream.<kind>/<version>`.

    Raises FileFormatError naming file and field, and OSError if the file cannot be read.
    """
    source = os.fspath(path)
    try:
        fields = json.loads(
            Path(path).read_bytes(), object_pairs_hook=functools.partial(_without_repeats, source)
        )
    except FileFormatError:
        raise
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise FileFormatError(
            f"{source}: not JSON: {why}; give a file that pipedream wrote, as with --output"
        ) from None
    check_format(fields, kind, version, source)
    try:
        for name, value in fields.items():
            check_figures(name, value, negative=True)
    except ValueError as error:
        raise FileFormatError(f"{source}: {error}") from None
    return dict(fields)


def _without_repeats(source: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise FileFormatError(f"{source}: {_shown(repeated)} is twice in one object: leave one out")
    return fields


def write_document(path: str | os.PathLike[str], fields: Mapping[str, Any]) -> None:
    """Writes the fields as indented JSON with a final newline."""
    Path(path).write_text(json.dumps(fields, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def check_format(fields: object, kind: str, version: int, source: str) -> None:
    """Raises FileFormatError unless this is an object of format `pipedream.<kind>/<version>`."""
    expected = f"pipedream.{kind}/{version}"
    if not isinstance(fields, Mapping):
        raise FileFormatError(f"{source}: is not a JSON object with a format {expected!r}")
    found = fields.get("format")
    if found == expected:
        return
    prefix = f"pipedream.{kind}/"
    if isinstance(found, str) and found.startswith(prefix) and found.removeprefix(prefix).isdigit():
        raise FileFormatError(
            f"{source}: format is {found!r}, this pipedream reads {expected!r}: install a later one"
        )
    raise FileFormatError(f"{source}: format is {found!r}, not {expected!r}")


def check_object(field: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{field} is {_shown(value)}: it must be an object")
    return dict(value)


def check_list(field: str, value: object) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{field} is {_shown(value)}: it must be a list")
    return list(value)


def check_number(field: str, value: object, *, positive: bool = False) -> float:
    """Returns the value as a float. It must be finite and not negative, or, with positive=True, above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{field} is {_shown(value)}: it must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{field} is {_shown(value)}: it must be finite")
    if number < 0 or (positive and number == 0):
        raise ValueError(
            f"{field} is {_shown(value)}: it must {'be positive' if positive else 'not be negative'}"
        )
    return number


def check_whole(field: str, value: object, *, at_least: int = 0) -> int:
    """Returns a whole number. A file may also write it as 1.5e9."""
    number = check_number(field, value)
    whole = value if isinstance(value, int) else int(number)
    if whole != number and not isinstance(value, int):
        raise ValueError(f"{field} is {_shown(value)}: it must be a whole number")
    if not at_least <= whole <= WHOLE_MAX:
        raise ValueError(f"{field} is {_shown(value)}: it must be from {at_least} to {WHOLE_MAX}")
    return whole


def check_text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{field} is {_shown(value)}: it must be a text")
    return value


def check_figures(field: str, value: object, *, negative: bool = False) -> None:
    """Checks all numbers in a nested value. Raises ValueError for NaN and infinity, and for negative numbers
    unless negative=True.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            check_figures(f"{field}.{name}", item, negative=negative)
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            check_figures(f"{field}[{position}]", item, negative=negative)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        check_number(field, abs(value) if negative else value)


def require(fields: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Raises ValueError for a missing field. The error names an existing field with a similar name:
    forward_us for forward_ms.
    """
    for name in names:
        if name in fields:
            continue
        stem, unit = name.rsplit("_", 1) if "_" in name else (name, "")
        similar = [key for key in fields if unit and key.startswith(stem + "_")]
        hint = f": found {similar[0]!r}, the unit is {unit}" if similar and unit in ("ms", "bytes") else ""
        raise ValueError(f"{where}{name} is missing{hint}")


def set_field(target: object, name: str, value: object) -> None:
    """Sets a field of a frozen dataclass, whose checks convert values to their final types."""
    object.__setattr__(target, name, value)


def read_value(field: str, value: object, kind: Any) -> Any:
    """Returns a file's value as the type `kind`: float, int, str, X | None, a tuple, a mapping, or a
    dataclass or named tuple of such types. An object of the file may lack a field whose default is None or
    empty, and may have fields that the class lacks.

    Raises ValueError naming the field. If the class refuses a value, the field's name is put in front.
    """
    if kind in _CHECKS:
        return _CHECKS[kind](field, value)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else read_value(field, value, arguments[0])
    if origin is tuple:
        items = check_list(field, value)
        kinds = [arguments[0]] * len(items) if arguments[-1] is Ellipsis else arguments
        if len(items) != len(kinds):
            raise ValueError(f"{field} has {len(items)} entries: it must have {len(kinds)}")
        pairs = enumerate(zip(items, kinds, strict=True))
        return tuple(read_value(f"{field}[{index}]", item, one) for index, (item, one) in pairs)
    given = check_object(field, value)
    if origin is Mapping:
        return {name: read_value(f"{field}.{name}", item, arguments[1]) for name, item in given.items()}
    known = _fields_of(kind)
    require(given, known.needed, f"{field}.")
    names = [name for name in known.kinds if name in given]
    values = {name: read_value(f"{field}.{name}", given[name], known.kinds[name]) for name in names}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{field}.{error}") from None


_CHECKS: dict[Any, Callable[[str, object], Any]] = {float: check_number, int: check_whole, str: check_text}


def write_value(value: Any) -> Any:
    """Returns a value in the form that a file has and read_value() reads. Fields that may be missing in a
    file are left out if they are None or empty.
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {name: write_value(item) for name, item in value.items()}
    if type(value) in (tuple, list):
        return [write_value(item) for item in value]
    known = _fields_of(value.__class__)
    items = {name: getattr(value, name) for name in known.kinds}
    return {
        name: write_value(item) for name, item in items.items() if name in known.needed or not _is_empty(item)
    }


class _Fields(NamedTuple):
    kinds: dict[str, Any]
    needed: tuple[str, ...]


@functools.cache
def _fields_of(kind: Any) -> _Fields:
    parameters = inspect.signature(kind).parameters.values()
    return _Fields(get_type_hints(kind), tuple(one.name for one in parameters if not _is_empty(one.default)))


def _is_empty(value: object) -> bool:
    return value is None or value == () or value == {}


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else text[:37] + "..."
