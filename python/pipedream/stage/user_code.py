"""The user's own code inside a run: timed, and its errors told with stage and minibatch.

Owned by the worker's compute thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from pipedream import _core
from pipedream.common.errors import PipelineError, describe_error

__all__ = ["UserCode"]

_Result = TypeVar("_Result")

_now_ns = time.perf_counter_ns


class UserCode:
    """Runs the user's own code: times it, and tells its errors with stage and minibatch."""

    def __init__(self, where: Callable[[str], str]) -> None:
        """where: of what is being run, for errors."""
        self._where = where
        self.elapsed_ns = 0
        """Since the last item was completed."""

    def take_elapsed_ns(self) -> int:
        """Returns the time of an item that is being completed, and starts to count from 0 again."""
        elapsed_ns, self.elapsed_ns = self.elapsed_ns, 0
        return elapsed_ns

    def drop_elapsed(self) -> None:
        """Forgets the time so far, which belongs to no item."""
        self.elapsed_ns = 0

    def run(self, what: str, function: Callable[..., _Result], *arguments: Any) -> _Result:
        began_ns = _now_ns()
        try:
            return function(*arguments)
        except (PipelineError, _core.RunFailure):
            raise  # forwarded data come from the core: its failures are the world's
        except Exception as error:
            raise PipelineError(f"{self._where(what)}: {describe_error(error)}") from error
        finally:
            self.elapsed_ns += _now_ns() - began_ns
