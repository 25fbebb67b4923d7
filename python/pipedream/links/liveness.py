"""Signs of life while a run is set up: how long each rank has given none. Pure; owned by one thread.

Until its links are open a rank says in the rendezvous, again and again, that it lives and what it does; once
they are, they tell of its end. A rank that has not joined yet says nothing, and nothing follows from that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["LivenessMonitor", "Sign", "sign_period_s"]

_SIGNS_PER_TIMEOUT = 8  # so that a few may be late


def sign_period_s(peer_timeout_s: float) -> float:
    return peer_timeout_s / _SIGNS_PER_TIMEOUT


@dataclass(frozen=True)
class Sign:
    """The sign of a rank, another one each time."""

    count: int
    peer_timeout_s: float
    """Its own: it gives eight signs in this time."""
    phase: str
    """ "opening links", for the sentence that says when it was lost."""
    is_done: bool = False
    """The last one: its links are open."""

    def to_json(self) -> str:
        return json.dumps([self.count, self.peer_timeout_s, self.phase, self.is_done])

    @classmethod
    def from_json(cls, text: str | bytes) -> Sign:
        return cls(*json.loads(text))


class LivenessMonitor:
    """Who of the other ranks is lost, by the signs that are read in rounds."""

    def __init__(self, peer_timeout_s: float) -> None:
        self._peer_timeout_s = peer_timeout_s
        self._last_round_s: float | None = None
        self._signs: dict[int, Sign] = {}
        self._silent_s: dict[int, float] = {}

    def observe(self, signs: Mapping[int, Sign], now_s: float) -> None:
        """A round: the latest sign of every rank that has given one."""
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
