"""A schedule in time: the workers' instruction lists, replayed with given durations.

The core replays them (csrc/planner/replay.h has the rules). The lists are those that the runtime follows,
so a picture or a bubble from here is one of the schedule that runs, not of a drawing of it. Pure; any
thread; needs no torch.

SharedHost says how much faster workers of one machine are while others wait. Every worker counts as having
a core of its own. Durations are those of as many workers as the machine has cores, all at work. The fewer
workers are at work, the faster each one is, as caches and memory are theirs:

    workers at work     1             num_cores or more
    speed of each       alone_speed   1

Between these each other worker lengthens an item by the same time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pipedream.common.document import check_number, check_whole
from pipedream.planning.item_cost import EVEN, Spread, StageWaking

if TYPE_CHECKING:
    from pipedream import _core

__all__ = [
    "TRANSFERS",
    "SharedHost",
    "Simulation",
    "StageTimes",
    "TimedInstruction",
    "Transfer",
    "TransferTimes",
    "ms_per_minibatch",
    "simulate",
    "steady_ms",
    "summarize",
]


class TimedInstruction(NamedTuple):
    """An instruction and when it was done, in milliseconds since the first one began."""

    instruction: _core.Instruction
    begin_ms: float
    end_ms: float


class Transfer(NamedTuple):
    """An item of an edge that a link has carried."""

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
    """The times of every instruction, and the figures that follow from them.

    Shares are of the workers' time, idle / all; compute that is repeated (RECOMPUTE) counts as work.

    The steady figures are None when there are too few minibatches for a whole one after every worker's
    warm-up and before its cool-down (csrc/planner/timeline.h has the window).
    """

    timeline: tuple[tuple[TimedInstruction, ...], ...]
    """Per worker, in order."""
    transfers: tuple[Transfer, ...]
    """In the order of their begin; between stages of one worker items go from hand to hand, at once."""
    makespan_ms: float
    bubble_share: float
    """1 - (sum of all workers' work) / (number of workers * makespan)."""
    steady_bubble_share: float | None
    ms_per_minibatch: float | None
    """In the steady window, from when a minibatch was updated everywhere to when the last one was."""

    @property
    def num_workers(self) -> int:
        return len(self.timeline)

    @property
    def num_minibatches(self) -> int:
        return 1 + max((timed.instruction.minibatch for row in self.timeline for timed in row), default=-1)


def simulate(
    programs: Sequence[Sequence[_core.Instruction]],
    stage_times: StageTimes | Sequence[StageTimes],
    transfer_ms: float | Sequence[TransferTimes] = 0.0,
    spread: Spread = EVEN,
    waking: StageWaking | None = None,
    *,
    host: SharedHost | None = None,
    one_link: bool = False,
    minibatches_per_body: int = 1,
) -> Simulation:
    """Replays one list per worker.

    stage_times: one StageTimes, or one per stage. transfer_ms: one time per transfer, or one pair per
    boundary between a stage and the next. spread: of single instructions about these times. waking: what work
    takes besides after waits; None: nothing. host: whose workers slow each other; None: none do. one_link: a
    worker has one link to all others, as a host has one network interface. minibatches_per_body: the lists
    repeat after so many.

    Raises ValueError for lists that wait for each other, naming who waits for what, for an instruction
    that is there twice, a stage that is at two workers or none, and figures of the wrong number.
    """
    from pipedream import _core

    durations: Any
    if not isinstance(stage_times, StageTimes):
        durations = _durations(stage_times, waking)
    elif waking:
        durations = _durations([stage_times] * len(waking.by_stage_ms), waking)
    else:
        durations = stage_times.durations()
    boundaries: Any
    if isinstance(transfer_ms, (int, float)):
        both_ms = check_number("transfer_ms", transfer_ms)
        boundaries = TransferTimes(both_ms, both_ms).durations()
    else:
        boundaries = [times.durations() for times in transfer_ms]
    how = _conditions(host, spread, waking, one_link) | {"minibatches_per_body": minibatches_per_body}
    with _collector_paused():
        rows, transfers, figures = _core.simulate(programs, durations, boundaries, **how)
        timeline = tuple(
            tuple(map(TimedInstruction, program, begins_ms, ends_ms))
            for program, (begins_ms, ends_ms) in zip(programs, rows, strict=True)
        )
        transfers.sort(key=lambda transfer: transfer[-2])
        return Simulation(timeline, tuple(map(Transfer._make, transfers)), *figures)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """The tuples of a timeline are in no circle, and the collector would go through them time and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def summarize(timeline: Sequence[Sequence[TimedInstruction]]) -> Simulation:
    """The simulation's figures, of instructions that were done when a run's trace says."""
    from pipedream import _core

    programs = [[timed.instruction for timed in row] for row in timeline]
    figures = _core.summarize(
        programs, [[(timed.begin_ms, timed.end_ms) for timed in row] for row in timeline]
    )
    return Simulation(tuple(map(tuple, timeline)), (), *figures)


def steady_ms(
    schedule: _core.ScheduleOptions,
    num_minibatches: int,
    stage_times: Sequence[StageTimes],
    transfers: Sequence[TransferTimes],
    *,
    host: SharedHost | None = None,
    spread: Spread = EVEN,
    waking: StageWaking | None = None,
    one_link: bool = False,
) -> float:
    """Milliseconds per minibatch in the steady state of the schedule's lists.

    It makes no timeline, for a search that asks it of thousands of plans. The arguments, one time per stage
    and boundary, are as of simulate(). Raises ValueError as simulate()."""
    from pipedream import _core

    boundaries = [times.durations() for times in transfers]
    how = _conditions(host, spread, waking, one_link)
    return _core.steady_ms(schedule, num_minibatches, _durations(stage_times, waking), boundaries, **how)


def ms_per_minibatch(simulation: Simulation) -> float:
    """Milliseconds per minibatch in the steady state, or over all of a simulation that is too short to have
    one."""
    steady = simulation.ms_per_minibatch
    return simulation.makespan_ms / simulation.num_minibatches if steady is None else steady


def _durations(stage_times: Sequence[StageTimes], waking: StageWaking | None) -> list[_core.StageDurations]:
    of_stages_ms = waking.by_stage_ms if waking else [()] * len(stage_times)
    return [times.durations(costs_ms) for times, costs_ms in zip(stage_times, of_stages_ms, strict=True)]


def _conditions(
    host: SharedHost | None, spread: Spread, waking: StageWaking | None, one_link: bool
) -> dict[str, Any]:
    """The arguments by which the core takes them."""
    return {
        "host": None if host is None else (host.num_workers, host.speeds()),
        "waking_after_ms": [one.after_ms for one in waking.wakings] if waking else [],
        "one_link": one_link,
        "factors": spread.factors,
        "shuffled": spread.shuffler(),
    }


TRANSFERS = ("SEND", "RECV")


@dataclass(frozen=True)
class StageTimes:
    """How long a stage takes, in milliseconds: per microbatch, and `update_ms` per update.

    `recompute_ms` None stands for forward_ms. `later_forward_ms` and `later_backward_ms` are of all
    microbatches of a minibatch but the first, which meets a new version and no gradients; None: as the first.
    `shard_ms` is how long a replica's shard, pushed or pulled, is on its way to one other replica; `push_ms`
    is of what is pushed, where that is not as much; `sync_latency_ms` is besides, as a link's.
    A shard travels in `num_chunks` equal chunks: one is updated, and leaves for the others, while the next
    come. `push_leads_ms` are by its owner: how long before the end of the last backward the first of its
    chunks is pushed, and the last one; none: all are after it. `updates_whole`: an update waits for all
    chunks, as where norms are measured.

    A stage's spares count on from its num_replicas. `spare_push_ms` is the time that a push to a spare is on
    its way, and `spare_shard_ms` the rest of a pull from it when all pushes have come: its chunks leave while
    others come.

    Raises ValueError naming the field for what is negative or not finite.
    """

    forward_ms: float
    backward_ms: float
    update_ms: float = 0.0
    recompute_ms: float | None = None
    shard_ms: float = 0.0
    later_forward_ms: float | None = None
    later_backward_ms: float | None = None
    push_ms: float | None = None
    sync_latency_ms: float = 0.0
    num_replicas: int | None = None
    spare_push_ms: float = 0.0
    spare_shard_ms: float = 0.0
    spare_update_ms: float = 0.0
    num_chunks: int = 1
    push_leads_ms: Sequence[tuple[float, float]] = ()
    updates_whole: bool = False

    def __post_init__(self) -> None:
        for name in (
            *("forward_ms", "backward_ms", "update_ms", "shard_ms", "sync_latency_ms"),
            *("spare_push_ms", "spare_shard_ms", "spare_update_ms"),
        ):
            check_number(name, getattr(self, name))
        check_whole("num_chunks", self.num_chunks, at_least=1)
        for leads_ms in self.push_leads_ms:
            for lead_ms in leads_ms:
                check_number("push_leads_ms", lead_ms)
        for name in ("recompute_ms", "later_forward_ms", "later_backward_ms", "push_ms"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))

    def durations(self, wakings_ms: Sequence[Mapping[str, float]] = ()) -> _core.StageDurations:
        """The value by which the core takes them. wakings_ms: by waking, what items of each kind take
        besides."""
        from pipedream import _core

        def either(one_ms: float | None, other_ms: float) -> float:
            return other_ms if one_ms is None else one_ms

        return _core.StageDurations(
            forward_ms=self.forward_ms,
            later_forward_ms=either(self.later_forward_ms, self.forward_ms),
            backward_ms=self.backward_ms,
            later_backward_ms=either(self.later_backward_ms, self.backward_ms),
            recompute_ms=either(self.recompute_ms, self.forward_ms),
            update_ms=self.update_ms,
            push_ms=either(self.push_ms, self.shard_ms),
            pull_ms=self.shard_ms,
            sync_latency_ms=self.sync_latency_ms,
            num_chunks=self.num_chunks,
            push_leads_ms=[*self.push_leads_ms],
            updates_whole=self.updates_whole,
            wakings_ms=[
                (ms.get("FORWARD", 0.0), ms.get("BACKWARD", 0.0), ms.get("UPDATE", 0.0)) for ms in wakings_ms
            ],
            num_replicas=self.num_replicas,
            spare_push_ms=self.spare_push_ms,
            spare_pull_ms=self.spare_shard_ms,
            spare_update_ms=self.spare_update_ms,
        )


@dataclass(frozen=True)
class TransferTimes:
    """How long one microbatch is on its way over a boundary, in milliseconds, downstream and upstream. What
    tied parameters and norms send takes no time beside it; what replicas do StageTimes.shard_ms says."""

    activation_ms: float = 0.0
    gradient_ms: float = 0.0
    latency_ms: float = 0.0
    """Besides, in which the link may carry the next item."""

    def __post_init__(self) -> None:
        for name in ("activation_ms", "gradient_ms", "latency_ms"):
            check_number(name, getattr(self, name))

    def durations(self) -> _core.BoundaryDurations:
        """The value by which the core takes them."""
        from pipedream import _core

        return _core.BoundaryDurations(self.activation_ms, self.gradient_ms, self.latency_ms)


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
        """The speed of each of so many workers that are at work at once."""
        if num_at_work >= self.num_cores:
            return 1.0
        others_share = (num_at_work - 1) / (self.num_cores - 1)
        return self.alone_speed / (1 + (self.alone_speed - 1) * others_share)

    def speeds(self) -> list[float]:
        """The speeds of 1, 2, ... workers at work at once, up to as many as there are cores."""
        return [self.speed(1 + core) for core in range(self.num_cores)]

    @classmethod
    def measured(cls, num_workers: int, num_cores: int, times_alone: float) -> SharedHost:
        """times_alone: how many times as fast one of the workers is alone as beside all the others."""
        if num_cores == 1 or num_workers == 1:
            return cls(num_workers, num_cores)
        alone_speed = times_alone
        if num_workers < num_cores:
            alone_speed = 1 + (times_alone - 1) * (num_cores - 1) / (num_workers - 1)
        return cls(num_workers, num_cores, max(1.0, alone_speed))
