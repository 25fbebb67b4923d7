"""RunResult: what a run did. Plain values that travel as JSON; any thread."""

from __future__ import annotations

import itertools
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from pipedream import _core
from pipedream.budget.memory import describe_memory
from pipedream.checkpoint.run_state import KeptState, RunState
from pipedream.common.table import format_table, html_of
from pipedream.common.units import format_bytes
from pipedream.links.channels import RunChannel
from pipedream.planning.plan import Plan
from pipedream.planning.prediction import predict_ms_of_run
from pipedream.report.status import in_turn, losses_of
from pipedream.report.summary import describe_data_waits, describe_result, plot_losses, summarize
from pipedream.report.transfers import (
    ChannelTransfers,
    combine_transfers,
    draw_transfers,
    transfers_from_json,
)
from pipedream.simulate.trace import Clock, Span, shift_ns, write_trace

__all__ = ["ChannelFigures", "RunResult", "UpdateOrder", "WorkSpan", "combine_reports"]


class WorkSpan(NamedTuple):
    """One work item of a worker; times on the machine's monotonic clock. On a GPU they are the device's own,
    whenever the host asked and launched."""

    kind: str
    """FORWARD, RECOMPUTE, BACKWARD, UPDATE or EVALUATE."""
    stage: int
    minibatch: int
    """The minibatch. An EVALUATE has the one before which the weights are evaluated; its microbatch is the
    validation minibatch."""
    microbatch: int
    asked_ns: int
    """When the worker asked for it; on a GPU not before the device had done the item before."""
    ready_ns: int
    """When it had its input; on a GPU when the device began the user's work."""
    completed_ns: int
    wait_ns: int
    """The part of asked to ready that waits for a neighbour's tensors, with nothing else to do."""
    compute_ns: int
    """The part of ready to completed that is in user code."""


class Evaluation(NamedTuple):
    """The figures that run(validation=...) has measured once, with the weights before a minibatch."""

    minibatch: int
    """The minibatches that these weights were trained on."""
    epoch: int
    """The epoch of the last of them."""
    loss: float
    """Mean over the samples, or by weight_fn."""
    metrics: dict[str, float]
    """By name: all sums over all counts."""
    samples: int


class ChannelFigures(NamedTuple):
    """Figures of one channel between two stages, over the whole run."""

    name: str
    sender: int
    """Its stage."""
    receiver: int
    transport: str
    """The transport as in RunResult.transports."""
    codec: str
    """The codec of its floating-point tensors; "none" if it applies to none of them, as bf16 and fp16 do not
    if autocast has made them 16 bits long."""
    items: int
    """Microbatches."""
    chunks: int
    tensor_bytes: int
    """Bytes of its tensors without a codec."""
    wire_bytes: int
    """By the socket, headers included."""
    placed_bytes: int
    """Written into the receiver's memory by the sender, on one host."""
    transfer_ms: float
    """In which tensors were under way, as far as the two ends can tell."""
    credit_wait_ms: float
    """Besides: in which the next item waited for the receiver to have room."""
    wait_ms: float
    """In which the receiver had nothing to do but to wait for this channel."""
    overlap_share: float | None
    """Share of transfer_ms in which the receiver did not wait, 0 to 1; None if nothing was under way. At
    least so much was hidden: the receiver also waits for what its neighbour has yet to compute."""
    chunk_bytes: int
    """Into how large chunks tensors were cut at the end of the run; it is measured on the first ones."""
    refused: int
    """Connections and frames that did not belong to the run, at both ends."""


class UpdateOrder(NamedTuple):
    """The order in which one asynchronous shard received the replicas' gradients, each an update of its
    own."""

    parts: list[list[tuple[str, int, int]]]
    """Parts of it that are updated at once: (parameter, first element, elements), as they lie in memory."""
    replicas: list[int]
    """By update, whose gradient it was of. A replica's come in their order, part by part. Empty where there
    were more than 2^20."""


