"""Refuses a call of run() in a script without the `__main__` guard, and inside another run.

A local worker process imports the caller's script again to find its classes and functions. Without `if
__name__ == "__main__":` this import would start another training in every worker. Torch-free; any thread.
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

# The environment variable with the folder in which a local worker stores its error for the caller: the
# process that called run() and started the worker. The variable is set while local workers run.
RUN_FOLDER_VARIABLE = "PIPEDREAM_RUN_FOLDER"

_MESSAGE = (
    'the script trains at import: put what calls pipedream under `if __name__ == "__main__":`, because each'
    " worker process imports the script to find its classes"
)

_running = threading.Lock()  # held while this process trains, as a caller of run() or as a local worker


@contextlib.contextmanager
def one_run_at_a_time() -> Iterator[None]:
    """A context around a run. A run changes the environment, signal handlers and random number generators of
    the whole process. Raises RuntimeError inside another run, in any thread.
    """
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
    """Writes a file in one step: the caller may read at any time, and must never see half a record."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record), encoding="utf-8")
    part.replace(path)


def check_main_guard() -> None:
    """Refuses a script without the `__main__` guard. Functions that would do long work while a script is
    imported call this first. It does nothing unless a worker process is importing the script. Then it stores
    an error for the caller and ends the process. In a process that no run has started it raises RuntimeError.
    """
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    folder = os.environ.get(RUN_FOLDER_VARIABLE)
    if folder is None:
        raise RuntimeError(_MESSAGE)
    error = {"type": "RuntimeError", "message": _MESSAGE, "derived": False, "traceback": None}
    write_record(error_path(folder, f"guard-{os.getpid()}"), error)
    os._exit(2)  # an exception would print a traceback of the user's script in every worker
