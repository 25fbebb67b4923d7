"""Stores figures of minibatch 0 in the run's folder. Local workers write the figures. The caller, which is
the process that called run(), compares them with its own figures (launch/first_loss.py).

    first-data.json          the fingerprint of the minibatch, written by the last stage
    first-gradients-S.json   the norm of stage S's gradients, if PIPEDREAM_CHECK=1 asks for it

The loss of minibatch 0 is on the status board (status.py). Torch-free; each file has one writer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from pipedream.common.guard import write_record

__all__ = ["CHECK_VARIABLE", "FirstFigures", "compares_gradients", "compares_losses"]

CHECK_VARIABLE = "PIPEDREAM_CHECK"


def compares_losses() -> bool:
    return _wanted() != "0"


def compares_gradients() -> bool:
    return _wanted() == "1"


def _wanted() -> str:
    wanted = os.environ.get(CHECK_VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise ValueError(
            f"{CHECK_VARIABLE} is {wanted!r}: 1 compares gradients too, 0 compares nothing, and without it"
            " losses are compared"
        )
    return wanted


class FirstFigures:
    """The files of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write_fingerprint(self, fingerprint: int) -> None:
        write_record(self._data_path, {"fingerprint": fingerprint})

    def write_gradient_norm(self, stage: int, norm: float) -> None:
        write_record(self._gradients_path(stage), {"norm": norm})

    def fingerprint(self) -> int | None:
        """Returns the fingerprint of minibatch 0; None if it has not been written yet."""
        return int(_read(self._data_path)["fingerprint"]) if self._data_path.exists() else None

    def gradient_norms(self, num_stages: int) -> list[float] | None:
        """Returns the norm of each stage's gradients; None if a stage has not written its norm yet."""
        paths = [self._gradients_path(stage) for stage in range(num_stages)]
        return [_read(path)["norm"] for path in paths] if all(map(Path.exists, paths)) else None

    @property
    def _data_path(self) -> Path:
        return self._folder / "first-data.json"

    def _gradients_path(self, stage: int) -> Path:
        return self._folder / f"first-gradients-{stage}.json"


def _read(path: Path) -> dict[str, float]:
    content: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return content
