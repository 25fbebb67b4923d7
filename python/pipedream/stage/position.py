"""Describes the work item that a worker is doing, for errors. This module also makes parts of the reports of
replicas and spares. Owned by the worker's compute thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipedream import _core
from pipedream.common.errors import PipelineError, describe_error
from pipedream.planning.plan import Plan

__all__ = ["LEAVE_TIMEOUT_S", "Position", "located", "memory_rows", "num_received_bytes"]


@dataclass
class Position:
    """The work item at which the worker is. A call returns a description of the item for an error."""

    plan: Plan
    rank: int
    stage: int
    minibatch: int = -1

    def __call__(self, what: str) -> str:
        worker = self.plan.describe_worker(self.rank, self.stage)
        return f"{worker} failed at minibatch {self.minibatch} in {what}"


@contextlib.contextmanager
def located(position: Position) -> Iterator[None]:
    """Adds the position to errors of the device. A device reports an error at the next call that waits for
    it, which may be a call outside the user's code."""
    try:
        yield
    except (PipelineError, _core.RunFailure):
        raise  # these errors name the place already
    except RuntimeError as error:
        raise PipelineError(f"{position('the work around the model')}: {describe_error(error)}") from error


LEAVE_TIMEOUT_S = 5.0
"""Seconds that a worker waits for its last sends before it reports."""


def memory_rows(
    core: _core.Worker, predicted: Mapping[str, int], measured: Mapping[str, int | None]
) -> dict[str, dict[str, int | None]]:
    """Returns predicted and peak bytes by term. measured: peaks of the terms that the core does not measure;
    None for a term that cannot be measured."""
    rows: dict[str, dict[str, int | None]] = {
        name: {"predicted": planned, "peak": peak} for name, planned, peak in core.memory()
    }
    for name, peak in measured.items():
        planned_bytes = predicted.get(name)
        if planned_bytes or peak or peak is None:
            rows[name] = {"predicted": planned_bytes, "peak": peak}
    return rows


def num_received_bytes(stats: Mapping[str, Mapping[str, Any]], channels: Iterable[str]) -> int:
    """Returns how many bytes were received through sockets, or written into this worker's memory by senders
    on this host. stats: figures of the core's channels, by name."""
    return sum(stats[name]["wire_bytes_received"] + stats[name]["placed_bytes"] for name in channels)
