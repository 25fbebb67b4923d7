"""Computes the costs that a run adds to a profile's layers, from the work items of calibrate()'s runs.

A work item begins when its input has arrived, and ends when the worker asks for the next item. Time in the
user's code is compute time; the rest is the runtime's own time. Two effects are removed from the times.
First, a worker is faster while others wait. So times are converted to the speed that a worker has while all
cores are busy (SharedHost). Second, a worker is slower after a wait. So times are converted to times
without waits (Waking). Pure; any thread.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pipedream.planning.formulas import parameter_bytes_of
from pipedream.planning.item_cost import WORK_KINDS, ItemCost, Spread, Waking, measured_spread, waking_share
from pipedream.planning.layer_profile import Profile
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.runtime_costs import (
    POSITIONS,
    PositionCosts,
    RuntimeCosts,
    SyncCost,
)
from pipedream.planning.simulator import SharedHost
from pipedream.report.result import RunResult, WorkSpan

__all__ = ["Runs", "runtime_costs"]

_FEW_BYTES = 65536  # the cost of fewer bytes depends on the number of messages
# Least difference between the shares (0 to 1) of the cost of waking that items pay in two kinds of runs. With
# a smaller difference the runs cannot show this cost.
_WOKEN_DIFFERENCE_MIN = 0.2
_DISCARDED_SHARE = 0.2  # share of a run's items: the warm-up, and items during which memory is measured
_SHARE_MIN = 0.05  # least share of time with all workers at work; smaller ones count as this
_WAKING_SHARE_MAX = 0.75  # largest share of waking in an item's time


class Item(NamedTuple):
    """The times of one work item, or the means over several items."""

    compute_ms: float
    """Milliseconds in the user's code."""
    own_ms: float
    """Milliseconds of the runtime itself."""
    waited_ms: float = 0.0
    """Milliseconds that the worker has waited since its previous item of this kind began."""

    @property
    def work_ms(self) -> float:
        return self.compute_ms + self.own_ms


class Key(NamedTuple):
    """A worker and a kind of item. Items with the same key should take the same time."""

    worker: int
    kind: str
    is_first: bool
    """Whether the item belongs to the first microbatch of its minibatch."""


Items = Mapping[Key, Sequence[Item]]
_Means = Mapping[Key, Item]


class Runs(NamedTuple):
    """The results of calibrate()'s runs. Each kind of run was repeated equally often."""

    one: list[RunResult]
    """Runs of the whole model at one worker."""
    straight: list[RunResult]
    """Runs with one stage per worker."""
    in_turn: list[RunResult]
    """Runs with one stage per worker, in which one worker works at a time (schedule model_parallel)."""
    cut: dict[int, list[RunResult]]
    """By number of microbatches, runs with one stage per worker and the schedule flush. Empty if minibatches
    have too few samples to be cut."""
    shared: list[RunResult]
    """Runs with two replicas of the whole model."""
    rested: Sequence[RunResult] = ()
    """Runs like in_turn, but the last worker pauses in each minibatch, so that other workers wait long."""


