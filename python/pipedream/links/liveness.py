"""Signs of life of the workers: by the rendezvous during the set-up of a run, and by the core's pulse
afterwards.

Until its links are open, a rank says in the rendezvous again and again that it lives and what it does.
After that the links show when it ends. A rank that has not joined yet says nothing, and nothing follows
from that.

Then the core's transport thread sends BEAT to the peers. It needs no interpreter, so a beat shows only that
the process lives. The pulse is a thread that tells the core again and again that the interpreter runs. If
some code holds the GIL for good, the pulse stops and beats go on without it. The peers then give the worker
up after peer_timeout. Each object is owned by one thread, the pulse by the core's owner.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from pipedream import _core

__all__ = ["LivenessMonitor", "Pulse", "Sign", "sign_period_s"]

_SIGNS_PER_TIMEOUT = 8  # so a few may be late


def sign_period_s(peer_timeout_s: float) -> float:
    return peer_timeout_s / _SIGNS_PER_TIMEOUT


@dataclass(frozen=True)
class Sign:
    """The sign of a rank, another one each time."""

    count: int
    peer_timeout_s: float
    """The rank's own timeout. It gives eight signs in this time."""
    phase: str
    """ "opening links", for the sentence that says when it was lost."""
    is_done: bool = False
    """Whether it is the rank's last sign, because its links are open."""

    def to_json(self) -> str:
        return json.dumps([self.count, self.peer_timeout_s, self.phase, self.is_done])

    @classmethod
    def from_json(cls, text: str | bytes) -> Sign:
        return cls(*json.loads(text))


class LivenessMonitor:
    """Finds out which of the other ranks are lost. It reads their signs in rounds."""

    def __init__(self, peer_timeout_s: float) -> None:
        self._peer_timeout_s = peer_timeout_s
        self._last_round_s: float | None = None
        self._signs: dict[int, Sign] = {}
        self._silent_s: dict[int, float] = {}

    def observe(self, signs: Mapping[int, Sign], now_s: float) -> None:
        """Takes a round: the latest sign of every rank that has given one."""
        # A round that comes late may be this process's own fault (it was stopped, or starved), and then that
        # of the others too, so it counts as no more than two.
        passed_s = 0.0
        if self._last_round_s is not None:
            passed_s = min(now_s - self._last_round_s, 2 * sign_period_s(self._peer_timeout_s))
        self._last_round_s = now_s
        for rank, sign in signs.items():
            is_new = self._signs.get(rank) != sign
            self._silent_s[rank] = 0.0 if is_new else self._silent_s[rank] + passed_s
            self._signs[rank] = sign

    def describe_lost(self) -> str | None:
        """One line naming a rank that gave no sign for peer_timeout: its own, or this rank's if longer."""
        for rank, sign in sorted(self._signs.items()):
            patience_s = max(self._peer_timeout_s, sign.peer_timeout_s)
            if not sign.is_done and self._silent_s[rank] > patience_s:
                return f"rank {rank} gave no sign of life for {patience_s:g} s while {sign.phase}"
        return None


# The core wants one in peer_timeout / 8 at least; twice as many, as the thread may have to wait for the GIL.
_PULSES_PER_TIMEOUT = 16


class Pulse:
    """Beats from its construction to stop(). Use it as a context manager around the core's life, close()
    included: the peers wait for what lingers."""

    def __init__(self, core: _core.Worker, peer_timeout_s: float) -> None:
        self._core = core
        self._period_s = peer_timeout_s / _PULSES_PER_TIMEOUT
        self._stopping = threading.Event()
        core.pulse()
        self._thread = threading.Thread(target=self._beat, name="pipedream-pulse", daemon=True)
        self._thread.start()

    def __enter__(self) -> Pulse:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops. May be called again. Afterwards the core is not called any more."""
        self._stopping.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stopping.wait(self._period_s):
            self._core.pulse()
