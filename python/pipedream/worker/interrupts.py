"""Ctrl-C during a run: the first one ends it as an early stop would, the second one at once.

On the main thread, whose handlers signals have; elsewhere, and where the script has a handler of its own,
nothing is changed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from pipedream.stage.job import JobOptions

__all__ = ["Interrupt", "interrupts_stop", "may_stop_early"]

_STOPPING = (
    b"pipedream: stopping when the minibatches in flight are done; Ctrl-C again ends the run at once\n"
)


class Interrupt:
    """Whether somebody wants the run of this process to end, and where it does (decisions.StopOrder)."""

    def __init__(self) -> None:
        self.is_stop_asked = False
        self.stop_at = -1

    def ask_for_stop(self) -> None:
        self.is_stop_asked = True


def may_stop_early(options: JobOptions, *, under_torchrun: bool) -> bool:
    """Whether rank 0 can choose a boundary that the other replicas of stage 0 hear of in time."""
    has_replicas = options.plan.stages[0].num_replicas > 1
    return not has_replicas or not (under_torchrun or options.is_asynchronous)


@contextlib.contextmanager
def interrupts_stop(
    ask: Callable[[], None], has_begun: Callable[[], bool], *, speaks: bool
) -> Iterator[None]:
    """In the block the first SIGINT calls ask(), and the next one raises KeyboardInterrupt, as does the first
    one before the training has begun. speaks: says so on stderr."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            return  # a forked process of a DataLoader, whose data the minibatches in flight still need
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not has_begun():
            raise KeyboardInterrupt
        ask()
        if speaks:
            os.write(2, _STOPPING)  # print() may be what was interrupted

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
