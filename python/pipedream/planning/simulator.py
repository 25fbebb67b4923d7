"""A schedule in time: the workers' instruction lists, replayed with given durations.

The core replays them (csrc/planner/replay.h has the rules). The lists are those that the runtime follows, so
a picture or a bubble from here is one of the schedule that runs, not of a drawing of it. Pure; any thread;
needs no torch.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pipedream.common.document import check_number
from pipedream.planning.shared_cores import SharedHost
from pipedream.planning.spread import EVEN, Spread
from pipedream.planning.step_times import TRANSFERS, StageTimes, TransferTimes
from pipedream.planning.waking import StageWaking

if TYPE_CHECKING:
    from pipedream import _core

__all__ = [
    "TRANSFERS",
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
    """When every instruction was done, and what follows from it.

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
    """In the steady state; where there are too few minibatches to have one, of all of them."""
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
