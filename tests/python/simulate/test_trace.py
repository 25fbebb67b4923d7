"""Tests the writing of spans as Chrome traces."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pipedream.simulate.trace import Clock, Span, read_clock, shift_ns, spread, write_trace

SPANS = [
    Span("stage 0", "compute", "F0", 5_000, 7_500, {"minibatch": 0}),
    Span("stage 1", "compute", "F0", 8_000, 9_000),
    Span("stage 0", "send", "activation 0", 7_500, 8_000),
    Span("stage 0", "compute", "F1", 4_000, 5_000),
]


def read(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


@pytest.mark.parametrize("file_name", ["trace.json", "trace.json.gz"])
def test_spans_become_complete_events_in_microseconds_since_the_first(tmp_path: Path, file_name: str) -> None:
    write_trace(tmp_path / file_name, iter(SPANS))
    complete = [event for event in read(tmp_path / file_name) if event["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in complete] == [
        ("F1", 0.0, 1.0),
        ("F0", 1.0, 2.5),
        ("activation 0", 3.5, 0.5),
        ("F0", 4.0, 1.0),
    ]
    assert complete[1]["args"] == {"minibatch": 0}


def test_workers_are_named_processes_and_tracks_their_named_threads(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", SPANS)
    events = read(tmp_path / "trace.json")
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(processes.values()) == ["stage 0", "stage 1"]
    shown = {(processes[e["pid"]], threads[e["pid"], e["tid"]], e["name"]) for e in events if e["ph"] == "X"}
    assert shown == {(span.worker_name, span.track, span.name) for span in SPANS}


def test_spans_that_overlap_are_spread_over_as_many_tracks_as_it_takes() -> None:
    times = [(0, 10), (4, 6), (5, 20), (6, 7), (10, 12), (30, 30), (12, 40)]
    spans = spread([Span("a", "wire", str(index), *ends) for index, ends in enumerate(times)])
    assert [span.name for span in spans] == [str(index) for index in range(len(times))]
    assert [(span.begin_ns, span.end_ns) for span in spans] == times
    assert [span.track for span in spans] == [
        *("wire", "wire (2)", "wire (3)", "wire (2)", "wire", "wire (2)", "wire")
    ]


def test_spans_of_other_tracks_and_workers_do_not_spread_each_other() -> None:
    spans = [Span("a", "wire", "0", 0, 10), Span("a", "copy", "0", 0, 10), Span("b", "wire", "0", 0, 10)]
    assert spread(spans) == spans


def test_arrows_join_the_beginnings_of_two_spans(tmp_path: Path) -> None:
    arrows = [(SPANS[2], SPANS[1]), (SPANS[3], SPANS[0])]
    write_trace(tmp_path / "trace.json", SPANS, None, arrows)
    events = read(tmp_path / "trace.json")
    begins = {
        (event["pid"], event["tid"], event["ts"]): event["name"] for event in events if event["ph"] == "X"
    }
    ends = {
        phase: {e["id"]: e for e in events if e["ph"] == phase and e["name"] == e["cat"] == "arrow"}
        for phase in "sf"
    }
    assert sorted(ends["s"]) == sorted(ends["f"]) == [0, 1]
    for arrow_id, names in enumerate([("activation 0", "F0"), ("F1", "F0")]):
        out, to = ends["s"][arrow_id], ends["f"][arrow_id]
        assert (begins[out["pid"], out["tid"], out["ts"]], begins[to["pid"], to["tid"], to["ts"]]) == names
        assert to["bp"] == "e"  # otherwise the arrow would point at the next span


def test_an_arrows_end_follows_its_span_in_the_file(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", SPANS, None, [(SPANS[0], SPANS[1])])
    seen = set()
    for event in read(tmp_path / "trace.json"):
        if event["ph"] == "X":
            seen.add((event["pid"], event["tid"], event["ts"]))
        elif event["ph"] in "sf":
            assert (event["pid"], event["tid"], event["ts"]) in seen


def test_same_spans_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        write_trace(tmp_path / name, SPANS)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_no_spans_make_an_empty_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", [])
    assert read(tmp_path / "trace.json") == []


def test_span_that_ends_before_it_begins_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="span 'F0' of 'stage 0' ends before it begins"):
        write_trace(tmp_path / "trace.json", [Span("stage 0", "compute", "F0", 2, 1)])
    assert not (tmp_path / "trace.json").exists()


def test_another_ending_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.json or \.json\.gz"):
        write_trace(tmp_path / "trace.txt", SPANS)


def test_figures_of_the_run_stand_beside_the_events(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", SPANS, {"channels": {"a": {"items": 3}}})
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document["otherData"] == {"channels": {"a": {"items": 3}}}
    write_trace(tmp_path / "trace.json", SPANS)
    assert "otherData" not in json.loads((tmp_path / "trace.json").read_text())


def test_one_machines_clock_needs_no_shift_and_anothers_is_shifted_by_their_difference() -> None:
    here, later = Clock("a", 1_000), Clock("a", 1_007)
    assert shift_ns(later, here) == 0
    elsewhere = Clock("b", 5_000)  # its monotonic clock began 4,000 ns after the one here
    assert shift_ns(elsewhere, here) == 4_000
    assert shift_ns(here, elsewhere) == -4_000


def test_all_processes_of_a_machine_read_one_clock() -> None:
    text = "from pipedream.simulate.trace import read_clock; print(read_clock().boot_id)"
    other = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
    assert other.strip() == read_clock().boot_id
    assert shift_ns(read_clock(), read_clock()) == 0
