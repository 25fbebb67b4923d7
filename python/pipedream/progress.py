"""The live display of a run: minibatches, loss, samples/s and the weight versions in use.

Shown by the last stage's worker, which has the losses. On a terminal it is one line that changes;
elsewhere (a log file, CI) nothing is printed. Owned by that worker's compute thread; rich draws on a
thread of its own, four times a second.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import _core

__all__ = ["RunProgress"]

_UPDATE_PERIOD_S = 0.25


class RunProgress:
    """Use as a context manager. num_minibatches: None when the data has no length."""

    def __init__(
        self, *, enabled: bool, num_minibatches: int | None, schedule: _core.ScheduleOptions
    ) -> None:
        console = Console(stderr=True)
        self._schedule = schedule
        self._samples = 0
        self._began_s = time.monotonic()
        self._next_update_s = 0.0
        self._latest = (0, 0.0)  # minibatch, loss
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,
            disable=not (enabled and console.is_terminal),
        )
        self._task = self._progress.add_task("training", total=num_minibatches, status="")

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._progress.disable and self._samples > 0:
            self._show(time.monotonic())  # what came since the last update
        self._progress.stop()

    def advance(self, minibatch: int, loss: float, samples: int) -> None:
        """The last stage has done this minibatch."""
        self._samples += samples
        if self._progress.disable:
            return
        now_s = time.monotonic()
        self._latest = (minibatch, loss)
        if now_s >= self._next_update_s:
            self._next_update_s = now_s + _UPDATE_PERIOD_S
            self._show(now_s)

    def _show(self, now_s: float) -> None:
        minibatch, loss = self._latest
        rate = self._samples / max(now_s - self._began_s, 1e-9)
        status = f"loss {loss:.4f}  {rate:.0f} samples/s  {self._versions(minibatch)}"
        self._progress.update(self._task, completed=minibatch + 1, status=status)

    def _versions(self, minibatch: int) -> str:
        read = [
            str(_core.forward_version(self._schedule, stage, minibatch))
            for stage in range(self._schedule.num_stages)
        ]
        return f"minibatch {minibatch} read weight versions {' '.join(read)}"
