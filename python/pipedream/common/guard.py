"""Checks of where run() is called: in a script without the guard that local workers need, or inside of
another run.

A worker process imports the caller's script anew to find its classes and functions. Without
`if __name__ == "__main__":` that import would train again, in every worker. Torch-free; any thread.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["RUN_FOLDER_VARIABLE", "check_main_guard", "error_path", "one_run_at_a_time", "write_record"]

# Where a local worker leaves its error for the caller; set while local workers run.
RUN_FOLDER_VARIABLE = "PIPEDREAM_RUN_FOLDER"

_MESSAGE = (
    'the script trains at import: put what calls pipedream under `if __name__ == "__main__":`, because each'
    " worker process imports the script to find its classes"
)

_running = threading.Lock()  # held by the run that this process calls, or is a worker of


@contextlib.contextmanager
def one_run_at_a_time() -> Iterator[None]:
    """Around a run. What it sets for a while is the whole process's: the environment, the handlers of
    signals, the random number generators. Raises RuntimeError within another one, in whatever thread."""
    if not _running.acquire(blocking=False):
        raise RuntimeError(
            "run() was called while another run() of this process trains: call it when that one has returned,"
            " or in another process"
        )
    try:
        yield
    finally:
        _running.release()


def error_path(folder: str | os.PathLike[str], name: str) -> Path:
    return Path(folder) / f"error-{name}.json"


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """All of it at once: the caller reads what there is whenever a worker ends, also while another writes."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record), encoding="utf-8")
    part.replace(path)


def check_main_guard() -> None:
    """Call first in whatever an unguarded script would call. Returns at once in any other process.

    In a worker that is importing the script, leaves the message for the caller and ends the process.
    """
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    folder = os.environ.get(RUN_FOLDER_VARIABLE)
    if folder is None:
        raise RuntimeError(_MESSAGE)
    error = {"type": "RuntimeError", "message": _MESSAGE, "derived": False, "traceback": None}
    write_record(error_path(folder, f"guard-{os.getpid()}"), error)
    os._exit(2)  # an exception would print a traceback of the user's script in every worker
