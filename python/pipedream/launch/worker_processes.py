"""Starts the processes of a local run through the fork server, waits until they end, and ends them together.

If one worker ends with a status other than 0, the run has failed. That worker may not be the cause: a peer of
the worker that caused the failure may end first. So while the cause is not known, the other workers get 2 s
to report it. Once the cause is known, they get time to save their weights. Runs on the caller's thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import Any

from pipedream.launch.fork_server import Process
from pipedream.report.status import LOOK_S

__all__ = ["run_processes", "signals_deferred"]

_PATIENCE_S = 2.0  # seconds for other workers to report why the first one ended
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class _Ended(BaseException):
    """Raised in the main thread when a signal arrives that would end this process."""


def run_processes(
    target: Callable[..., None],
    arguments: Sequence[tuple[Any, ...]],
    environment: Mapping[str, str],
    is_explained: Callable[[Mapping[int, int]], bool],
    look: Callable[[], bool],
    last_words_s: Callable[[], float],
    *,
    look_s: float = LOOK_S,
) -> dict[int, int]:
    """Calls target(*arguments[rank]) in one process per rank, and returns when all processes have ended.

    environment: further variables of the processes.
    is_explained: called with the exit codes so far; returns whether the cause of the failure is known.
    look: called once all processes have started, then every look_s seconds, as long as it returns True and no
        process has failed. An error that it raises ends all processes.
    last_words_s: returns the seconds that the other workers have to end by themselves, once the cause is
        known.

    Returns {rank: exit code} of the processes that failed by themselves, in the order of their ends. A
    negative code is a signal. No process is left running, even after an error.
    """
    processes: list[Process] = []
    try:
        for rank, of_rank in enumerate(arguments):
            name = f"pipedream-{rank}"
            processes.append(Process(target=target, args=of_rank, name=name, environment=environment))
            processes[-1].start()
        return _wait(processes, is_explained, look, last_words_s, look_s)
    finally:
        _end([process for process in processes if process.pid is not None])


def _wait(
    processes: list[Process],
    is_explained: Callable[[Mapping[int, int]], bool],
    look: Callable[[], bool],
    last_words_s: Callable[[], float],
    look_s: float,
) -> dict[int, int]:
    codes: dict[int, int] = {}
    looks, is_known, known_s = True, False, 0.0
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    deadline_s = float("inf")
    while running and time.monotonic() < deadline_s:
        looks = looks and not codes and look()
        timeout_s = look_s if looks else None
        if codes:
            timeout_s = min(LOOK_S, max(0.0, deadline_s - time.monotonic()))
        for sentinel in connection.wait(list(running), timeout_s):
            assert isinstance(sentinel, int)
            rank = running.pop(sentinel)
            processes[rank].join()
            code = processes[rank].exitcode
            if code:
                codes[rank] = code
        if codes and not is_known and is_explained(codes):
            is_known, known_s = True, time.monotonic()
        if is_known:
            deadline_s = known_s + last_words_s()
        if is_known and all(_is_stopped(processes[rank]) for rank in running.values()):
            return codes
        if codes and deadline_s == float("inf"):
            deadline_s = time.monotonic() + _PATIENCE_S
    return codes


def _is_stopped(process: Process) -> bool:
    """Whether SIGSTOP has stopped the process. Waiting for such a process is useless."""
    with contextlib.suppress(OSError, IndexError):
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii", errors="replace")
        return stat.rpartition(")")[2].split()[0] in "tT"
    return False


def _end(processes: Sequence[Process]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
        process.close()


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Defers signals that would end this process at once. In the with block such a signal raises an error, so
    that the block cleans up. Then the signal ends the process.

    Only the main thread may set signal handlers. On another thread this function does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def end_the_block(number: int, _: FrameType | None) -> None:
        if not came:
            came.append(number)
            raise _Ended

    taken = [number for number in _SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end_the_block)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
        if came:
            os.kill(os.getpid(), came[0])
