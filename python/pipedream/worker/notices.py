"""Lets a run write a checkpoint when it gets a notice. A notice is the signal SIGTERM or SIGUSR1, which Slurm
and clouds send before they take a machine away. A file named `save` in the folder of the checkpoints is also
a notice, and anybody may make it.

    process that gets the signal    makes the file; after SIGTERM waits at most `grace` for a checkpoint, and
                                    ends
    rank 0                          finds the file at its next boundary between groups of minibatches
                                    (stage/boundaries.py), and chooses the boundary at which to save
    all ranks                       copy their state, and write it

After SIGUSR1 the run goes on. If the script has a handler for SIGTERM, the handler is called once the
checkpoint is there. If the script ignores SIGTERM, the run goes on. Python runs signal handlers on the main
thread alone, so on another thread this module changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from pipedream.checkpoint.checkpoint_folder import checkpoints_in, is_complete
from pipedream.checkpoint.checkpoints import Checkpoints
from pipedream.checkpoint.manifest import MANIFEST_NAME
from pipedream.stage.job import JobOptions

__all__ = [
    "LOOK_S",
    "SaveRequests",
    "noticed_checkpoints",
    "notices_save",
    "signals_left_to_caller",
]

_REQUEST_NAME = "save"
LOOK_S = 0.2
"""Seconds between two looks for the file."""
_SAVING = b"pipedream: saving a checkpoint before this process ends\n"


def ask_to_save(path: Path) -> None:
    """Asks the run that writes into this folder to save a checkpoint soon."""
    with contextlib.suppress(OSError):
        (path / _REQUEST_NAME).touch()


class SaveRequests:
    """Decides at rank 0 when to save: after a notice, or a number of seconds after the last checkpoint."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._request = checkpoints.folder / _REQUEST_NAME
        self._seconds = checkpoints.seconds
        self._saved_s = self._looked_s = time.monotonic()
        self._forget()

    def saves_now(self) -> bool:
        """Returns whether to save at this boundary. Call it at each boundary."""
        now_s = time.monotonic()
        is_due = self._seconds is not None and now_s - self._saved_s >= self._seconds
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            is_due = self._forget() or is_due
        if is_due:
            self._saved_s = now_s
        return is_due

    def _forget(self) -> bool:
        """Removes the notice's file. Returns whether there was one."""
        try:
            self._request.unlink()
        except OSError:
            return False
        return True


def noticed_checkpoints(options: JobOptions) -> Checkpoints | None:
    """Returns the run's checkpoints if the run can write one on notice; None otherwise."""
    return options.checkpoints if options.may_choose_boundaries else None


@contextlib.contextmanager
def notices_save(checkpoints: Checkpoints | None, *, has_begun: Callable[[], bool]) -> Iterator[None]:
    """Handles notices inside the with block. SIGTERM saves a checkpoint, and then does what it would have
    done without this handler. SIGUSR1 only saves a checkpoint. has_begun: returns whether the training has
    begun. Before that, or if `grace` is 0, SIGTERM does not wait for a checkpoint."""
    if checkpoints is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    known = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    # The handler is None if a C library has installed it. Python could not put it back, so it stays.
    handlers: dict[int, Any] = {number: handler for number, handler in known.items() if handler is not None}
    owner, is_over = os.getpid(), threading.Event()
    came: list[int] = []

    def wait_and_end(number: int, asked_s: float) -> None:
        until_s = time.monotonic() + checkpoints.grace
        while time.monotonic() < until_s and not _is_saved_since(checkpoints.folder, asked_s):
            if is_over.wait(LOOK_S):
                return
        is_over.set()
        os.kill(owner, number)

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            return  # a forked process of a DataLoader goes on, because its data are still needed
        if number == signal.SIGUSR1 or handlers[number] == signal.SIG_IGN:
            ask_to_save(checkpoints.folder)
        elif is_over.is_set() or not has_begun() or checkpoints.grace == 0:
            _pass_on(number, frame, handlers[number])
        elif not came:
            came.append(number)
            os.write(2, _SAVING)
            ask_to_save(checkpoints.folder)
            threading.Thread(target=wait_and_end, args=(number, time.time()), daemon=True).start()

    for number in handlers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        was_over = is_over.is_set()
        is_over.set()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came and not was_over:  # the run has ended before the checkpoint was there
            os.kill(owner, came[0])


def _pass_on(number: int, frame: FrameType | None, handler: Any) -> None:
    if callable(handler):
        handler(number, frame)
        return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _is_saved_since(path: Path, asked_s: float) -> bool:
    """Whether a checkpoint was completed at asked_s or later. asked_s: a wall-clock time, as the times of
    files are."""
    complete = [checkpoint for checkpoint in checkpoints_in(path) if is_complete(checkpoint)]
    with contextlib.suppress(OSError, IndexError):
        return (complete[-1] / MANIFEST_NAME).stat().st_mtime >= asked_s
    return False


def signals_left_to_caller(checkpoints: Checkpoints | None) -> None:
    """Makes a local worker ignore notices. If all processes get a notice, the caller handles it and ends the
    workers."""
    if checkpoints is None:
        return
    owner = os.getpid()

    def ignore(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # this is a forked process of a DataLoader
            _pass_on(number, frame, None)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, ignore)