def runtime_costs(profile: Profile, plan: Plan, runs: Runs, num_cores: int) -> RuntimeCosts:
    """Computes the costs. plan: the plan of the runs with several stages. num_cores: this machine's cores."""
    wakings = _slow_wakings(runs)
    alone_speed = times_alone(runs.straight, runs.in_turn, wakings)
    host = SharedHost.measured(max(plan.num_stages, 2), num_cores, alone_speed)
    # The cost of short waits is measured only if workers are not faster while others wait. Otherwise that
    # effect would hide the cost.
    wakings = [*(_quick_wakings(runs, wakings) if host.alone_speed == 1 else ()), *wakings]
    whole = Standard(host.speed, wakings)
    one, shared = (means(pooled(results, whole)) for results in (runs.one, runs.shared))
    straight_items = pooled(runs.straight, whole)
    straight = means(straight_items)
    pieces = Standard(host.speed, wakings, straight)
    cut_items = {m: pooled(results, pieces) for m, results in runs.cut.items()}
    cut = {m: means(items) for m, items in cut_items.items()}
    last = plan.num_stages - 1
    stage_bytes = [parameter_bytes_of(profile, stage) for stage in plan.stages]
    update_ms, update_ms_per_byte = _line(_updates_in_place(stage_bytes, one, straight, cut))
    # All stages except the last keep several versions, and copy a version before they update the copy.
    copied = [stage for stage in range(last) if stage_bytes[stage]]
    copies_ms = sum(
        straight[Key(stage, "UPDATE", True)].compute_ms - update_ms - update_ms_per_byte * stage_bytes[stage]
        for stage in copied
    )
    return RuntimeCosts(
        positions=_positions(profile, plan, one, straight, cut),
        forward_share=_share("FORWARD", straight, cut, last),
        backward_share=_share("BACKWARD", straight, cut, last),
        update_ms=update_ms,
        update_ms_per_byte=update_ms_per_byte,
        copy_ms_per_byte=max(0.0, copies_ms) / max(1, sum(stage_bytes[stage] for stage in copied)),
        sync=_sync(shared, one, sum(stage_bytes), update_ms_per_byte),
        latency_ms=_latency_ms(runs.in_turn),
        cut_bytes=profile.layers[plan.stages[0].last_layer].activation_bytes if last else 0,
        num_cores=host.num_cores,
        alone_speed=host.alone_speed,
        spread=_spread([straight_items, *cut_items.values()]),
        waking=tuple(wakings),
    )


def _slow_wakings(runs: Runs) -> list[Waking]:
    """Finds the cost of long waits. Compares the compute times of the first stage's items in runs with and
    without pauses. Item.own_ms is not compared, because the receiver sleeps in these runs and would not sleep
    with slow links."""
    if not runs.rested:
        return []
    rested, in_turn = (
        {
            key: item._replace(own_ms=0.0)
            for key, item in means(pooled(results, Standard())).items()
            if key.worker == 0
        }
        for results in (runs.rested, runs.in_turn)
    )
    waking = Waking(max(item.waited_ms for item in rested.values()))
    shares = {
        kind: _waking_share([key for key in rested if key.kind == kind], waking, rested, in_turn)
        for kind in WORK_KINDS
    }
    return _known(waking, shares)


def _quick_wakings(runs: Runs, slow: Sequence[Waking]) -> list[Waking]:
    """Finds the cost of short waits. Compares items of runs in which one worker works at a time with items of
    runs in which all work. slow: the cost of long waits, which is removed first."""
    rows = [spans for result in runs.in_turn for spans in result.spans]
    num_minibatches = sum(len({span.minibatch for span, _ in kept(spans)}) for spans in rows)
    waited_ms = sum(span.wait_ns for spans in rows for span, _ in kept(spans)) / 1e6
    if not num_minibatches or not waited_ms:
        return []
    standard, waking = Standard(wakings=slow), Waking(waited_ms / num_minibatches)
    in_turn, straight = (means(pooled(results, standard)) for results in (runs.in_turn, runs.straight))
    last = max(key.worker for key in in_turn)
    shares = {
        # Only the last stage's UPDATE is compared, because other stages update in place in one of the two
        # kinds of runs only.
        kind: _waking_share(
            [key for key in in_turn if key.kind == kind and key.worker >= floor], waking, in_turn, straight
        )
        for kind, floor in (("FORWARD", 0), ("BACKWARD", 0), ("UPDATE", last))
    }
    return _known(waking, shares)


def _known(waking: Waking, shares: Mapping[str, float]) -> list[Waking]:
    known = {kind: share for kind, share in shares.items() if share}
    return [replace(waking, shares=known)] if known else []


