"""A region is a function that makes a context, such as torch.autocast, around a part of a stage's work, such
as one forward. The region is called anew for each part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

__all__ = ["Region", "entered", "within"]

Region = Callable[[], contextlib.AbstractContextManager[Any]]

_Result = TypeVar("_Result")


@contextlib.contextmanager
def entered(regions: Sequence[Region]) -> Iterator[None]:
    """Enters all regions, the first as the outermost."""
    with contextlib.ExitStack() as stack:
        for region in regions:
            stack.enter_context(region())
        yield


def within(region: Region | None, function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Returns a function that calls `function` inside the region. If region is None, returns `function`."""
    if region is None:
        return function
    make_region = region

    def inside(*arguments: Any) -> _Result:
        with make_region():
            return function(*arguments)

    return inside
