"""Tests pictures of schedules: texts are compared to the character, drawings by their boxes, and traces by
their spans.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pipedream import _core
from pipedream.planning.simulator import simulate
from pipedream.simulate import schedule_picture
from pipedream.simulate.schedule_drawing import PhaseSpan
from pipedream.simulate.schedule_picture import check_picture_path, draw_text, make_spans, write_picture
from simulating import simulate_schedule


class Box(NamedTuple):
    colour: str
    begin: float
    end: float
    bottom: float


def boxes_of(path: Path) -> list[Box]:
    """Returns the filled and the hatched rectangles of an SVG."""
    corners = r'<path d="M (\S+) (\S+) \nL (\S+) (\S+) \nL .*?\nL .*?\nz\n"'
    pattern = corners + r' (?:clip-path="\S+" )?style="fill: (#\w+|url)'
    return [
        Box(colour, float(begin), float(end), float(bottom))
        for begin, bottom, end, _, colour in re.findall(pattern, path.read_text())
    ]


def texts_of(path: Path) -> list[str]:
    return re.findall(r"<text [^>]*>(.*?)</text>", path.read_text())


FORWARD, BACKWARD, UPDATE = "#57b5e8", "#f2ab2e", "#303030"


def of_colour(boxes: list[Box], colour: str) -> list[Box]:
    return [box for box in boxes if box.colour == colour]


def test_ascii_picture_of_two_stages() -> None:
    assert draw_text(simulate_schedule("pipedream", 2, 3), "title", "subtitle") == (
        "title\n"
        "subtitle\n"
        "\n"
        "worker 0  |F0v0|F1v0|.........|B0v0     *F2v1|B1v0     *....|B2v1     *\n"
        "worker 1  .....|F0v0|B0v0     *F1v1|B1v1     *F2v2|B2v2     *..........\n"
        "\n"
        "F forward,   B backward,   * update,   . idle,   3  minibatch 3,   v2  reads weight version 2\n"
    )


def test_ascii_picture_names_microbatches_recomputes_and_long_updates() -> None:
    simulation = simulate_schedule(
        *("gpipe", 2, 1), num_microbatches=2, recompute=True, times=_core.StageDurations(1, 2, update_ms=1)
    )
    assert draw_text(simulation, "title").splitlines()[2:] == [
        "worker 0  |F0.0|F0.1|R0.0|..............|B0.0     |R0.1|B0.1     ******",
        "worker 1  .....|F0.0|F0.1|R0.0|B0.0     |R0.1|B0.1     ******..........",
        "",
        "F forward,   R recompute,   B backward,   * update,   . idle,   3.1  minibatch 3, microbatch 1",
    ]


def test_ascii_picture_has_a_row_for_each_link_that_something_takes_time_on() -> None:
    simulation = simulate_schedule("flush", 2, 1, num_microbatches=2, transfer_ms=1.0)
    assert draw_text(simulation, "title").splitlines()[2:] == [
        "worker 0  |F0.0|F0.1|...................|B0.0     |....|B0.1     *",
        "worker 1  ..........|F0.0|B0.0     |F0.1|B0.1     *...............",
        "0 to 1    .....|a0.0|a0.1|........................................",
        "1 to 0    .........................|g0.0|.........|g0.1|..........",
        "",
        "F forward,   B backward,   * update,   . idle,   3.1  minibatch 3, microbatch 1,   a activation,"
        "   g gradient, on their way",
    ]


def test_drawing_has_a_line_for_each_transfer_that_takes_time(tmp_path: Path) -> None:
    def num_paths(transfer_ms: float) -> int:
        simulation = simulate_schedule("flush", 2, 1, num_microbatches=3, transfer_ms=transfer_ms)
        path = tmp_path / f"{transfer_ms}.svg"
        write_picture(path, simulation, "title", phases=[])
        return path.read_text().count("stroke: #666666; stroke-opacity: 0.6")

    assert (num_paths(0.0), num_paths(1.0)) == (0, 6)


def test_versions_are_written_where_they_are_not_the_minibatch_or_as_asked() -> None:
    shown = "v2  reads weight version 2"
    for schedule, is_shown in (
        ("pipedream", True),
        ("naive", True),
        ("flush", False),
        ("model_parallel", False),
    ):
        assert (shown in draw_text(simulate_schedule(schedule, 2, 3), "")) == is_shown
    assert shown not in draw_text(simulate_schedule("pipedream", 2, 3), "", show_versions=False)
    assert "F1v1" in draw_text(simulate_schedule("flush", 2, 3), "", show_versions=True)


def test_ascii_picture_stays_within_its_width_when_durations_differ_wildly() -> None:
    simulation = simulate_schedule("pipedream", 2, 3, times=_core.StageDurations(1, 100_000))
    lines = draw_text(simulation, "title").splitlines()
    assert max(map(len, lines)) == len("worker 0  ") + 2_000 + 1
    assert lines[2].endswith("*")


def test_ascii_picture_of_no_work_and_of_no_time() -> None:
    assert "worker 1  .\n" in draw_text(simulate([[], []], _core.StageDurations(1, 1)), "")
    assert "worker 0  *\n" in draw_text(
        simulate_schedule("pipedream", 1, 1, times=_core.StageDurations(0, 0)), ""
    )


def test_drawn_boxes_are_the_instructions_at_their_times(tmp_path: Path) -> None:
    simulation = simulate_schedule("pipedream", 3, 6)
    write_picture(tmp_path / "a.svg", simulation, "title")
    boxes = boxes_of(tmp_path / "a.svg")
    drawn = {
        "FORWARD": of_colour(boxes, FORWARD)[:-1],  # the last box of each colour is in the legend
        "BACKWARD": of_colour(boxes, BACKWARD)[:-1],
        "UPDATE": of_colour(boxes, UPDATE)[:-1],
    }
    first = min(drawn["FORWARD"], key=lambda box: box.begin)
    last = max(drawn["BACKWARD"], key=lambda box: box.end)
    points_per_ms = (last.end - first.begin) / simulation.makespan_ms
    rows = sorted({box.bottom for box in drawn["FORWARD"]})
    for worker, row in enumerate(simulation.timeline):
        for opcode in ("FORWARD", "BACKWARD"):
            expected = [(begin, end) for step, begin, end in row if step.opcode == opcode]
            found = sorted(box for box in drawn[opcode] if box.bottom == rows[worker])
            times = [
                ((box.begin - first.begin) / points_per_ms, (box.end - first.begin) / points_per_ms)
                for box in found
            ]
            assert [begin for begin, _ in times] == pytest.approx([begin for begin, _ in expected], abs=1e-3)
            assert [end for _, end in times] == pytest.approx([end for _, end in expected], abs=1e-3)
    assert len(drawn["UPDATE"]) == 18
    assert {"title", "stage 0", "stage 2", "forward", "backward", "update", "idle"} <= set(
        texts_of(tmp_path / "a.svg")
    )


def test_drawing_writes_minibatch_microbatch_version_and_phases(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    phases = [PhaseSpan("warm-up", 0, 12), PhaseSpan("steady", 12, 50)]
    write_picture(path, simulate_schedule("2bw", 2, 4, num_microbatches=2), "title", "below", phases=phases)
    texts = texts_of(path)
    # Each microbatch has a label on its forward and on its backward, at both stages.
    assert [texts.count(f"{i}.{k}") for i in range(4) for k in range(2)] == [4] * 8
    assert (texts.count("v0"), texts.count("v1"), texts.count("v2")) == (16, 8, 8)
    assert {"below", "warm-up", "steady", "time, ms"} <= set(texts)


def test_stages_of_one_worker_differ_in_shade_the_later_the_darker(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    simulation = simulate_schedule("interleaved", 6, 1, num_microbatches=4, num_workers=2)
    write_picture(path, simulation, "title")
    blues = [box.colour for box in boxes_of(path) if is_blue(box.colour)]
    shades = sorted(set(blues), key=lambda colour: -sum(rgb(colour)))
    # Each shade is once in the legend, too.
    assert [blues.count(shade) for shade in shades] == [4 * 2 + 1] * 3
    stages = [step.stage for step, _, _ in simulation.timeline[0] if step.opcode == "FORWARD"]
    assert [shades.index(shade) * 2 for shade in blues[:12]] == stages
    assert "worker 0: stages 0, 2, 4" in texts_of(path)


def rgb(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def is_blue(colour: str) -> bool:
    red, _, blue = rgb(colour)
    return blue > red + 40


def test_recompute_is_hatched_and_in_the_legend_only_where_there_is_any(tmp_path: Path) -> None:
    for recompute in (False, True):
        path = tmp_path / "a.svg"
        write_picture(path, simulate_schedule("flush", 2, 2, recompute=recompute), "title")
        assert ("recompute" in texts_of(path)) == recompute
        assert ("<pattern " in path.read_text()) == recompute


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")])
def test_same_schedule_gives_the_same_file(tmp_path: Path, name: str, magic: bytes) -> None:
    made = []
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        write_picture(tmp_path / folder / name, simulate_schedule("gpipe", 2, 1, num_microbatches=2), "title")
        made.append((tmp_path / folder / name).read_bytes())
    assert made[0] == made[1]
    assert made[0].startswith(magic)


def test_schedules_of_one_stage_and_of_no_work_can_be_drawn(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.svg", simulate_schedule("pipedream", 1, 1), "title")
    assert "stage 0" in texts_of(tmp_path / "a.svg")
    write_picture(tmp_path / "b.svg", simulate([[], []], _core.StageDurations(1, 1)), "title")
    assert "title" in texts_of(tmp_path / "b.svg")


def test_text_file_is_the_ascii_picture(tmp_path: Path) -> None:
    simulation = simulate_schedule("flush", 3, 2, num_microbatches=3)
    write_picture(tmp_path / "a.txt", simulation, "title", "below", show_versions=True)
    assert (tmp_path / "a.txt").read_text() == draw_text(simulation, "title", "below", show_versions=True)


def test_replicas_are_named_and_what_they_exchange_is_drawn(tmp_path: Path) -> None:
    options = _core.ScheduleOptions(in_flight=[2, 1], placement=_core.Placement.in_order([2, 1]))
    programs = [_core.make_program(options, worker, 4) for worker in range(3)]
    simulation = simulate(programs, _core.StageDurations(2, 4, pull_ms=2.0))
    rows = draw_text(simulation, "title").splitlines()
    assert [row.split("  ")[0] for row in rows[2:5]] == ["stage 0 replica 0", "stage 0 replica 1", "stage 1"]
    assert [row.split("  ")[0] for row in rows[5:7]] == ["0 to 1", "1 to 0"]
    assert rows[-1].endswith(",   p push or pull,   a activation,   g gradient, on their way")
    assert "p0" in rows[5]
    assert "p1" in rows[6]
    write_picture(tmp_path / "a.svg", simulation, "title")
    assert "stage 0 replica 1" in (tmp_path / "a.svg").read_text()
    assert {"push 1.0", "pull 0.0"} <= {span.name for span in make_spans(simulation)}


def test_trace_has_compute_and_a_track_of_sends_per_neighbour(tmp_path: Path) -> None:
    simulation = simulate_schedule("pipedream", 3, 2, transfer_ms=0.5)
    write_picture(tmp_path / "a.json.gz", simulation, "title")
    events: list[dict[str, Any]] = json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes()))[
        "traceEvents"
    ]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"compute", "send to worker 0", "send to worker 1", "send to worker 2"}
    spans = list(make_spans(simulation))
    assert len([event for event in events if event["ph"] == "X"]) == len(spans)
    by_name = {(span.worker_name, span.name): span for span in spans}
    assert by_name["worker 1", "activation 0.0"].track == "send to worker 2"
    assert by_name["worker 1", "gradient 0.0"].track == "send to worker 0"
    backward = by_name["worker 2", "backward 0.0"]
    assert (backward.begin_ns, backward.end_ns) == (4_000_000, 6_000_000)
    assert backward.args == {"stage": 2, "replica": 0, "minibatch": 0, "microbatch": 0, "version": 0}
    assert by_name["worker 2", "update 1"].args["version"] == 2


@pytest.mark.parametrize("name", ["a.bmp", "svg", "a", "a.svg.gz"])
def test_ending_that_names_no_form_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ValueError, match=r"its name must end in one of .svg, .png, .pdf, .txt, .json, .json.gz"
    ):
        write_picture(tmp_path / name, simulate_schedule("pipedream", 1, 1), "title")
    assert list(tmp_path.iterdir()) == []


def test_missing_matplotlib_is_named_with_what_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ValueError, match=r"^a.svg: drawing needs matplotlib: pip install matplotlib, or name a"
    ):
        check_picture_path("a.svg")
    check_picture_path("a.txt")
    check_picture_path("a.json")


def test_more_than_can_be_drawn_is_refused_but_fits_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_picture, "_DRAWN_BOXES_MAX", 5)
    simulation = simulate_schedule("pipedream", 1, 2)
    with pytest.raises(ValueError, match="6 instructions are too many to draw"):
        write_picture(tmp_path / "a.svg", simulation, "title")
    write_picture(tmp_path / "a.json", simulation, "title")
    assert (tmp_path / "a.json").stat().st_size > 0
