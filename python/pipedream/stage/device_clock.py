"""The device clock finds out when a device ran the user's code of each work item.

The host's clock would only measure how long the host takes to launch work on the device. So the device
records one event before the item's first call of user code, and another event after the last call. Both
events are read once the device has passed them; nothing waits for the device while the pipeline runs. Two
events give only the time between them. So the clock adds the time since the previous item's last event to the
host time of that event.

    host    |launch 0|launch 1|             tell 0 ...
    device     b---- 0 ----e b------ 1 ------e          b, e: the events of an item

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


class TimingEvent(Protocol):  # the interface of torch.cuda.Event(enable_timing=True)
    def record(self) -> Any: ...
    def query(self) -> bool: ...
    def synchronize(self) -> Any: ...
    def elapsed_time(self, end_event: Any) -> float:
        """Returns the milliseconds from this event to the other."""


@dataclass
class _Item:
    """One work item. Its events are None if the item called no user code."""

    recorded_ns: int
    """The host's time when the first event was recorded, or when an item without events was completed. The
    device did not begin the item earlier."""
    begin: TimingEvent | None
    end: TimingEvent | None


class DeviceClock:
    """Reports when the device worked on each completed work item, in the order of completion."""

    def __init__(
        self,
        make_event: Callable[[], TimingEvent],
        tell: Callable[[int, int], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """tell: called as tell(began_ns, ended_ns) for each item in order. Construct the clock while the
        device is idle.
        """
        self._make_event = make_event
        self._tell = tell
        self._now_ns = now_ns
        self._free: list[TimingEvent] = []
        self._doing = _Item(0, None, None)
        self._pending: deque[_Item] = deque()  # completed items that the device may not have done yet
        self._anchor = make_event()  # the latest event that the device has passed
        self._anchor.record()
        self._anchor.synchronize()
        self._anchor_ns = now_ns()

    def begin(self) -> None:
        """Records the item's first event, before a call of user code."""
        if self._doing.begin is None:
            self._doing.begin = self._event()
            self._doing.recorded_ns = self._now_ns()
            self._doing.begin.record()

    def end(self) -> None:
        """Records the item's last event, after a call of user code."""
        if self._doing.end is None:
            self._doing.end = self._event()
        self._doing.end.record()

    def complete(self) -> None:
        """Ends an item. The calls of user code since the last item belong to it."""
        if self._doing.begin is None:
            self._doing.recorded_ns = self._now_ns()
        self._pending.append(self._doing)
        self._doing = _Item(0, None, None)

    def drop(self) -> None:
        """Forgets the calls since the last item, because they belong to no item."""
        self._release(self._doing)
        self._doing = _Item(0, None, None)

    def tell_done(self) -> None:
        """Reports the items that the device has finished. Does not wait."""
        while self._pending and _is_done(self._pending[0]):
            self._place(self._pending.popleft())

    def finish(self) -> None:
        """Waits until the device has finished all items, and reports them."""
        for item in self._pending:
            if item.end is not None:
                item.end.synchronize()
        self.tell_done()

    def _place(self, item: _Item) -> None:
        began_ns = ended_ns = max(self._anchor_ns, item.recorded_ns)
        if item.begin is not None and item.end is not None:
            # The clocks of host and device drift apart, so two bounds correct the result. An item cannot
            # begin before its first event was recorded. It cannot end after it was seen to be done.
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
    """Makes the clock of a GPU. Returns None for the host, where the host's own clock is enough."""
    return DeviceClock(_make_timing_event, tell) if device.type == "cuda" else None


def make_user_code(where: Callable[[str], str], clock: DeviceClock | None) -> UserCode:
    return UserCode(where) if clock is None else UserCodeOnDevice(where, clock)


def _make_timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


def _is_done(item: _Item) -> bool:
    return item.end is None or item.end.query()


def _ns(begin: TimingEvent, end: TimingEvent) -> int:
    return max(round(begin.elapsed_time(end) * 1e6), 0)
