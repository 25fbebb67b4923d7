"""Describes the work item that a worker is doing, for errors. Also makes the part that the reports of
replicas and spares have in common. Owned by the worker's compute thread."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipedream import _core
from pipedream.common.errors import PipelineError, describe_error
from pipedream.planning.plan import Plan
from pipedream.simulate.trace import read_clock

__all__ = ["Position", "common_report", "located", "memory_rows"]


@dataclass
class Position:
    """The work item that the worker is doing. Calling this object returns a description of the item for an
    error."""

    plan: Plan
    rank: int
    stage: int
    minibatch: int = -1

    def __call__(self, what: str) -> str:
        worker = self.plan.describe_worker(self.rank, self.stage)
        return f"{worker} failed at minibatch {self.minibatch} in {what}"


@contextlib.contextmanager
def located(position: Position) -> Iterator[None]:
    """Adds the position to errors of the device. A device reports an error at a later call that waits for it,
    which may be outside the user's code."""
    try:
        yield
    except (PipelineError, _core.RunFailure):
        raise  # these errors already name the place
    except RuntimeError as error:
        raise PipelineError(f"{position('the work around the model')}: {describe_error(error)}") from error


_LEAVE_TIMEOUT_S = 5.0
"""Seconds that a worker waits for its last sends before it reports."""


def memory_rows(
    core: _core.Worker, predicted: Mapping[str, int], measured: Mapping[str, int | None]
) -> dict[str, dict[str, int | None]]:
    """Returns the predicted and the peak bytes by term. measured: peaks of the terms that the core does not
    measure; None for a term that cannot be measured."""
    rows: dict[str, dict[str, int | None]] = {
        name: {"predicted": planned, "peak": peak} for name, planned, peak in core.memory()
    }
    for name, peak in measured.items():
        planned_bytes = predicted.get(name)
        if planned_bytes or peak or peak is None:
            rows[name] = {"predicted": planned_bytes, "peak": peak}
    return rows


def common_report(
    core: _core.Worker, memory: Callable[[], dict[str, dict[str, int | None]]], channels: Iterable[str]
) -> dict[str, Any]:
    """Returns the part that the reports of replicas and spares have in common. memory: returns the result of
    memory_rows(). channels: the channels that carry gradients and versions of shards to this worker."""
    core.wait_for_transfers(_LEAVE_TIMEOUT_S)  # after the time-out, the trace lacks the last transfers
    stats = core.channel_stats()
    return {
        "pid": os.getpid(),
        "totals": core.totals(),
        "spans": core.spans(),
        "transfers": core.transfers(),
        "memory": memory(),
        # The sum counts bytes received through sockets and bytes that senders on this host have written into
        # this worker's memory.
        "synced_bytes": sum(
            stats[name]["wire_bytes_received"] + stats[name]["placed_bytes"] for name in channels
        ),
        "clock": read_clock(),
    }
