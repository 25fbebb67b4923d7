"""Finds out why a local run failed, and makes one error that says why.

A worker that fails leaves a record of its error in the folder of the run. A worker that is killed leaves no
record; its exit code tells how it ended. Any thread.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipedream.common import errors
from pipedream.common.guard import error_path, write_record
from pipedream.common.tracebacks import describe_user_error
from pipedream.planning.plan import Plan
from pipedream.report.status import StatusBoard

__all__ = ["cause_of", "is_explained", "traceback_of", "write_error"]


class _RemoteTraceback(Exception):  # noqa: N818 (not an error of its own: the cause that is shown)
    """The traceback of a worker process. It is shown as the cause of the caller's error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def write_error(folder: Path, rank: int, error: Exception) -> None:
    """Writes the record of the rank's error, unless the rank has already written one."""
    if error_path(folder, str(rank)).exists():
        return
    record = {
        "minibatch": getattr(error, "minibatch", None),
        "type": type(error).__name__,
        "message": errors.one_line(error)
        if type(error).__name__ in _ERROR_TYPES
        else errors.describe_error(error),
        "derived": getattr(error, "_pipedream_derived", False),
        "traceback": describe_user_error(error),
    }
    write_record(error_path(folder, str(rank)), record)


def _read_errors(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _first_cause(folder: Path) -> dict[str, Any] | None:
    """Returns the earliest error that is not a consequence of another worker's end; None if there is none."""
    records = _read_errors(folder)
    causes = [r for r in records if not r["derived"] and r["type"] != "PeerLost"]
    return next(iter(causes), None)


def traceback_of(folder: Path) -> BaseException | None:
    cause = _first_cause(folder)
    return _RemoteTraceback(cause["traceback"]) if cause is not None and cause["traceback"] else None


_ERROR_TYPES: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ValueError,
        TypeError,
        RuntimeError,
        errors.PipelineError,
        errors.DataMismatch,
        errors.NonFiniteLoss,
        errors.PeerLost,
    )
}


def is_explained(codes: Mapping[int, int], folder: Path) -> bool:
    """Whether the workers that have failed so far explain the failure of the run. If not, another worker has
    caused it, and has not been seen to end yet."""
    return _first_cause(folder) is not None or bool(_silent(codes, folder))


def _silent(codes: Mapping[int, int], folder: Path) -> list[int]:
    """Returns the ranks that ended without a record, for example killed ones, in the order of their ends."""
    return [rank for rank in codes if not error_path(folder, str(rank)).exists()]


def cause_of(codes: Mapping[int, int], folder: Path, board: StatusBoard, plan: Plan) -> Exception:
    """Returns one error for a run in which some workers failed. It describes the first cause, and not the
    consequences of that cause.

    codes: by rank, the exit codes of the workers that failed by themselves, in the order of their ends.
    """
    cause = _first_cause(folder)
    if cause is None:
        for rank in _silent(codes, folder):
            position = _position(board, rank)
            lost = errors.WorkerLost(f"{plan.describe_worker(rank)} {_end_of(codes[rank])} {position}")
            return _at(lost, board.read(rank))
        cause = _read_errors(folder)[0]
    return _at(
        _ERROR_TYPES.get(cause["type"], errors.PipelineError)(cause["message"]), cause.get("minibatch")
    )


def _at(error: Exception, minibatch: int | None) -> Exception:
    error.minibatch = minibatch if minibatch is None or minibatch >= 0 else None  # type: ignore[attr-defined]
    return error


def _end_of(code: int) -> str:
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _position(board: StatusBoard, rank: int) -> str:
    minibatch = board.read(rank)
    return "before its first minibatch" if minibatch < 0 else f"at minibatch {minibatch}"
