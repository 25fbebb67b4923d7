"""What carries a simulation's items from worker to worker: a lane for each edge, by the links of both ends.

Pure; any thread; needs no torch. The core has the same (csrc/planner/steady_time.cc).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pipedream.planning.step_times import SYNC

if TYPE_CHECKING:
    from pipedream.planning.simulator import StepEdge

__all__ = ["Lane", "LineIn"]


class Lane:
    """What travels over one edge."""

    def __init__(
        self,
        edge: StepEdge,
        ends: tuple[int, int],
        transfer_ms: float,
        latency_ms: float,
        *,
        one_link: bool,
    ) -> None:
        self.kind = edge.kind
        self.ends = ends
        """The workers."""
        self.source = (edge.from_stage, edge.from_replica)
        # Only ends[0] uses this direction of the link, and does its instructions in order: so first sent is
        # first carried.
        is_shared = one_link or edge.kind in SYNC
        self.link = None if ends[0] == ends[1] else (ends[0], None if is_shared else ends[1])
        self.queues_in = one_link and ends[0] != ends[1]
        """At the receiver, with what others send."""
        self.transfer_ms = transfer_ms
        self.latency_ms = latency_ms
        self.arrivals_ms: deque[float] = deque()
        """Of what has been sent and is not received."""
        self.is_awaited = False
        """The receiver can do nothing else."""
        self.answer: Lane | None = None
        """Of a push to an asynchronous shard: by which it is answered."""


class LineIn:
    """By which a worker gets what others send it."""

    def __init__(self) -> None:
        self._free_ms = 0.0  # for what other stages send
        self._exchanges_until_ms = 0.0
        self._taken_ms = 0.0  # of what replicas exchange, by what has come meanwhile

    def begin(self, kind: str, ready_ms: float, transfer_ms: float) -> float:
        """When an item begins to come that could at that time."""
        if kind in SYNC:
            begin_ms = max(ready_ms, min(ready_ms, self._exchanges_until_ms) + self._taken_ms)
            self._taken_ms = 0.0
            self._exchanges_until_ms = max(self._exchanges_until_ms, begin_ms + transfer_ms)
            return begin_ms
        begin_ms = max(ready_ms, self._free_ms)
        self._free_ms = begin_ms + transfer_ms
        self._taken_ms += max(0.0, min(self._free_ms, self._exchanges_until_ms) - begin_ms)
        return begin_ms
