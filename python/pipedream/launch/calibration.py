"""calibrate(): short runs of the user's own model that tell what a run adds to a profile's layers.

    one worker                 the model by itself, its optimizer in place
    a stage per worker, m = 1  workers that share the machine; versions that are copied
    the same, 2bw, m = 4       what of each time is the same for a microbatch as for a minibatch
    two replicas               what an update costs that they share

A work item lasts from asking for it to asking for the next, without waiting; of that compute is the user's
code and the rest the runtime's own. Runs in the caller's process; the model and the random generators stay
as they were.
"""

from __future__ import annotations

import copy
import itertools
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pipedream.common.checks import check_count
from pipedream.common.guard import check_main_guard
from pipedream.launch.runner import run
from pipedream.model.seeding import generators_kept
from pipedream.model.splitter import Model
from pipedream.planning.layer_profile import Profile
from pipedream.planning.partitioner import partition
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.runtime_costs import ItemCost, PositionCosts, RuntimeCosts
from pipedream.report.result import RunResult, WorkSpan

__all__ = ["Runs", "calibrate", "runtime_costs"]

_MICROBATCHES = 4
_BATCHES_MAX = 16  # of the user's data, used in turn
_FAST_BYTES_PER_S = 1e15  # the cut is to balance the stages, whatever crosses it
_DISCARDED_SHARE = 0.2  # of a run's items: warm-up, and what memory is measured in
_FEW_BYTES = 65536  # below, what replicas exchange costs messages, not bytes
_TRIMMED_SHARE = 0.05  # of the shortest and the longest


