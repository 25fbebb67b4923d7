"""The protocol of callbacks: what they are told, and what they may decide. On the caller's thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Answer",
    "Callback",
    "Decision",
    "EndReport",
    "EpochReport",
    "MinibatchReport",
    "StartReport",
    "callback_of",
    "decision_of",
]


@dataclass(frozen=True)
class Decision:
    """The wish of a callback at the boundary that its report names (`takes_effect`)."""

    stop: bool = False
    rate_factor: float = 1.0
    """Multiplies the learning rates of all stages."""
    evaluate: bool = False
    checkpoint: bool = False

    def __or__(self, other: Decision) -> Decision:
        return Decision(
            self.stop or other.stop,
            self.rate_factor * other.rate_factor,
            self.evaluate or other.evaluate,
            self.checkpoint or other.checkpoint,
        )


Answer = Decision | bool | None
"""False stops the run; None and True go on."""


@dataclass(frozen=True)
class StartReport:
    """The training is about to begin."""

    num_minibatches: int | None
    """Minibatches of all epochs; None if the data have no length."""
    epochs: int
    num_workers: int
    schedule: str
    decision_lead: int
    """Minibatches from the boundary of a report to the one where its decision takes effect."""


@dataclass(frozen=True)
class MinibatchReport:
    """Consecutive minibatches, whose losses are known. Under a schedule that drains, all stages have made
    their updates."""

    first: int
    """The first of the minibatches, counted through all epochs."""
    losses: Sequence[float]
    samples: Sequence[int]
    rates: Sequence[float]
    """Learning rates of the first stage's parameter groups, at the end."""
    takes_effect: int | None
    """The minibatch before which a decision takes effect; None: none can any more."""
    seconds: float
    """Since the report before, or the start."""

    @property
    def end(self) -> int:
        """The minibatch after the last one, and the weight version that this makes."""
        return self.first + len(self.losses)

    @property
    def loss(self) -> float:
        """The mean per sample."""
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
    """Metrics of the newest evaluation, by name: NaN before there is one, empty without validation. If the
    schedule drains, the evaluation after this epoch is still to come, and the one before it counts."""

    def value_of(self, metric: str) -> float:
        """A metric, or "loss": the mean of the epoch's losses where no evaluation has one. Raises ValueError
        for a metric that there is not."""
        if metric in self.metrics:
            return self.metrics[metric]
        if metric == "loss":
            return self.loss
        known = ", ".join(map(repr, ["loss", *sorted(self.metrics)]))
        raise ValueError(f"metric is {metric!r}, of which epoch {self.epoch} knows nothing: it has {known}")


@dataclass(frozen=True)
class EndReport:
    """The run is over."""

    result: Any
    """The RunResult; None where it failed."""
    error: BaseException | None
    """Why it failed; None where it did not."""


class Callback:
    """Told of a run; a subclass defines the methods that it needs. What on_minibatches and on_epoch return is
    decided: under a schedule that drains, before any later minibatch is admitted; else a fixed number of
    minibatches later (StartReport.decision_lead), for which the pipeline waits if the answer is late."""

    every: int | None = None
    """Minibatches after which on_minibatches is called, rounded up to a boundary; None: never."""
    decides = True
    """Whether the methods may return decisions. False: the pipeline never waits for this callback."""

    def on_start(self, report: StartReport) -> None: ...

    def on_minibatches(self, report: MinibatchReport) -> Answer: ...

    def on_epoch(self, report: EpochReport) -> Answer: ...

    def on_end(self, report: EndReport) -> None: ...


class _EpochFunction(Callback):
    """run(on_epoch_end=...) as a callback."""

    def __init__(self, function: Callable[[EpochReport], Answer]) -> None:
        self._function = function

    def on_epoch(self, report: EpochReport) -> Answer:
        return self._function(report)


def callback_of(on_epoch_end: Callable[[EpochReport], Answer]) -> Callback:
    return _EpochFunction(on_epoch_end)


def decision_of(callback: Callback, answer: Answer) -> Decision:
    """Raises TypeError or ValueError for what is no decision."""
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
