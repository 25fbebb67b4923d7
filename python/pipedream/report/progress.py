"""Shows a run's progress on stderr: epoch, minibatches, loss and samples/s.

The last stage's worker shows it, because that worker has the losses; with replicas it is the first of them. A
terminal gets one line that changes. A log file gets a line every few seconds and one at the end. The worker's
compute thread owns the display. The display starts no thread, because processes that a DataLoader forks would
inherit the thread's locks as taken.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipedream import _core
from pipedream.common.progress_bar import progress_bar
from pipedream.common.units import format_figure
from pipedream.planning.plan_schedule import mean_delay

__all__ = ["RunProgress", "skipping_shown"]

_BAR_PERIOD_S = 0.25
_LINE_PERIOD_S = 5.0
_RATE_WINDOW_S = 10.0
_DELAY_WIDTH_MIN = 110  # columns; a narrower terminal has no room for the delay


class _Display(Protocol):
    period_s: float

    def show(self, minibatch: int, epoch: int, loss: float, samples_per_s: float) -> None:
        """Shows the figures of the newest finished minibatch."""

    def note(self, text: str) -> None:
        """Prints a line that stays."""

    def close(self) -> None: ...


class RunProgress:
    """Shows the progress while its `with` block runs."""

    def __init__(
        self,
        *,
        enabled: bool,
        num_minibatches: int | None,
        num_epochs: int,
        schedule: _core.ScheduleOptions,
        file: TextIO | None = None,
    ) -> None:
        """num_minibatches: the number of minibatches of the run; None if the data have no length. file: the
        stream on which the progress is shown; None is stderr."""
        self._enabled = enabled
        self._make_display = functools.partial(
            _display_for, file or sys.stderr, num_minibatches, num_epochs, schedule
        )
        self._display: _Display | None = None
        self._samples = 0
        self._newest: tuple[int, int, float] | None = None  # minibatch, epoch and loss that are not shown yet
        self._marks: deque[tuple[float, int]] = deque()  # (time, number of samples until this time)
        self._next_s = 0.0

    def __enter__(self) -> RunProgress:
        if self._enabled:
            now_s = time.monotonic()
            self._display = self._make_display()
            self._marks.append((now_s, 0))
            self._next_s = now_s + self._display.period_s
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._display is None:
            return
        if self._newest is not None:
            self._show(self._display, time.monotonic())
        self._display.close()

    @property
    def is_shown(self) -> bool:
        return self._display is not None

    def advance(self, minibatch: int, epoch: int, loss: float, samples: int) -> None:
        """Counts a minibatch that the last stage has finished, and updates the display if a line is due."""
        if self._display is None:
            return
        self._samples += samples
        self._newest = (minibatch, epoch, loss)
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self._display.period_s
            self._show(self._display, now_s)

    def show_evaluation(self, boundary: int, samples: int, figures: Mapping[str, float]) -> None:
        """Shows the figures of an evaluation of the weights before minibatch `boundary`."""
        if self._display is not None:
            named = ", ".join(f"{name} {format_figure(figure)}" for name, figure in figures.items())
            self._display.note(f"validation after {boundary} minibatches: {named} ({samples} samples)")

    def _show(self, display: _Display, now_s: float) -> None:
        assert self._newest is not None
        newest, self._newest = self._newest, None
        display.show(*newest, self._rate(now_s))

    def _rate(self, now_s: float) -> float:
        """Returns the samples per second of about the last _RATE_WINDOW_S seconds."""
        self._marks.append((now_s, self._samples))
        while self._marks[1][0] <= now_s - _RATE_WINDOW_S:
            self._marks.popleft()
        began_s, samples = self._marks[0]
        return (self._samples - samples) / max(now_s - began_s, 1e-9)


@contextlib.contextmanager
def skipping_shown(num_minibatches: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Shows the progress of a resumed run that skips the minibatches before its checkpoint. Yields a
    function. Call it after each skipped minibatch, with the number of minibatches skipped so far."""
    doing = "reading past the minibatches that were trained on"
    started_s = shown_s = time.monotonic()
    with progress_bar(doing, num_minibatches, "minibatches", is_shown=is_shown) as advance:

        def tell(num_behind: int) -> None:
            nonlocal shown_s
            advance(1)
            now_s = time.monotonic()
            if is_shown and not sys.stderr.isatty() and now_s >= shown_s + _LINE_PERIOD_S:
                shown_s = now_s
                left_s = (now_s - started_s) / num_behind * (num_minibatches - num_behind)
                print(
                    f"{doing}: {num_behind}/{num_minibatches}, {format_figure(left_s)} s left",
                    file=sys.stderr,
                    flush=True,
                )

        yield tell


def _display_for(
    file: TextIO, num_minibatches: int | None, num_epochs: int, schedule: _core.ScheduleOptions
) -> _Display:
    # Rich's own test takes a CI log that allows colours for a terminal, so isatty() decides.
    if file.isatty():
        console = Console(file=file)
        if not console.is_dumb_terminal:
            return _Bar(console, num_minibatches, num_epochs, schedule)
    return _Lines(file, num_minibatches, num_epochs)


class _Lines:
    """Prints plain lines such as "epoch 1/3, minibatch 120/2814, loss 0.1234, 15300 samples/s"."""

    period_s = _LINE_PERIOD_S

    def __init__(self, file: TextIO, num_minibatches: int | None, num_epochs: int) -> None:
        self._file = file
        self._of_all = "" if num_minibatches is None else f"/{num_minibatches}"
        self._num_epochs = num_epochs

    def show(self, minibatch: int, epoch: int, loss: float, samples_per_s: float) -> None:
        print(
            f"epoch {epoch + 1}/{self._num_epochs}, minibatch {minibatch + 1}{self._of_all},"
            f" loss {format_figure(loss)}, {format_figure(samples_per_s)} samples/s",
            file=self._file,
            flush=True,
        )

    def note(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def close(self) -> None:
        pass


class _Bar:
    """A bar in one line that changes. It also shows the remaining time and, on a wide terminal, the mean
    delay of gradients.
    """

    period_s = _BAR_PERIOD_S

    def __init__(
        self,
        console: Console,
        num_minibatches: int | None,
        num_epochs: int,
        schedule: _core.ScheduleOptions,
    ) -> None:
        self._num_epochs = num_epochs
        self._delay = _describe_delay(schedule) if console.width >= _DELAY_WIDTH_MIN else ""
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
            expand=True,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),  # if stdout is a file, the user's prints must stay in it
        )
        self._task = self._progress.add_task("", total=num_minibatches, epoch=f"1/{num_epochs}", status="")
        self._progress.start()

    def show(self, minibatch: int, epoch: int, loss: float, samples_per_s: float) -> None:
        status = f"loss {format_figure(loss)}  {format_figure(samples_per_s)} samples/s{self._delay}"
        self._progress.update(
            self._task,
            completed=minibatch + 1,
            epoch=f"{epoch + 1}/{self._num_epochs}",
            status=status,
            refresh=True,
        )

    def note(self, text: str) -> None:
        self._progress.console.print(text, highlight=False)

    def close(self) -> None:
        self._progress.stop()


def _describe_delay(schedule: _core.ScheduleOptions) -> str:
    """Returns the mean delay of gradients as text; "" if the schedule has no delay."""
    delay = mean_delay(schedule)
    return f"  gradients {delay:.2g} update{'s' * (delay != 1)} late" if delay else ""
