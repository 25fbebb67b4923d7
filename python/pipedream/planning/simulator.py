"""Simulates when a schedule's instructions run: it replays the workers' instruction lists with given
durations. Pure; any thread; needs no torch.

The C++ core does the replay (csrc/planner/replay.h has the rules). The runtime executes the same lists, so
pictures and bubbles from here show the schedule that runs.

SharedHost models workers that share one machine. Every worker has a core of its own. The given durations hold
while as many workers compute as the machine has cores. If fewer workers compute, each one is faster, because
it gets more of the caches and of the memory's bandwidth:

    computing workers   1             num_cores or more
    speed of each       alone_speed   1

Between these two, each additional worker lengthens an item by the same time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pipedream.common.document import check_number, check_whole
from pipedream.planning.item_cost import EVEN, Spread, shuffler

if TYPE_CHECKING:
    from pipedream import _core

__all__ = [
    "Conditions",
    "SharedHost",
    "Simulation",
    "TimedInstruction",
    "Transfer",
    "ms_per_minibatch",
    "simulate",
    "steady_ms",
    "summarize",
]


class Conditions(NamedTuple):
    """The conditions under which a replay runs, in addition to its durations."""

    host: SharedHost | None = None
    """The machine whose workers slow each other. None: no slowing."""
    spread: Spread = EVEN
    """How single instructions vary about their durations."""
    waking_after_ms: Sequence[float] = ()
    """The wait after which an instruction costs more (Waking), for each of StageDurations.wakings_ms."""
    one_link: bool = False
    """Whether a worker has a single link to all others, as a host has one network interface."""

    def of_core(self) -> dict[str, Any]:
        return {
            "host": None if self.host is None else (self.host.num_workers, self.host.speeds()),
            "waking_after_ms": self.waking_after_ms,
            "one_link": self.one_link,
            "factors": self.spread,
            "shuffled": shuffler(self.spread),
        }


class TimedInstruction(NamedTuple):
    """An instruction with its begin and end, in milliseconds since the first instruction began."""

    instruction: _core.Instruction
    begin_ms: float
    end_ms: float


class Transfer(NamedTuple):
    """The transfer of one tensor, norm, push or pull over a link."""

    what: str
    """The edge's kind: activation, gradient, tied_gradient, tied_version, norm, push or pull."""
    from_worker: int
    to_worker: int
    minibatch: int
    microbatch: int
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Simulation:
    """The begin and end of every instruction, and figures computed from them.

    A bubble share is the workers' idle time divided by all their time. Repeated computing (RECOMPUTE) counts
    as work. The steady figures are measured after each worker's warm-up and before its cool-down
    (csrc/planner/timeline.h). They are None if there is no whole minibatch in that time.
    """

    timeline: tuple[tuple[TimedInstruction, ...], ...]
    """Instructions of each worker, in order."""
    transfers: tuple[Transfer, ...]
    """Transfers in the order of their begin. Stages at one worker pass items directly, without a transfer."""
    makespan_ms: float
    bubble_share: float
    """1 - (sum of all workers' work) / (number of workers * makespan)."""
    steady_bubble_share: float | None
    ms_per_minibatch: float | None
    """Mean milliseconds, in the steady state, from the time when all workers have updated for one minibatch
    to the same time for the next minibatch.
    """

    @property
    def num_workers(self) -> int:
        return len(self.timeline)

    @property
    def num_minibatches(self) -> int:
        return 1 + max((timed.instruction.minibatch for row in self.timeline for timed in row), default=-1)


