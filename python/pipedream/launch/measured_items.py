"""The work items of a calibration's runs, brought to what they take beside others and after no wait. Pure;
any thread.

A work item lasts from when its input is there until the next one is asked for; of that compute is the user's
code and the rest the runtime's own. Each is brought to the speed of as many workers at work as the machine
has cores (shared_cores.py): what was done alone counts more. And to a worker that has not waited (waking.py).
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipedream.planning.waking import Waking, waking_share
from pipedream.report.result import RunResult, WorkSpan

__all__ = [
    "Item",
    "Items",
    "Key",
    "Standard",
    "begin_ns",
    "kept",
    "means",
    "pooled",
    "times_alone",
]

_DISCARDED_SHARE = 0.2  # of a run's items: warm-up, and what memory is measured in
_SHARE_MIN = 0.05  # of the time: less says nothing of how workers slow each other
_WAKING_SHARE_MAX = 0.75  # of an item: what it does itself is not nothing


class Item(NamedTuple):
    """Milliseconds."""

    compute_ms: float
    own_ms: float
    waited_ms: float = 0.0
    """By its worker since the last item of its kind began."""

    @property
    def work_ms(self) -> float:
        return self.compute_ms + self.own_ms


class Key(NamedTuple):
    worker: int
    kind: str
    is_first: bool
    """Whether it is the first of its minibatch's microbatches."""


Items = Mapping[Key, Sequence[Item]]
_SpeedOf = Callable[[int], float]
"""By how many workers are at work."""


@dataclass(frozen=True)
class Standard:
    """The standard that items are brought to."""

    speed_of: _SpeedOf = lambda at_work: 1.0
    wakings: Sequence[Waking] = ()
    whole_ms: Mapping[Key, Item] = field(default_factory=dict)
    """The time that whole items take, for items that are cut; waking has shares of it."""

    def of(self, key: Key, item: Item, speed: float) -> Item:
        share = waking_share(self.wakings, key.kind, item.waited_ms)
        whole = self.whole_ms.get(key._replace(is_first=True))
        if whole is None:
            awake = 1 / (1 + share)
        else:
            awake = 1 - min(share * whole.work_ms / max(item.work_ms * speed, 1e-9), _WAKING_SHARE_MAX)
        return Item(item.compute_ms * speed * awake, item.own_ms * speed * awake, item.waited_ms)


def kept(spans: Sequence[WorkSpan]) -> Iterator[tuple[WorkSpan, int]]:
    """Each with when the next one was asked for."""
    for span, following in itertools.pairwise(spans[int(len(spans) * _DISCARDED_SHARE) :]):
        yield span, following.asked_ns


def begin_ns(span: WorkSpan) -> int:
    return span.asked_ns + span.wait_ns


def pooled(results: Iterable[RunResult], standard: Standard) -> Items:
    items: dict[Key, list[Item]] = {}
    for result in results:
        speeds = _Speeds(result, standard.speed_of)
        for worker, spans in enumerate(result.spans):
            waited_ms = _waited_ms(spans)
            for span, end_ns in kept(spans):
                compute_ms = span.compute_ns / 1e6
                own_ms = max(0.0, (end_ns - begin_ns(span)) / 1e6 - compute_ms)
                key = Key(worker, span.kind, span.microbatch == 0)
                item = Item(compute_ms, own_ms, waited_ms[id(span)])
                speed = speeds.mean(begin_ns(span), end_ns)
                items.setdefault(key, []).append(standard.of(key, item, speed))
    return items


def means(items: Items) -> Mapping[Key, Item]:
    """Plain ones: a stall now and then is part of what an item takes."""
    return {
        key: Item(*(statistics.fmean(column) for column in zip(*rows, strict=True)))
        for key, rows in items.items()
    }


def times_alone(
    together: Sequence[RunResult], in_turn: Sequence[RunResult], wakings: Sequence[Waking] = ()
) -> float:
    """How many times as fast workers are while the others wait: items of the same stages both ways. Of those
    together a part was alone, too. wakings: without what these cost."""
    beside, alone = (means(pooled(results, Standard(wakings=wakings))) for results in (together, in_turn))
    kinds = [key for key in alone if key in beside]
    if len({key.worker for key in kinds}) < 2:
        return 1.0
    slower = sum(beside[key].work_ms for key in kinds) / sum(alone[key].work_ms for key in kinds)
    return max(1.0, 1 + (slower - 1) / statistics.fmean(map(_share_together, together)))


def _waited_ms(spans: Sequence[WorkSpan]) -> dict[int, float]:
    """By span, as Item has it."""
    waited_ns = 0
    waited_then_ns: dict[str, int] = {}
    waited_ms: dict[int, float] = {}
    for span in spans:
        waited_ns += span.wait_ns
        waited_ms[id(span)] = (waited_ns - waited_then_ns.get(span.kind, waited_ns)) / 1e6
        waited_then_ns[span.kind] = waited_ns
    return waited_ms


class _Speeds:
    """Speeds of one run's workers, by who is at work when."""

    def __init__(self, result: RunResult, speed_of: _SpeedOf) -> None:
        changes: list[tuple[int, int]] = []
        for spans in result.spans:
            for span, following in itertools.pairwise(spans):
                changes += [(begin_ns(span), 1), (following.asked_ns, -1)]
        self._times: list[int] = []
        self._done: list[float] = []  # at full speed, since the first of these times
        self._speed: list[float] = []  # from then on
        at_work, done = 0, 0.0
        for time_ns, change in sorted(changes):
            if self._times:
                done += (time_ns - self._times[-1]) * self._speed[-1]
            at_work += change
            self._times.append(time_ns)
            self._done.append(done)
            self._speed.append(speed_of(at_work) if at_work else 0.0)

    def mean(self, from_ns: int, end_ns: int) -> float:
        if end_ns <= from_ns:
            return 1.0
        return (self._until(end_ns) - self._until(from_ns)) / (end_ns - from_ns)

    def _until(self, time_ns: int) -> float:
        index = bisect.bisect_right(self._times, time_ns) - 1
        return self._done[index] + (time_ns - self._times[index]) * self._speed[index]


def _share_together(result: RunResult) -> float:
    """Returns the share of the time in which all workers are at work, of that in which any is."""
    num_workers = len(result.spans)
    from_ns = max(spans[int(len(spans) * _DISCARDED_SHARE)].asked_ns for spans in result.spans)
    end_ns = min(spans[-1].asked_ns for spans in result.spans)
    all_share = _Speeds(result, lambda at_work: float(at_work == num_workers)).mean(from_ns, end_ns)
    any_share = _Speeds(result, lambda at_work: float(at_work > 0)).mean(from_ns, end_ns)
    return max(all_share, _SHARE_MIN) / any_share if any_share else 1.0
