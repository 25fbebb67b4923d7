"""Simulates schedules for tests."""

from __future__ import annotations

from collections.abc import Sequence

from pipedream import _core
from pipedream.planning.simulator import Simulation, simulate

__all__ = ["FORWARD_1_BACKWARD_2", "simulate_schedule"]

FORWARD_1_BACKWARD_2 = _core.StageDurations(1, 2)


def simulate_schedule(
    schedule: str,
    num_stages: int,
    num_minibatches: int,
    *,
    num_microbatches: int = 1,
    num_workers: int | None = None,
    in_flight: Sequence[int] | None = None,
    recompute: bool = False,
    times: _core.StageDurations | Sequence[_core.StageDurations] = FORWARD_1_BACKWARD_2,
    transfer_ms: float = 0.0,
) -> Simulation:
    workers = num_workers or num_stages
    options = _core.ScheduleOptions(
        schedule=schedule,
        in_flight=list(in_flight or range(num_stages, 0, -1)),
        num_microbatches=num_microbatches,
        placement=_core.Placement.at_ranks([stage % workers for stage in range(num_stages)]),
        recompute=[recompute] * num_stages,
    )
    programs = [_core.make_program(options, worker, num_minibatches) for worker in range(workers)]
    return simulate(programs, times, transfer_ms)
