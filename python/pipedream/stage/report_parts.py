"""Parts that the reports of a replica and of a spare share. Pure; on the worker's compute thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipedream import _core

__all__ = ["LEAVE_TIMEOUT_S", "memory_rows", "num_received_bytes"]

LEAVE_TIMEOUT_S = 5.0
"""For what was sent to leave before a worker reports."""


def memory_rows(
    core: _core.Worker, predicted: Mapping[str, int], measured: Mapping[str, int | None]
) -> dict[str, dict[str, int | None]]:
    """By term: bytes predicted and at most there. measured: of what is not the core's own, None where it
    cannot be told."""
    rows: dict[str, dict[str, int | None]] = {
        name: {"predicted": planned, "peak": peak} for name, planned, peak in core.memory()
    }
    for name, peak in measured.items():
        planned_bytes = predicted.get(name)
        if planned_bytes or peak or peak is None:
            rows[name] = {"predicted": planned_bytes, "peak": peak}
    return rows


def num_received_bytes(stats: Mapping[str, Mapping[str, Any]], channels: Iterable[str]) -> int:
    """By the wire or placed by a sender of this host. stats: of the core's channels, by name."""
    return sum(stats[name]["wire_bytes_received"] + stats[name]["placed_bytes"] for name in channels)
