"""RunResult has the losses of a run, and the figures that were measured. Plain values that are sent as JSON;
any thread."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from pipedream import _core
from pipedream.budget.memory import describe_memory
from pipedream.checkpoint.run_state import KeptState, RunState
from pipedream.common.table import format_table, html_of
from pipedream.common.units import format_bytes
from pipedream.report.summary import describe_data_waits, describe_result, plot_losses, summarize
from pipedream.report.transfers import (
    ChannelTransfers,
    draw_transfers,
    transfers_from_json,
)
from pipedream.simulate.trace import Span, write_trace

__all__ = ["ChannelFigures", "Evaluation", "RunResult", "UpdateOrder", "WorkSpan"]


class WorkSpan(NamedTuple):
    """One work item of a worker: a forward, recompute, backward, update or evaluation. Times are on the
    machine's monotonic clock. On a GPU they say when the device worked, not when the host launched the
    work."""

    kind: str
    """The name of its opcode: FORWARD, RECOMPUTE, BACKWARD, UPDATE or EVALUATE."""
    stage: int
    minibatch: int
    """The minibatch of the item. An EVALUATE has the minibatch before which the weights are evaluated, and
    the number of the validation minibatch as its microbatch."""
    microbatch: int
    asked_ns: int
    """When the worker asked for the item. On a GPU this is never before the device had finished the previous
    item.
    """
    ready_ns: int
    """When the item had its input. On a GPU: when the device began the user's work."""
    completed_ns: int
    wait_ns: int
    """Nanoseconds between asked_ns and ready_ns in which the worker waited for a neighbour's tensors and had
    nothing else to do."""
    compute_ns: int
    """Nanoseconds between ready_ns and completed_ns in which user code ran."""

    @property
    def traits(self) -> _core.OpcodeTraits:
        return _core.OPCODES[self.kind]


class Evaluation(NamedTuple):
    """The figures of one evaluation by run(validation=...), with the weights before a minibatch."""

    minibatch: int
    """The number of minibatches that these weights were trained on."""
    epoch: int
    """The epoch of the last of these minibatches."""
    loss: float
    """Mean loss over the validation samples, or the mean weighted by weight_fn."""
    metrics: dict[str, float]
    """Metrics by name. Each is the sum over all validation minibatches, divided by the sum of their
    counts.
    """
    samples: int


class ChannelFigures(NamedTuple):
    """Figures of one channel between two stages, over the whole run."""

    name: str
    sender: int
    """The stage that sends the tensors."""
    receiver: int
    transport: str
    """The transport as in RunResult.transports."""
    codec: str
    """The codec of the channel's floating-point tensors. "none" if the codec applies to none of them: bf16
    and fp16 do not apply to tensors that autocast has made 16 bits long."""
    items: int
    """Microbatches."""
    chunks: int
    tensor_bytes: int
    """Bytes of the channel's tensors before the codec."""
    wire_bytes: int
    """Bytes that went through the socket, headers included."""
    placed_bytes: int
    """Bytes that the sender wrote directly into the receiver's memory, if both are on one host."""
    transfer_ms: float
    """Milliseconds in which tensors were on their way, as far as the two ends can tell."""
    credit_wait_ms: float
    """Milliseconds, in addition to transfer_ms, in which the next tensors waited until the receiver had
    room.
    """
    wait_ms: float
    """Milliseconds in which the receiver only waited for this channel."""
    overlap_share: float | None
    """Share of transfer_ms in which the receiver did not wait, 0 to 1; None if nothing was sent. The true
    share of hidden transfers may be larger, because wait_ms includes time in which the neighbour was still
    computing."""
    chunk_bytes: int
    """Size of the chunks into which tensors were cut at the end of the run. The channel chooses it by
    measuring its first transfers."""
    refused: int
    """Number of connections and frames, at both ends, that were refused because they did not belong to the
    run.
    """


class UpdateOrder(NamedTuple):
    """The order in which one asynchronous shard received the replicas' gradients. Each gradient makes a
    separate update."""

    parts: list[list[tuple[str, int, int]]]
    """Parts of the shard. A part is updated as a whole. It lists (parameter, first element, number of
    elements) in the order of memory."""
    replicas: list[int]
    """For each update, the replica whose gradient it used. The gradients of one replica are used in the order
    in which it made them, part by part. Empty if there were more than 2^20 updates."""

    @classmethod
    def of(cls, parts: list[Any], replicas: list[int]) -> UpdateOrder:
        """Reads a worker's record, with tuples where JSON has lists."""
        return cls([[(name, first, count) for name, first, count in part] for part in parts], replicas)


