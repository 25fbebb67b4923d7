"""The report of one worker on a run in several segments (worker/segment.py), joined to one.

Counts and times are sums without what lies between two segments, memory is the most of any. Plain values that
travel as JSON; any thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["join_reports"]

_NUM_SPANS_MAX = 50_000  # as of one segment
_NUM_ORDERED_MAX = 1 << 20  # likewise (ShardUpdates::kNumOrderedMax)
_OF_THE_LAST = ("chunk_bytes", "transport", "codec")  # of a channel

_Report = dict[str, Any]


def join_reports(reports: Sequence[_Report], drained_at: Sequence[int]) -> _Report:
    """reports: of the segments, in order; empty ones at a rank beyond the plan. drained_at: the first
    minibatches of all but the first."""
    last = reports[-1]
    if not last:
        return {}
    joined = last | {"drained_at": list(drained_at)}
    if len(reports) == 1:
        return joined
    return joined | {
        "stages": {
            stage: _joined_stage([report["stages"][stage] for report in reports]) for stage in last["stages"]
        },
        "totals": _sums([report["totals"] for report in reports]),
        "spans": _chained(report["spans"] for report in reports)[-_NUM_SPANS_MAX:],
        "transfers": [_joined_transfers([report["transfers"][end] for report in reports]) for end in (0, 1)],
        "memory": _joined_memory([report["memory"] for report in reports]),
        "synced_bytes": sum(report["synced_bytes"] for report in reports),
        "channels": {
            name: _sums([report["channels"][name] for report in reports]) for name in last["channels"]
        },
        "losses": _chained(report["losses"] for report in reports),
        "validation": _chained(report["validation"] for report in reports),
    }


def _joined_stage(of_segments: Sequence[_Report]) -> _Report:
    last = of_segments[-1]
    joined = last | {"versions": _chained(each["versions"] for each in of_segments)}
    if last["shard"] is not None:
        joined["shard"] = _joined_shard([each["shard"] for each in of_segments])
    return joined


def _joined_shard(of_segments: Sequence[_Report]) -> _Report:
    """Joins the records of an asynchronous shard (AsynchronousServer.record). Each segment begins with all
    gradients of the one before, whatever the replica had read of them."""
    *before, last = of_segments
    order = _chained(each["order"] for each in of_segments)
    is_known = all(each["order"] or _num_rounds(each) == 0 for each in of_segments)
    return last | {
        "order": order if is_known and len(order) <= _NUM_ORDERED_MAX else [],
        "contained": [*_chained(each["contained"][:-1] for each in before), *last["contained"]],
    }


def _num_rounds(shard: _Report) -> int:
    return len(shard["contained"]) - 1


def _chained(lists: Iterable[Sequence[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def _sums(figures: Sequence[_Report]) -> _Report:
    last = figures[-1]
    return {
        name: value if name in _OF_THE_LAST else sum(each[name] for each in figures)
        for name, value in last.items()
    }


def _joined_transfers(of_segments: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """By channel, of one end."""
    return {name: _chained(each.get(name, []) for each in of_segments) for name in of_segments[-1]}


def _joined_memory(
    of_segments: Sequence[dict[str, dict[str, int | None]]],
) -> dict[str, dict[str, int | None]]:
    """By term."""
    terms: dict[str, list[dict[str, int | None]]] = {}
    for memory in of_segments:
        for name, figures in memory.items():
            terms.setdefault(name, []).append(figures)
    return {
        name: {which: _most(each[which] for each in figures) for which in ("predicted", "peak")}
        for name, figures in terms.items()
    }


def _most(values: Iterable[int | None]) -> int | None:
    """None: one of them is not known."""
    found = list(values)
    known = [value for value in found if value is not None]
    return max(known) if len(known) == len(found) else None
