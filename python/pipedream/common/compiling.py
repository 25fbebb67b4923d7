"""Calls functions that torch marks as not to be compiled without that mark, as long as nothing can be
compiled.

The mark (torch._disable_dynamo) imports torch._dynamo, the Python half of the compiler, at the first call.
The import adds 1.6 s or more to a process's first `run`, which may not need it. Torch-free; any thread.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["unmarked_until_compiling"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def unmarked_until_compiling(marked: _Function) -> _Function:
    """Returns a function that calls the plain function inside the mark. Once torch._dynamo is imported it
    calls `marked`: before that, nothing can be compiled.
    """
    plain = getattr(marked, "__wrapped__", marked)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (marked if "torch._dynamo" in sys.modules else plain)(*args, **kwargs)

    return call  # type: ignore[return-value]
