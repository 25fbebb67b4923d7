"""RunResult: what a run did. Plain values that travel as JSON; any thread."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from .trace import Span, write_trace

__all__ = ["RunResult"]


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
    memory: list[dict[str, dict[str, int]]]
    """Per worker and named term: "predicted" and "peak" bytes."""
    overhead_us: list[float] = field(default_factory=list)
    """Per worker: mean time per work item in which it neither ran user code nor waited for data."""
    wait_share: list[float] = field(default_factory=list)
    """Per worker: share of its time spent waiting for a neighbour's tensors."""
    spans: list[list[tuple[str, int, int, int, int, int, int]]] = field(default_factory=list, repr=False)
    """Per worker: (kind, minibatch, asked_ns, ready_ns, completed_ns, wait_ns, compute_ns) of the
    latest work items, on the machine's monotonic clock."""

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a Chrome trace (.json or .json.gz) that ui.perfetto.dev opens."""
        write_trace(path, list(self._trace_spans()))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> RunResult:
        """The result from its JSON form, with tuples where JSON has lists."""
        fields = dict(fields)
        fields["versions"] = [[(pair[0], pair[1]) for pair in stage] for stage in fields["versions"]]
        fields["spans"] = [[tuple(span) for span in worker] for worker in fields["spans"]]
        return cls(**fields)

    def _trace_spans(self) -> Any:
        for rank, worker_spans in enumerate(self.spans):
            worker_name = f"worker {rank} (stage {rank})"
            for kind, minibatch, asked_ns, ready_ns, completed_ns, wait_ns, _ in worker_spans:
                arguments = {"minibatch": minibatch}
                if wait_ns > 0:
                    yield Span(worker_name, "waiting", "wait", asked_ns, ready_ns, arguments)
                name = f"{kind[0]}{minibatch}"
                yield Span(worker_name, "compute", name, ready_ns, completed_ns, arguments)
