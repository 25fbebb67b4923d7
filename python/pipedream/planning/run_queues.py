"""Which workers of a machine run when there are more of them than cores. Pure; any thread; torch-free.

As Linux has it (sched(7), kernel/sched/fair.c): each core has a queue of its own. Who has something to do
again goes back to the core where it ran last, or to an idle one where that is busy. Those of one queue take
turns. An idle core takes a worker from another one's queue only at the timer's next tick, and idles until
then while others wait: of three equal workers on two cores each gets less than two thirds of one.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["TICK_MS", "RunQueues"]

TICK_MS = 4.0  # CONFIG_HZ=250
_BASE_TURN_MS = 0.7  # of one core; a turn is longer the more there are, up to eight


class RunQueues:
    """Of a machine's workers, who are numbered from 0."""

    def __init__(self, num_workers: int, num_cores: int) -> None:
        self._turn_ms = _BASE_TURN_MS * (1 + int(math.log2(min(num_cores, 8))))
        self._core_of = [worker % num_cores for worker in range(num_workers)]
        self._queues: list[deque[int]] = [deque() for _ in range(num_cores)]
        self._turn_left_ms = [self._turn_ms] * num_cores

    def enter(self, worker: int) -> None:
        """It has something to do from now on."""
        core = self._core_of[worker]
        if self._queues[core]:
            core = next((idle for idle, queue in enumerate(self._queues) if not queue), core)
        self._core_of[worker] = core
        self._queues[core].append(worker)

    def leave(self, worker: int) -> None:
        """It waits from now on."""
        core = self._core_of[worker]
        if self._queues[core][0] == worker:
            self._turn_left_ms[core] = self._turn_ms
        self._queues[core].remove(worker)

    def running(self) -> list[int]:
        """At most one for each core."""
        return [queue[0] for queue in self._queues if queue]

    def next_change_ms(self, now_ms: float) -> float:
        """From now, until others run though nobody comes or goes; infinite where nobody waits for a core."""
        crowded = [core for core, queue in enumerate(self._queues) if len(queue) > 1]
        until_ms = min((self._turn_left_ms[core] for core in crowded), default=math.inf)
        if crowded and not all(self._queues):
            until_ms = min(until_ms, _next_tick_ms(now_ms) - now_ms)
        return until_ms

    def pass_time(self, now_ms: float, passing_ms: float) -> None:
        """At most next_change_ms()."""
        is_tick = now_ms + passing_ms >= _next_tick_ms(now_ms)
        for core, queue in enumerate(self._queues):
            self._turn_left_ms[core] -= passing_ms
            if self._turn_left_ms[core] <= 0:
                queue.rotate(-1)
                self._turn_left_ms[core] = self._turn_ms
        if is_tick:
            self._balance()

    def _balance(self) -> None:
        for core, queue in enumerate(self._queues):
            longest = max(self._queues, key=len)
            if not queue and len(longest) > 1:
                worker = longest.pop()
                self._core_of[worker] = core
                queue.append(worker)


def _next_tick_ms(now_ms: float) -> float:
    return (math.floor(now_ms / TICK_MS) + 1) * TICK_MS
