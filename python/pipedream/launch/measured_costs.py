"""What a run adds to a profile's layers, from the work items of calibrate()'s runs. Pure; any thread.

A work item lasts from when its input is there until the next one is asked for; of that compute is the user's
code and the rest the runtime's own. Each is brought to the speed of as many workers at work as the machine
has cores, as the cost model has it (shared_cores.py): what was done alone counts more.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import NamedTuple

from pipedream.planning.formulas import parameter_bytes_of
from pipedream.planning.layer_profile import Profile
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.runtime_costs import (
    POSITIONS,
    WORK_KINDS,
    ItemCost,
    PositionCosts,
    RuntimeCosts,
    SyncCost,
)
from pipedream.planning.shared_cores import SharedHost
from pipedream.planning.spread import Spread
from pipedream.report.result import RunResult, WorkSpan

__all__ = ["Runs", "runtime_costs"]

_DISCARDED_SHARE = 0.2  # of a run's items: warm-up, and what memory is measured in
_SHARE_MIN = 0.05  # of the time: less says nothing of how workers slow each other
_FEW_BYTES = 65536  # below, what replicas exchange costs messages, not bytes


class Runs(NamedTuple):
    """Of which the costs are made, each done as often as the others."""

    one: list[RunResult]
    """The whole model at one worker."""
    straight: list[RunResult]
    """A stage per worker."""
    in_turn: list[RunResult]
    """The same, one worker at work at a time."""
    cut: list[RunResult]
    """The same, each minibatch in num_microbatches, which drain; none where it cannot be cut."""
    shared: list[RunResult]
    """Two replicas of the whole model."""
    num_microbatches: int


class _Item(NamedTuple):
    """Milliseconds."""

    compute_ms: float
    own_ms: float

    @property
    def work_ms(self) -> float:
        return self.compute_ms + self.own_ms


class _Key(NamedTuple):
    worker: int
    kind: str
    is_first: bool
    """Of its minibatch's microbatches."""


_Items = Mapping[_Key, Sequence[_Item]]
_SpeedOf = Callable[[int], float]
"""By how many workers are at work."""


def runtime_costs(profile: Profile, plan: Plan, runs: Runs, num_cores: int) -> RuntimeCosts:
    """plan: of the runs with several stages, whose workers had so many cores."""
    host = SharedHost.measured(max(plan.num_stages, 2), num_cores, _times_alone(runs.straight, runs.in_turn))
    one, shared = (_means(_pooled(results, host.speed)) for results in (runs.one, runs.shared))
    straight_items, cut_items = (_pooled(results, host.speed) for results in (runs.straight, runs.cut))
    straight = _means(straight_items)
    cut = _means(cut_items)
    last = plan.num_stages - 1
    stage_bytes = [parameter_bytes_of(profile, stage) for stage in plan.stages]
    update_ms, update_ms_per_byte = _line(_updates_in_place(stage_bytes, one, straight, cut))
    # All stages but the last keep several versions, and copy one before they update it.
    copied = [stage for stage in range(last) if stage_bytes[stage]]
    copies_ms = sum(
        straight[_Key(stage, "UPDATE", True)].compute_ms - update_ms - update_ms_per_byte * stage_bytes[stage]
        for stage in copied
    )
    return RuntimeCosts(
        positions=_positions(profile, plan, one, straight, cut, runs.num_microbatches),
        forward_share=_share("FORWARD", straight, cut, last, runs.num_microbatches),
        backward_share=_share("BACKWARD", straight, cut, last, runs.num_microbatches),
        update_ms=update_ms,
        update_ms_per_byte=update_ms_per_byte,
        copy_ms_per_byte=max(0.0, copies_ms) / max(1, sum(stage_bytes[stage] for stage in copied)),
        sync=_sync(shared, one, sum(stage_bytes), update_ms_per_byte),
        latency_ms=_latency_ms(runs.in_turn),
        cut_bytes=profile.layers[plan.stages[0].last_layer].activation_bytes if last else 0,
        num_cores=host.num_cores,
        alone_speed=host.alone_speed,
        spread=_spread([straight_items, cut_items]),
    )


# Items of the runs.


def _kept(spans: Sequence[WorkSpan]) -> Iterator[tuple[WorkSpan, int]]:
    """Each with when the next one was asked for."""
    for span, following in itertools.pairwise(spans[int(len(spans) * _DISCARDED_SHARE) :]):
        yield span, following.asked_ns


def _begin_ns(span: WorkSpan) -> int:
    return span.asked_ns + span.wait_ns


class _Speeds:
    """Of one run's workers, by who is at work when."""

    def __init__(self, result: RunResult, speed_of: _SpeedOf) -> None:
        changes: list[tuple[int, int]] = []
        for spans in result.spans:
            for span, following in itertools.pairwise(spans):
                changes += [(_begin_ns(span), 1), (following.asked_ns, -1)]
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

    def mean(self, begin_ns: int, end_ns: int) -> float:
        if end_ns <= begin_ns:
            return 1.0
        return (self._until(end_ns) - self._until(begin_ns)) / (end_ns - begin_ns)

    def _until(self, time_ns: int) -> float:
        index = bisect.bisect_right(self._times, time_ns) - 1
        return self._done[index] + (time_ns - self._times[index]) * self._speed[index]