def _waking_share(keys: Sequence[Key], waking: Waking, longer_waits: _Means, shorter_waits: _Means) -> float:
    """Returns the cost of waking as a share of an item's time.

    In both kinds of runs an item takes t * (1 + share * woken), where t is its time without waits. woken is 0
    without a wait and 1 after a long wait. The ratio of the two times gives the share."""
    if not keys or any(key not in shorter_waits for key in keys):
        return 0.0
    longer = sum(longer_waits[key].work_ms for key in keys) / sum(shorter_waits[key].work_ms for key in keys)
    woken, woken_beside = (
        statistics.fmean(waking.part(items[key].waited_ms) for key in keys)
        for items in (longer_waits, shorter_waits)
    )
    if longer <= 1 or woken - longer * woken_beside < _WOKEN_DIFFERENCE_MIN:
        return 0.0
    return (longer - 1) / (woken - longer * woken_beside)


def _spread(runs: Iterable[Items]) -> Spread:
    times: dict[str, list[list[float]]] = {kind: [] for kind in WORK_KINDS}
    for items in runs:
        for key, rows in items.items():
            times[key.kind].append([item.work_ms for item in rows])
    return measured_spread(times)


def _positions(
    profile: Profile,
    plan: Plan,
    one: _Means,
    straight: _Means,
    cut: Mapping[int, _Means],
) -> dict[str, PositionCosts]:
    def position(items: _Means, cut: Mapping[int, _Means], worker: int, stage: Stage) -> PositionCosts:
        layers = profile.layers[stage.first_layer : stage.last_layer + 1]

        def cost_of(kind: str) -> ItemCost:
            own_ms = items[Key(worker, kind, True)].own_ms
            return ItemCost.of_pieces(own_ms, _pieces(cut, [Key(worker, kind, True)], "own_ms"))

        def scale_of(kind: str, profiled_ms: float) -> float:
            return items[Key(worker, kind, True)].compute_ms / profiled_ms if profiled_ms else 1.0

        return PositionCosts(
            forward=cost_of("FORWARD"),
            backward=cost_of("BACKWARD"),
            update_ms=items[Key(worker, "UPDATE", True)].own_ms,
            forward_scale=scale_of("FORWARD", sum(layer.forward_ms for layer in layers)),
            backward_scale=scale_of("BACKWARD", sum(layer.backward_ms for layer in layers)),
        )

    only = position(one, {}, 0, Stage(0, profile.num_layers - 1))
    if plan.num_stages == 1:
        return dict.fromkeys(POSITIONS, only)
    first, *inner, end = (position(straight, cut, index, stage) for index, stage in enumerate(plan.stages))
    return {"only": only, "first": first, "middle": _mean_position(inner or [first, end]), "last": end}


def _pieces(cut: Mapping[int, _Means], wholes: Sequence[Key], name: str) -> dict[int, tuple[float, float]]:
    """Returns {m: (time of a minibatch's first microbatch, time of a later microbatch)}, summed over the
    items `wholes`. Leaves out an m for which an item is missing."""
    pieces = {}
    for m, items in cut.items():
        laters = [key._replace(is_first=False) for key in wholes]
        if all(key in items for key in (*wholes, *laters)):
            first_ms, later_ms = (sum(getattr(items[key], name) for key in keys) for keys in (wholes, laters))
            pieces[m] = (first_ms, later_ms)
    return pieces


def _share(kind: str, straight: _Means, cut: Mapping[int, _Means], last: int) -> ItemCost:
    """Returns the compute time of a microbatch as a share of its minibatch's compute time. The times are
    summed over all stages."""
    wholes = [Key(stage, kind, True) for stage in range(last + 1)]
    whole_ms = sum(straight[key].compute_ms for key in wholes)
    pieces = _pieces(cut, wholes, "compute_ms")
    if not whole_ms or not pieces:  # too few samples to be cut, so a microbatch counts as 1/m of a minibatch
        return ItemCost(minibatch_ms=1.0)
    return ItemCost.of_pieces(whole_ms, pieces).scaled(1 / whole_ms)


