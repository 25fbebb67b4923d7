"""Tests device_clock.py: events of the device tell when each item was done, in the host's time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from pipedream import PipelineError, _core
from pipedream.stage.device_clock import DeviceClock, UserCodeOnDevice

_MS = 1_000_000


class _Device:
    """Stands in for a GPU with a clock of its own. Enqueued work is done when the test says so."""

    def __init__(self) -> None:
        self.host_ns = 1_000 * _MS
        self.rate = 1.0  # rate of the device's clock relative to the host's
        self.offset_ms = 77.0
        self.queue: list[tuple[_Event, float] | float] = []
        self.done_ns = float(self.host_ns)
        self.told: list[tuple[int, int]] = []

    def now_ns(self) -> int:
        return self.host_ns

    def enqueue(self, num_ms: float) -> None:
        self.queue.append(num_ms)

    def pass_time(self, num_ms: float) -> None:
        """Lets time pass on the host. Meanwhile the device does what it can of its queue."""
        until_ns = self.host_ns + num_ms * _MS
        while self.queue:
            head = self.queue[0]
            if not isinstance(head, float):
                event, recorded_ns = head
                self.done_ns = max(self.done_ns, recorded_ns)
                if recorded_ns == event.recorded_ns:  # otherwise the event was recorded again later
                    event.passed_ns = self.done_ns
            elif self.done_ns + head * _MS <= until_ns:
                self.done_ns += head * _MS
            else:
                break
            self.queue.pop(0)
        self.host_ns = int(until_ns)

    def clock(self) -> DeviceClock:
        return DeviceClock(lambda: _Event(self), lambda *times: self.told.append(times), self.now_ns)


@dataclass(eq=False)
class _Event:
    device: _Device
    recorded_ns: float = 0.0
    passed_ns: float | None = None

    def record(self) -> None:
        self.recorded_ns, self.passed_ns = float(self.device.host_ns), None
        self.device.queue.append((self, self.recorded_ns))
        self.device.pass_time(0)

    def query(self) -> bool:
        return self.passed_ns is not None

    def synchronize(self) -> None:
        while not self.query():
            self.device.pass_time(1)

    def elapsed_time(self, end_event: _Event) -> float:
        assert self.passed_ns is not None and end_event.passed_ns is not None, "not done yet"
        return (end_event.passed_ns - self.passed_ns) / _MS * self.device.rate


def _run_item(clock: DeviceClock, device: _Device, *parts_ms: float, launch_ms: float = 1) -> None:
    """Runs an item of several calls. Each call enqueues work of the given milliseconds."""
    for num_ms in parts_ms:
        clock.begin()
        device.enqueue(num_ms)
        device.pass_time(launch_ms)
        clock.end()
    clock.complete()


def test_items_are_told_when_the_device_is_done_with_them_and_not_before() -> None:
    device = _Device()
    clock = device.clock()
    start_ns = device.host_ns
    _run_item(clock, device, 10.0)
    _run_item(clock, device, 5.0, 5.0)
    clock.tell_done()
    assert device.told == []  # the host is 3 ms ahead, and the device still computes item 0
    device.pass_time(8)
    clock.tell_done()
    assert device.told == [(start_ns, start_ns + 10 * _MS)]
    clock.finish()
    # The device did the items back to back, although the host launched the second one only at 1 to 3 ms.
    assert device.told[1:] == [(start_ns + 10 * _MS, start_ns + 20 * _MS)]


def test_an_item_begins_when_its_own_work_does_and_not_when_it_was_asked_for() -> None:
    device = _Device()
    clock = device.clock()
    _run_item(clock, device, 2.0)
    device.pass_time(50)
    began_ns = device.host_ns
    _run_item(clock, device, 3.0)
    device.pass_time(10)
    clock.tell_done()
    (_, (second_began, second_ended)) = device.told
    # The device was idle and had to wait for the launch, so the time of the launch counts.
    assert second_began == began_ns
    assert second_ended == began_ns + 3 * _MS


def test_an_item_without_work_keeps_its_place() -> None:
    device = _Device()
    clock = device.clock()
    _run_item(clock, device, 10.0)
    clock.complete()
    clock.begin()
    clock.end()
    clock.drop()  # stands for a read that found no more data
    _run_item(clock, device, 4.0)
    clock.tell_done()
    assert device.told == []
    clock.finish()
    first, empty, last = device.told
    assert empty == (first[1], first[1])
    assert last == (first[1], first[1] + 4 * _MS)


@pytest.mark.parametrize("rate", [0.9, 1.1])
def test_clocks_that_drift_apart_are_held_together(rate: float) -> None:
    device = _Device()
    clock = device.clock()
    device.rate = rate
    for _ in range(2000):
        _run_item(clock, device, 1.0)
        device.pass_time(9)
        clock.tell_done()
    # Without the correction the times would be wrong by almost 2 s. With it they are wrong by at most the
    # time from the end of the work until tell_done().
    began_ns, ended_ns = device.told[-1]
    assert device.host_ns - 10 * _MS <= began_ns < ended_ns <= device.host_ns
    assert all(earlier[1] <= later[0] for earlier, later in zip(device.told, device.told[1:], strict=False))


def test_events_are_used_again() -> None:
    device = _Device()
    made: list[_Event] = []

    def make_event() -> _Event:
        made.append(_Event(device))
        return made[-1]

    clock = DeviceClock(make_event, lambda *_: None, device.now_ns)
    for _ in range(100):
        _run_item(clock, device, 1.0)
        device.pass_time(2)
        clock.tell_done()
    assert len(made) <= 5


def test_the_users_calls_of_an_item_are_timed_by_the_device_also_where_one_fails() -> None:
    device = _Device()
    user = UserCodeOnDevice(lambda what: f"stage 1 failed in {what}", device.clock())
    assert user.run("forward", lambda: device.enqueue(6.0)) is None
    with pytest.raises(PipelineError, match="stage 1 failed in loss_fn: ZeroDivisionError"):
        user.run("loss_fn", lambda: 1 // 0)
    assert user.take_elapsed_ns() == _core.COMPUTED_LATER
    user._clock.finish()
    ((began_ns, ended_ns),) = device.told
    assert ended_ns - began_ns == 6 * _MS
