"""RunResult has the losses and the measured figures of a run. Plain values that are sent as JSON; any
thread."""

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
    """One work item of a worker: a forward, recompute, backward, update or evaluation. All workers' times are
    on the monotonic clock of rank 0's machine. On a GPU they say when the device worked, not when the host
    launched the work."""

    kind: str
    """The name of its opcode: FORWARD, RECOMPUTE, BACKWARD, UPDATE or EVALUATE."""
    stage: int
    minibatch: int
    """The minibatch of the item. An EVALUATE has the minibatch before which it takes place; its `microbatch`
    is the number of the validation minibatch."""
    microbatch: int
    asked_ns: int
    """When the worker asked for the item. On a GPU it is never earlier than the end of the previous item.
    """
    ready_ns: int
    """When the item had its input. On a GPU it is when the device began the user's work."""
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
    """The figures of one evaluation by run(validation=...)."""

    minibatch: int
    """The number of minibatches that the evaluated weights were trained on."""
    epoch: int
    """The epoch of the last of these minibatches."""
    loss: float
    """Mean loss over the validation samples, or the mean weighted by weight_fn."""
    metrics: dict[str, float]
    """Metrics by name. A metric returns a sum and a count for each validation minibatch; its value is the sum
    of the sums, divided by the sum of the counts.
    """
    samples: int


class ChannelFigures(NamedTuple):
    """Figures of one channel between two stages, over the whole run."""

    name: str
    sender: int
    """The stage that sends the tensors."""
    receiver: int
    transport: str
    """One of the names in RunResult.transports."""
    codec: str
    """The codec of the channel's floating-point tensors. It is "none" if the codec applies to none of them:
    bf16 and fp16 do not apply to tensors that autocast has made 16 bits long."""
    items: int
    """The number of microbatches whose tensors were sent."""
    chunks: int
    tensor_bytes: int
    """Bytes of the channel's tensors before the codec."""
    wire_bytes: int
    """Bytes of the frames that arrived, headers included."""
    placed_bytes: int
    """Bytes that the sender wrote directly into the receiver's memory, if both are on one host."""
    transfer_ms: float
    """Milliseconds in which tensors were on their way: the longer of the times that the two ends measured."""
    credit_wait_ms: float
    """Milliseconds in which the next tensors waited until the receiver had room. transfer_ms does not include
    them.
    """
    wait_ms: float
    """Milliseconds in which the receiver waited for this channel and did nothing else."""
    overlap_share: float | None
    """Share of transfer_ms in which the receiver did not wait, 0 to 1; None if nothing was sent. The true
    share of hidden transfers may be larger, because wait_ms includes time in which the sender was still
    computing."""
    chunk_bytes: int
    """Bytes of the chunks in which tensors go over the wire."""
    refused: int
    """Number of connections and frames that the two ends refused because they did not belong to the run."""


class UpdateOrder(NamedTuple):
    """The order in which one asynchronous shard received the replicas' gradients. Each gradient makes a
    separate update."""

    parts: list[list[tuple[str, int, int]]]
    """Parts of the shard, each of which is updated as a whole. A part is a list of (parameter, first element,
    number of elements), in the order of memory."""
    replicas: list[int]
    """For each update, the replica whose gradient it used. The gradients of one replica are used in the order
    in which the replica made them, part by part. Empty if there were more than 2^20 updates."""

    @classmethod
    def of(cls, parts: list[Any], replicas: list[int]) -> UpdateOrder:
        """Makes the order from its JSON form, in which tuples have become lists."""
        return cls([[(name, first, count) for name, first, count in part] for part in parts], replicas)


