"""Defines the reports that callbacks get, and the decisions that they may return.

Boundary N lies before minibatch N, where a round of updates ends at every stage. Reports are made at
boundaries, and decisions take effect at boundaries. All code here runs on the thread that called run()."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipedream.checkpoint.checkpoint_folder import minibatch_of, pin

__all__ = [
    "Answer",
    "Callback",
    "CheckpointReport",
    "Decision",
    "EndReport",
    "EpochFunction",
    "EpochReport",
    "EvaluationReport",
    "MinibatchReport",
    "StartReport",
    "decision_of",
    "defines",
]


@dataclass(frozen=True)
class Decision:
    """A callback's decision. It takes effect at the report's boundary `takes_effect`."""

    stop: bool = False
    rate_factor: float = 1.0
    """Multiplies the learning rates of all stages."""
    evaluate: bool = False
    """Whether to evaluate at that boundary. The run needs run(validation=...)."""
    checkpoint: bool = False
    """Whether to save a checkpoint at that boundary. The run needs run(checkpoints=...)."""

    def __or__(self, other: Decision) -> Decision:
        return Decision(
            self.stop or other.stop,
            self.rate_factor * other.rate_factor,
            self.evaluate or other.evaluate,
            self.checkpoint or other.checkpoint,
        )


Answer = Decision | bool | None
"""A callback's answer to a report: a Decision, or False to stop the run. None and True change nothing."""


@dataclass(frozen=True)
class StartReport:
    """Facts about the run. Callbacks get this report before the training begins."""

    num_minibatches: int | None
    """Minibatches of all epochs; None if the data have no length."""
    epochs: int
    num_workers: int
    schedule: str
    decision_lead: int
    """The number of minibatches between a report's boundary and the boundary where its decision takes
    effect."""
    minibatches_per_update: int = 1
    """The number of minibatches per update of the first stage. It may be more than one if the stage has
    replicas, because each replica needs equally many microbatches."""


@dataclass(frozen=True)
class MinibatchReport:
    """A report of consecutive minibatches and their losses. If the schedule drains, all stages have made the
    updates of these minibatches."""

    first: int
    """The first of the minibatches, counted through all epochs."""
    losses: Sequence[float]
    samples: Sequence[int]
    rates: Sequence[float]
    """Learning rates of the first stage's parameter groups after the last of these minibatches."""
    takes_effect: int | None
    """The minibatch before which a decision takes effect; None if it is too late for decisions."""
    seconds: float
    """Seconds since the previous report of this kind, or since the start of the training."""
    version: int = 0
    """Weight version of the first stage after the last minibatch. It also counts the updates of the earlier
    run that this run continues."""
    gradient_norms: Sequence[float] = ()
    """2-norm of the gradients of each update, before they are clipped. It is over all stages if the schedule
    drains, otherwise over the first stage only. Norms are measured if max_grad_norm is given, if autocast is
    float16, or if a callback has `wants_gradient_norms`; otherwise this is empty. The callback's wish has no
    effect with sync="asp" or "allreduce", sync_every, spare shards or a Program."""
    is_past: bool = False
    """Whether these minibatches came before the checkpoint from which the run continues. Callbacks get such
    reports again, so that their counts are right. Rates, norms and times are not known then."""

    @property
    def end(self) -> int:
        """The minibatch after the last minibatch of the report."""
        return self.first + len(self.losses)

    @property
    def loss(self) -> float:
        """Returns the mean loss per sample; NaN without samples."""
        num_samples = sum(self.samples)
        if num_samples == 0:
            return math.nan
        return sum(loss * n for loss, n in zip(self.losses, self.samples, strict=True)) / num_samples

    @property
    def samples_per_s(self) -> float:
        return sum(self.samples) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class EpochReport(MinibatchReport):
    """A report of the minibatches of one epoch. Callbacks get it when the epoch has ended."""

    epoch: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the newest evaluation, by name. They are NaN before the first evaluation, and empty without
    validation. With Validation(every="epoch") the newest evaluation is the one after this epoch."""

    def value_of(self, metric: str) -> float:
        """Returns a metric of the newest evaluation. "loss" is the mean of the epoch's losses if there is no
        evaluation. Raises ValueError for an unknown metric."""
        if metric in self.metrics:
            return self.metrics[metric]
        if metric == "loss":
            return self.loss
        known = ", ".join(map(repr, ["loss", *sorted(self.metrics)]))
        raise ValueError(f"metric is {metric!r}, of which epoch {self.epoch} knows nothing: it has {known}")


@dataclass(frozen=True)
class EvaluationReport:
    """The figures of an evaluation of held-out data."""

    minibatch: int
    """The number of minibatches that the weights were trained on, as in RunResult.validation."""
    metrics: Mapping[str, float]
    """Figures by name. One of the names is "loss"."""
    samples: int
    takes_effect: int | None
    """The minibatch before which a decision takes effect; None if it is too late for decisions."""
    is_past: bool = False
    """Whether the evaluation came before the checkpoint from which the run continues."""

    @property
    def loss(self) -> float:
        return self.metrics["loss"]


@dataclass(frozen=True)
class CheckpointReport:
    """Names a checkpoint that is complete."""

    path: Path

    @property
    def minibatch(self) -> int:
        """The number of minibatches that the checkpoint's weights were trained on."""
        return minibatch_of(self.path)

    def pin(self) -> None:
        """Pins the checkpoint, so that it stays when newer checkpoints replace older ones. Raises ValueError
        if the checkpoint has been removed already. Only the newest Checkpoints.keep stay without a pin."""
        pin(self.path)


