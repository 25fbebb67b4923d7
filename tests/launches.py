"""Lets run() end before it starts workers, for tests of its options."""

from __future__ import annotations

from typing import Any

import pytest
from pipedream.launch import runner
from pipedream.stage.job import JobOptions


class Launched(Exception):  # noqa: N818 (no error)
    """Raised instead of launching workers."""


def note_launches(monkeypatch: pytest.MonkeyPatch) -> list[JobOptions]:
    """Collects the options of each later run(), which raises Launched instead of launching workers."""
    noted: list[JobOptions] = []

    def launch(model: Any, data: Any, options: JobOptions, *others: Any) -> None:
        noted.append(options)
        raise Launched

    monkeypatch.setattr(runner, "run_locally", launch)
    return noted
