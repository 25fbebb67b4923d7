"""The pulse of a worker."""

from __future__ import annotations

import threading
from typing import Any

from pipedream.links.pulse import Pulse

_DEADLINE_S = 60.0


class Core:
    """Counts pulses; `reached` is set by the fourth."""

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
    assert len(core.threads) == 2  # the first by the maker, so that no link opens without one
    assert not core.threads & {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}


def test_the_pulse_has_beaten_once_before_anything_is_waited_for_and_may_be_stopped_twice() -> None:
    core = Core()
    pulse = _start(core, 1e6)
    assert core.num_pulses == 1
    pulse.stop()
    pulse.stop()
    assert core.num_pulses == 1
