"""Workers give signs of life: through the rendezvous during the set-up of a run, and through the core's beats
afterwards.

During the set-up, a rank writes again and again into the rendezvous that it lives and what it does. A rank
that has not joined yet writes nothing, so it is not counted as lost.

Once links are open, the core's transport thread sends beats to the peers. This thread needs no interpreter,
so a beat shows only that the process lives. The pulse is a Python thread that tells the core again and again
that the interpreter runs. Each beat says whether the core has heard from the pulse lately. If some code never
releases the GIL, the pulse stops, but the beats go on. The peers then consider the worker lost after about
peer_timeout.

One thread owns each object. The thread that owns the core owns the pulse.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from pipedream import _core

__all__ = ["LivenessMonitor", "Pulse", "Sign", "sign_period_s"]

_SIGNS_PER_TIMEOUT = 8  # so a few signs may be late or lost before a rank counts as lost


def sign_period_s(peer_timeout_s: float) -> float:
    return peer_timeout_s / _SIGNS_PER_TIMEOUT


@dataclass(frozen=True)
class Sign:
    """One sign of life of a rank."""

    count: int
    """A number that grows from sign to sign, so that no two signs are equal."""
    peer_timeout_s: float
    """Seconds of peer_timeout at the rank that gives the sign."""
    phase: str
    """The rank's present work, such as "opening links". If the rank is lost, the error names this work."""
    is_done: bool = False
    """Whether this is the rank's last sign, because its links are open."""

    def to_json(self) -> str:
        return json.dumps([self.count, self.peer_timeout_s, self.phase, self.is_done])

    @classmethod
    def from_json(cls, text: str | bytes) -> Sign:
        return cls(*json.loads(text))


class LivenessMonitor:
    """Finds out which other ranks are lost. The rendezvous reads their signs at intervals and passes them to
    observe()."""

    def __init__(self, peer_timeout_s: float) -> None:
        self._peer_timeout_s = peer_timeout_s
        self._last_round_s: float | None = None
        self._signs: dict[int, Sign] = {}
        self._silent_s: dict[int, float] = {}

    def observe(self, signs: Mapping[int, Sign], now_s: float) -> None:
        """Notes the latest sign of every rank that has given a sign. now_s: when the signs were read."""
        # If this process was stopped or got no CPU time, it reads the signs late, and living ranks would seem
        # silent. So the time since the last read counts as at most two periods of signs.
        passed_s = 0.0
        if self._last_round_s is not None:
            passed_s = min(now_s - self._last_round_s, 2 * sign_period_s(self._peer_timeout_s))
        self._last_round_s = now_s
        for rank, sign in signs.items():
            is_new = self._signs.get(rank) != sign
            self._silent_s[rank] = 0.0 if is_new else self._silent_s[rank] + passed_s
            self._signs[rank] = sign

    def describe_lost(self) -> str | None:
        """Returns a line about a rank that gave no sign for peer_timeout; None if no rank is lost. If that
        rank and this rank have different peer_timeouts, the longer one counts."""
        for rank, sign in sorted(self._signs.items()):
            patience_s = max(self._peer_timeout_s, sign.peer_timeout_s)
            if not sign.is_done and self._silent_s[rank] > patience_s:
                return f"rank {rank} gave no sign of life for {patience_s:g} s while {sign.phase}"
        return None


# For the core a pulse lasts peer_timeout / 4 (csrc/transport/transport.h). The thread may have to wait for
# the GIL, so it pulses four times as often.
_PULSES_PER_TIMEOUT = 16


class Pulse:
    """A thread that tells the core that the interpreter runs, from construction until stop().

    Stop it only after the core's close() has returned. close() may wait until the last items are sent, and
    the peers watch this worker until then.
    """

    def __init__(self, core: _core.Worker, peer_timeout_s: float) -> None:
        self._core = core
        self._period_s = peer_timeout_s / _PULSES_PER_TIMEOUT
        self._stopping = threading.Event()
        core.pulse()
        self._thread = threading.Thread(target=self._beat, name="pipedream-pulse", daemon=True)
        self._thread.start()

    def __enter__(self) -> Pulse:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops the thread, which then calls the core no more. A second call does nothing."""
        self._stopping.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stopping.wait(self._period_s):
            self._core.pulse()
