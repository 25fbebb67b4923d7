"""Times at which a device did the user's work of each item, by device events, told after its completion.

The host only enqueues, so its clock would tell how long launching takes. An event before the user's first
call of an item and one after the last are read when the device has passed both; nothing here waits for the
device while the pipeline runs. Events tell distances: each is placed on the host's clock by the one before.

    host    |launch 0|launch 1|             tell 0 ...
    device     b---- 0 ----e b------ 1 ------e

Owned by the worker's compute thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from pipedream import _core
from pipedream.stage.user_code import UserCode

__all__ = ["DeviceClock", "TimingEvent", "UserCodeOnDevice", "make_device_clock", "make_user_code"]

_Result = TypeVar("_Result")


class TimingEvent(Protocol):  # of torch.cuda.Event(enable_timing=True)
    def record(self) -> Any: ...
    def query(self) -> bool: ...
    def synchronize(self) -> Any: ...
    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to the other."""


@dataclass
class _Item:
    """None: nothing of the user's was called in it."""

    recorded_ns: int
    """On the host: the device cannot have been there before."""
    begin: TimingEvent | None
    end: TimingEvent | None


class DeviceClock:
    """Tells, in their order, when the device worked on the items that were completed."""

    def __init__(
        self,
        make_event: Callable[[], TimingEvent],
        tell: Callable[[int, int], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """tell: takes (began_ns, ended_ns) of the oldest item that it has not been told of. The device has
        nothing to do now."""
        self._make_event = make_event
        self._tell = tell
        self._now_ns = now_ns
        self._free: list[TimingEvent] = []
        self._doing = _Item(0, None, None)
        self._pending: deque[_Item] = (
            deque()
        )  # no more than the schedule has in flight, and what waits for it
        self._anchor = make_event()  # the latest that was passed, and when
        self._anchor.record()
        self._anchor.synchronize()
        self._anchor_ns = now_ns()

    def begin(self) -> None:
        """Begins a time, before a call of user code."""
        if self._doing.begin is None:
            self._doing.begin = self._event()
            self._doing.recorded_ns = self._now_ns()
            self._doing.begin.record()

    def end(self) -> None:
        """Ends the time, after the call of user code."""
        if self._doing.end is None:
            self._doing.end = self._event()
        self._doing.end.record()

    def complete(self) -> None:
        """The calls so far are those of an item that is being completed."""
        if self._doing.begin is None:
            self._doing.recorded_ns = self._now_ns()
        self._pending.append(self._doing)
        self._doing = _Item(0, None, None)

    def drop(self) -> None:
        """The calls so far are those of no item."""
        self._release(self._doing)
        self._doing = _Item(0, None, None)

    def tell_done(self) -> None:
        """Tells of the items that the device is done with. Waits for none."""
        while self._pending and _is_done(self._pending[0]):
            self._place(self._pending.popleft())

    def finish(self) -> None:
        """Tells of all items, once the device is done with them."""
        for item in self._pending:
            if item.end is not None:
                item.end.synchronize()
        self.tell_done()

    def _place(self, item: _Item) -> None:
        began_ns = ended_ns = max(self._anchor_ns, item.recorded_ns)
        if item.begin is not None and item.end is not None:
            # The two clocks drift apart; that nothing is done before it is asked for, or seen before it is
            # done, holds them together.
            duration_ns = _ns(item.begin, item.end)
            earliest_ns, latest_ns = began_ns, max(self._now_ns() - duration_ns, began_ns)
            began_ns = min(max(self._anchor_ns + _ns(self._anchor, item.begin), earliest_ns), latest_ns)
            ended_ns = began_ns + duration_ns
            self._free += [self._anchor, item.begin]
            self._anchor = item.end
        self._anchor_ns = ended_ns
        self._tell(began_ns, ended_ns)

    def _event(self) -> TimingEvent:
        return self._free.pop() if self._free else self._make_event()

    def _release(self, item: _Item) -> None:
        self._free += [event for event in (item.begin, item.end) if event is not None]


class UserCodeOnDevice(UserCode):
    """Times the user's code by the device."""

    def __init__(self, where: Callable[[str], str], clock: DeviceClock) -> None:
        super().__init__(where)
        self._clock = clock

    def run(self, what: str, function: Callable[..., _Result], *arguments: Any) -> _Result:
        self._clock.begin()
        try:
            return super().run(what, function, *arguments)
        finally:
            self._clock.end()

    def take_elapsed_ns(self) -> int:
        super().take_elapsed_ns()
        self._clock.complete()
        return _core.COMPUTED_LATER

    def drop_elapsed(self) -> None:
        super().drop_elapsed()
        self._clock.drop()


def make_device_clock(device: torch.device, tell: Callable[[int, int], None]) -> DeviceClock | None:
    """None on the host, whose own clock tells how long the user's code takes."""
    return DeviceClock(_make_timing_event, tell) if device.type == "cuda" else None


def make_user_code(where: Callable[[str], str], clock: DeviceClock | None) -> UserCode:
    return UserCode(where) if clock is None else UserCodeOnDevice(where, clock)


def _make_timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


def _is_done(item: _Item) -> bool:
    return item.end is None or item.end.query()


def _ns(begin: TimingEvent, end: TimingEvent) -> int:
    return max(round(begin.elapsed_time(end) * 1e6), 0)
