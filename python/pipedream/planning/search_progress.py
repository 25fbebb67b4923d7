"""How far a search over plans is, on stderr. Owned by the thread that searches; needs no torch.

Nothing for a search that is over in a second. On a terminal one line that changes and is gone at the end,
elsewhere (a log file, CI) a line every few seconds.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

__all__ = ["SearchProgress"]

_FIRST_S = 1.0
_TERMINAL_PERIOD_S = 0.25
_LINE_PERIOD_S = 5.0
_CLEAR_LINE = "\r\x1b[K"


class SearchProgress:
    """Use as a context manager."""

    def __init__(self, *, enabled: bool = True, file: TextIO | None = None) -> None:
        """file: where it is shown, None is stderr."""
        self._file = file or sys.stderr
        self._enabled = enabled
        self._is_terminal = self._file.isatty()
        self._has_line = False
        self._next_s = time.monotonic() + _FIRST_S

    def __enter__(self) -> SearchProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._has_line:
            print(_CLEAR_LINE, end="", file=self._file, flush=True)

    def advance(self, num_plans: int, plans_max: int, least_ms: float) -> None:
        """So many plans, of so many at most, were looked at; the fastest one's milliseconds per minibatch."""
        now_s = time.monotonic()
        if not self._enabled or now_s < self._next_s:
            return
        self._next_s = now_s + (_TERMINAL_PERIOD_S if self._is_terminal else _LINE_PERIOD_S)
        best = f"{least_ms:.3f} ms per minibatch"
        text = f"planning: {num_plans} of at most {plans_max} plans simulated, {best}"
        if self._is_terminal:
            print(f"{_CLEAR_LINE}{text}", end="", file=self._file, flush=True)
            self._has_line = True
        else:
            print(text, file=self._file, flush=True)