def simulate(
    programs: Sequence[Sequence[_core.Instruction]],
    stage_times: _core.StageDurations | Sequence[_core.StageDurations],
    transfer_ms: float | Sequence[_core.BoundaryDurations] = 0.0,
    conditions: Conditions | None = None,
    *,
    minibatches_per_body: int = 1,
) -> Simulation:
    """Replays the workers' lists of instructions, one list per worker.

    stage_times: the durations of all stages alike, or of each stage. transfer_ms: one time for every
    transfer, or the durations of each boundary between a stage and the next. minibatches_per_body: the number
    of minibatches after which the lists repeat.

    Raises ValueError if lists wait for each other, naming each worker and the event that it waits for. Also
    raises it for an instruction that is there twice, for a stage that is at no worker or at two, and for a
    wrong number of figures.
    """
    from pipedream import _core

    boundaries: Any = transfer_ms
    if isinstance(transfer_ms, (int, float)):
        boundaries = _core.BoundaryDurations(transfer_ms, transfer_ms)
    how = (conditions or Conditions()).of_core() | {"minibatches_per_body": minibatches_per_body}
    with _collector_paused():
        rows, transfers, figures = _core.simulate(programs, stage_times, boundaries, **how)
        timeline = tuple(
            tuple(map(TimedInstruction, program, begins_ms, ends_ms))
            for program, (begins_ms, ends_ms) in zip(programs, rows, strict=True)
        )
        transfers.sort(key=lambda transfer: transfer[-2])
        return Simulation(timeline, tuple(map(Transfer._make, transfers)), *figures)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses garbage collection. A timeline's tuples form no cycles, and the collector would scan them
    repeatedly.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def summarize(timeline: Sequence[Sequence[TimedInstruction]]) -> Simulation:
    """Makes a Simulation of the times measured in a run's trace, with the figures that simulate() gives, but
    without transfers.
    """
    from pipedream import _core

    programs = [[timed.instruction for timed in row] for row in timeline]
    figures = _core.summarize(
        programs, [[(timed.begin_ms, timed.end_ms) for timed in row] for row in timeline]
    )
    return Simulation(tuple(map(tuple, timeline)), (), *figures)


def steady_ms(
    schedule: _core.ScheduleOptions,
    num_minibatches: int,
    stage_times: Sequence[_core.StageDurations],
    transfers: Sequence[_core.BoundaryDurations],
    conditions: Conditions,
) -> float:
    """Returns milliseconds per minibatch in the steady state of the schedule's lists of instructions.

    No timeline is made, so this is fast enough for a search over thousands of plans. The arguments and errors
    are those of simulate(), with one time per stage and boundary.
    """
    from pipedream import _core

    return _core.steady_ms(schedule, num_minibatches, stage_times, transfers, **conditions.of_core())


def ms_per_minibatch(simulation: Simulation) -> float:
    """Returns the steady-state time, or the mean over all minibatches if there are too few for a steady
    state.
    """
    steady = simulation.ms_per_minibatch
    return simulation.makespan_ms / simulation.num_minibatches if steady is None else steady


@dataclass(frozen=True)
class SharedHost:
    """A machine of a run. All machines are alike: each has num_workers workers, in the order of their ranks.

    Raises ValueError naming the field for less than one core or worker, and for workers that are slower alone
    than together.
    """

    num_workers: int
    num_cores: int
    alone_speed: float = 1.0

    def __post_init__(self) -> None:
        check_whole("num_workers", self.num_workers, at_least=1)
        check_whole("num_cores", self.num_cores, at_least=1)
        if check_number("alone_speed", self.alone_speed) < 1:
            raise ValueError(f"alone_speed is {self.alone_speed}: alone a worker is at least as fast, 1")

    def speed(self, num_at_work: int) -> float:
        """Returns the speed of each worker while this many compute at once."""
        if num_at_work >= self.num_cores:
            return 1.0
        others_share = (num_at_work - 1) / (self.num_cores - 1)
        return self.alone_speed / (1 + (self.alone_speed - 1) * others_share)

    def speeds(self) -> list[float]:
        """Returns the speeds for 1, 2, ... workers that compute at once, up to the number of cores."""
        return [self.speed(1 + core) for core in range(self.num_cores)]

    @classmethod
    def measured(cls, num_workers: int, num_cores: int, times_alone: float) -> SharedHost:
        """Makes the host from a measurement. times_alone: a worker's speed when it computes alone, divided by
        its speed when all workers compute.
        """
        if num_cores == 1 or num_workers == 1:
            return cls(num_workers, num_cores)
        alone_speed = times_alone
        if num_workers < num_cores:
            alone_speed = 1 + (times_alone - 1) * (num_cores - 1) / (num_workers - 1)
        return cls(num_workers, num_cores, max(1.0, alone_speed))
