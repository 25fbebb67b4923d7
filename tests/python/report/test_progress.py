"""Tests the live display, which is a bar on a terminal and plain lines elsewhere."""

from __future__ import annotations

import io
import re

import pytest
from pipedream import _core
from pipedream.report import progress
from pipedream.report.progress import RunProgress

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Clock:
    """Replaces time.monotonic. Tests set its time."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def _progress(file: io.StringIO, *, enabled: bool = True, num_minibatches: int | None = 30) -> RunProgress:
    schedule = _core.ScheduleOptions(in_flight=[2, 1])
    return RunProgress(
        enabled=enabled, num_minibatches=num_minibatches, num_epochs=3, schedule=schedule, file=file
    )


def _train(shown: RunProgress, clock: _Clock, num_minibatches: int = 15) -> None:
    """Reports minibatches of 8 samples that take a second each."""
    with shown:
        for minibatch in range(num_minibatches):
            clock.now_s += 1.0
            shown.advance(minibatch, minibatch // 10, 1 / (minibatch + 1), 8)


def test_off_a_terminal_a_line_comes_every_five_seconds_and_one_at_the_end(clock: _Clock) -> None:
    file = io.StringIO()
    _train(_progress(file), clock, 12)
    assert file.getvalue().splitlines() == [
        "epoch 1/3, minibatch 5/30, loss 0.2, 8 samples/s",
        "epoch 1/3, minibatch 10/30, loss 0.1, 8 samples/s",
        "epoch 2/3, minibatch 12/30, loss 0.08333, 8 samples/s",
    ]


def test_nothing_is_said_twice_or_of_nothing(clock: _Clock) -> None:
    file = io.StringIO()
    _train(_progress(file, num_minibatches=None), clock, 5)
    assert file.getvalue() == "epoch 1/3, minibatch 5, loss 0.2, 8 samples/s\n"
    _train(_progress(nothing := io.StringIO()), clock, 0)
    assert nothing.getvalue() == ""


def test_the_rate_is_that_of_the_latest_seconds(clock: _Clock) -> None:
    file = io.StringIO()
    with (shown := _progress(file)):
        for minibatch, (seconds, samples) in enumerate([(10, 100), (5, 100), (5, 200), (5, 200)]):
            clock.now_s += seconds
            shown.advance(minibatch, 0, 1.0, samples)
    rates = [line.rpartition(", ")[2] for line in file.getvalue().splitlines()]
    assert rates == ["10 samples/s", "13.33 samples/s", "30 samples/s", "40 samples/s"]


@pytest.mark.parametrize("file", [io.StringIO(), _Terminal()], ids=["lines", "bar"])
def test_progress_that_is_off_shows_nothing(clock: _Clock, file: io.StringIO) -> None:
    _train(_progress(file, enabled=False), clock)
    assert file.getvalue() == ""


def _last_line_on_a_terminal(clock: _Clock, monkeypatch: pytest.MonkeyPatch, columns: int) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    _train(_progress(file := _Terminal()), clock)
    return [line for line in re.split(r"[\r\n]+", _CONTROL.sub("", file.getvalue())) if line][-1]


def test_the_bar_has_room_on_a_terminal_of_80_columns(clock: _Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    line = _last_line_on_a_terminal(clock, monkeypatch, 80)
    assert len(line.rstrip()) <= 80
    assert line.count("━") + line.count("╸") + line.count("╺") >= 15
    for part in ("epoch 2/3", "15/30", "loss 0.06667", "8 samples/s"):
        assert part in line
    assert "late" not in line


def test_a_wide_terminal_also_says_how_late_gradients_are(
    clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "gradients 1 update late" in _last_line_on_a_terminal(clock, monkeypatch, 120)


def test_a_dumb_terminal_gets_lines(clock: _Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    _train(_progress(file := _Terminal()), clock, 5)
    assert file.getvalue() == "epoch 1/3, minibatch 5/30, loss 0.2, 8 samples/s\n"


def test_what_is_printed_into_a_file_meanwhile_goes_there(
    clock: _Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with _progress(file := _Terminal()):
        print("for the file")
    assert capsys.readouterr().out == "for the file\n"
    assert "for the file" not in file.getvalue()
