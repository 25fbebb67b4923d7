"""Saves the import of torch's compiler in processes that compile nothing.

Torch marks some functions as not to be compiled. At the first call of such a function the mark
(torch._disable_dynamo) imports torch._dynamo, the Python half of the compiler. That adds 1.6 s or more to a
process's first `run`. So the functions are called without the mark until something else imports
torch._dynamo. Torch-free; any thread.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["unmarked_until_compiling"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def unmarked_until_compiling(marked: _Function) -> _Function:
    """Returns a function that calls `marked`. As long as torch._dynamo is not imported, it calls the function
    under the mark instead, because nothing can be compiled until then.
    """
    plain = getattr(marked, "__wrapped__", marked)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (marked if "torch._dynamo" in sys.modules else plain)(*args, **kwargs)

    return call  # type: ignore[return-value]
