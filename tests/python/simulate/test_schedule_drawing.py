"""Tests that the picture of a large schedule shows a part of it, and says which part."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path

from pipedream import _core
from pipedream.planning.simulator import Simulation, simulate
from pipedream.simulate.schedule_drawing import ROWS_MAX, drawn_part
from pipedream.simulate.schedule_picture import write_picture
from pipedream.simulate.traced_schedule import minibatches_to_draw


def _simulated(replicas: Sequence[int], num_minibatches: int | None = None) -> Simulation:
    options = _core.ScheduleOptions(
        in_flight=_core.derive_in_flight(replicas), placement=_core.Placement.in_order(replicas)
    )
    count = num_minibatches or minibatches_to_draw(options)
    programs = [_core.make_program(options, rank, count) for rank in range(sum(replicas))]
    return simulate(programs, [_core.StageDurations(1.0 * r, 2.0 * r) for r in replicas])


def _width_of_png(path: Path) -> int:
    width: int = struct.unpack(">I", path.read_bytes()[16:20])[0]
    return width


def test_a_picture_of_fifteen_replicas_is_no_wider_than_a_few_screens(tmp_path: Path) -> None:
    """If every label had room, the picture would be 20,383 pixels wide."""
    write_picture(tmp_path / "a.png", _simulated([15, 1]), "title")
    assert _width_of_png(tmp_path / "a.png") <= 32 * 200


def test_all_of_a_small_schedule_is_drawn() -> None:
    simulation = _simulated([2, 1])
    part = drawn_part(simulation, lambda step: 0.1, 30.0)
    assert (part.simulation, part.note) == (simulation, "")
    assert part.row_names == ["stage 0 replica 0", "stage 0 replica 1", "stage 1"]


def test_of_many_workers_the_first_replicas_of_each_stage_are_drawn() -> None:
    part = drawn_part(_simulated([50, 10, 1], 100), lambda step: 0.0, 30.0)
    assert part.note == f"{ROWS_MAX} of 61 workers are drawn"
    assert part.row_names[28:30] == ["stage 0 replica 28", "stage 1 replica 0"]
    assert part.row_names[-1] == "stage 2"
    shown = {timed.instruction.stage for row in part.simulation.timeline for timed in row}
    assert shown == {0, 1, 2}


def test_of_many_stages_the_first_and_the_last_are_drawn() -> None:
    part = drawn_part(_simulated([1] * 60, 4), lambda step: 0.0, 30.0)
    assert part.row_names == [f"stage {i}" for i in (*range(20), *range(40, 60))]
    ends = {worker for one in part.simulation.transfers for worker in (one.from_worker, one.to_worker)}
    assert ends <= set(range(ROWS_MAX))


def test_of_a_long_time_the_beginning_is_drawn_and_the_picture_says_so(tmp_path: Path) -> None:
    simulation = _simulated([1, 1], 1_000)
    path = tmp_path / "a.svg"
    write_picture(path, simulation, "title", "below")
    (note,) = re.findall(r">below; the first (\S+) of (\S+) are drawn<", path.read_text())
    shown_ms, all_ms = map(float, note)
    assert all_ms == float(f"{simulation.makespan_ms:.4g}")
    assert 0 < shown_ms < all_ms / 2
    part = drawn_part(simulation, lambda step: 1.0, 30.0)  # forwards take 1 ms, and backwards 2 ms
    assert part.simulation.makespan_ms == 30.0
    assert max(timed.end_ms for row in part.simulation.timeline for timed in row) == 30.0