def calibrate(
    profile: Profile,
    model: Model,
    data: Iterable[Any],
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    *,
    optimizer: Callable[..., torch.optim.Optimizer],
    workers: int = 2,
    minibatches: int = 60,
    transport: str = "auto",
) -> Profile:
    """The profile with what a run on this machine adds to it, for partition(..., cost_model="calibrated").

    model, data, loss_fn, optimizer and transport: as of run(). workers: so many share this machine's cores,
    as they will in training; from 2. minibatches: of each of four runs; the data's first ones, again and
    again. Where a minibatch has too few samples to be cut, microbatches are taken to cost their share of it.

    Raises ValueError for fewer than 2 workers or 20 minibatches, and as run().
    """
    check_main_guard()
    check_count("workers", workers)
    check_count("minibatches", minibatches)
    if workers < 2:
        raise ValueError(f"workers is {workers}: it takes 2 to see what they do to each other")
    if minibatches < 20:
        raise ValueError(f"minibatches is {minibatches}: give at least 20")
    batches = list(itertools.islice(iter(data), _BATCHES_MAX))
    repeated = list(itertools.islice(itertools.cycle(batches), minibatches))
    threads = torch.get_num_threads()

    def measure(plan: Plan, **options: Any) -> RunResult:
        # Of every run the workers have as many threads as where all are at work.
        torch.set_num_threads(max(1, min(threads, (os.cpu_count() or 1) // workers)))
        try:
            return run(
                copy.deepcopy(model),
                plan,
                data=repeated,
                loss_fn=loss_fn,
                optimizer=optimizer,
                transport=transport,
                progress=False,
                **options,
            )
        finally:
            torch.set_num_threads(threads)

    stages = min(workers, profile.num_layers)
    straight = partition(profile, stages, _FAST_BYTES_PER_S, straight=True)
    last = profile.num_layers - 1
    whole = Plan((Stage(0, last),), max_shapes=straight.max_shapes, cuts=straight.cuts)
    with generators_kept():
        one = measure(whole)
        async_run = measure(straight)
        m = max(_MICROBATCHES, stages)
        cut = None
        if stages > 1 and profile.batch_size is not None and profile.batch_size >= m:
            cut = measure(straight, schedule="2bw", microbatches=m)
        replicated = (Stage(0, last, num_replicas=2),)
        shared = measure(Plan(replicated, max_shapes=straight.max_shapes, cuts=straight.cuts))
    runtime = runtime_costs(profile, straight, Runs(one, async_run, cut, shared, m))
    return replace(profile, runtime=runtime.to_dict())


class Runs(NamedTuple):
    """Of which the costs are made; what each measures is said above."""

    one: RunResult
    straight: RunResult
    cut: RunResult | None
    shared: RunResult
    num_microbatches: int
    """Of `cut`."""


class _Item(NamedTuple):
    """Milliseconds."""

    compute_ms: float
    own_ms: float


def _items(spans: Sequence[WorkSpan], kind: str) -> _Item:
    """Mean of one kind of a worker's items."""
    kept = list(itertools.pairwise(spans[int(len(spans) * _DISCARDED_SHARE) :]))
    rows = [
        (span.compute_ns / 1e6, (following.asked_ns - span.asked_ns - span.wait_ns - span.compute_ns) / 1e6)
        for span, following in kept
        if span.kind == kind
    ]
    return _Item(*(max(0.0, _trimmed_mean(column)) for column in zip(*rows, strict=True)))


def _trimmed_mean(values: Sequence[float]) -> float:
    ordered = sorted(values)
    cut = int(len(ordered) * _TRIMMED_SHARE)
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def runtime_costs(profile: Profile, plan: Plan, runs: Runs) -> RuntimeCosts:
    """plan: of the runs with several stages."""
    num_stages, last = plan.num_stages, plan.num_stages - 1
    kinds = ("FORWARD", "BACKWARD", "UPDATE")
    one = {kind: _items(runs.one.spans[0], kind) for kind in kinds}
    straight = [{kind: _items(spans, kind) for kind in kinds} for spans in runs.straight.spans]
    cut = None
    if runs.cut is not None:
        cut = [{kind: _items(spans, kind) for kind in kinds} for spans in runs.cut.spans]
    scales, shares = {}, {}
    for kind, field in (("FORWARD", "forward_ms"), ("BACKWARD", "backward_ms")):
        whole_ms = sum(stage[kind].compute_ms for stage in straight)
        profiled_ms = sum(getattr(layer, field) for layer in profile.layers)
        scales[kind] = whole_ms / profiled_ms if profiled_ms else 1.0
        shares[kind] = 0.0
        if cut is not None and whole_ms:
            piece_ms = sum(stage[kind].compute_ms for stage in cut)
            shares[kind] = _fixed(whole_ms, piece_ms, runs.num_microbatches) / whole_ms
    passes = kinds[:2]
    alone_ms = sum(one[kind].compute_ms for kind in passes)
    together_ms = sum(stage[kind].compute_ms for stage in straight for kind in passes)

    def position(stage: int) -> PositionCosts:
        forward, backward = (
            _item_cost(
                straight[stage][kind].own_ms,
                None if cut is None else cut[stage][kind].own_ms,
                runs.num_microbatches,
            )
            for kind in passes
        )
        return PositionCosts(forward, backward, straight[stage]["UPDATE"].own_ms)

    only = PositionCosts(
        ItemCost(one["FORWARD"].own_ms), ItemCost(one["BACKWARD"].own_ms), one["UPDATE"].own_ms
    )
    first, end = (position(0), position(last)) if num_stages > 1 else (only, only)
    inner = [position(stage) for stage in range(1, last)]
    middle = _mean_position(inner or [first, end])
    num_bytes = [_stage_bytes(profile, stage) for stage in plan.stages]
    # One worker and the last stage write in place; the others copy the version first.
    update_ms, update_ms_per_byte = _line(
        [num_bytes[last], sum(num_bytes)], [straight[last]["UPDATE"].compute_ms, one["UPDATE"].compute_ms]
    )
    copied = [stage for stage in range(last) if num_bytes[stage]]
    copies_ms = sum(
        straight[stage]["UPDATE"].compute_ms - update_ms - update_ms_per_byte * num_bytes[stage]
        for stage in copied
    )
    sync_ms, sync_ms_per_byte = _sync(runs.shared, one, sum(num_bytes), update_ms_per_byte)
    return RuntimeCosts(
        positions={"only": only, "first": first, "middle": middle, "last": end},
        forward_scale=scales["FORWARD"],
        backward_scale=scales["BACKWARD"],
        forward_fixed_share=shares["FORWARD"],
        backward_fixed_share=shares["BACKWARD"],
        update_ms=update_ms,
        update_ms_per_byte=update_ms_per_byte,
        copy_ms_per_byte=max(0.0, copies_ms) / max(1, sum(num_bytes[stage] for stage in copied)),
        sync_ms=sync_ms,
        sync_ms_per_byte=sync_ms_per_byte,
        latency_ms=_latency_ms(runs.straight),
        cut_bytes=profile.layers[plan.stages[0].last_layer].activation_bytes if num_stages > 1 else 0,
        num_cores=os.cpu_count() or 1,
        alone_speed=max(1.0, together_ms / alone_ms) if alone_ms else 1.0,
    )


def _fixed(whole_ms: float, piece_ms: float, num_microbatches: int) -> float:
    """What a minibatch and one of its microbatches have in common."""
    common_ms = (num_microbatches * piece_ms - whole_ms) / (num_microbatches - 1)
    return min(max(common_ms, 0.0), whole_ms)


def _item_cost(whole_ms: float, piece_ms: float | None, num_microbatches: int) -> ItemCost:
    fixed_ms = whole_ms if piece_ms is None else _fixed(whole_ms, piece_ms, num_microbatches)
    return ItemCost(fixed_ms, whole_ms - fixed_ms)


def _mean_position(positions: Sequence[PositionCosts]) -> PositionCosts:
    def mean(items: Sequence[ItemCost]) -> ItemCost:
        return ItemCost(
            statistics.fmean(item.fixed_ms for item in items),
            statistics.fmean(item.minibatch_ms for item in items),
        )

    return PositionCosts(
        mean([position.forward for position in positions]),
        mean([position.backward for position in positions]),
        statistics.fmean(position.update_ms for position in positions),
    )


def _line(sizes: Sequence[int], times_ms: Sequence[float]) -> tuple[float, float]:
    """(at size 0, per size) of the line nearest to the points, neither below 0."""
    mean_size, mean_ms = statistics.fmean(sizes), statistics.fmean(times_ms)
    spread = sum((size - mean_size) ** 2 for size in sizes)
    slope = 0.0
    if spread:
        products = ((size - mean_size) * (ms - mean_ms) for size, ms in zip(sizes, times_ms, strict=True))
        slope = max(0.0, sum(products) / spread)
    if mean_ms < slope * mean_size:
        slope = mean_ms / mean_size
    return max(0.0, mean_ms - slope * mean_size), slope


def _sync(
    shared: RunResult, one: dict[str, _Item], num_bytes: int, update_ms_per_byte: float
) -> tuple[float, float]:
    """What replicas exchange costs a worker per round, of which each of the two does half of the update: all
    per byte, unless the parameters are so few that it is the messages' cost."""
    rest_ms = []
    for spans in shared.spans:
        items = [_items(spans, kind) for kind in ("FORWARD", "BACKWARD", "UPDATE")]
        rest_ms.append(sum(item.own_ms for item in items) + items[2].compute_ms)
    known_ms = sum(item.own_ms for item in one.values()) + one["UPDATE"].compute_ms
    known_ms -= update_ms_per_byte * num_bytes / 2
    extra_ms = max(0.0, statistics.fmean(rest_ms) - known_ms)
    exchanged = num_bytes / 2
    if exchanged < _FEW_BYTES:
        return extra_ms, 0.0
    return 0.0, extra_ms / exchanged


def _latency_ms(result: RunResult) -> float:
    """Of an activation that its receiver waits for: from when its sender goes on to when it is there."""
    latencies = []
    for upstream, downstream in itertools.pairwise(result.spans):
        sent_ns = {
            (span.minibatch, span.microbatch): following.asked_ns
            for span, following in itertools.pairwise(upstream)
            if span.kind == "FORWARD"
        }
        for span in downstream:
            key = (span.minibatch, span.microbatch)
            if span.kind == "FORWARD" and span.wait_ns > 0 and key in sent_ns:
                latencies.append(max(0.0, (span.asked_ns + span.wait_ns - sent_ns[key]) / 1e6))
    return statistics.median(latencies) if latencies else 0.0


def _stage_bytes(profile: Profile, stage: Stage) -> int:
    return sum(layer.parameter_bytes for layer in profile.layers[stage.first_layer : stage.last_layer + 1])
