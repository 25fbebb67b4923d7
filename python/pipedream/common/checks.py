"""Checks arguments for several functions. Each error is one line that names the argument and its value."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "WHOLE_MAX",
    "check_choice",
    "check_count",
    "check_data",
    "check_function",
    "check_output_file",
    "is_count",
    "is_number",
    "is_whole",
]


WHOLE_MAX = 2**63 - 1
"""The largest whole number: larger ones do not fit into a C++ int64."""


def is_whole(value: Any) -> bool:
    """Whether the value is an int, but not True or False."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: Any, *, at_least: int = 1) -> bool:
    """Whether the value is a whole number from at_least to the largest that the core takes."""
    return is_whole(value) and at_least <= value <= WHOLE_MAX


def is_number(value: Any) -> bool:
    """Whether the value is an int or float that is finite as a float, but not True or False."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_count(name: str, value: Any) -> None:
    if not is_count(value):
        most = f", and at most {WHOLE_MAX}" if is_whole(value) and value > WHOLE_MAX else ""
        raise ValueError(f"{name} is {value!r}: give a whole number of at least 1{most}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: use one of {', '.join(map(repr, choices))}")


def check_function(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name} is a {type(value).__name__}: give a function")


def check_data(name: str, value: Any) -> None:
    if not isinstance(value, Iterable):
        raise TypeError(
            f"{name} is a {type(value).__name__}: give something that yields (inputs, targets), as a"
            " DataLoader does"
        )


def check_output_file(path: str | os.PathLike[str], name: str = "") -> None:
    """Raises ValueError if the file cannot be written. Call it before long work whose result would be lost.
    name: name of the argument, for the error.
    """
    shown = f"{name} is {os.fspath(path)!r}" if name else os.fspath(path)
    file = Path(path).absolute()
    if not file.parent.is_dir():
        raise ValueError(f"{shown}: there is no folder {file.parent}")
    if file.is_dir():
        raise ValueError(f"{shown}: is a folder, give a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"{shown}: may not be written, give another file or folder")