def _mean_position(positions: Sequence[PositionCosts]) -> PositionCosts:
    return PositionCosts(
        ItemCost.mean([position.forward for position in positions]),
        ItemCost.mean([position.backward for position in positions]),
        statistics.fmean(position.update_ms for position in positions),
        statistics.fmean(position.forward_scale for position in positions),
        statistics.fmean(position.backward_scale for position in positions),
    )


def _updates_in_place(
    stage_bytes: Sequence[int],
    one: _Means,
    straight: _Means,
    cut: Mapping[int, _Means],
) -> list[tuple[int, float]]:
    """Returns (bytes, milliseconds) of updates in place. These are the updates of a single worker, those of
    the last stage, and those of all stages with a schedule that drains."""
    last = len(stage_bytes) - 1
    rows = [(sum(stage_bytes), one[Key(0, "UPDATE", True)])]
    rows.append((stage_bytes[last], straight[Key(last, "UPDATE", True)]))
    rows += [
        (stage_bytes[key.worker], item)
        for items in cut.values()
        for key, item in items.items()
        if key.kind == "UPDATE"
    ]
    return [(num_bytes, item.compute_ms) for num_bytes, item in rows]


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fits a line to (size, milliseconds) points by least squares, and returns (ms at size 0, ms per unit of
    size). If the line would be negative at size 0, takes the line through 0 and the points' mean."""
    mean_size, mean_ms = (statistics.fmean(column) for column in zip(*points, strict=True))
    spread = sum((size - mean_size) ** 2 for size, _ in points)
    slope = 0.0
    if spread:
        slope = max(0.0, sum((size - mean_size) * (ms - mean_ms) for size, ms in points) / spread)
    if mean_ms < slope * mean_size:
        slope = mean_ms / mean_size
    return max(0.0, mean_ms - slope * mean_size), slope


def _sync(
    shared: _Means,
    one: _Means,
    num_bytes: int,
    update_ms_per_byte: float,
) -> dict[str, SyncCost]:
    """Returns the cost of the exchange between replicas, for a worker and a round of updates.

    The cost is the time of an item with two replicas minus its time with one worker. Each replica does half
    of the update, which is subtracted first. The cost is given per byte, or per round if the parameters are
    so few that messages cost more than bytes."""
    exchanged = num_bytes / 2
    workers = {key.worker for key in shared}

    def cost_of(kind: str) -> SyncCost:
        alone_ms = one[Key(0, kind, True)].work_ms
        if kind == "UPDATE":
            alone_ms -= update_ms_per_byte * num_bytes / 2
        beside_ms = statistics.fmean(shared[Key(worker, kind, True)].work_ms for worker in workers)
        extra_ms = max(0.0, beside_ms - alone_ms)
        return SyncCost(extra_ms) if exchanged < _FEW_BYTES else SyncCost(0.0, extra_ms / exchanged)

    return {kind: cost_of(kind) for kind in WORK_KINDS}


def _latency_ms(in_turn: Sequence[RunResult]) -> float:
    """Returns the latency: the milliseconds from the end of the sender's item until its tensors reach a
    receiver that waits for them."""
    latencies_ms = []
    for result in in_turn:
        for kind, ends in (("FORWARD", result.spans), ("BACKWARD", result.spans[::-1])):
            for sender, receiver in itertools.pairwise(ends):
                sent = {
                    (span.minibatch, span.microbatch): (span, end)
                    for span, end in kept(sender)
                    if span.kind == kind
                }
                for span, _ in kept(receiver):
                    source = sent.get((span.minibatch, span.microbatch))
                    if span.kind == kind and source and span.asked_ns < source[0].completed_ns:
                        latencies_ms.append((begin_ns(span) - source[1]) / 1e6)
    return max(0.0, statistics.median(latencies_ms)) if latencies_ms else 0.0


_SpeedOf = Callable[[int], float]
"""Maps the number of workers that are at work to the speed of each of them."""


