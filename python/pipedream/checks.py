"""Checks of arguments that several functions take. Each raises one line naming the argument and its value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["check_choice", "check_count", "is_number", "is_whole"]


def is_whole(value: Any) -> bool:
    """An int, and not True or False."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """An int or float that is finite as a float, and not True or False."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_count(name: str, value: Any) -> None:
    if not is_whole(value) or value < 1:
        raise ValueError(f"{name} is {value!r}: give a whole number of at least 1")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: use one of {', '.join(map(repr, choices))}")