@dataclass(repr=False)
class RunResult:
    """The result that `run` returns. Lists over workers are in the order of their ranks. Its repr has a few
    lines, summary() has all figures."""

    losses: list[float]
    """One per minibatch, in order, unrounded."""
    epoch_losses: list[float]
    """Mean loss per sample of each epoch."""
    versions: list[list[tuple[int, int]]]
    """versions[stage][minibatch] = the weight versions that the forward of its first microbatch and the
    backward of its last one actually read."""
    samples_per_s: float
    """All samples over the time from the first work item to the last, without pauses to plan again."""
    predicted_ms: float | None
    """Per minibatch, by the plan's cost model; None when the plan has no figure. The calibrated model's is of
    this run's schedule and microbatches; the paper's is the bottleneck, whatever the schedule."""
    measured_ms: float
    """Per minibatch, in the steady phase, at the last stage, without evaluations."""
    bubble_share: float
    """Share of the workers' time in which they did not run user code, 0 to 1."""
    bytes_sent: int
    """By all workers between stages, headers included, and what they wrote into each other's memory."""
    transports: dict[str, str]
    """"0->1": how activations travel from stage 0 to 1, and gradients back as "1->0": "zmq/tcp", encrypted
    as "zmq/tcp curve", "shared memory" (where they are of 16 KiB or more), or "cuda ipc"."""
    worker_pids: list[int]
    memory: list[dict[str, dict[str, int | None]]]
    """Per worker and named term: "predicted" and "peak" bytes; None where a term cannot be measured. On the
    host the terms that torch makes are measured over the first minibatches."""
    microbatch_versions: list[list[list[tuple[int, int]]]] = field(default_factory=list)
    """microbatch_versions[stage][minibatch][microbatch] = the weight versions that (forward, backward)
    actually read."""
    overhead_us: list[float] = field(default_factory=list)
    """Per worker: mean time per work item in which it neither ran user code nor waited for data."""
    wait_share: list[float] = field(default_factory=list)
    """Per worker: share of its time spent waiting for a neighbour's tensors."""
    data_wait_share: list[float] = field(default_factory=list)
    """Per worker: share of its time spent reading data, which counts as user code; 0 where it reads none."""
    data_sources: list[str] = field(default_factory=list)
    """Per worker: what it reads, as "DataLoader with num_workers=2"; "" where it reads nothing."""
    epoch_sizes: list[int] = field(default_factory=list)
    """Minibatches of each epoch."""
    recompute: list[bool] = field(default_factory=list)
    """Per stage: whether its forwards were done again before their backwards."""
    offload: list[list[str]] = field(default_factory=list)
    """Per stage: what waited in host memory for its use, of "versions" and "activations"."""
    channels: list[ChannelFigures] = field(default_factory=list)
    """Figures of every channel between two stages, activations and gradients."""
    bytes_synced: int = 0
    """By the replicas of each stage, and its spares, to each other, headers included: gradients, or their
    factors, and versions of the weights. What an all-reduce sends is not in it."""
    spans: list[list[WorkSpan]] = field(default_factory=list)
    """Per worker: the latest work items, oldest first."""
    transfers: list[ChannelTransfers] = field(default_factory=list)
    """Times at which the latest items of each of `channels` were under way. At rank 0 only, as `spans`
    are."""
    worker_names: list[str] = field(default_factory=list)
    """Per worker: its stages and rank."""
    drained_at: list[int] = field(default_factory=list)
    """The minibatches before which all workers finished, as one was larger than planned, planned their memory
    again and began anew: they read the newest version as the run's first does. Given these,
    pipedream.reference computes the same numbers. `memory` has the most of any of the plans, per term; the
    time in between is in no figure."""
    stopped_at: int | None = None
    """Minibatches that were trained on when the run was stopped early, by Ctrl-C or a callback: all stages
    ended with the version after so many. None where the data were used up."""
    continued_at: int = 0
    """The minibatch of the checkpoint from which the run continued: the first of `versions` and
    `microbatch_versions`. `losses` and what is by epoch have those before it, too."""
    checkpoints: list[dict[str, int]] = field(default_factory=list)
    """Per worker: num_copied and num_written parts of checkpoints, stall_ns, for which its training waited,
    and write_ns, which its other thread spent."""
    updates_read: list[list[tuple[int, int]]] = field(default_factory=list)
    """With sync="asp", updates_read[stage][minibatch] = (fewest, most): how many minibatches' gradients the
    parts of the weights contained that its forward read. Empty for a stage without replicas, whose versions
    say it."""
    validation: list[Evaluation] = field(default_factory=list)
    """Evaluations of run(validation=...), one entry each, in order."""
    update_orders: list[list[UpdateOrder]] = field(default_factory=list)
    """With sync="asp", by stage and replica, of each one's shard; none for a stage without replicas. Given
    these, pipedream.reference computes the same numbers."""

    def __post_init__(self) -> None:
        self._kept: KeptState | None = None
        self.ema: dict[str, Tensor] | None = None
        """Averages of callbacks.EMA by the names of parameters, for model.load_state_dict(ema, strict=False);
        where the trained model is, and with gather="none" nowhere. None: there was no EMA."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy comes without the state, of which each process keeps one."""
        return {**vars(self), "_kept": None}

    @property
    def state(self) -> RunState:
        """The state in which the run ended, for another that goes on from it: run(..., state=result.state). A
        process keeps that of its latest run: raises ValueError where another has begun since, unless somebody
        holds it."""
        if self._kept is None:
            raise ValueError("this result has come from elsewhere, without the state of its run")
        return self._kept.get()

    def keep(self, state: RunState) -> None:
        """Keeps this as the run's state from now on."""
        self._kept = KeptState(state)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a Chrome trace (.json or .json.gz) that ui.perfetto.dev opens: the workers' items of work
        and what travelled between them. docs/transport.md says what its tracks are."""
        channels = {channel.name: channel._asdict() for channel in self.channels}
        spans, arrows = list(self._work_spans()), []
        for transfers in self.transfers:
            drawn, drawn_arrows = self._draw(transfers)
            spans += drawn
            arrows += drawn_arrows
        write_trace(path, spans, {"channels": channels}, arrows)

    def describe_memory(self) -> str:
        """A table of `memory`: predicted and peak bytes per worker and term."""
        return describe_memory(self.worker_names, self.memory)

    def describe_channels(self) -> str:
        """A table of `channels`, and a line for each stage that waited for its data instead; empty when
        nothing travels and no stage waited."""
        parts = [_describe_channels(self.channels), "\n".join(describe_data_waits(self))]
        return "\n\n".join(part for part in parts if part)

    def __repr__(self) -> str:
        return describe_result(self)

    def _repr_html_(self) -> str:
        return html_of(repr(self))

    def summary(self) -> str:
        """Tables of all figures but the single work items: losses by epoch, time, bytes, memory."""
        return summarize(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the losses into a .png, .svg or .pdf file. Raises ValueError for another ending, and where
        matplotlib is missing."""
        plot_losses(self, path)

    def to_dict(self) -> dict[str, Any]:
        # Not asdict: copying the spans one by one takes seconds. Its state is no part of it.
        return {name: value for name, value in vars(self).items() if name not in ("_kept", "ema")}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> RunResult:
        """The result from its JSON form, with tuples where JSON has lists."""
        fields = dict(fields)
        fields["versions"] = [[(pair[0], pair[1]) for pair in stage] for stage in fields["versions"]]
        fields["microbatch_versions"] = [
            [[(pair[0], pair[1]) for pair in minibatch] for minibatch in stage]
            for stage in fields.get("microbatch_versions", [])
        ]
        fields["channels"] = [ChannelFigures(*channel) for channel in fields["channels"]]
        fields["spans"] = [[WorkSpan(*span) for span in worker] for worker in fields["spans"]]
        fields["transfers"] = transfers_from_json(fields["transfers"])
        fields["updates_read"] = [[(pair[0], pair[1]) for pair in stage] for stage in fields["updates_read"]]
        fields["validation"] = [Evaluation(*each) for each in fields["validation"]]
        fields["update_orders"] = [[_order_of(*o) for o in stage] for stage in fields["update_orders"]]
        return cls(**fields)

    def _draw(self, transfers: ChannelTransfers) -> tuple[list[Span], list[tuple[Span, Span]]]:
        channel = next(channel for channel in self.channels if channel.name == transfers.channel)
        has_parts = self._has_microbatches()
        letter = channel.name[0].upper()  # Activations and Gradients

        def name_of(minibatch: int, microbatch: int) -> str:
            return f"{letter}{minibatch}" + (f".{microbatch}" if has_parts else "")

        arguments = {"codec": channel.codec, "transport": channel.transport}
        return draw_transfers(transfers, self._process_names(), arguments, name_of)

    def _has_microbatches(self) -> bool:
        spans = (span for worker in self.spans for span in worker)
        return any(span.microbatch > 0 and span.kind != "EVALUATE" for span in spans)

    def _process_names(self) -> list[str]:
        return [f"worker {rank} ({name})" for rank, name in enumerate(self.worker_names)]

    def _work_spans(self) -> Iterator[Span]:
        has_parts = self._has_microbatches()
        for worker_name, worker_spans in zip(self._process_names(), self.spans, strict=True):
            for span in worker_spans:
                arguments = {
                    "stage": span.stage,
                    "minibatch": span.minibatch,
                    "microbatch": span.microbatch,
                }
                if span.wait_ns > 0:
                    yield Span(worker_name, "waiting", "wait", span.asked_ns, span.ready_ns, arguments)
                is_part = span.kind == "EVALUATE" or (has_parts and span.kind != "UPDATE")
                part = f".{span.microbatch}" if is_part else ""
                name = f"{span.kind[0]}{span.minibatch}{part}"
                yield Span(worker_name, "compute", name, span.ready_ns, span.completed_ns, arguments)


