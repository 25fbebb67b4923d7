"""Tests that a failing worker's error is read only when it is written completely."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pipedream.common.errors import PipelineError
from pipedream.worker.failure import is_explained, traceback_of, write_error

_FAILED = {1: 1}  # exit codes by rank


def test_an_error_that_is_half_written_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller reads the folder when any worker ends. It must not find a half-written file of another
    worker.
    """
    write_text, seen = Path.write_text, []

    def slow(path: Path, text: str, encoding: str | None = None) -> int:
        write_text(path, text[: len(text) // 2], encoding)
        seen.append(traceback_of(tmp_path))
        return write_text(path, text, encoding)

    monkeypatch.setattr(Path, "write_text", slow)
    write_error(tmp_path, 1, PipelineError("stage 1 failed"))
    assert seen == [None]
    assert is_explained(_FAILED, tmp_path)
    (record,) = tmp_path.glob("error-*")
    assert json.loads(record.read_bytes())["message"] == "stage 1 failed"
