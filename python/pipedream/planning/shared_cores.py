"""What a schedule does in time where workers share the cores of their machine. Pure; any thread; torch-free.

Every worker counts as having a core of its own. Durations are those of as many workers as the machine has
cores, all at work. The fewer workers are at work, the faster each one is, as caches and memory are theirs.

    workers at work     1             num_cores or more
    speed of each       alone_speed   1

Between these each other worker lengthens an item by the same time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipedream.common.document import check_number, check_whole
from pipedream.planning.simulator import (
    Replay,
    Simulation,
    StageTimes,
    Step,
    TimedInstruction,
    TransferTimes,
    simulate,
    summarize,
)
from pipedream.planning.spread import EVEN, Spread
from pipedream.planning.waking import StageWaking

__all__ = ["SharedHost", "simulate_shared"]


@dataclass(frozen=True)
class SharedHost:
    """A machine, of which each has num_workers in the order of their ranks. Raises ValueError naming the
    field for less than one core or worker, and for workers that are slower alone than together."""

    num_workers: int
    num_cores: int
    alone_speed: float = 1.0

    def __post_init__(self) -> None:
        check_whole("num_workers", self.num_workers, at_least=1)
        check_whole("num_cores", self.num_cores, at_least=1)
        if check_number("alone_speed", self.alone_speed) < 1:
            raise ValueError(f"alone_speed is {self.alone_speed}: alone a worker is at least as fast, 1")

    def speed(self, num_at_work: int) -> float:
        """Of each of so many that are at work at once."""
        if num_at_work >= self.num_cores:
            return 1.0
        others_share = (num_at_work - 1) / (self.num_cores - 1)
        return self.alone_speed / (1 + (self.alone_speed - 1) * others_share)

    @classmethod
    def measured(cls, num_workers: int, num_cores: int, times_alone: float) -> SharedHost:
        """times_alone: how many times as fast one of the workers is alone as beside all the others."""
        if num_cores == 1 or num_workers == 1:
            return cls(num_workers, num_cores)
        alone_speed = times_alone
        if num_workers < num_cores:
            alone_speed = 1 + (times_alone - 1) * (num_cores - 1) / (num_workers - 1)
        return cls(num_workers, num_cores, max(1.0, alone_speed))


def simulate_shared(
    programs: Sequence[Sequence[Step]],
    stage_times: StageTimes | Sequence[StageTimes],
    transfer_ms: float | Sequence[TransferTimes],
    host: SharedHost | None,
    spread: Spread = EVEN,
    waking: StageWaking | None = None,
    *,
    one_link: bool = False,
) -> Simulation:
    """As simulate(), of workers that share machines; None: each has its own."""
    if host is None:
        return simulate(programs, stage_times, transfer_ms, spread, waking, one_link=one_link)
    return _SharedReplay(programs, stage_times, transfer_ms, host, spread, waking, one_link=one_link).run()


class _SharedReplay(Replay):
    """In the order of time, as who is at work now says how fast all are."""

    def __init__(
        self,
        programs: Sequence[Sequence[Step]],
        stage_times: StageTimes | Sequence[StageTimes],
        transfer_ms: float | Sequence[TransferTimes],
        host: SharedHost,
        spread: Spread,
        waking: StageWaking | None,
        *,
        one_link: bool,
    ) -> None:
        super().__init__(programs, stage_times, transfer_ms, spread, waking, one_link=one_link)
        self._host = host
        num_workers = len(programs)
        self._now_ms = 0.0
        self._began_ms = [0.0] * num_workers
        self._left_ms: list[float | None] = [None] * num_workers  # of the work at hand, at speed 1

    def run(self) -> Simulation:
        while any(len(row) < len(steps) for row, steps in zip(self.timeline, self.steps, strict=True)):
            # What one sends another may be waiting for.
            while sum(self._begin_work(worker) for worker in range(len(self.steps))):
                pass
            self._pass_time()
        return summarize(self.timeline, self._network.transfers)

    def _begin_work(self, worker: int) -> bool:
        """Does what takes no time until there is work or a wait; whether anything was done."""
        steps, done = self.steps[worker], self.timeline[worker]
        num_before = len(done)
        while self._left_ms[worker] is None and len(done) < len(steps):
            step = steps[len(done)]
            if step.lane is None:
                self._began_ms[worker] = self._now_ms
                self._left_ms[worker] = self.work_ms(worker, step)
                break
            if step.opcode == "SEND":
                self.send(worker, self._now_ms)
            else:
                arrivals_ms = step.lane.arrivals_ms
                if not arrivals_ms or arrivals_ms[0] > self._now_ms:
                    break
                since_ms = done[-1].end_ms if done else 0.0
                self.receive(worker, since_ms)
                self.waited(worker, self._now_ms - since_ms)
                self._finish(worker, self._now_ms)
        return len(done) > num_before

    def _finish(self, worker: int, began_ms: float) -> None:
        step = self.steps[worker][len(self.timeline[worker])]
        self.timeline[worker].append(TimedInstruction(step.instruction, began_ms, self._now_ms))

    def _pass_time(self) -> None:
        """Until someone is done with their work, or something arrives that someone waits for."""
        speeds = self._speeds()
        passing_ms = min(
            [
                *((self._left_ms[worker] or 0.0) / speed for worker, speed in speeds.items()),
                *(arrival - self._now_ms for arrival in self._awaited_ms()),
            ],
            default=math.inf,
        )
        if passing_ms == math.inf:
            self.check_all_done()
            return
        self._now_ms += passing_ms
        for worker, speed in speeds.items():
            left_ms = self._left_ms[worker] or 0.0
            if left_ms / speed <= passing_ms:
                self._left_ms[worker] = None
                self._finish(worker, self._began_ms[worker])
            else:
                self._left_ms[worker] = left_ms - passing_ms * speed

    def _speeds(self) -> dict[int, float]:
        """Of the workers that are at work."""
        at_work = [worker for worker, left_ms in enumerate(self._left_ms) if left_ms is not None]
        of_machines = Counter(worker // self._host.num_workers for worker in at_work)
        return {worker: self._host.speed(of_machines[worker // self._host.num_workers]) for worker in at_work}

    def _awaited_ms(self) -> list[float]:
        awaited = []
        for worker, steps in enumerate(self.steps):
            position = len(self.timeline[worker])
            if self._left_ms[worker] is None and position < len(steps):
                lane = steps[position].lane
                if lane is not None and lane.arrivals_ms:
                    awaited.append(lane.arrivals_ms[0])
        return awaited
