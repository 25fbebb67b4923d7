"""RunResult: what a run did. Plain values that travel as JSON; any thread."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import _core
from .memory import describe_memory
from .plan import Plan
from .trace import Span, write_trace

__all__ = ["RunResult", "WorkSpan", "combine_reports"]


class WorkSpan(NamedTuple):
    """One work item of a worker; times on the machine's monotonic clock."""

    kind: str
    """FORWARD, RECOMPUTE, BACKWARD or UPDATE."""
    stage: int
    minibatch: int
    microbatch: int
    asked_ns: int
    """When the worker asked for it."""
    ready_ns: int
    """When it had its input."""
    completed_ns: int
    wait_ns: int
    """Of asked to ready: waiting for a neighbour's tensors."""
    compute_ns: int
    """Of ready to completed: in user code."""


@dataclass
class RunResult:
    """What `run` returns. Lists over workers are in the order of their ranks."""

    losses: list[float]
    """One per minibatch, in order, unrounded."""
    epoch_losses: list[float]
    """Mean loss per sample of each epoch."""
    versions: list[list[tuple[int, int]]]
    """versions[stage][minibatch] = the weight versions that (forward, backward) actually read."""
    samples_per_s: float
    """All samples over the time from the first work item to the last."""
    predicted_ms: float | None
    """Per minibatch, by the plan's cost model; None when the plan has no figure."""
    measured_ms: float
    """Per minibatch, in the steady phase, at the last stage."""
    bubble_share: float
    """Share of the workers' time in which they did not run user code, 0 to 1."""
    bytes_sent: int
    """By all workers between stages, headers included."""
    transports: dict[str, str]
    """"0->1": how activations travel from stage 0 to 1, and gradients back as "1->0"."""
    worker_pids: list[int]
    memory: list[dict[str, dict[str, int | None]]]
    """Per worker and named term: "predicted" and "peak" bytes; None where a term cannot be measured. On the
    host the terms that torch makes are measured over the first minibatches."""
    overhead_us: list[float] = field(default_factory=list)
    """Per worker: mean time per work item in which it neither ran user code nor waited for data."""
    wait_share: list[float] = field(default_factory=list)
    """Per worker: share of its time spent waiting for a neighbour's tensors."""
    recompute: list[bool] = field(default_factory=list)
    """Per stage: whether its forwards were done again before their backwards."""
    offload: list[list[str]] = field(default_factory=list)
    """Per stage: what waited in host memory for its use, of "versions" and "activations"."""
    spans: list[list[WorkSpan]] = field(default_factory=list, repr=False)
    """Per worker: the latest work items, oldest first."""
    worker_names: list[str] = field(default_factory=list, repr=False)
    """Per worker: its stages and rank."""

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a Chrome trace (.json or .json.gz) that ui.perfetto.dev opens."""
        write_trace(path, list(self._trace_spans()))

    def describe_memory(self) -> str:
        """A table of `memory`: predicted and peak bytes per worker and term."""
        return describe_memory(self.worker_names, self.memory)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))  # not asdict: copying the spans one by one takes seconds

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> RunResult:
        """The result from its JSON form, with tuples where JSON has lists."""
        fields = dict(fields)
        fields["versions"] = [[(pair[0], pair[1]) for pair in stage] for stage in fields["versions"]]
        fields["spans"] = [[WorkSpan(*span) for span in worker] for worker in fields["spans"]]
        return cls(**fields)

    def _trace_spans(self) -> Any:
        num_microbatches = 1 + max((span.microbatch for worker in self.spans for span in worker), default=0)
        for rank, worker_spans in enumerate(self.spans):
            worker_name = f"worker {rank} ({self.worker_names[rank]})"
            for span in worker_spans:
                arguments = {
                    "stage": span.stage,
                    "minibatch": span.minibatch,
                    "microbatch": span.microbatch,
                }
                if span.wait_ns > 0:
                    yield Span(worker_name, "waiting", "wait", span.asked_ns, span.ready_ns, arguments)
                part = f".{span.microbatch}" if num_microbatches > 1 and span.kind != "UPDATE" else ""
                name = f"{span.kind[0]}{span.minibatch}{part}"
                yield Span(worker_name, "compute", name, span.ready_ns, span.completed_ns, arguments)


def combine_reports(
    plan: Plan, schedule: _core.ScheduleOptions, transport: str, reports: list[dict[str, Any]]
) -> RunResult:
    """The run's result from what the workers report, in the order of their ranks."""
    last = reports[plan.worker_of_stage[-1]]
    losses, samples, epochs = last["losses"], last["samples"], last["epochs"]
    totals = [report["totals"] for report in reports]
    elapsed_ns = max(entry["elapsed_ns"] for entry in totals)
    stages = [reports[worker]["stages"][str(stage)] for stage, worker in enumerate(plan.worker_of_stage)]
    transports: dict[str, str] = {}
    for stage in range(plan.num_stages - 1):
        transports[f"{stage}->{stage + 1}"] = transport
        transports[f"{stage + 1}->{stage}"] = transport
    num_warm_up = 1 if _core.drains_every_minibatch(schedule) else plan.in_flight[0]
    return RunResult(
        losses=losses,
        epoch_losses=_epoch_losses(losses, samples, epochs),
        versions=[[(forward, backward) for forward, backward in stage["versions"]] for stage in stages],
        samples_per_s=sum(samples) / max(elapsed_ns / 1e9, 1e-9),
        predicted_ms=plan.bottleneck_ms,
        measured_ms=_steady_ms(last["spans"], num_warm_up),
        bubble_share=1.0
        - sum(t["compute_ns"] for t in totals) / max(sum(t["elapsed_ns"] for t in totals), 1),
        bytes_sent=sum(report["bytes_sent"] for report in reports),
        transports=transports,
        worker_pids=[report["pid"] for report in reports],
        memory=[report["memory"] for report in reports],
        recompute=[stage["recompute"] for stage in stages],
        offload=[stage["offload"] for stage in stages],
        overhead_us=[
            (t["elapsed_ns"] - t["wait_ns"] - t["compute_ns"]) / 1e3 / max(t["num_work_items"], 1)
            for t in totals
        ],
        wait_share=[t["wait_ns"] / max(t["elapsed_ns"], 1) for t in totals],
        spans=[[WorkSpan(*span) for span in report["spans"]] for report in reports],
        worker_names=[plan.describe_worker(rank) for rank in range(len(reports))],
    )