@dataclass(frozen=True)
class Standard:
    """Converts the times of items to the same conditions: full load of the machine, and no waits."""

    speed_of: _SpeedOf = lambda at_work: 1.0
    wakings: Sequence[Waking] = ()
    whole_ms: Mapping[Key, Item] = field(default_factory=dict)
    """The items of whole minibatches. The cost of waking is a share of their times, even for items of
    microbatches. Empty if all items are of whole minibatches."""

    def of(self, key: Key, item: Item, speed: float) -> Item:
        share = waking_share(self.wakings, key.kind, item.waited_ms)
        whole = self.whole_ms.get(key._replace(is_first=True))
        if whole is None:
            awake = 1 / (1 + share)
        else:
            awake = 1 - min(share * whole.work_ms / max(item.work_ms * speed, 1e-9), _WAKING_SHARE_MAX)
        return Item(item.compute_ms * speed * awake, item.own_ms * speed * awake, item.waited_ms)


def kept(spans: Sequence[WorkSpan]) -> Iterator[tuple[WorkSpan, int]]:
    """Yields (span, nanosecond at which the worker asked for its next work item). Leaves out the warm-up, and
    the last item, which has no next one."""
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
    """Returns the means of the items' times. They include rare stalls, which are part of an item's time."""
    return {
        key: Item(*(statistics.fmean(column) for column in zip(*rows, strict=True)))
        for key, rows in items.items()
    }


def times_alone(
    together: Sequence[RunResult], in_turn: Sequence[RunResult], wakings: Sequence[Waking] = ()
) -> float:
    """Returns how many times faster a worker is while the other workers wait; at least 1.

    Compares items of the same stages in the runs `together` and `in_turn`. In the runs `together` a worker is
    sometimes alone, too. The result is corrected for that. wakings: costs of waiting, which are removed
    first."""
    beside, alone = (means(pooled(results, Standard(wakings=wakings))) for results in (together, in_turn))
    kinds = [key for key in alone if key in beside]
    if len({key.worker for key in kinds}) < 2:
        return 1.0
    slower = sum(beside[key].work_ms for key in kinds) / sum(alone[key].work_ms for key in kinds)
    return max(1.0, 1 + (slower - 1) / statistics.fmean(map(_share_together, together)))


def _waited_ms(spans: Sequence[WorkSpan]) -> dict[int, float]:
    """Returns Item.waited_ms of each span, by the id() of the span."""
    waited_ns = 0
    waited_then_ns: dict[str, int] = {}
    waited_ms: dict[int, float] = {}
    for span in spans:
        waited_ns += span.wait_ns
        waited_ms[id(span)] = (waited_ns - waited_then_ns.get(span.kind, waited_ns)) / 1e6
        waited_then_ns[span.kind] = waited_ns
    return waited_ms


class _Speeds:
    """The speed of a run's workers over time. It depends on how many of them are at work."""

    def __init__(self, result: RunResult, speed_of: _SpeedOf) -> None:
        changes: list[tuple[int, int]] = []
        for spans in result.spans:
            for span, following in itertools.pairwise(spans):
                changes += [(begin_ns(span), 1), (following.asked_ns, -1)]
        self._times: list[int] = []
        self._done: list[float] = []  # for each of _times, the work done until then
        self._speed: list[float] = []  # for each of _times, the speed from then on
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
    """Returns the time in which all workers are at work, as a share of the time in which any worker is."""
    num_workers = len(result.spans)
    from_ns = max(spans[int(len(spans) * _DISCARDED_SHARE)].asked_ns for spans in result.spans)
    end_ns = min(spans[-1].asked_ns for spans in result.spans)
    all_share = _Speeds(result, lambda at_work: float(at_work == num_workers)).mean(from_ns, end_ns)
    any_share = _Speeds(result, lambda at_work: float(at_work > 0)).mean(from_ns, end_ns)
    return max(all_share, _SHARE_MIN) / any_share if any_share else 1.0
