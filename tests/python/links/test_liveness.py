"""Tests the monitor that finds lost ranks by their signs of life, which it reads periodically. Also tests a
worker's pulse, a thread that shows that the interpreter runs.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from pipedream.links.liveness import LivenessMonitor, Pulse, Sign, sign_period_s

_TIMEOUT_S = 8.0
_PERIOD_S = sign_period_s(_TIMEOUT_S)


def _sign(count: int, phase: str = "opening links", *, peer_timeout_s: float = _TIMEOUT_S) -> Sign:
    return Sign(count, peer_timeout_s, phase)


def _observe(monitor: LivenessMonitor, signs: list[Sign], *, rank: int = 2, begin_s: float = 0.0) -> None:
    """Gives the monitor one sign per round. Rounds are one period apart."""
    for index, sign in enumerate(signs):
        monitor.observe({rank: sign}, begin_s + index * _PERIOD_S)


def test_there_are_eight_signs_in_a_timeout() -> None:
    assert _PERIOD_S == 1.0


def test_a_sign_is_read_as_it_was_written() -> None:
    for sign in (_sign(3), Sign(4, 0.5, "an é", is_done=True)):
        assert Sign.from_json(sign.to_json()) == sign
        assert Sign.from_json(sign.to_json().encode()) == sign


def test_a_rank_that_goes_on_is_not_lost() -> None:
    monitor = LivenessMonitor(_TIMEOUT_S)
    _observe(monitor, [_sign(round_index // 5) for round_index in range(100)])
    assert monitor.describe_lost() is None


def test_a_rank_that_is_silent_for_the_timeout_is_named_with_its_phase() -> None:
    monitor = LivenessMonitor(_TIMEOUT_S)
    _observe(monitor, [_sign(7)] * 9)  # the eight periods are not longer than the timeout
    assert monitor.describe_lost() is None
    monitor.observe({2: _sign(7)}, 9 * _PERIOD_S)
    assert monitor.describe_lost() == "rank 2 gave no sign of life for 8 s while opening links"


def test_a_rank_that_speaks_again_is_not_lost() -> None:
    monitor = LivenessMonitor(_TIMEOUT_S)
    _observe(monitor, [_sign(7)] * 20 + [_sign(8)])
    assert monitor.describe_lost() is None


def test_one_rank_alone_is_lost() -> None:
    monitor = LivenessMonitor(_TIMEOUT_S)
    for round_index in range(20):
        signs = {0: _sign(round_index), 1: _sign(1, "agreeing on the plan"), 3: _sign(-round_index)}
        monitor.observe(signs, round_index * _PERIOD_S)
    assert monitor.describe_lost() == "rank 1 gave no sign of life for 8 s while agreeing on the plan"


def test_a_rank_whose_links_are_open_may_be_silent() -> None:
    monitor = LivenessMonitor(_TIMEOUT_S)
    _observe(monitor, [_sign(1)] * 5 + [Sign(2, _TIMEOUT_S, "opening links", is_done=True)] * 20)
    assert monitor.describe_lost() is None


def test_nothing_follows_from_a_rank_that_has_not_joined() -> None:
    monitor = LivenessMonitor(_TIMEOUT_S)
    for round_index in range(100):
        monitor.observe({}, round_index * _PERIOD_S)
    monitor.observe({2: _sign(1)}, 100 * _PERIOD_S)
    assert monitor.describe_lost() is None


@pytest.mark.parametrize(("own_s", "theirs_s", "patience"), [(8.0, 80.0, "80 s"), (80.0, 8.0, "80 s")])
def test_the_longer_timeout_of_the_two_holds(own_s: float, theirs_s: float, patience: str) -> None:
    # Ranks with different timeouts must get the error about their arguments. So no rank may count as lost
    # before.
    monitor = LivenessMonitor(own_s)
    for round_index in range(80):
        monitor.observe({0: _sign(1, peer_timeout_s=theirs_s)}, float(round_index))
    assert monitor.describe_lost() is None
    for round_index in range(80, 100):
        monitor.observe({0: _sign(1, peer_timeout_s=theirs_s)}, float(round_index))
    assert f"for {patience} while" in str(monitor.describe_lost())


def test_a_round_that_comes_late_is_not_held_against_the_others() -> None:
    # All ranks were stopped, for example by Ctrl-Z, and have just been continued. This rank is the first to
    # check, before the others give signs.
    monitor = LivenessMonitor(_TIMEOUT_S)
    _observe(monitor, [_sign(1), _sign(2)])
    monitor.observe({2: _sign(2)}, 3600.0)
    assert monitor.describe_lost() is None
    _observe(monitor, [_sign(2)] * 8, begin_s=3600.0 + _PERIOD_S)
    assert monitor.describe_lost() is not None


_DEADLINE_S = 60.0


class Core:
    """Counts pulses. The fourth one sets `reached`."""

    def __init__(self) -> None:
        self.num_pulses = 0
        self.threads: set[int] = set()
        self.reached = threading.Event()

    def pulse(self) -> None:
        self.num_pulses += 1
        self.threads.add(threading.get_ident())
        if self.num_pulses == 4:
            self.reached.set()


def _start(core: Any, peer_timeout_s: float) -> Pulse:
    return Pulse(core, peer_timeout_s)


def test_the_pulse_beats_by_itself_until_it_is_stopped() -> None:
    core = Core()
    with _start(core, 0.016):
        assert core.reached.wait(_DEADLINE_S)
    assert len(core.threads) == 2  # the caller gives the first pulse, so that no link opens without one
    assert not core.threads & {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}


def test_the_pulse_has_beaten_once_before_anything_is_waited_for_and_may_be_stopped_twice() -> None:
    core = Core()
    pulse = _start(core, 1e6)
    assert core.num_pulses == 1
    pulse.stop()
    pulse.stop()
    assert core.num_pulses == 1
