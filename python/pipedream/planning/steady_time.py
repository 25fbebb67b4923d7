"""How long a minibatch takes with given durations, and no more: what a search asks of thousands of plans.
Pure; any thread; needs no torch.

simulate() in C++, without a timeline, to the same bits (csrc/planner/steady_time.h). What that does not do,
times that spread, spares and asynchronous shards, is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipedream.planning.shared_cores import SharedHost, simulate_shared
from pipedream.planning.simulator import Simulation, StageTimes, TransferTimes
from pipedream.planning.spread import EVEN, Spread
from pipedream.planning.waking import StageWaking

if TYPE_CHECKING:
    from pipedream import _core

__all__ = ["ms_per_minibatch", "steady_ms"]


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
    """Milliseconds per minibatch in the steady state of the schedule's lists, as ms_per_minibatch(); one
    StageTimes per stage, one TransferTimes per boundary. host, spread, waking, one_link: as of
    simulate_shared(). Raises ValueError as simulate()."""
    from pipedream import _core

    if schedule.asynchronous or schedule.placement.num_spares or spread.factors:
        programs = [
            _core.make_program(schedule, rank, num_minibatches) for rank in range(schedule.num_workers)
        ]
        return ms_per_minibatch(
            simulate_shared(programs, stage_times, transfers, host, spread, waking, one_link=one_link)
        )
    of_stages_ms = waking.by_stage_ms if waking else [()] * len(stage_times)
    return _core.steady_ms(
        schedule,
        num_minibatches,
        [_durations(times, wakings_ms) for times, wakings_ms in zip(stage_times, of_stages_ms, strict=True)],
        [(one.activation_ms, one.gradient_ms, one.latency_ms) for one in transfers],
        None
        if host is None
        else (host.num_workers, [host.speed(1 + core) for core in range(host.num_cores)]),
        [one.after_ms for one in waking.wakings] if waking else [],
        one_link,
    )


def ms_per_minibatch(simulation: Simulation) -> float:
    """In the steady state; where there are too few minibatches to have one, of all of them."""
    steady = simulation.ms_per_minibatch
    return simulation.makespan_ms / simulation.num_minibatches if steady is None else steady


def _durations(times: StageTimes, wakings_ms: Sequence[Mapping[str, float]]) -> tuple[Any, ...]:
    """In the order of the core's StageDurations."""
    return (
        times.of("FORWARD"),
        times.of("FORWARD", 1),
        times.of("BACKWARD"),
        times.of("BACKWARD", 1),
        times.of("RECOMPUTE"),
        times.of("UPDATE"),
        times.of_exchange("push", 0),
        times.of_exchange("pull", 0),
        times.sync_latency_ms,
        float(times.num_chunks),
        [*times.push_leads_ms],
        times.updates_whole,
        [[by_kind.get(kind, 0.0) for kind in ("FORWARD", "BACKWARD", "UPDATE")] for by_kind in wakings_ms],
    )
