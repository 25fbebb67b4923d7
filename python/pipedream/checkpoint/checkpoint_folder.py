"""Lists, finds and removes the checkpoints in a run's folder.

A checkpoint is complete if it has a manifest (manifest.py), which is written last. It is whole if it is
complete and no file has changed since. Torch-free; any thread of the process that owns the folder.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
from pathlib import Path

from pipedream.checkpoint.manifest import MANIFEST_NAME, Manifest, problems_of, read_manifest
from pipedream.common.errors import FileFormatError

__all__ = [
    "checkpoints_in",
    "find_checkpoint",
    "folder_of",
    "go_on_after",
    "is_complete",
    "is_pinned",
    "make_folder",
    "mark_of",
    "minibatch_of",
    "newest_whole",
    "pin",
    "remove_incomplete",
    "remove_old",
]

_NAME = re.compile(r"checkpoint-(\d{9,})\Z")
_PIN_NAME = "pinned"
_REMOVED = "removed-"
_DAMAGED = "damaged-"
_MARK = "mark-"


def folder_of(path: Path, minibatch: int) -> Path:
    """Returns the folder of the checkpoint before this minibatch, for example checkpoint-000000300."""
    return path / f"checkpoint-{minibatch:09}"


def checkpoints_in(path: Path) -> list[Path]:
    """Returns the folders of all checkpoints, complete or not. The newest minibatch comes last."""
    found: list[tuple[int, Path]] = []
    with contextlib.suppress(FileNotFoundError):
        for entry in path.iterdir():
            match = _NAME.match(entry.name)
            if match is not None and entry.is_dir():
                found.append((int(match.group(1)), entry))
    return [entry for _, entry in sorted(found)]


def is_complete(checkpoint: Path) -> bool:
    """Whether all parts of the checkpoint were written. It does not check whether files have changed
    since."""
    return (checkpoint / MANIFEST_NAME).is_file()


def newest_whole(path: Path) -> tuple[tuple[Path, Manifest] | None, list[str]]:
    """Returns the newest whole checkpoint with its manifest, and the reasons why newer checkpoints are not
    used."""
    unused: list[str] = []
    for checkpoint in reversed(checkpoints_in(path)):
        if not is_complete(checkpoint):
            unused.append(f"{checkpoint} is not complete: the run ended while writing it")
            continue
        try:
            manifest = read_manifest(checkpoint)
        except (FileFormatError, OSError) as error:
            unused.append(str(error))
            continue
        problems = problems_of(checkpoint, manifest)
        if not problems:
            return (checkpoint, manifest), unused
        unused += problems
    return None, unused


def find_checkpoint(path: Path) -> tuple[Path, Manifest, list[str]]:
    """Finds a checkpoint. The path names the checkpoint, or a folder in which the newest whole one is found.

    Returns the checkpoint, its manifest, and the reasons why newer checkpoints are not used. Raises
    ValueError if there is no whole checkpoint, or if the path names a checkpoint that is not whole."""
    if is_complete(path):
        manifest = read_manifest(path)
        problems = problems_of(path, manifest)
        if problems:
            raise ValueError(f"{problems[0]}: use another checkpoint of {path.parent}")
        return path, manifest, []
    if _NAME.match(path.name) and path.is_dir():
        raise ValueError(f"{path} is not complete: the run ended while writing it; use another one")
    if not path.is_dir():
        raise ValueError(f"{path} is no checkpoint and no folder of checkpoints")
    found, unused = newest_whole(path)
    if found is None:
        reason = f" ({unused[0]})" if unused else ""
        raise ValueError(f"{path} has no complete checkpoint{reason}")
    return *found, unused


def pin(checkpoint: Path) -> None:
    """Marks the checkpoint as pinned, so that remove_old() never removes it. Raises ValueError if the
    checkpoint is gone."""
    with contextlib.suppress(OSError):
        (checkpoint / _PIN_NAME).touch()
    # The check comes after the mark. So if _remove() has renamed the folder, either the mark is found there
    # or this check fails.
    if not is_complete(checkpoint):
        raise ValueError(
            f"{checkpoint} is gone, as `keep` newer ones are complete: give a larger keep to pin it in time"
        )


def is_pinned(checkpoint: Path) -> bool:
    return (checkpoint / _PIN_NAME).exists()


def remove_old(path: Path, keep: int) -> None:
    """Removes the checkpoints that are older than the newest `keep` complete ones. Pinned checkpoints
    stay."""
    complete = [checkpoint for checkpoint in checkpoints_in(path) if is_complete(checkpoint)]
    if len(complete) <= keep:
        return
    oldest_kept = complete[-keep]
    for checkpoint in checkpoints_in(path):
        if checkpoint == oldest_kept:
            return
        if not is_pinned(checkpoint):
            _remove(checkpoint, unless_pinned=True)


def make_folder(path: Path, mark: Path) -> None:
    """Makes the folder if it is missing, and the mark in it. Raises ValueError if the folder cannot be
    written, because otherwise a run would train for days and save nothing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise ValueError(
            f"checkpoints: {path} cannot be written on this machine ({error.strerror}): give another folder"
        ) from None


def mark_of(path: Path, name: str) -> Path:
    """Returns the path of an empty file. The process `name` makes the file to show that it can write into the
    folder."""
    return path / f"{_MARK}{name}"


def remove_incomplete(path: Path) -> None:
    """Removes incomplete checkpoints, and the files that an interrupted removal or start has left. Call it
    before a run writes into the folder, while no other process writes there."""
    for checkpoint in checkpoints_in(path):
        if not is_complete(checkpoint):
            _remove(checkpoint)
    for left in path.glob(f"{_REMOVED}*"):
        shutil.rmtree(left, ignore_errors=True)
    for mark in path.glob(f"{_MARK}*"):
        mark.unlink(missing_ok=True)


def go_on_after(checkpoint: Path, minibatch: int, path: Path) -> Path:
    """Prepares the folder `path` for a run that continues from the checkpoint and begins with `minibatch`.

    The run would overwrite the checkpoints of later minibatches, so they are renamed to damaged-..., where
    the user can still find them. If the run begins some minibatches before the checkpoint's minibatch, the
    checkpoint is renamed to the minibatch with which the run begins. Returns the checkpoint's path.
    """
    for other in checkpoints_in(path):
        if other != checkpoint and minibatch_of(other) > minibatch:
            other.rename(path / f"{_DAMAGED}{secrets.token_hex(4)}-{other.name}")
    if checkpoint.parent != path or minibatch_of(checkpoint) <= minibatch:
        return checkpoint
    renamed = folder_of(path, minibatch)
    if renamed.exists():
        _remove(renamed)
    return checkpoint.rename(renamed)


def minibatch_of(checkpoint: Path) -> int:
    """Returns the minibatch in the checkpoint's name; -1 if the name is not the name of a checkpoint."""
    match = _NAME.match(checkpoint.name)
    return -1 if match is None else int(match.group(1))


def _remove(checkpoint: Path, *, unless_pinned: bool = False) -> None:
    """Removes a checkpoint. Renames it first, so that no process finds a half removed checkpoint, or
    completes it during the removal. Files that cannot be removed stay until the next remove_incomplete().

    unless_pinned: renames the checkpoint back if it has been pinned meanwhile."""
    removed = checkpoint.with_name(f"{_REMOVED}{secrets.token_hex(4)}-{checkpoint.name}")
    with contextlib.suppress(OSError):
        checkpoint.rename(removed)
        if unless_pinned and is_pinned(removed):
            removed.rename(checkpoint)
            return
        shutil.rmtree(removed, ignore_errors=True)