def _as_it_was(at_work: int) -> float:
    return 1.0


def _pooled(results: Iterable[RunResult], speed_of: _SpeedOf) -> _Items:
    items: dict[_Key, list[_Item]] = {}
    for result in results:
        speeds = _Speeds(result, speed_of)
        for worker, spans in enumerate(result.spans):
            for span, end_ns in _kept(spans):
                speed = speeds.mean(_begin_ns(span), end_ns)
                compute_ms = span.compute_ns / 1e6
                own_ms = max(0.0, (end_ns - _begin_ns(span)) / 1e6 - compute_ms)
                key = _Key(worker, span.kind, span.microbatch == 0)
                items.setdefault(key, []).append(_Item(compute_ms * speed, own_ms * speed))
    return items


def _means(items: _Items) -> Mapping[_Key, _Item]:
    """Plain ones: a stall now and then is part of what an item takes."""
    return {
        key: _Item(*(statistics.fmean(column) for column in zip(*rows, strict=True)))
        for key, rows in items.items()
    }


def _times_alone(together: Sequence[RunResult], in_turn: Sequence[RunResult]) -> float:
    """How many times as fast workers are while the others wait: items of the same stages both ways. Of those
    together a part was alone, too."""
    beside, alone = _means(_pooled(together, _as_it_was)), _means(_pooled(in_turn, _as_it_was))
    kinds = [key for key in alone if key in beside]
    if len({key.worker for key in kinds}) < 2:
        return 1.0
    slower = sum(beside[key].work_ms for key in kinds) / sum(alone[key].work_ms for key in kinds)
    return max(1.0, 1 + (slower - 1) / statistics.fmean(map(_share_together, together)))


def _share_together(result: RunResult) -> float:
    """Of the time in which any worker is at work: that in which all of them are."""
    num_workers = len(result.spans)
    begin_ns = max(spans[int(len(spans) * _DISCARDED_SHARE)].asked_ns for spans in result.spans)
    end_ns = min(spans[-1].asked_ns for spans in result.spans)
    all_share = _Speeds(result, lambda at_work: float(at_work == num_workers)).mean(begin_ns, end_ns)
    any_share = _Speeds(result, lambda at_work: float(at_work > 0)).mean(begin_ns, end_ns)
    return max(all_share, _SHARE_MIN) / any_share if any_share else 1.0


def _spread(runs: Iterable[_Items]) -> Spread:
    times: dict[str, list[list[float]]] = {kind: [] for kind in WORK_KINDS}
    for items in runs:
        for key, rows in items.items():
            times[key.kind].append([item.work_ms for item in rows])
    return Spread.measured(times)


# What they say.


def _positions(
    profile: Profile,
    plan: Plan,
    one: Mapping[_Key, _Item],
    straight: Mapping[_Key, _Item],
    cut: Mapping[_Key, _Item],
    num_microbatches: int,
) -> dict[str, PositionCosts]:
    def position(
        items: Mapping[_Key, _Item], pieces: Mapping[_Key, _Item], worker: int, stage: Stage
    ) -> PositionCosts:
        layers = profile.layers[stage.first_layer : stage.last_layer + 1]

        def cost_of(kind: str) -> ItemCost:
            own_ms = items[_Key(worker, kind, True)].own_ms
            return _item_cost(own_ms, _pieces(pieces, worker, kind, "own_ms"), num_microbatches)

        def scale_of(kind: str, profiled_ms: float) -> float:
            return items[_Key(worker, kind, True)].compute_ms / profiled_ms if profiled_ms else 1.0

        return PositionCosts(
            forward=cost_of("FORWARD"),
            backward=cost_of("BACKWARD"),
            update_ms=items[_Key(worker, "UPDATE", True)].own_ms,
            forward_scale=scale_of("FORWARD", sum(layer.forward_ms for layer in layers)),
            backward_scale=scale_of("BACKWARD", sum(layer.backward_ms for layer in layers)),
        )

    only = position(one, {}, 0, Stage(0, profile.num_layers - 1))
    if plan.num_stages == 1:
        return dict.fromkeys(POSITIONS, only)
    first, *inner, end = (position(straight, cut, index, stage) for index, stage in enumerate(plan.stages))
    return {"only": only, "first": first, "middle": _mean_position(inner or [first, end]), "last": end}


def _pieces(cut: Mapping[_Key, _Item], worker: int, kind: str, field: str) -> tuple[float, float] | None:
    """Of a minibatch's first microbatch and of those after it, where there are any."""
    first, later = cut.get(_Key(worker, kind, True)), cut.get(_Key(worker, kind, False))
    return None if first is None or later is None else (getattr(first, field), getattr(later, field))


