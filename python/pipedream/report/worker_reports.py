"""Joins the workers' reports into the result of their run. Pure; any thread."""

from __future__ import annotations

import itertools
import types
from collections.abc import Mapping, Sequence
from typing import Any

from pipedream import _core
from pipedream.links.channels import RunChannel
from pipedream.planning.plan import Plan
from pipedream.planning.prediction import predict_ms_of_run
from pipedream.report.result import ChannelFigures, Evaluation, RunResult, UpdateOrder, WorkSpan
from pipedream.report.status import in_turn, losses_of
from pipedream.report.transfers import combine_transfers
from pipedream.simulate.trace import Clock, shift_ns

__all__ = ["combine_reports"]


def combine_reports(
    plan: Plan,
    schedule: _core.ScheduleOptions,
    channels: Sequence[RunChannel],
    reports: list[dict[str, Any]],
    record: Mapping[str, list[Any]] = types.MappingProxyType({}),
) -> RunResult:
    """Makes the run's result from the workers' reports.

    channels: the channels of activations and gradients. reports: in the order of ranks. record: the losses,
    samples, epochs and evaluations before the checkpoint from which the run continues."""
    of_stages = [
        [
            reports[plan.placement.rank_of(stage, replica)]
            for replica in range(plan.stages[stage].num_replicas)
        ]
        for stage in range(plan.num_stages)
    ]
    last = of_stages[-1][0]
    m = schedule.num_microbatches
    losses = losses_of([report["losses"] for report in of_stages[-1]], m)
    samples, epochs = last["samples"], last["epochs"]
    all_losses = [*record.get("losses", []), *losses]
    all_epochs = [*record.get("epochs", []), *epochs]
    totals = [report["totals"] for report in reports]
    elapsed_ns = max(entry["elapsed_ns"] for entry in totals)
    stages = [replicas[0]["stages"][str(stage)] for stage, replicas in enumerate(of_stages)]
    versions = [
        _by_minibatch(in_turn([report["stages"][str(stage)]["versions"] for report in replicas]), m)
        for stage, replicas in enumerate(of_stages)
    ]
    figures = [_figures_of(channel, reports) for channel in channels]
    # measured_ms leaves out this warm-up, which contains the slow minibatches in which memory is measured.
    num_in_flight = (2 * max(schedule.in_flight) + 1) * max(stage.num_replicas for stage in plan.stages)
    num_warm_up = -(-num_in_flight // m)
    return RunResult(
        losses=all_losses,
        epoch_losses=_epoch_losses(all_losses, [*record.get("samples", []), *samples], all_epochs),
        versions=[[(read[0][0], read[-1][1]) for read in stage] for stage in versions],
        microbatch_versions=versions,
        samples_per_s=sum(samples) / max(elapsed_ns / 1e9, 1e-9),
        predicted_ms=predict_ms_of_run(plan, schedule),
        measured_ms=_steady_ms(last["spans"], num_warm_up, [schedule.first_minibatch, *last["drained_at"]]),
        bubble_share=1.0
        - sum(t["compute_ns"] for t in totals) / max(sum(t["elapsed_ns"] for t in totals), 1),
        bytes_sent=sum(channel.wire_bytes + channel.placed_bytes for channel in figures),
        transports={f"{channel.sender}->{channel.receiver}": channel.transport for channel in figures},
        worker_pids=[report["pid"] for report in reports],
        memory=[report["memory"] for report in reports],
        recompute=[stage["recompute"] for stage in stages],
        offload=[stage["offload"] for stage in stages],
        overhead_us=[
            (t["elapsed_ns"] - t["wait_ns"] - t["compute_ns"]) / 1e3 / max(t["num_work_items"], 1)
            for t in totals
        ],
        wait_share=[t["wait_ns"] / max(t["elapsed_ns"], 1) for t in totals],
        data_wait_share=[
            report["data"]["read_ns"] / max(report["totals"]["elapsed_ns"], 1) for report in reports
        ],
        data_sources=[report["data"]["source"] for report in reports],
        epoch_sizes=[all_epochs.count(epoch) for epoch in sorted(set(all_epochs))],
        continued_at=schedule.first_minibatch if record else 0,
        checkpoints=[report.get("checkpoints", {}) for report in reports],
        channels=figures,
        bytes_synced=sum(report["synced_bytes"] for report in reports),
        spans=[_spans_of(report, reports[0]) for report in reports],
        transfers=combine_transfers(channels, reports),
        stopped_at=len(all_losses) if reports[0]["stopped"] else None,
        worker_names=[plan.describe_worker(rank) for rank in range(len(reports))],
        drained_at=reports[0]["drained_at"],
        validation=_evaluations_of(last, record, all_epochs, schedule),
        updates_read=[_updates_read(schedule, stage, of_stages[stage]) for stage in range(plan.num_stages)],
        update_orders=[
            [
                UpdateOrder.of(shard["parts"], shard["order"])
                for report in replicas
                if (shard := report["stages"][str(stage)]["shard"]) is not None
            ]
            for stage, replicas in enumerate(of_stages)
        ],
    )


def _evaluations_of(
    report: dict[str, Any],
    record: Mapping[str, list[Any]],
    epochs: Sequence[int],
    schedule: _core.ScheduleOptions,
) -> list[Evaluation]:
    """Returns the evaluations of the run. report: the report of the last stage's first replica. epochs: the
    epoch of each minibatch of the result."""
    rows = [*record.get("evaluated", []), *report["validation"]]
    first_minibatch = 0 if record else schedule.first_minibatch
    return [
        Evaluation(
            minibatch,
            epochs[minibatch - 1 - first_minibatch],
            figures["loss"],
            {name: figure for name, figure in figures.items() if name != "loss"},
            count,
        )
        for minibatch, count, figures in rows
    ]


def _by_minibatch(versions: list[list[int]], num_microbatches: int) -> list[list[tuple[int, int]]]:
    """Groups versions by minibatch. versions: for each microbatch, the versions that its forward and its
    backward read.
    """
    pairs = [(forward, backward) for forward, backward in versions]
    return [pairs[first : first + num_microbatches] for first in range(0, len(pairs), num_microbatches)]


def _updates_read(
    schedule: _core.ScheduleOptions, stage: int, replicas: list[dict[str, Any]]
) -> list[tuple[int, int]]:
    """Returns RunResult.updates_read of one stage. replicas: the reports of the stage's replicas."""
    first = _core.rounds_of(schedule, stage).first_version
    read: list[list[tuple[int, int]]] = []
    for report in replicas:
        shard = report["stages"][str(stage)]["shard"]
        if shard is None:
            return []
        versions = report["stages"][str(stage)]["versions"]
        contained = [shard["contained"][forward - first] for forward, _ in versions]
        read.append([(fewest, most) for fewest, most in contained])
    return in_turn(read)[:: schedule.num_microbatches]


def _figures_of(channel: RunChannel, reports: list[dict[str, Any]]) -> ChannelFigures:
    """Returns a channel's figures. The counts come from the receiver, because the sender may report while it
    still sends the last tensors."""
    assert channel.stages is not None
    sent = reports[channel.sender]["channels"][channel.name]
    received = reports[channel.receiver]["channels"][channel.name]
    # The sender's time alone would be too short, because a socket accepts bytes long before they arrive.
    transfer_ns = max(sent["transfer_ns"] - sent["credit_wait_ns"], received["transfer_ns"])
    wait_ns = received["wait_ns"]
    return ChannelFigures(
        name=channel.name,
        sender=channel.stages[0],
        receiver=channel.stages[1],
        transport=sent["transport"],
        codec=sent["codec"],
        items=received["num_items"],
        chunks=received["num_chunks"],
        tensor_bytes=received["tensor_bytes"],
        wire_bytes=received["wire_bytes_received"],
        placed_bytes=received["placed_bytes"],
        transfer_ms=transfer_ns / 1e6,
        credit_wait_ms=sent["credit_wait_ns"] / 1e6,
        wait_ms=wait_ns / 1e6,
        overlap_share=min(max(1 - wait_ns / transfer_ns, 0.0), 1.0) if transfer_ns > 0 else None,
        chunk_bytes=sent["chunk_bytes"],
        refused=sent["num_refused"] + received["num_refused"],
    )


def _spans_of(report: dict[str, Any], first: dict[str, Any]) -> list[WorkSpan]:
    """Returns the worker's work items, with times on the clock of rank 0's machine. first: rank 0's
    report."""
    shift = shift_ns(Clock(*report["clock"]), Clock(*first["clock"]))
    spans = [WorkSpan(*span) for span in report["spans"]]
    if shift == 0:
        return spans
    return [
        span._replace(
            asked_ns=span.asked_ns + shift,
            ready_ns=span.ready_ns + shift,
            completed_ns=span.completed_ns + shift,
        )
        for span in spans
    ]


def _epoch_losses(losses: list[float], samples: list[int], epochs: list[int]) -> list[float]:
    """Returns the mean loss per sample of each epoch."""
    sums: dict[int, tuple[float, int]] = {}
    for loss, count, epoch in zip(losses, samples, epochs, strict=True):
        total, seen = sums.get(epoch, (0.0, 0))
        sums[epoch] = (total + loss * count, seen + count)
    return [total / max(seen, 1) for _, (total, seen) in sorted(sums.items())]


def _evaluated_ns(spans: Sequence[WorkSpan], begin_ns: int, end_ns: int) -> int:
    """Returns the nanoseconds of evaluations between the times begin_ns and end_ns, including the waits for
    them."""
    evaluated = (span for span in spans if span.traits.scope == "boundary")
    return sum(
        span.completed_ns - span.asked_ns
        for span in evaluated
        if begin_ns <= span.asked_ns and span.completed_ns <= end_ns
    )


def _steady_ms(spans: list[list[int | str]], num_warm_up: int, begins: Sequence[int]) -> float:
    """Returns milliseconds per minibatch, measured between updates of the last stage and without evaluations.

    begins: the first minibatch of the run, and the first one after each pause (RunResult.drained_at).
    num_warm_up: this number of minibatches after each of `begins` does not count. If too few minibatches
    remain, all count."""
    named = [WorkSpan(*span) for span in spans]  # type: ignore[arg-type]
    if not named:
        return 0.0
    last_stage = max(span.stage for span in named)
    done = [
        (span.minibatch, span.completed_ns)
        for span in named
        if span.traits.writes_version and span.stage == last_stage
    ]
    elapsed_ns, num_minibatches = 0, 0
    for begin, end in itertools.zip_longest(begins, begins[1:]):
        of_segment = [update for update in done if begin <= update[0] and (end is None or update[0] < end)]
        steady = [update for update in of_segment if update[0] >= begin + num_warm_up]
        counted = steady if len(steady) > 2 else of_segment
        if len(counted) > 1:
            (first, first_ns), *_, (last, last_ns) = counted
            elapsed_ns, num_minibatches = elapsed_ns + last_ns - first_ns, num_minibatches + last - first
            elapsed_ns -= _evaluated_ns(named, first_ns, last_ns)
    if num_minibatches > 0:
        return elapsed_ns / 1e6 / num_minibatches
    return (named[-1].completed_ns - named[0].asked_ns) / 1e6 / max(len(done), 1)
