"""Compares a run's trace with the simulation of its plan. It lists the differences between simulated and
measured times, the largest first.

Both times are milliseconds per minibatch, for each worker, of forwards, recomputes, backwards, updates,
evaluations and idling. Only the middle half of the worker's minibatches counts. Pure except for the file; any
thread; needs no torch.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipedream.common.errors import FileFormatError, describe_error
from pipedream.common.table import format_table
from pipedream.planning.simulator import Simulation

__all__ = ["Comparison", "WorkTime", "compare_with_trace", "read_trace"]

_IDLE = "idle"
_ROWS_SHOWN = 6


class WorkTime(NamedTuple):
    """One work item of a worker."""

    kind: str
    """The kind of work, such as "forward": `OpcodeTraits.meaning` of the item's opcode."""
    minibatch: int
    begin_ms: float
    end_ms: float


class Difference(NamedTuple):
    """Simulated and measured milliseconds per minibatch for one worker and one kind of work."""

    worker: int
    kind: str
    simulated_ms: float
    measured_ms: float

    @property
    def more_ms(self) -> float:
        return self.measured_ms - self.simulated_ms


@dataclass(frozen=True)
class Comparison:
    simulated_ms: float
    """Milliseconds per minibatch, at the slowest worker."""
    measured_ms: float
    differences: tuple[Difference, ...]
    """The differences of all workers and kinds of work, the largest first."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "simulated_ms": self.simulated_ms,
            "measured_ms": self.measured_ms,
            "differences": [one._asdict() | {"more_ms": one.more_ms} for one in self.differences],
        }

    def __str__(self) -> str:
        error = self.simulated_ms / self.measured_ms - 1 if self.measured_ms else 0.0
        headings = ("worker", "work", "simulated ms", "measured ms", "more ms")
        rows = [
            (
                str(one.worker),
                one.kind,
                *(f"{ms:.3f}" for ms in (one.simulated_ms, one.measured_ms)),
                f"{one.more_ms:+.3f}",
            )
            for one in self.differences[:_ROWS_SHOWN]
        ]
        return (
            f"beside the trace: {self.simulated_ms:.3f} ms per minibatch simulated, {self.measured_ms:.3f}"
            f" measured, {100 * error:+.1f} %; the largest differences, per minibatch:\n\n"
            + format_table(headings, rows, "><>>>")
        )


def compare_with_trace(simulation: Simulation, path: str | os.PathLike[str]) -> Comparison:
    """Compares the simulation with a trace. Raises ValueError if the trace has another number of workers, or
    too few minibatches.
    """
    measured = read_trace(path)
    simulated = [
        [
            WorkTime(timed.instruction.traits.meaning, timed.instruction.minibatch, *timed[1:])
            for timed in row
            if timed.instruction.edge is None
        ]
        for row in simulation.timeline
    ]
    if len(measured) != len(simulated):
        raise ValueError(
            f"{os.fspath(path)} has {len(measured)} workers and the plan {len(simulated)}: give the trace"
            " of a run of this plan"
        )
    differences, slowest = [], [0.0, 0.0]
    for worker, pair in enumerate(zip(simulated, measured, strict=True)):
        times = [_times_of(row, os.fspath(path)) for row in pair]
        slowest = [max(slow, sum(one.values())) for slow, one in zip(slowest, times, strict=True)]
        differences += [
            Difference(worker, kind, times[0].get(kind, 0.0), times[1].get(kind, 0.0))
            for kind in sorted({*times[0], *times[1]})
        ]
    differences.sort(key=lambda one: -abs(one.more_ms))
    return Comparison(slowest[0], slowest[1], tuple(differences))


def read_trace(path: str | os.PathLike[str]) -> list[list[WorkTime]]:
    """Reads the work items of each worker, in the order of ranks, from a file that `save_trace` wrote.

    Raises FileFormatError for any other file.
    """
    from pipedream import _core

    source = os.fspath(path)
    kinds = {traits.letter: traits.meaning for traits in _core.OPCODES.values() if not traits.travels}
    try:
        data = Path(path).read_bytes()
        document = json.loads(gzip.decompress(data) if source.endswith(".gz") else data)
        events = document["traceEvents"]
        names = {
            (event["pid"], event["tid"], event["name"]): event["args"]["name"]
            for event in events
            if event["ph"] == "M" and "name" in event["args"]
        }
        rows: dict[int, list[WorkTime]] = {}
        for event in events:
            if event["ph"] != "X" or names.get((event["pid"], event["tid"], "thread_name")) != "compute":
                continue
            worker = _rank_of(names[event["pid"], 0, "process_name"])
            begin_ms = event["ts"] / 1e3
            rows.setdefault(worker, []).append(
                WorkTime(
                    kinds[event["name"][0]],
                    event["args"]["minibatch"],
                    begin_ms,
                    begin_ms + event["dur"] / 1e3,
                )
            )
    except (ValueError, LookupError, TypeError, EOFError, RecursionError, gzip.BadGzipFile) as error:
        raise FileFormatError(
            f"{source}: no trace of a run, as RunResult.save_trace writes ({describe_error(error)})"
        ) from None
    if sorted(rows) != list(range(len(rows))) or not rows:
        raise FileFormatError(
            f"{source}: no trace of a run, which RunResult.save_trace writes: no work in it"
        )
    return [sorted(rows[worker], key=lambda item: item.begin_ms) for worker in range(len(rows))]


def _rank_of(name: str) -> int:
    found = re.match(r"worker (\d+) ", name)
    if found is None:
        raise ValueError(f"{name!r} is no worker's name")
    return int(found[1])


def _times_of(row: Sequence[WorkTime], source: str) -> Mapping[str, float]:
    """Returns milliseconds per minibatch by kind of work. A replica's time is divided by the number of
    minibatches of all replicas.
    """
    minibatches = sorted({item.minibatch for item in row if item.kind == "update"})
    first, last = (minibatches[len(minibatches) * n // 4] for n in (1, 3)) if minibatches else (0, 0)
    if last <= first:
        raise ValueError(f"{source}: too few minibatches to compare: 4 updates of each worker are needed")
    ends = {item.minibatch: item.end_ms for item in row if item.kind == "update"}
    window = [item for item in row if item.begin_ms >= ends[first] and item.end_ms <= ends[last]]
    times = dict.fromkeys((*{item.kind for item in row}, _IDLE), 0.0)
    for item in window:
        times[item.kind] += (item.end_ms - item.begin_ms) / (last - first)
    times[_IDLE] = max(0.0, (ends[last] - ends[first]) / (last - first) - sum(times.values()))
    return times