def _item_cost(whole_ms: float, pieces_ms: tuple[float, float] | None, num_microbatches: int) -> ItemCost:
    """Of a whole minibatch, and of one of its microbatches, first and later."""
    if pieces_ms is None:
        return ItemCost(whole_ms, whole_ms)
    first_ms, later_ms = pieces_ms
    minibatch_ms = (whole_ms - first_ms) * num_microbatches / (num_microbatches - 1)
    minibatch_ms = min(max(minibatch_ms, 0.0), whole_ms)
    return ItemCost(
        whole_ms - minibatch_ms, max(0.0, later_ms - minibatch_ms / num_microbatches), minibatch_ms
    )


def _share(
    kind: str,
    straight: Mapping[_Key, _Item],
    cut: Mapping[_Key, _Item],
    last: int,
    num_microbatches: int,
) -> ItemCost:
    """Of the layers' own time, over all stages."""
    whole_ms = sum(straight[_Key(stage, kind, True)].compute_ms for stage in range(last + 1))
    pieces = [_pieces(cut, stage, kind, "compute_ms") for stage in range(last + 1)]
    known = [piece for piece in pieces if piece is not None]
    if not whole_ms or len(known) <= last:  # too few samples to cut: a microbatch takes its part
        return ItemCost(minibatch_ms=1.0)
    sums = (sum(first for first, _ in known), sum(later for _, later in known))
    return _item_cost(whole_ms, sums, num_microbatches).scaled(1 / whole_ms)


def _mean_position(positions: Sequence[PositionCosts]) -> PositionCosts:
    def mean(items: Sequence[ItemCost]) -> ItemCost:
        return ItemCost(*(statistics.fmean(column) for column in zip(*map(astuple, items), strict=True)))

    return PositionCosts(
        mean([position.forward for position in positions]),
        mean([position.backward for position in positions]),
        statistics.fmean(position.update_ms for position in positions),
        statistics.fmean(position.forward_scale for position in positions),
        statistics.fmean(position.backward_scale for position in positions),
    )


def _updates_in_place(
    stage_bytes: Sequence[int],
    one: Mapping[_Key, _Item],
    straight: Mapping[_Key, _Item],
    cut: Mapping[_Key, _Item],
) -> list[tuple[int, float]]:
    """(bytes, milliseconds) of the updates that write in place: one worker's, the last stage's, and those
    of a schedule that drains."""
    last = len(stage_bytes) - 1
    rows = [(sum(stage_bytes), one[_Key(0, "UPDATE", True)])]
    rows.append((stage_bytes[last], straight[_Key(last, "UPDATE", True)]))
    rows += [(stage_bytes[key.worker], item) for key, item in cut.items() if key.kind == "UPDATE"]
    return [(num_bytes, item.compute_ms) for num_bytes, item in rows]


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(at size 0, per size) of the line nearest to the points, neither below 0."""
    mean_size, mean_ms = (statistics.fmean(column) for column in zip(*points, strict=True))
    spread = sum((size - mean_size) ** 2 for size, _ in points)
    slope = 0.0
    if spread:
        slope = max(0.0, sum((size - mean_size) * (ms - mean_ms) for size, ms in points) / spread)
    if mean_ms < slope * mean_size:
        slope = mean_ms / mean_size
    return max(0.0, mean_ms - slope * mean_size), slope


def _sync(
    shared: Mapping[_Key, _Item],
    one: Mapping[_Key, _Item],
    num_bytes: int,
    update_ms_per_byte: float,
) -> dict[str, SyncCost]:
    """What replicas exchange costs a worker per round, of which each of the two does half of the update: all
    per byte, unless the parameters are so few that it is the messages' cost."""
    exchanged = num_bytes / 2
    workers = {key.worker for key in shared}

    def cost_of(kind: str) -> SyncCost:
        alone_ms = one[_Key(0, kind, True)].work_ms
        if kind == "UPDATE":
            alone_ms -= update_ms_per_byte * num_bytes / 2
        beside_ms = statistics.fmean(shared[_Key(worker, kind, True)].work_ms for worker in workers)
        extra_ms = max(0.0, beside_ms - alone_ms)
        return SyncCost(extra_ms) if exchanged < _FEW_BYTES else SyncCost(0.0, extra_ms / exchanged)

    return {kind: cost_of(kind) for kind in WORK_KINDS}


def _latency_ms(in_turn: Sequence[RunResult]) -> float:
    """From when a sender goes on until its receiver, which has been waiting, has the item."""
    latencies_ms = []
    for result in in_turn:
        for kind, ends in (("FORWARD", result.spans), ("BACKWARD", result.spans[::-1])):
            for sender, receiver in itertools.pairwise(ends):
                sent = {
                    (span.minibatch, span.microbatch): (span, end)
                    for span, end in _kept(sender)
                    if span.kind == kind
                }
                for span, _ in _kept(receiver):
                    source = sent.get((span.minibatch, span.microbatch))
                    if span.kind == kind and source and span.asked_ns < source[0].completed_ns:
                        latencies_ms.append((_begin_ns(span) - source[1]) / 1e6)
    return max(0.0, statistics.median(latencies_ms)) if latencies_ms else 0.0
