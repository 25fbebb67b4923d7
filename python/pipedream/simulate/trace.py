"""Writes spans as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The form is that of the Trace Event Format document. Pure except for the file; any thread; needs no torch.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Clock", "Counter", "Span", "check_trace_path", "read_clock", "shift_ns", "spread", "write_trace"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Span(NamedTuple):
    """A period on one track (a thread, a stream, the wire) of one worker.

    `begin_ns` and `end_ns` are readings of one clock, in nanoseconds. Viewers show `args` beside the span.
    """

    worker_name: str
    track: str
    name: str
    begin_ns: int
    end_ns: int
    args: Mapping[str, Any] = {}


class Clock(NamedTuple):
    """Describes a machine's monotonic clock: the boot from which it counts, and the time of that boot. A
    worker sends this description to other workers as JSON.
    """

    boot_id: str
    """Id of the machine's boot. Processes with the same id share the clock. Empty if it cannot be read."""
    unix_ns: int
    """Nanoseconds to add to a reading of the monotonic clock to get the time since 1970."""


def read_clock() -> Clock:
    """Returns this machine's clock."""
    boot_id = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else ""
    return Clock(boot_id, time.time_ns() - time.monotonic_ns())


def shift_ns(clock: Clock, to: Clock) -> int:
    """Returns the nanoseconds to add to a reading of `clock` to get the same time on the clock `to`. It is 0
    for equal boot ids, as on one machine. Between two machines its error is that of their times of day
    (milliseconds with NTP).
    """
    return 0 if clock.boot_id == to.boot_id else clock.unix_ns - to.unix_ns


def check_trace_path(path: str | os.PathLike[str]) -> None:
    """Raises ValueError for a name that write_trace() would refuse. Use it before a run."""
    if not os.fspath(path).endswith((".json", ".json.gz")):
        raise ValueError(f"trace file is {os.fspath(path)!r}: its name must end in .json or .json.gz")


class Counter(NamedTuple):
    """A figure of a worker over time: pairs (milliseconds, value). Each value holds until the next pair's
    time.
    """

    worker_name: str
    name: str
    values: Sequence[tuple[float, float]]


def spread(spans: Iterable[Span]) -> list[Span]:
    """Returns the spans in the same order. A span that overlaps an earlier one of its track is moved to a
    further track: from "wire" to "wire (2)", and so on. On one track the format allows only spans that follow
    or contain each other.
    """
    spread_out = list(spans)
    ends_ns: dict[tuple[str, str], list[int]] = {}  # end of the last span on each track
    for index in sorted(range(len(spread_out)), key=lambda index: spread_out[index].begin_ns):
        span = spread_out[index]
        ends = ends_ns.setdefault((span.worker_name, span.track), [])
        place = next((place for place, end_ns in enumerate(ends) if end_ns <= span.begin_ns), len(ends))
        ends[place : place + 1] = [span.end_ns]
        if place > 0:
            spread_out[index] = span._replace(track=f"{span.track} ({place + 1})")
    return spread_out


def write_trace(
    path: str | os.PathLike[str],
    spans: Iterable[Span],
    figures: Mapping[str, Any] | None = None,
    arrows: Iterable[tuple[Span, Span]] = (),
    counters: Iterable[Counter] = (),
) -> None:
    """Writes the spans to a .json or .json.gz file, with workers and tracks in the order of their first
    spans. Times become microseconds since the earliest span.

    figures: figures of the whole run, which are stored as "otherData". arrows: pairs of spans; an arrow goes
    from the begin of the first span to the begin of the second. counters: counters of workers that have
    spans.

    Raises ValueError for another ending, and for a span that ends before it begins.
    """
    check_trace_path(path)
    target = Path(path)
    events = _make_events(list(spans), list(arrows), list(counters))
    document: dict[str, Any] = {"displayTimeUnit": "ms", "traceEvents": events}
    if figures:
        document["otherData"] = dict(figures)
    text = json.dumps(document)
    data = text.encode()
    # With mtime=0 equal spans give equal files.
    target.write_bytes(gzip.compress(data, mtime=0) if target.suffix == ".gz" else data)


def _make_events(
    spans: list[Span], arrows: list[tuple[Span, Span]], counters: list[Counter]
) -> list[dict[str, Any]]:
    origin_ns = min((span.begin_ns for span in spans), default=0)
    process_ids: dict[str, int] = {}
    thread_ids: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = []
    for span in spans:
        if span.end_ns < span.begin_ns:
            raise ValueError(f"span {span.name!r} of {span.worker_name!r} ends before it begins")
        process_id = process_ids.setdefault(span.worker_name, len(process_ids))
        # Thread ids differ between workers, too, because some viewers join threads of several processes that
        # have the same id.
        thread_id = thread_ids.setdefault((span.worker_name, span.track), len(thread_ids))
        events.append(
            {
                "ph": "X",
                "pid": process_id,
                "tid": thread_id,
                "name": span.name,
                "ts": (span.begin_ns - origin_ns) / 1e3,
                "dur": (span.end_ns - span.begin_ns) / 1e3,
                "args": dict(span.args),
            }
        )
    # Arrows are written after the spans, because viewers attach an arrow's end to the span that began last
    # before it in the file.
    for arrow_id, ends in enumerate(arrows):
        for phase, span in zip(({"ph": "s"}, {"ph": "f", "bp": "e"}), ends, strict=True):
            place = {
                "pid": process_ids[span.worker_name],
                "tid": thread_ids[span.worker_name, span.track],
                "ts": (span.begin_ns - origin_ns) / 1e3,
            }
            events.append(phase | place | {"cat": "arrow", "name": "arrow", "id": arrow_id})
    for counter in counters:
        process_id = process_ids[counter.worker_name]
        of_counter: dict[str, Any] = {"ph": "C", "pid": process_id, "name": counter.name}
        events += [
            of_counter | {"ts": 1e3 * time_ms - origin_ns / 1e3, "args": {counter.name: value}}
            for time_ms, value in counter.values
        ]
    names = []
    for worker_name, process_id in process_ids.items():
        names += _name_events("process", process_id, 0, worker_name, process_id)
    for (worker_name, track), thread_id in thread_ids.items():
        names += _name_events("thread", process_ids[worker_name], thread_id, track, thread_id)
    return names + sorted(events, key=lambda event: float(event["ts"]))


def _name_events(
    kind: str, process_id: int, thread_id: int, name: str, position: int
) -> list[dict[str, Any]]:
    place = {"ph": "M", "pid": process_id, "tid": thread_id}
    return [
        place | {"name": f"{kind}_name", "args": {"name": name}},
        place | {"name": f"{kind}_sort_index", "args": {"sort_index": position}},
    ]
