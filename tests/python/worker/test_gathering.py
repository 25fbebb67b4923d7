"""Tests gathering.py, which joins one worker's reports on several segments of a run. A segment is the part of
a run that is trained with one memory plan."""

from __future__ import annotations

from typing import Any

import pytest
from pipedream.worker import gathering
from pipedream.worker.gathering import join_reports


def _report(index: int) -> dict[str, Any]:
    """Returns a worker's report on one of several segments, which have two minibatches each."""
    first = 2 * index
    return {
        "pid": 7,
        "stages": {
            "1": {
                "versions": [(first, first), (first, first + 1)],
                "recompute": index == 1,
                "offload": [],
                "shard": None,
            }
        },
        "totals": {"num_work_items": 6, "wait_ns": 1 + index, "compute_ns": 20, "elapsed_ns": 30},
        "spans": [["UPDATE", 1, first, 0, 1, 2, 3, 0, 1]],
        "transfers": [{"out": [[first, 0]]}, {"back": [[first, 0], [first + 1, 0]]}],
        "memory": {
            "weight versions": {"predicted": 10, "peak": 10 - index},
            "stash": {"predicted": 5 + index, "peak": None if index == 0 else 4},
        },
        "synced_bytes": 3,
        "channels": {
            "out": {"transport": "zmq/tcp", "codec": "none", "num_items": 2, "chunk_bytes": 8 + index}
        },
        "clock": ["a", index],
        "losses": [0.5 + index, 0.25],
        "validation": [[index, 4, {"loss": 0.5}]],
        "samples": [4] * (2 * index + 2),
        "epochs": [0] * (2 * index + 2),
        "data": {"source": "list", "read_ns": 100 * (index + 1)},
    }


def test_what_segments_did_adds_up_and_memory_is_the_most_of_any() -> None:
    joined = join_reports([_report(0), _report(1)], [2])
    assert joined["drained_at"] == [2]
    assert joined["losses"] == [0.5, 0.25, 1.5, 0.25]
    assert [minibatch for minibatch, _, _ in joined["validation"]] == [0, 1]
    stage = joined["stages"]["1"]
    assert stage["versions"] == [(0, 0), (0, 1), (2, 2), (2, 3)]
    assert stage["recompute"] is True  # the value of the newest segment
    assert joined["totals"] == {"num_work_items": 12, "wait_ns": 3, "compute_ns": 40, "elapsed_ns": 60}
    assert [span[2] for span in joined["spans"]] == [0, 2]
    assert joined["transfers"] == [
        {"out": [[0, 0], [2, 0]]},
        {"back": [[0, 0], [1, 0], [2, 0], [3, 0]]},
    ]
    assert joined["memory"]["weight versions"] == {"predicted": 10, "peak": 10}
    # The peak of one segment was not measured.
    assert joined["memory"]["stash"] == {"predicted": 6, "peak": None}
    assert joined["synced_bytes"] == 6
    assert joined["channels"]["out"] == {
        "transport": "zmq/tcp",
        "codec": "none",
        "num_items": 4,
        "chunk_bytes": 9,
    }
    # The data stream lives on between segments, so its newest figures count all of them.
    assert (len(joined["samples"]), joined["data"]["read_ns"]) == (4, 200)


def test_one_segment_is_reported_as_it_is() -> None:
    assert join_reports([_report(0)], []) == _report(0) | {"drained_at": []}


def test_a_rank_beyond_the_plan_reports_nothing() -> None:
    assert join_reports([{}, {}], [4]) == {}


def test_of_more_spans_than_are_kept_the_newest_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_NUM_SPANS_MAX", 2)
    joined = join_reports([_report(index) for index in range(3)], [2, 4])
    assert [span[2] for span in joined["spans"]] == [2, 4]