@dataclass(repr=False)
class RunResult:
    """The result that `run` returns. Lists with an entry per worker are in the order of ranks. repr() shows a
    few lines, summary() shows all figures."""

    losses: list[float]
    """The loss of each minibatch, in order."""
    epoch_losses: list[float]
    """Mean loss per sample of each epoch."""
    versions: list[list[tuple[int, int]]]
    """versions[stage][minibatch] is a pair of weight versions. The forward of the minibatch's first
    microbatch read the first one, and the backward of its last microbatch read the second one."""
    samples_per_s: float
    """All samples, divided by the seconds from the first work item to the last. Pauses in which memory is
    planned again do not count."""
    predicted_ms: float | None
    """Milliseconds per minibatch that the plan's cost model predicts; None if the plan has no figure. The
    calibrated model predicts this run's schedule and microbatches. The paper's model gives the time of the
    slowest stage or link under any schedule."""
    measured_ms: float
    """Milliseconds per minibatch in the steady phase, measured at the last stage, without evaluations."""
    bubble_share: float
    """Share of the workers' time in which they ran no user code, 0 to 1."""
    bytes_sent: int
    """Bytes of activations and gradients that all workers sent between stages, headers included. They include
    the bytes that workers wrote into each other's memory."""
    transports: dict[str, str]
    """The transport between two stages. "0->1" is for activations from stage 0 to 1, "1->0" for gradients
    from stage 1 to 0. The values are "zmq/tcp", "zmq/tcp curve" if encrypted, "shared memory" and "cuda
    ipc"."""
    worker_pids: list[int]
    memory: list[dict[str, dict[str, int | None]]]
    """For each worker, the "predicted" and "peak" bytes of its memory terms, by the term's name. A figure
    that cannot be measured is None. On the host, torch's own memory is measured only during the first
    minibatches."""
    microbatch_versions: list[list[list[tuple[int, int]]]] = field(default_factory=list)
    """microbatch_versions[stage][minibatch][microbatch] is a pair of weight versions. The forward read the
    first one, and the backward read the second one."""
    overhead_us: list[float] = field(default_factory=list)
    """For each worker, the mean microseconds per work item in which it ran no user code and did not wait for
    tensors.
    """
    wait_share: list[float] = field(default_factory=list)
    """For each worker, the share of its time in which it waited for a neighbour's tensors."""
    data_wait_share: list[float] = field(default_factory=list)
    """For each worker, the share of its time in which it read data; 0 if it reads none. This time counts as
    user code."""
    data_sources: list[str] = field(default_factory=list)
    """For each worker, the data that it reads, such as "DataLoader with num_workers=2"; "" if it reads
    none."""
    epoch_sizes: list[int] = field(default_factory=list)
    """The number of minibatches in each epoch."""
    recompute: list[bool] = field(default_factory=list)
    """For each stage, whether its forwards were repeated before their backwards."""
    offload: list[list[str]] = field(default_factory=list)
    """For each stage, what was offloaded to host memory: a list with none, one or both of "versions" and
    "activations"."""
    channels: list[ChannelFigures] = field(default_factory=list)
    """Figures of every channel that carries activations or gradients between two stages."""
    bytes_synced: int = 0
    """Bytes that the replicas and spares of each stage sent each other, headers included: gradients or their
    factors, and weight versions. Bytes of an all-reduce are not included."""
    spans: list[list[WorkSpan]] = field(default_factory=list)
    """For each worker, its latest work items, oldest first. Only rank 0's result has them."""
    transfers: list[ChannelTransfers] = field(default_factory=list)
    """For each channel in `channels`, the times of its latest transfers. Only rank 0's result has them."""
    worker_names: list[str] = field(default_factory=list)
    """For each worker, a text with its stages and rank."""
    drained_at: list[int] = field(default_factory=list)
    """The minibatches before which the run paused, because a minibatch was larger than planned. In a pause
    all workers finish their work and plan their memory again. The next minibatch reads the newest version.
    `memory` has the largest figure of all memory plans for each term. No figure includes the time of pauses.
    pipedream.reference takes this list to compute the same numbers.
    """
    stopped_at: int | None = None
    """The number of minibatches that were trained on, if Ctrl-C or a callback stopped the run. All stages
    then have the version after these minibatches. None if the run ended with its data."""
    is_interrupted: bool = False
    """Whether Ctrl-C in this process asked the run to end. The request may have come too late to end the run
    early.
    """
    continued_at: int = 0
    """The minibatch of the checkpoint from which the run continued; 0 without a checkpoint. `versions` and
    `microbatch_versions` begin with this minibatch. `losses` and the figures by epoch include the minibatches
    before it."""
    checkpoints: list[dict[str, int]] = field(default_factory=list)
    """For each worker, four figures of its checkpoints: "num_copied" and "num_written" count copied and
    written states of stages; "stall_ns" is the time in which training waited, and "write_ns" the time in
    which a thread wrote."""
    updates_read: list[list[tuple[int, int]]] = field(default_factory=list)
    """With sync="asp", updates_read[stage][minibatch] is a pair (fewest, most). The minibatch's forward read
    the weights in parts, and each part contained the gradients of some number of minibatches. The pair has
    the smallest and the largest of these numbers. Empty for a stage without replicas, for which `versions`
    has the number."""
    validation: list[Evaluation] = field(default_factory=list)
    """The evaluations of run(validation=...), in order."""
    update_orders: list[list[UpdateOrder]] = field(default_factory=list)
    """With sync="asp", update_orders[stage][replica] is the order of the updates of the replica's shard.
    Empty for a stage without replicas. pipedream.reference takes these orders to compute the same numbers."""

    def __post_init__(self) -> None:
        self._kept: KeptState | None = None
        self.ema: dict[str, Tensor] | None = None
        """Averages of callbacks.EMA by the names of parameters, for model.load_state_dict(ema, strict=False).
        Only the process that has the trained model has them; with gather="none" no process has. Otherwise, or
        without an EMA, this is None."""

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields without the run's state. So copies of the result do not keep the state."""
        return {**vars(self), "_kept": None}

    @property
    def state(self) -> RunState:
        """The state in which the run ended. Another run can continue from it: run(..., state=result.state).

        A process keeps only the state of its latest run. Raises ValueError if another run has begun since,
        unless the user has held the state."""
        if self._kept is None:
            raise ValueError("this result has come from elsewhere, without the state of its run")
        return self._kept.get()

    def keep(self, state: RunState) -> None:
        """Keeps `state` as the state in which the run ended."""
        self._kept = KeptState(state)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a Chrome trace (.json or .json.gz), which ui.perfetto.dev opens. It shows the workers' work
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
        """Returns `channels` as a table, and a line for each worker that waited long for its data. The text
        is empty if there are no channels and no such workers."""
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
        # dataclasses.asdict() would take seconds, because it copies the spans one by one.
        return {name: value for name, value in vars(self).items() if name not in ("_kept", "ema")}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> RunResult:
        """Makes the result from its JSON form, in which tuples have become lists."""
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
        letter = channel.name[0].upper()  # A for activations, G for gradients

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
