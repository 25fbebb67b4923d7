"""Callbacks that end the run, or lower its learning rates, when a metric has stopped improving."""

from __future__ import annotations

import math
from typing import Literal

from pipedream.callbacks.callback import Answer, Callback, Decision, EpochReport, StartReport

__all__ = ["EarlyStopping", "ReduceLROnPlateau"]


class _Watch(Callback):
    """Counts the epochs in which a metric has not improved."""

    def __init__(
        self, metric: str, patience: int, min_delta: float, mode: Literal["min", "max"], name: str
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode of {name} is {mode!r}: use 'min' or 'max'")
        if patience < 0:
            raise ValueError(f"patience of {name} is {patience}: use 0 or more epochs")
        self.metric = metric
        self.patience = patience
        self.min_delta = abs(min_delta)
        self.mode = mode
        self.best = math.inf
        self.num_worse = 0
        """The number of epochs since the best value, or since the last decision."""

    def on_start(self, report: StartReport) -> None:
        self.best = math.inf if self.mode == "min" else -math.inf
        self.num_worse = 0

    def _is_over(self, report: EpochReport) -> bool:
        """Counts an epoch. Returns whether the metric has not improved in more than `patience` epochs. While
        the evaluations have no figure of the metric yet, epochs do not count."""
        known = report.metrics.values()
        if (
            self.metric != "loss"
            and self.metric not in report.metrics
            and known
            and all(map(math.isnan, known))
        ):
            return False  # there was no evaluation yet; the first one may have a figure of this name
        value = report.value_of(self.metric)
        if self.metric in report.metrics and math.isnan(value):
            return False  # no evaluation yet
        better = self.best - value if self.mode == "min" else value - self.best
        if better > self.min_delta:
            self.best, self.num_worse = value, 0
            return False
        self.num_worse += 1
        return self.num_worse > self.patience


class EarlyStopping(_Watch):
    """Stops the run when `metric` has not improved in more than `patience` epochs in a row.

    metric: a metric of the validation. Without validation, "loss" is the mean loss of the epoch.
    min_delta: a change that is not larger does not count as an improvement.
    mode: "min" if smaller values are better, otherwise "max".
    Raises ValueError for another mode or a negative patience."""

    def __init__(
        self,
        metric: str = "loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        super().__init__(metric, patience, min_delta, mode, "EarlyStopping")

    def on_epoch(self, report: EpochReport) -> Answer:
        return Decision(stop=True) if self._is_over(report) else None


class ReduceLROnPlateau(_Watch):
    """Multiplies the learning rates of all stages by `factor` when `metric` has not improved in more than
    `patience` epochs in a row. All stages change their rates at the same minibatch.

    metric, min_delta, mode: as for EarlyStopping. max_reductions: the most times that it changes the rates;
    None has no limit. Raises ValueError for a factor that is not between 0 and 1, another mode or a negative
    patience."""

    def __init__(
        self,
        metric: str = "loss",
        *,
        factor: float = 0.1,
        patience: int = 10,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        max_reductions: int | None = None,
    ) -> None:
        super().__init__(metric, patience, min_delta, mode, "ReduceLROnPlateau")
        if not 0.0 < factor < 1.0:
            raise ValueError(f"factor of ReduceLROnPlateau is {factor}: use a number between 0 and 1")
        self.factor = factor
        self.max_reductions = max_reductions
        self.num_reductions = 0

    def on_start(self, report: StartReport) -> None:
        super().on_start(report)
        self.num_reductions = 0

    def on_epoch(self, report: EpochReport) -> Answer:
        if self.num_reductions == self.max_reductions or not self._is_over(report):
            return None
        self.num_worse = 0
        self.num_reductions += 1
        return Decision(rate_factor=self.factor)
