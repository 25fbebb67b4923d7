"""The argument `checkpoints` of run() says where and how often a run saves checkpoints, and from which
checkpoint it continues. Torch-free; any thread."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipedream.checkpoint.checkpoint_folder import (
    checkpoints_in,
    find_checkpoint,
    is_complete,
    minibatch_of,
    newest_whole,
)
from pipedream.checkpoint.manifest import Manifest
from pipedream.common.checks import check_count, is_number, is_whole

__all__ = ["Checkpoints", "Found", "checkpoints_of"]

_DURATION = re.compile(r"(\d+(?:\.\d+)?) *(s|min|h)\Z")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_GRACE_MAX_S = 3600.0


@dataclass(frozen=True)
class Found:
    """The checkpoint that a run continues from."""

    checkpoint: Path
    manifest: Manifest
    unused: tuple[str, ...]
    """A line for each newer checkpoint that is not whole."""


@dataclass(frozen=True)
class Checkpoints:
    """The folder into which a run saves checkpoints, and how often.

    path: a folder, which is made if it is missing. Several machines must share it.
    every: "epoch", a number of minibatches, or a time such as "10min". The run saves only where a round of
        updates ends at every stage, which may be some minibatches later.
    keep: the number of newest checkpoints that stay. Older ones are removed, except those that a callback has
        pinned.
    resume: True continues from the newest whole checkpoint in the folder, if there is one. The path of a
        checkpoint continues from that checkpoint, the path of another folder from its newest whole one. False
        refuses a folder that has checkpoints.
    grace: seconds between SIGTERM and the end of the process, in which the run saves once more.
    """

    path: str | os.PathLike[str]
    every: str | int = "epoch"
    keep: int = 3
    resume: bool | str | os.PathLike[str] = True
    grace: float = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path):
            raise TypeError(f"checkpoints: path is {self.path!r}: give the path of a folder")
        self._check_every()
        check_count("checkpoints: keep", self.keep)
        if not isinstance(self.resume, (bool, str, os.PathLike)):
            raise TypeError(
                f"checkpoints: resume is {self.resume!r}: use True, False or the path of a checkpoint"
            )
        if not is_number(self.grace) or not 0 <= self.grace <= _GRACE_MAX_S:
            raise ValueError(
                f"checkpoints: grace is {self.grace!r}: give seconds, from 0 to {_GRACE_MAX_S:.0f}"
            )

    def _check_every(self) -> None:
        is_time = isinstance(self.every, str) and _DURATION.match(self.every) is not None
        is_number_of_minibatches = is_whole(self.every) and int(self.every) >= 1
        if self.every != "epoch" and not is_number_of_minibatches and not (is_time and self.seconds):
            raise ValueError(
                f"checkpoints: every is {self.every!r}: use 'epoch', a number of minibatches, or a time such"
                " as '10min'"
            )

    @property
    def folder(self) -> Path:
        return Path(os.path.abspath(self.path))

    @property
    def minibatches(self) -> int | None:
        """The value of `every` if it is a number of minibatches, otherwise None."""
        return self.every if isinstance(self.every, int) else None

    @property
    def seconds(self) -> float | None:
        """The value of `every` in seconds if it is a time, otherwise None."""
        match = _DURATION.match(self.every) if isinstance(self.every, str) else None
        return None if match is None else float(match.group(1)) * _SECONDS[match.group(2)]

    def find(self) -> Found | None:
        """Returns the checkpoint to continue from, or None to start from the beginning.

        Raises ValueError if `resume` is False and there are checkpoints, if `resume` names a checkpoint that
        is not whole or is older than others in the folder, or if there are complete checkpoints but no whole
        one."""
        if self.resume is False:
            present = checkpoints_in(self.folder)
            if present:
                raise ValueError(
                    f"checkpoints: resume is False, and {self.folder} has {present[-1].name}: give another"
                    " folder, remove it, or leave resume out to continue"
                )
            return None
        if self.resume is True:
            found, unused = newest_whole(self.folder)
            if found is None and any(map(is_complete, checkpoints_in(self.folder))):
                raise ValueError(
                    f"checkpoints: no checkpoint of {self.folder} is whole ({unused[0]}): move them away to"
                    " start from the beginning"
                )
            return None if found is None else Found(*found, tuple(unused))
        return self._find_named(Path(os.path.abspath(self.resume)))

    def _find_named(self, named: Path) -> Found:
        checkpoint, manifest, unused = find_checkpoint(named)
        present = [other for other in checkpoints_in(self.folder) if is_complete(other)]
        reached = manifest.header.minibatch
        newer = [other for other in present if minibatch_of(other) >= reached and other != checkpoint]
        if newer:
            raise ValueError(
                f"checkpoints: resume is {checkpoint.name}, and {self.folder} has newer ones, as"
                f" {newer[-1].name}, which this run would write over: give another folder as path, or leave"
                " resume out to continue from the newest"
            )
        return Found(checkpoint, manifest, tuple(unused))


def checkpoints_of(value: Any) -> Checkpoints | None:
    """Returns the argument `checkpoints` of run() as Checkpoints. A plain path means Checkpoints(path)."""
    if value is None or isinstance(value, Checkpoints):
        return value
    if isinstance(value, (str, os.PathLike)):
        return Checkpoints(value)
    raise TypeError(
        f"checkpoints is a {type(value).__name__}: give the path of a folder, or"
        " pipedream.Checkpoints(path, every=...)"
    )