def _epoch_losses(losses: list[float], samples: list[int], epochs: list[int]) -> list[float]:
    """Mean loss per sample of each epoch."""
    sums: dict[int, tuple[float, int]] = {}
    for loss, count, epoch in zip(losses, samples, epochs, strict=True):
        total, seen = sums.get(epoch, (0.0, 0))
        sums[epoch] = (total + loss * count, seen + count)
    return [total / max(seen, 1) for _, (total, seen) in sorted(sums.items())]


def _steady_ms(spans: list[list[int | str]], num_warm_up: int) -> float:
    """Milliseconds per minibatch between updates of the last stage, after as many minibatches as are in
    flight; over all of them when there are too few."""
    named = [WorkSpan(*span) for span in spans]  # type: ignore[arg-type]
    if not named:
        return 0.0
    last_stage = max(span.stage for span in named)
    done_ns = [span.completed_ns for span in named if span.kind == "UPDATE" and span.stage == last_stage]
    if len(done_ns) < 2:
        return (named[-1].completed_ns - named[0].asked_ns) / 1e6 / max(len(done_ns), 1)
    steady = done_ns[num_warm_up:] if len(done_ns) > num_warm_up + 2 else done_ns
    return float(steady[-1] - steady[0]) / 1e6 / (len(steady) - 1)
