"""The folder through which a caller and its local workers hand each other files, and its end.

    pipedream-xxxxxxxx/  mode 0700, in the temporary folder
        owner            locked (flock) by the process that made the folder, as long as that lives

A caller that is killed cannot remove its folder. The next one that starts does: the lock is free then, which
the kernel sees to, whatever became of the process's number. A folder whose owner lives, of another user, or
without a lock file is left alone. Torch-free; the caller's thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["run_folder"]

_PREFIX = "pipedream-"
_LOCK = "owner"
_LOCK_IN_THE_MAKING = "owner.new"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A new folder that only this user can read, removed with all that is in it. First removes those that
    killed callers have left."""
    _remove_left_ones(Path(tempfile.gettempdir()))
    with contextlib.ExitStack() as held, tempfile.TemporaryDirectory(prefix=_PREFIX) as name:  # mode 0700
        folder = Path(name)
        held.callback(os.close, _lock(folder))  # held until the folder is gone
        yield folder


def _lock(folder: Path) -> int:
    """A descriptor; the lock ends with it, at the latest with this process."""
    made = folder / _LOCK_IN_THE_MAKING
    descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
    with contextlib.suppress(OSError):  # where there are no locks the folder is never taken for left
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made.rename(folder / _LOCK)  # not before, so that nobody finds it unlocked
    return descriptor


def _remove_left_ones(temporary: Path) -> None:
    """Best effort: what cannot be removed stays."""
    with contextlib.suppress(OSError), os.scandir(temporary) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(_PREFIX)]
        for name in names:
            with contextlib.suppress(OSError):
                _remove_if_left(temporary, name)


def _remove_if_left(temporary: Path, name: str) -> None:
    """All through descriptors of what was checked: the names may mean something else a moment later."""
    with _opened(temporary / name, os.O_DIRECTORY) as folder:
        status = os.fstat(folder)
        if status.st_uid != os.getuid() or status.st_mode & _OTHERS:
            return
        with _opened(_LOCK, os.O_RDWR, within=folder) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where the owner lives
            _empty(folder)
            os.rmdir(temporary / name)  # of a folder that is empty, whatever has the name now


def _empty(folder: int) -> None:
    """The lock file at last: without it a folder that is half removed would stay for ever."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name == _LOCK)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            with _opened(entry.name, os.O_DIRECTORY, within=folder) as inner:
                _empty(inner)
            os.rmdir(entry.name, dir_fd=folder)
        else:
            os.unlink(entry.name, dir_fd=folder)


@contextlib.contextmanager
def _opened(path: str | Path, flags: int, *, within: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
