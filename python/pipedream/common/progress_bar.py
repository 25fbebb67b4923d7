"""A bar on the standard error's terminal for what takes long and counts its steps; elsewhere nothing. The
caller's thread."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(
    doing: str, total: float, unit: str, *, is_shown: bool = True
) -> Iterator[Callable[[float], None]]:
    """Yields a function that counts so many steps on."""
    console = Console(stderr=True)
    if not (is_shown and sys.stderr.isatty() and console.is_terminal):
        yield lambda steps: None
        return
    columns = (
        TextColumn(doing),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    to_terminal = sys.stdout.isatty()  # a file gets what the user prints
    with Progress(*columns, console=console, transient=True, redirect_stdout=to_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda steps: progress.advance(task, steps)
