"""Handles Ctrl-C during a run. The first Ctrl-C ends the run early with a result: at a boundary between
groups of minibatches (stage/boundaries.py). It ends the run at once before the training begins, or if
replicas of stage 0 cannot agree on a boundary. The second one always ends the run at once.

Python runs signal handlers on the main thread alone, so on another thread this module changes nothing. It
also changes nothing if the script has a handler of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from pipedream.links.rendezvous import Rendezvous
from pipedream.stage.job import JobOptions

__all__ = ["Interrupt", "interrupts_end", "interrupts_stop", "stop_order"]

_STOPPING = (
    b"pipedream: stopping when the minibatches in flight are done; Ctrl-C again ends the run at once\n"
)
_ENDING = (
    b"pipedream: ending at once: replicas of stage 0 with sync='asp' have no minibatch in common at which"
    b" they could stop\n"
)
_ALONE = b"pipedream: ending at once: other ranks of stage 0 were not interrupted\n"
_HEARD_S = 10.0
"""Seconds for which rank 0 trains on while some replicas of stage 0 have not been interrupted."""
_ORDER_KEY = "where the run stops"


class Interrupt:
    """Stores whether the user has asked to end the run of this process early, and the boundary at which the
    run ends. It is a StopOrder (stage/decisions.py)."""

    def __init__(self) -> None:
        self.is_stop_asked = False
        self.stop_at = -1

    def ask_for_stop(self) -> None:
        self.is_stop_asked = True

    @property
    def is_asked(self) -> bool:
        return self.is_stop_asked


class SharedInterrupt:
    """The StopOrder of a rank of torchrun if stage 0 has replicas. The signal reaches each replica
    separately. Only interrupted ranks use the rendezvous:

        replica r    publishes that it was interrupted, then looks for rank 0's order at each boundary
        rank 0       when all replicas have published, chooses a boundary, publishes the order, and trains on

    So every replica reads the order before it passes that boundary. Rank 0 raises KeyboardInterrupt if
    another rank of stage 0 is not interrupted within _HEARD_S."""

    def __init__(self, rendezvous: Rendezvous, rank: int, others: list[int]) -> None:
        """others: the ranks of stage 0 except rank 0."""
        self._rendezvous = rendezvous
        self._rank = rank
        self._others = others
        self.is_asked = False
        """Whether this rank was interrupted."""
        self._asked_s: float | None = None
        """The time at which this rank reached its first boundary after the interrupt."""
        self._stop_at = -1

    def ask_for_stop(self) -> None:
        self.is_asked = True

    @property
    def is_stop_asked(self) -> bool:
        """Whether all replicas of stage 0 were interrupted, at rank 0. Raises KeyboardInterrupt if a replica
        was not interrupted within _HEARD_S."""
        if not self.is_asked:
            return False
        if self._asked_s is None:
            self._asked_s = time.monotonic()
        if self._rendezvous.read([_heard_key(rank) for rank in self._others]) is not None:
            return True
        if time.monotonic() > self._asked_s + _HEARD_S:
            os.write(2, _ALONE)
            raise KeyboardInterrupt
        return False

    @property
    def stop_at(self) -> int:
        if self._stop_at < 0 and self.is_asked and self._rank in self._others:
            if self._asked_s is None:
                self._asked_s = time.monotonic()
                self._rendezvous.publish(_heard_key(self._rank), True)
            found = self._rendezvous.read([_ORDER_KEY])
            self._stop_at = -1 if found is None else found[0]
        return self._stop_at

    @stop_at.setter
    def stop_at(self, minibatch: int) -> None:
        self._stop_at = minibatch
        self._rendezvous.publish(_ORDER_KEY, minibatch)


def _heard_key(rank: int) -> str:
    return f"heard of the interrupt/{rank}"


def stop_order(options: JobOptions, rendezvous: Rendezvous, rank: int) -> Interrupt | SharedInterrupt | None:
    """Returns the stop order of a rank of torchrun; None if the run cannot end early."""
    if not options.may_choose_boundaries:
        return None
    num_replicas = options.plan.stages[0].num_replicas
    others = [options.plan.placement.rank_of(0, replica) for replica in range(1, num_replicas)]
    return SharedInterrupt(rendezvous, rank, others) if others else Interrupt()


@contextlib.contextmanager
def interrupts_end(*, speaks: bool) -> Iterator[None]:
    """Makes an interrupt in the with block end the run at once. speaks: whether to say on stderr why the run
    cannot end early with a result."""

    def speak() -> None:
        if speaks:
            os.write(2, _ENDING)
        raise KeyboardInterrupt

    with interrupts_stop(speak, lambda: True, speaks=False):
        yield


@contextlib.contextmanager
def interrupts_stop(
    ask: Callable[[], None], has_begun: Callable[[], bool], *, speaks: bool
) -> Iterator[None]:
    """Makes the first SIGINT in the with block call ask(), and the second one raise KeyboardInterrupt. The
    first one also raises KeyboardInterrupt if has_begun() returns False, because the training has not begun.
    speaks: whether to say on stderr that the run will end."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            return  # a forked process of a DataLoader goes on, because minibatches in flight need its data
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not has_begun():
            raise KeyboardInterrupt
        ask()
        if speaks:
            os.write(2, _STOPPING)  # print() fails if the interrupt came inside another print()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