def combine_reports(
    plan: Plan,
    schedule: _core.ScheduleOptions,
    channels: Sequence[RunChannel],
    reports: list[dict[str, Any]],
    record: Mapping[str, list[Any]] = types.MappingProxyType({}),
) -> RunResult:
    """Makes the run's result from the workers' reports, which are in the order of ranks. channels: those of
    activations and gradients. record: the losses, samples, epochs and evaluations before the checkpoint from
    which the run continues."""
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
    # Besides the warm-up those in which memory is measured, which takes time per operator on the host.
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
                _order_of(shard["parts"], shard["order"])
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
    """report: of the last stage. epochs: of each minibatch of the result."""
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
    """versions: (forward, backward) by microbatch, counted through the run."""
    pairs = [(forward, backward) for forward, backward in versions]
    return [pairs[first : first + num_microbatches] for first in range(0, len(pairs), num_microbatches)]


def _order_of(parts: list[Any], replicas: list[int]) -> UpdateOrder:
    return UpdateOrder([[(name, first, count) for name, first, count in part] for part in parts], replicas)


def _updates_read(
    schedule: _core.ScheduleOptions, stage: int, replicas: list[dict[str, Any]]
) -> list[tuple[int, int]]:
    """The updates that the version of each minibatch's first forward contained."""
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
    """Counts are the receiver's, which has had everything when it reports; its sender may still be at the
    last item then."""
    assert channel.stages is not None
    sent = reports[channel.sender]["channels"][channel.name]
    received = reports[channel.receiver]["channels"][channel.name]
    # A socket takes bytes long before they are there, so the sender's time alone would be too short.
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