@dataclass(repr=False)
class RunResult:
    """The result that `run` returns. Lists over workers are in the order of their ranks. repr() shows a few
    lines, summary() shows all figures."""

    losses: list[float]
    """The loss of each minibatch, in order, not rounded."""
    epoch_losses: list[float]
    """Mean loss per sample of each epoch."""
    versions: list[list[tuple[int, int]]]
    """versions[stage][minibatch] = two weight versions: the one that the forward of the minibatch's first
    microbatch read, and the one that the backward of its last microbatch read."""
    samples_per_s: float
    """All samples, divided by the time from the first work item to the last. Pauses in which memory is
    planned again do not count."""
    predicted_ms: float | None
    """Milliseconds per minibatch that the plan's cost model predicts; None if the plan has no figure. The
    calibrated model predicts this run's schedule and microbatches. The paper's model gives the time of the
    bottleneck, whatever the schedule."""
    measured_ms: float
    """Milliseconds per minibatch in the steady phase, measured at the last stage, without evaluations."""
    bubble_share: float
    """Share of the workers' time in which they ran no user code, 0 to 1."""
    bytes_sent: int
    """Bytes that all workers sent between stages, headers included, and bytes that they wrote into each
    other's memory."""
    transports: dict[str, str]
    """How tensors are sent between two stages. "0->1" has activations from stage 0 to 1, "1->0" gradients
    back. Values are "zmq/tcp", "zmq/tcp curve" if encrypted, "shared memory" (for tensors of 16 KiB or more),
    and "cuda ipc"."""
    worker_pids: list[int]
    memory: list[dict[str, dict[str, int | None]]]
    """Per worker and named term: "predicted" and "peak" bytes; None if a term cannot be measured. On the
    host, the terms of torch's own memory are measured during the first minibatches only."""
    microbatch_versions: list[list[list[tuple[int, int]]]] = field(default_factory=list)
    """microbatch_versions[stage][minibatch][microbatch] = (weight version that the forward read, weight
    version that the backward read)."""
    overhead_us: list[float] = field(default_factory=list)
    """Per worker: mean microseconds per work item in which it ran no user code and did not wait for
    tensors.
    """
    wait_share: list[float] = field(default_factory=list)
    """Per worker: share of its time spent waiting for a neighbour's tensors."""
    data_wait_share: list[float] = field(default_factory=list)
    """Per worker: share of its time spent reading data, which counts as user code; 0 where it reads none."""
    data_sources: list[str] = field(default_factory=list)
    """Per worker: the data that it reads, such as "DataLoader with num_workers=2"; "" if it reads none."""
    epoch_sizes: list[int] = field(default_factory=list)
    """Minibatches of each epoch."""
    recompute: list[bool] = field(default_factory=list)
    """Per stage: whether its forwards were repeated before their backwards."""
    offload: list[list[str]] = field(default_factory=list)
    """Per stage: the parts that were offloaded to host memory, of "versions" and "activations"."""
    channels: list[ChannelFigures] = field(default_factory=list)
    """Figures of every channel between two stages, activations and gradients."""
    bytes_synced: int = 0
    """Bytes that the replicas of each stage, and its spares, sent each other, headers included. These are
    gradients or their factors, and versions of the weights. Bytes of an all-reduce are not included."""
    spans: list[list[WorkSpan]] = field(default_factory=list)
    """Per worker: the latest work items, oldest first."""
    transfers: list[ChannelTransfers] = field(default_factory=list)
    """Times at which the latest tensors of each of `channels` were on their way. Present at rank 0 only, as
    `spans` is."""
    worker_names: list[str] = field(default_factory=list)
    """Per worker: its stages and rank."""
    drained_at: list[int] = field(default_factory=list)
    """Minibatches before which the run paused, because a minibatch was larger than planned. In a pause all
    workers finish their work and plan their memory again. The next minibatch reads the newest version, as the
    first minibatch of a run does. `memory` has the largest figure that any of the memory plans has for a
    term. No figure includes the time of the pauses. Given this list, pipedream.reference computes the same
    numbers.
    """
    stopped_at: int | None = None
    """How many minibatches were trained on, if Ctrl-C or a callback stopped the run. All stages ended with
    the version after so many minibatches. None if the run ended with its data."""
    is_interrupted: bool = False
    """Whether Ctrl-C in this process asked the run to end. The request may have come too late to end the run
    early.
    """
    continued_at: int = 0
    """The minibatch of the checkpoint from which the run continued; 0 if it did not continue one. `versions`
    and `microbatch_versions` begin with this minibatch. `losses` and the figures by epoch include the
    minibatches before it."""
    checkpoints: list[dict[str, int]] = field(default_factory=list)
    """Per worker: num_copied and num_written, the parts of checkpoints that were copied and written;
    stall_ns, the time for which training waited for checkpoints; and write_ns, the time that the writing
    thread spent."""
    updates_read: list[list[tuple[int, int]]] = field(default_factory=list)
    """With sync="asp": updates_read[stage][minibatch] = (fewest, most). The minibatch's forward read weights
    in parts, and each part contained the gradients of some number of minibatches. The pair has the smallest
    and the largest of these numbers. Empty for a stage without replicas, for which `versions` has the
    number."""
    validation: list[Evaluation] = field(default_factory=list)
    """Evaluations of run(validation=...), one entry each, in order."""
    update_orders: list[list[UpdateOrder]] = field(default_factory=list)
    """With sync="asp": by stage and replica, the order of the updates of the replica's shard. Empty for a
    stage without replicas. Given these orders, pipedream.reference computes the same numbers."""

    def __post_init__(self) -> None:
        self._kept: KeptState | None = None
        self.ema: dict[str, Tensor] | None = None
        """Averages of callbacks.EMA by the names of parameters, for model.load_state_dict(ema, strict=False).
        Only the process that has the trained model has the averages; with gather="none" no process has them.
        None: there was no EMA, or the averages are not in this process."""

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields without the run's state, so that copies lack it: a process keeps the state of
        one run only.
        """
        return {**vars(self), "_kept": None}

    @property
    def state(self) -> RunState:
        """The state in which the run ended. Another run can continue from it: run(..., state=result.state).

        A process keeps the state of its latest run. Raises ValueError if another run has begun since and
        nobody held the state until then."""
        if self._kept is None:
            raise ValueError("this result has come from elsewhere, without the state of its run")
        return self._kept.get()

    def keep(self, state: RunState) -> None:
        """Keeps `state` as the state in which the run ended."""
        self._kept = KeptState(state)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a Chrome trace (.json or .json.gz) that ui.perfetto.dev opens. It shows the workers' work
        items and the tensors that were sent between workers. docs/transport.md describes its tracks."""
        channels = {channel.name: channel._asdict() for channel in self.channels}
        spans, arrows = list(self._work_spans()), []
        for transfers in self.transfers:
            drawn, drawn_arrows = self._draw(transfers)
            spans += drawn
            arrows += drawn_arrows
        write_trace(path, spans, {"channels": channels}, arrows)

    def describe_memory(self) -> str:
        """Returns `memory` as a table: predicted and peak bytes per worker and term."""
        return describe_memory(self.worker_names, self.memory)

    def describe_channels(self) -> str:
        """Returns `channels` as a table, with a line for each worker that waited long for its data. Empty if
        no tensors were sent and no worker waited long."""
        parts = [_describe_channels(self.channels), "\n".join(describe_data_waits(self))]
        return "\n\n".join(part for part in parts if part)

    def __repr__(self) -> str:
        return describe_result(self)

    def _repr_html_(self) -> str:
        return html_of(repr(self))

    def summary(self) -> str:
        """Returns tables of all figures except single work items: losses by epoch, time, bytes, memory."""
        return summarize(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the losses into a .png, .svg or .pdf file. Raises ValueError for another ending, and if
        matplotlib is missing."""
        plot_losses(self, path)

    def to_dict(self) -> dict[str, Any]:
        # Does not use asdict, which copies the spans one by one and takes seconds. The run's state is left
        # out.
        return {name: value for name, value in vars(self).items() if name not in ("_kept", "ema")}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> RunResult:
        """Makes the result from its JSON form, with tuples where JSON has lists."""
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
        fields["update_orders"] = [[UpdateOrder.of(*o) for o in stage] for stage in fields["update_orders"]]
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
        return any(span.microbatch > 0 and span.traits.scope == "microbatch" for span in spans)

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
                scope = span.traits.scope
                is_part = scope == "boundary" or (has_parts and scope == "microbatch")
                part = f".{span.microbatch}" if is_part else ""
                name = f"{span.traits.letter}{span.minibatch}{part}"
                yield Span(worker_name, "compute", name, span.ready_ns, span.completed_ns, arguments)


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
