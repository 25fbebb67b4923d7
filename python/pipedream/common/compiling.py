"""Calls of functions that torch marks as not to be compiled, without the mark if nothing can be compiled.

The mark (torch._disable_dynamo) imports torch._dynamo at the first call, the compiler's Python half: 1.6 s
and more of a process's first `run`, which may need none of it. Torch-free; any thread.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["unmarked_until_compiling"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def unmarked_until_compiling(marked: _Function) -> _Function:
    """A function that calls what the mark wraps, from the import of torch._dynamo on `marked` itself: nothing
    is compiled without that module."""
    plain = getattr(marked, "__wrapped__", marked)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (marked if "torch._dynamo" in sys.modules else plain)(*args, **kwargs)

    return call  # type: ignore[return-value]
