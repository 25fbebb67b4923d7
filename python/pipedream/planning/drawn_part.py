"""The part of a simulated schedule that a picture shows: as many rows as a person reads, and as much time as
fits in the width. Pure; any thread; needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from pipedream.planning.row_names import name_rows
from pipedream.planning.simulator import Simulation, TimedInstruction

if TYPE_CHECKING:
    from pipedream import _core

__all__ = ["ROWS_MAX", "DrawnPart", "drawn_part"]

ROWS_MAX = 40
_READABLE_SHARE = 0.9  # of the boxes, that must have room for what is written on them


class DrawnPart(NamedTuple):
    simulation: Simulation
    """The simulation of the rows and the time that are shown; its shares are of the whole."""
    row_names: list[str]
    note: str
    """A line about rows and time that are left out; empty if none are."""


def drawn_part(
    simulation: Simulation, narrowest_inches: Callable[[_core.Instruction], float], width_max: float
) -> DrawnPart:
    """narrowest_inches: of a box on which an instruction's label can be read. width_max: inches of the time
    that is shown."""
    rows = _drawn_rows(simulation)
    shown = simulation
    notes = []
    if len(rows) < simulation.num_workers:
        shown = _of_rows(shown, rows)
        notes.append(f"{len(rows)} of {simulation.num_workers} workers are drawn")
    end_ms = _drawn_ms(shown, narrowest_inches, width_max)
    if end_ms < simulation.makespan_ms:
        shown = _until(shown, end_ms)
        notes.append(f"the first {end_ms:.4g} of {simulation.makespan_ms:.4g} are drawn")
    names = name_rows(simulation)
    return DrawnPart(shown, [names[worker] for worker in rows], "; ".join(notes))


def _drawn_rows(simulation: Simulation) -> list[int]:
    """The first replicas of each stage, of each as many; of too many stages the first and the last."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for worker, row in enumerate(simulation.timeline):
        groups.setdefault(tuple(sorted({timed.instruction.stage for timed in row})), []).append(worker)
    of_stages = list(groups.values())
    if len(of_stages) > ROWS_MAX:
        of_stages = of_stages[: ROWS_MAX // 2] + of_stages[-(ROWS_MAX // 2) :]
    count = max(map(len, of_stages), default=1)
    while count > 1 and sum(min(count, len(workers)) for workers in of_stages) > ROWS_MAX:
        count -= 1
    return sorted(worker for workers in of_stages for worker in workers[:count])


def _drawn_ms(
    simulation: Simulation, narrowest_inches: Callable[[_core.Instruction], float], width_max: float
) -> float:
    """All, or the beginning in which most labels can be read."""
    wanted = sorted(
        narrowest_inches(timed.instruction) / (timed.end_ms - timed.begin_ms)
        for row in simulation.timeline
        for timed in row
        if timed.end_ms > timed.begin_ms and timed.instruction.opcode != "UPDATE"
    )
    inches_per_ms = wanted[int(_READABLE_SHARE * (len(wanted) - 1))] if wanted else 0.0
    if inches_per_ms * simulation.makespan_ms <= width_max:
        return simulation.makespan_ms
    return width_max / inches_per_ms


def _of_rows(simulation: Simulation, rows: Sequence[int]) -> Simulation:
    places = {worker: place for place, worker in enumerate(rows)}
    return replace(
        simulation,
        timeline=tuple(simulation.timeline[worker] for worker in rows),
        transfers=tuple(
            one._replace(from_worker=places[one.from_worker], to_worker=places[one.to_worker])
            for one in simulation.transfers
            if one.from_worker in places and one.to_worker in places
        ),
    )


def _until(simulation: Simulation, end_ms: float) -> Simulation:
    def cut(row: Sequence[TimedInstruction]) -> tuple[TimedInstruction, ...]:
        return tuple(
            timed._replace(end_ms=min(timed.end_ms, end_ms)) for timed in row if timed.begin_ms < end_ms
        )

    return replace(
        simulation,
        timeline=tuple(map(cut, simulation.timeline)),
        transfers=tuple(one for one in simulation.transfers if one.end_ms <= end_ms),
        makespan_ms=end_ms,
    )
