"""Tests the comparison of a trace with a simulation. Equal times show no difference, and the largest
difference comes first.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pipedream import _core
from pipedream.common.errors import FileFormatError
from pipedream.planning.simulator import Simulation, simulate
from pipedream.simulate.measured_trace import compare_with_trace, read_trace
from pipedream.simulate.trace import Span, write_trace


def _simulation(times: list[_core.StageDurations]) -> Simulation:
    num_stages = len(times)
    in_flight = list(range(num_stages, 0, -1))
    options = _core.ScheduleOptions("pipedream", in_flight, 1, _core.Placement.in_order([1] * num_stages))
    programs = [_core.make_program(options, rank, 24) for rank in range(num_stages)]
    return simulate(programs, times, 0.0)


def _write(simulation: Simulation, path: Path) -> Path:
    """Writes a trace as RunResult.save_trace does."""
    spans = [
        Span(
            f"worker {worker} (stage {worker} (rank {worker}))",
            "compute",
            f"{timed.instruction.opcode[0]}{timed.instruction.minibatch}",
            int(timed.begin_ms * 1e6),
            int(timed.end_ms * 1e6),
            {"minibatch": timed.instruction.minibatch},
        )
        for worker, row in enumerate(simulation.timeline)
        for timed in row
        if timed.instruction.edge is None
    ]
    waits = [spans[-1]._replace(track="waiting", name="wait", args={})]
    write_trace(path, [*spans, *waits])
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_run_that_goes_as_simulated_shows_no_difference(tmp_path: Path, name: str) -> None:
    simulation = _simulation([_core.StageDurations(1.0, 2.0, 0.5)] * 2)
    comparison = compare_with_trace(simulation, _write(simulation, tmp_path / name))
    assert comparison.simulated_ms == pytest.approx(3.5)
    assert comparison.measured_ms == pytest.approx(3.5)
    assert all(one.more_ms == pytest.approx(0, abs=1e-5) for one in comparison.differences)


def test_the_largest_difference_is_named_first(tmp_path: Path) -> None:
    simulation = _simulation([_core.StageDurations(1.0, 2.0, 0.5)] * 2)
    measured = _simulation([_core.StageDurations(1.0, 2.0, 0.5), _core.StageDurations(1.25, 4.0, 0.5)])
    comparison = compare_with_trace(simulation, _write(measured, tmp_path / "trace.json"))
    assert comparison.measured_ms == pytest.approx(5.75)
    named = [(one.worker, one.kind, round(one.more_ms, 3)) for one in comparison.differences[:3]]
    assert named == [(0, "idle", 2.25), (1, "backward", 2.0), (1, "forward", 0.25)]
    shown = str(comparison)
    assert "3.500 ms per minibatch simulated, 5.750 measured, -39.1 %" in shown
    assert shown.splitlines()[3].split() == ["0", "idle", "0.000", "2.250", "+2.250"]
    assert comparison.to_dict()["differences"][1]["more_ms"] == pytest.approx(2.0)


def test_work_is_read_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    simulation = _simulation([_core.StageDurations(1.0, 2.0)] * 2)
    rows = read_trace(_write(simulation, tmp_path / "trace.json"))
    assert [len(row) for row in rows] == [72, 72]
    assert (rows[1][0].kind, rows[1][0].minibatch, rows[1][0].begin_ms) == ("forward", 0, pytest.approx(1.0))


def test_a_run_with_evaluations_shows_their_time_apart(tmp_path: Path) -> None:
    simulation = _simulation([_core.StageDurations(1.0, 2.0, 0.5)] * 2)
    path = _write(simulation, tmp_path / "trace.json")
    document = json.loads(path.read_text())
    update = next(event for event in document["traceEvents"] if event["name"] == "U12")
    document["traceEvents"].append(update | {"name": "E12.0", "dur": 0.24e3})
    path.write_text(json.dumps(document))
    (shown,) = (one for one in compare_with_trace(simulation, path).differences if one.kind == "evaluation")
    assert (shown.simulated_ms, shown.measured_ms) == (0.0, pytest.approx(0.02))


def test_other_files_and_other_runs_are_refused(tmp_path: Path) -> None:
    simulation = _simulation([_core.StageDurations(1.0, 2.0)] * 2)
    path = _write(_simulation([_core.StageDurations(1.0, 2.0)] * 3), tmp_path / "three.json")
    with pytest.raises(ValueError, match="has 3 workers and the plan 2"):
        compare_with_trace(simulation, path)
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    with pytest.raises(FileFormatError, match=r"other\.json: no trace of a run"):
        read_trace(tmp_path / "other.json")
    (tmp_path / "nested.json").write_text("[" * 100_000)
    with pytest.raises(FileFormatError, match=r"nested\.json: no trace of a run"):
        read_trace(tmp_path / "nested.json")
    (tmp_path / "broken.json.gz").write_bytes(b"no gzip")
    with pytest.raises(FileFormatError, match=r"broken\.json\.gz: no trace of a run"):
        read_trace(tmp_path / "broken.json.gz")