def _describe_channels(channels: Sequence[ChannelFigures]) -> str:
    if not channels:
        return ""
    headings = (
        *("channel", "transport", "codec", "items", "tensors", "on the wire", "placed"),
        *("under way", "no room", "waited", "overlap"),
    )
    rows = [
        (
            *(channel.name, channel.transport, channel.codec, str(channel.items)),
            *map(format_bytes, (channel.tensor_bytes, channel.wire_bytes, channel.placed_bytes)),
            *(f"{ms:.1f} ms" for ms in (channel.transfer_ms, channel.credit_wait_ms, channel.wait_ms)),
            "" if channel.overlap_share is None else f"{100 * channel.overlap_share:.0f} %",
        )
        for channel in channels
    ]
    return format_table(headings, rows, "<<<>>>>>>>>")


def _spans_of(report: dict[str, Any], first: dict[str, Any]) -> list[WorkSpan]:
    """The worker's spans, with times on the clock of the first worker's machine."""
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
    """Mean loss per sample of each epoch."""
    sums: dict[int, tuple[float, int]] = {}
    for loss, count, epoch in zip(losses, samples, epochs, strict=True):
        total, seen = sums.get(epoch, (0.0, 0))
        sums[epoch] = (total + loss * count, seen + count)
    return [total / max(seen, 1) for _, (total, seen) in sorted(sums.items())]


def _evaluated_ns(spans: Sequence[WorkSpan], begin_ns: int, end_ns: int) -> int:
    """Time that a worker spent on evaluations, and waiting for them, between two updates."""
    evaluated = (span for span in spans if span.kind == "EVALUATE")
    return sum(
        span.completed_ns - span.asked_ns
        for span in evaluated
        if begin_ns <= span.asked_ns and span.completed_ns <= end_ns
    )


def _steady_ms(spans: list[list[int | str]], num_warm_up: int, begins: Sequence[int]) -> float:
    """Milliseconds per minibatch between updates of the last stage, without evaluations and without the first
    minibatches, which are counted from `begins`: of the run, and after each drain. Over all of them when
    there are too few. An update that several minibatches share names the first."""
    named = [WorkSpan(*span) for span in spans]  # type: ignore[arg-type]
    if not named:
        return 0.0
    last_stage = max(span.stage for span in named)
    done = [
        (span.minibatch, span.completed_ns)
        for span in named
        if span.kind == "UPDATE" and span.stage == last_stage
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
