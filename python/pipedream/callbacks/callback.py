"""Defines the reports that callbacks get, and the decisions that they may return. Runs on the caller's
thread."""

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
    """A callback's decision. It takes effect at the boundary that the report names in `takes_effect`."""

    stop: bool = False
    rate_factor: float = 1.0
    """Multiplies the learning rates of all stages."""
    evaluate: bool = False
    """Evaluates run(validation=...) at that boundary, too."""
    checkpoint: bool = False
    """Saves a checkpoint of run(checkpoints=...) at that boundary, too."""

    def __or__(self, other: Decision) -> Decision:
        return Decision(
            self.stop or other.stop,
            self.rate_factor * other.rate_factor,
            self.evaluate or other.evaluate,
            self.checkpoint or other.checkpoint,
        )


Answer = Decision | bool | None
"""A callback's answer: a Decision, or False to stop the run. After None and True the run goes on."""


@dataclass(frozen=True)
class StartReport:
    """The training is about to begin."""

    num_minibatches: int | None
    """Minibatches of all epochs; None if the data have no length."""
    epochs: int
    num_workers: int
    schedule: str
    decision_lead: int
    """Minibatches from the boundary of a report to the boundary where its decision takes effect."""
    minibatches_per_update: int = 1
    """The number of minibatches per update of the first stage. It is more than one if the stage has replicas,
    which get minibatches in turn."""


@dataclass(frozen=True)
class MinibatchReport:
    """A report of consecutive minibatches, whose losses are known. Under a schedule that drains, all stages
    have made the updates of these minibatches."""

    first: int
    """The first of the minibatches, counted through all epochs."""
    losses: Sequence[float]
    samples: Sequence[int]
    rates: Sequence[float]
    """Learning rates of the first stage's parameter groups, after the last of the minibatches."""
    takes_effect: int | None
    """The minibatch before which a decision takes effect. None: it is too late for decisions."""
    seconds: float
    """Seconds since the report before, or since the start."""
    version: int = 0
    """Weight version of the first stage after the last minibatch. It counts the updates of this run and of
    the run that this run continues."""
    gradient_norms: Sequence[float] = ()
    """2-norm of the gradients of each update, before they are clipped. It is over all stages if the schedule
    drains, otherwise over the first stage only. Empty unless max_grad_norm is given, autocast is float16, or
    a callback has `wants_gradient_norms`. Always empty with sync="asp" or "allreduce", sync_every, spare
    shards or a Program."""
    is_past: bool = False
    """Whether these minibatches came before the checkpoint from which the run continues. Callbacks get their
    reports again, so that the callbacks' counts are right. Rates, norms and times are not known."""

    @property
    def end(self) -> int:
        """The minibatch after the last one."""
        return self.first + len(self.losses)

    @property
    def loss(self) -> float:
        """Returns the mean loss per sample."""
        num_samples = sum(self.samples)
        if num_samples == 0:
            return math.nan
        return sum(loss * n for loss, n in zip(self.losses, self.samples, strict=True)) / num_samples

    @property
    def samples_per_s(self) -> float:
        return sum(self.samples) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class EpochReport(MinibatchReport):
    """The minibatches of one epoch."""

    epoch: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the newest evaluation, by name: NaN before there is one, empty without validation. With
    Validation(every="epoch") it is the evaluation after this epoch."""

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
    """Held-out data have been evaluated."""

    minibatch: int
    """The number of minibatches that the weights were trained on, as in RunResult.validation."""
    metrics: Mapping[str, float]
    """Figures by name, "loss" among them."""
    samples: int
    takes_effect: int | None
    """The minibatch before which a decision takes effect. None: it is too late for decisions."""
    is_past: bool = False
    """See MinibatchReport."""

    @property
    def loss(self) -> float:
        return self.metrics["loss"]


@dataclass(frozen=True)
class CheckpointReport:
    """A checkpoint is complete."""

    path: Path

    @property
    def minibatch(self) -> int:
        """The number of minibatches that the checkpoint's weights were trained on."""
        return minibatch_of(self.path)

    def pin(self) -> None:
        """Marks the checkpoint, so that it is never removed for newer ones. Raises ValueError if it has been
        removed already, because run(checkpoints=...) keeps a limited number."""
        pin(self.path)


@dataclass(frozen=True)
class EndReport:
    """The run is over."""

    result: Any
    """The RunResult; None if the run failed."""
    error: BaseException | None
    """The error with which the run failed; None if it did not fail."""


class Callback:
    """The base class of callbacks. A subclass defines the methods that it needs.

    Answers of on_minibatches, on_epoch and on_evaluation take effect at a fixed boundary. If the schedule
    drains, it is the boundary of the report, and no later minibatch starts before the answer. Otherwise the
    boundary comes StartReport.decision_lead minibatches later. The pipeline waits there for an answer that is
    late."""

    every: int | None = None
    """The number of minibatches between calls of on_minibatches, rounded up to a boundary. None: it is never
    called."""
    decides = True
    """Whether the methods may return decisions. False: the pipeline never waits for this callback."""
    wants_gradient_norms = False
    """Whether reports must have gradient_norms, even if nothing else needs the norms."""

    def on_start(self, report: StartReport) -> None: ...

    def on_minibatches(self, report: MinibatchReport) -> Answer: ...

    def on_epoch(self, report: EpochReport) -> Answer: ...

    def on_evaluation(self, report: EvaluationReport) -> Answer:
        """Called at the boundary of a planned evaluation, before on_minibatches and on_epoch of the same
        boundary. For an evaluation that a decision asked for, it is called at the next boundary."""

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Called soon after a checkpoint is complete. It may pin the checkpoint. Its return value is
        ignored."""

    def on_end(self, report: EndReport) -> None: ...


class EpochFunction(Callback):
    """run(on_epoch_end=...) as a callback."""

    def __init__(self, function: Callable[[EpochReport], Answer]) -> None:
        self._function = function

    def on_epoch(self, report: EpochReport) -> Answer:
        return self._function(report)


def defines(callback: Callback, method: str) -> bool:
    """Whether the callback has a method of its own."""
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
