"""Regions around parts of a stage's work: made anew for each, and nothing at all where a run has none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

__all__ = ["Region", "entered", "within"]

Region = Callable[[], contextlib.AbstractContextManager[Any]]

_Result = TypeVar("_Result")


@contextlib.contextmanager
def entered(regions: Sequence[Region]) -> Iterator[None]:
    """Inside all of them, the first outermost."""
    with contextlib.ExitStack() as stack:
        for region in regions:
            stack.enter_context(region())
        yield


def within(region: Region | None, function: Callable[..., _Result]) -> Callable[..., _Result]:
    """The function inside the region; the function itself where there is none."""
    if region is None:
        return function
    make_region = region

    def inside(*arguments: Any) -> _Result:
        with make_region():
            return function(*arguments)

    return inside