@dataclass(frozen=True)
class EndReport:
    """Says how the run ended. Callbacks get this report last."""

    result: Any
    """The RunResult; None if the run failed."""
    error: BaseException | None
    """The error with which the run failed; None if it did not fail."""


class Callback:
    """The base class of callbacks. A subclass defines the methods that it needs.

    Answers of on_minibatches, on_epoch and on_evaluation take effect at a fixed boundary. If the schedule
    drains, it is the boundary of the report, and no later minibatch starts before the answer. Otherwise the
    boundary comes StartReport.decision_lead minibatches after the report's. The pipeline waits there for a
    late answer."""

    every: int | None = None
    """The number of minibatches between calls of on_minibatches, rounded up to a boundary. If it is None,
    on_minibatches is never called."""
    decides = True
    """Whether the methods may return decisions. If it is False, the pipeline never waits for this
    callback."""
    wants_gradient_norms = False
    """Whether the run must measure gradient norms for this callback's reports."""

    def on_start(self, report: StartReport) -> None: ...

    def on_minibatches(self, report: MinibatchReport) -> Answer: ...

    def on_epoch(self, report: EpochReport) -> Answer: ...

    def on_evaluation(self, report: EvaluationReport) -> Answer:
        """The run calls this at the boundary of a planned evaluation, before on_minibatches and on_epoch of
        the same boundary. If a decision asked for the evaluation, the run calls it at the next boundary."""

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """The run calls this soon after a checkpoint is complete. The method may pin the checkpoint. Its
        return value is ignored."""

    def on_end(self, report: EndReport) -> None: ...


class EpochFunction(Callback):
    """The callback that calls the function given as run(on_epoch_end=...)."""

    def __init__(self, function: Callable[[EpochReport], Answer]) -> None:
        self._function = function

    def on_epoch(self, report: EpochReport) -> Answer:
        return self._function(report)


def defines(callback: Callback, method: str) -> bool:
    """Whether the callback's class overrides the method of Callback."""
    return getattr(getattr(callback, method), "__func__", None) is not getattr(Callback, method)


def decision_of(callback: Callback, answer: Answer) -> Decision:
    """Returns the answer as a Decision. Raises TypeError or ValueError if the answer is not valid."""
    name = type(callback).__name__
    if answer is None or answer is True:
        return Decision()
    if not callback.decides:
        raise TypeError(f"{name} returned {answer!r}, but its `decides` is False: set it to True")
    if answer is False:
        return Decision(stop=True)
    if not isinstance(answer, Decision):
        raise TypeError(
            f"{name} returned {answer!r}: return False to stop the run, a callbacks.Decision, or None"
        )
    if not 0.0 < answer.rate_factor < math.inf:
        raise ValueError(f"{name}: rate_factor is {answer.rate_factor!r}: give a positive number")
    return answer
