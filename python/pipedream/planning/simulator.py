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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pipedream.common.document import check_number, check_whole
from pipedream.planning.item_cost import EVEN, Spread, StageWaking, shuffler

if TYPE_CHECKING:
    from pipedream import _core

__all__ = [
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
    """An instruction with its begin and end, in milliseconds since the first instruction began."""

    instruction: _core.Instruction
    begin_ms: float
    end_ms: float


class Transfer(NamedTuple):
    """One transfer of an item over a link."""

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

    Shares are idle time divided by all time of the workers. Repeated computing (RECOMPUTE) counts as work.

    The steady figures are measured after each worker's warm-up and before its cool-down
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

    stage_times: one StageTimes for all stages, or one per stage.
    transfer_ms: one time for every transfer, or a TransferTimes per boundary between a stage and the next.
    spread: how single instructions vary about these times.
    waking: the additional cost of work after waits. None: no cost.
    host: the machine whose workers slow each other. None: no slowing.
    one_link: whether a worker has a single link to all others, as a host has one network interface.
    minibatches_per_body: the number of minibatches after which the lists repeat.

    Raises ValueError if lists wait for each other, naming each worker and the event that it waits for. Also
    raises it for an instruction that is there twice, a stage that is at two workers or none, and a wrong
    number of figures.
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
    """Returns a simulation's figures for the measured times in a run's trace."""
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
    """Returns milliseconds per minibatch in the steady state of the schedule's lists.

    No timeline is made, so this is fast enough for a search over thousands of plans. The arguments and errors
    are as for simulate(), with one time per stage and boundary.
    """
    from pipedream import _core

    boundaries = [times.durations() for times in transfers]
    how = _conditions(host, spread, waking, one_link)
    return _core.steady_ms(schedule, num_minibatches, _durations(stage_times, waking), boundaries, **how)


def ms_per_minibatch(simulation: Simulation) -> float:
    """Returns the steady-state time, or the mean over all minibatches if there are too few for a steady
    state.
    """
    steady = simulation.ms_per_minibatch
    return simulation.makespan_ms / simulation.num_minibatches if steady is None else steady


def _durations(stage_times: Sequence[StageTimes], waking: StageWaking | None) -> list[_core.StageDurations]:
    of_stages_ms = waking.by_stage_ms if waking else [()] * len(stage_times)
    return [times.durations(costs_ms) for times, costs_ms in zip(stage_times, of_stages_ms, strict=True)]


def _conditions(
    host: SharedHost | None, spread: Spread, waking: StageWaking | None, one_link: bool
) -> dict[str, Any]:
    """Returns these arguments in the core's form."""
    return {
        "host": None if host is None else (host.num_workers, host.speeds()),
        "waking_after_ms": [one.after_ms for one in waking.wakings] if waking else [],
        "one_link": one_link,
        "factors": spread,
        "shuffled": shuffler(spread),
    }


@dataclass(frozen=True)
class StageTimes:
    """How long a stage's work takes, in milliseconds. Forward and backward times are per microbatch,
    update_ms is per update.

    recompute_ms: time to repeat a forward. None: as forward_ms.
    later_forward_ms, later_backward_ms: times of the second and later microbatches of a minibatch. They may
        differ from the first's, which finds a new version and no gradients yet. None: as the first.
    shard_ms: time in which a replica pushes a shard to one other replica, or pulls one from it.
    push_ms: time of a push, if a push has another size than a pull. None: as shard_ms.
    sync_latency_ms: latency of each push and pull, in addition.
    num_chunks: number of equal chunks in which a shard is sent. The owner updates a chunk and sends its new
        version while the next chunks arrive.
    push_leads_ms: for each owner, two times: how long before the end of the last backward its first chunk is
        pushed, and its last chunk. Empty: all chunks are pushed after the backward.
    updates_whole: whether an update waits for all chunks, as it must if norms of gradients are computed.
    num_replicas: number of the stage's replicas. Spares are numbered after the replicas.
    spare_push_ms: time of a push to a spare.
    spare_shard_ms: time that a pull from a spare still takes after all pushes have arrived. A spare sends new
        chunks while it receives gradients, so part of the pull is done by then.

    Raises ValueError naming the field for a negative or infinite figure.
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
        """Returns these times in the core's form. wakings_ms: for each waking, the additional cost by kind of
        item.
        """
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
    """How long one microbatch's tensors take to cross a boundary, downstream and upstream, in milliseconds.
    Tied parameters and norms are assumed to take no time. For traffic between replicas see
    StageTimes.shard_ms.
    """

    activation_ms: float = 0.0
    gradient_ms: float = 0.0
    latency_ms: float = 0.0
    """Additional latency. During it the link may already carry the next tensors."""

    def __post_init__(self) -> None:
        for name in ("activation_ms", "gradient_ms", "latency_ms"):
            check_number(name, getattr(self, name))

    def durations(self) -> _core.BoundaryDurations:
        """Returns these times in the core's form."""
        from pipedream import _core

        return _core.BoundaryDurations(self.activation_ms, self.gradient_ms, self.latency_ms)


@dataclass(frozen=True)
class SharedHost:
    """The machines of a run. Each one has num_workers workers, in the order of their ranks.

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
