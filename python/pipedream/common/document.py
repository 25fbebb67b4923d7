"""Reads and writes pipedream's JSON files, and checks their fields.

A check raises ValueError with a message that starts with the field. The reader of the file puts the file's
name in front and raises FileFormatError. A user then sees "plan.json: stages[1].last_layer ...".
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipedream.common.errors import FileFormatError

# The largest whole number: larger ones do not fit into a C++ int64.
_WHOLE_MAX = 2**63 - 1


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
        raise FileFormatError(
            f"{source}: not JSON: {error or 'nested too deeply'}; give a file that pipedream wrote, as with"
            " --output"
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
    """Returns a finite number that is not negative, or that is positive."""
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
    if not at_least <= whole <= _WHOLE_MAX:
        raise ValueError(f"{field} is {_shown(value)}: it must be from {at_least} to {_WHOLE_MAX}")
    return whole


def check_text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{field} is {_shown(value)}: it must be a text")
    return value


def check_figures(field: str, value: object, *, negative: bool = False) -> None:
    """Raises ValueError for NaN and infinity, and for negative numbers unless allowed, anywhere in a nested
    value.
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


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else text[:37] + "..."
