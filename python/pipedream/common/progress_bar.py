"""Shows a progress bar on standard error if that is a terminal. Runs on the caller's thread."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

__all__ = ["progress_bar", "seconds_bar"]


@contextlib.contextmanager
def progress_bar(
    doing: str, total: float, unit: str, *, is_shown: bool = True
) -> Iterator[Callable[[float], None]]:
    """Shows a bar that counts steps. Yields a function that advances the bar by a number of steps."""
    console = _terminal() if is_shown else None
    if console is None:
        yield lambda steps: None
        return
    columns = (*_columns(doing, unit), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as progress:
        task = progress.add_task("", total=total)
        yield lambda steps: progress.advance(task, steps)


@contextlib.contextmanager
def seconds_bar(doing: str, seconds: float) -> Iterator[Callable[[], None]]:
    """Shows a bar that fills as time passes. Yields a function that starts the bar's clock at its first call.
    Until then the bar only shows activity.
    """
    console = _terminal()
    if console is None:
        yield lambda: None
        return
    columns = _columns(doing, "seconds")
    with TimedProgress(
        *columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()
    ) as progress:
        task = progress.add_task("", total=seconds, start=False)
        yield lambda: progress.start_task(task)


class TimedProgress(Progress):
    """Fills the bars of started tasks by the time that has passed. Nobody needs to call advance()."""

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            task.completed = min(task.elapsed or 0.0, task.total or 0.0)
        yield from super().get_renderables()


def _terminal() -> Console | None:
    """Returns a console for standard error if that is a terminal, else None."""
    console = Console(stderr=True)
    return console if sys.stderr.isatty() and console.is_terminal else None


def _columns(doing: str, unit: str) -> tuple[ProgressColumn, ...]:
    return (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
