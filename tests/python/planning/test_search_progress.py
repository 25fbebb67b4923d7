"""Tests that a long search shows its progress, both on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from pipedream.planning import partitioner
from pipedream.planning.partitioner import SearchProgress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(partitioner, "time", clock)
    return clock


def _search(clock: _Clock, file: io.StringIO, *, step_s: float, enabled: bool = True) -> str:
    with SearchProgress(enabled=enabled, file=file) as shown:
        for count in range(1, 21):
            clock.now_s += step_s
            shown.advance(count, 400, 12.5)
    return file.getvalue()


def test_a_search_that_is_over_at_once_says_nothing(clock: _Clock) -> None:
    assert _search(clock, io.StringIO(), step_s=0.04) == ""
    assert _search(clock, _Terminal(), step_s=0.04) == ""
    assert _search(clock, io.StringIO(), step_s=1.0, enabled=False) == ""


def test_a_file_has_a_line_every_few_seconds(clock: _Clock) -> None:
    lines = _search(clock, io.StringIO(), step_s=1.0).splitlines()
    assert lines[0] == "planning: 1 of at most 400 plans simulated, 12.500 ms per minibatch"
    assert [line.split()[1] for line in lines] == ["1", "6", "11", "16"]


def test_a_terminal_has_one_line_that_is_gone_at_the_end(clock: _Clock) -> None:
    text = _search(clock, _Terminal(), step_s=1.0)
    assert "\n" not in text
    assert text.count("planning: ") == 20
    assert text.endswith("\r\x1b[K")
