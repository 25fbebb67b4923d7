"""Calls the callbacks of a run, with what has become of it between two of its boundaries, and joins what they
decide. In the caller's process, under torchrun at rank 0; on whichever thread calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipedream.callbacks.callback import (
    Callback,
    Decision,
    EndReport,
    EpochReport,
    MinibatchReport,
    StartReport,
    decision_of,
)

__all__ = ["CallPoints", "Question", "Steering"]


@dataclass(frozen=True)
class CallPoints:
    """The places at which the callbacks of a run are called, for the workers, which have none of them."""

    everys: tuple[int, ...] = ()
    """Minibatches between two calls, of each callback that has a number."""
    at_epochs: bool = False
    decides: bool = False
    """Whether the pipeline waits for an answer."""

    def is_due(self, begin: int, end: int, *, has_ended_epoch: bool) -> bool:
        """Whether one is after the boundary `begin` and not after `end`."""
        return (self.at_epochs and has_ended_epoch) or any(
            begin // every != end // every for every in self.everys
        )


@dataclass(frozen=True)
class Question:
    """The message of the first stage at a boundary."""

    boundary: int
    takes_effect: int | None
    """The boundary at which the answer is due; None: the data are over, and nothing is asked."""
    epochs: list[tuple[int, int]]
    """(epoch, the minibatch after its last one) of those that have ended since the question before."""
    samples: list[int]
    """Samples of each minibatch since the question before, up to the boundary."""
    rates: list[float]
    evaluated_at: int = -1
    """The minibatch before which the newest evaluation is that the callbacks are told of; -1: none."""

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Question:
        """From its JSON form, with tuples where JSON has lists."""
        return cls(**fields | {"epochs": [(epoch, end) for epoch, end in fields["epochs"]]})


class Steering:
    """The callbacks of one run."""

    def __init__(self, callbacks: Iterable[Callback], metrics: Iterable[str] = ()) -> None:
        """metrics: that evaluations will have; NaN until there is one."""
        self._callbacks = list(callbacks)
        numbers = [callback.every for callback in self._callbacks]
        self.points = CallPoints(
            everys=tuple(sorted({every for every in numbers if every is not None})),
            at_epochs=bool(self._callbacks),
            decides=any(callback.decides for callback in self._callbacks),
        )
        self.error: Exception | None = None
        """Raised by a callback: the run stops, and then it is raised to the user."""
        self.why_rates_are_fixed = ""
        """The reason why no callback may change the rates; else empty."""
        self._samples: list[int] = []
        self._told_to = [0] * len(self._callbacks)  # on_minibatches of each
        self._told_s = [0.0] * len(self._callbacks)
        self._epoch_begin, self._epoch_s, self._num_epochs = 0, 0.0, 0
        self._rates: list[float] = []
        self._metrics: Mapping[str, float] = dict.fromkeys(metrics, math.nan)
        self._has_begun = False

    def start(self, report: StartReport) -> None:
        """Tells the callbacks of the start. An exception of one ends the run before it begins."""
        for callback in self._callbacks:
            callback.on_start(report)

    def begin(self) -> None:
        """The first time: minibatches are trained on from now on."""
        if not self._has_begun:
            self._has_begun = True
            self._epoch_s = time.monotonic()
            self._told_s = [self._epoch_s] * len(self._callbacks)

    def note_last(self, question: Question) -> None:
        self._samples += question.samples
        self._rates = question.rates

    def tell(
        self, question: Question, losses: Sequence[float], metrics: Mapping[str, float] | None = None
    ) -> Decision:
        """losses: of all minibatches up to the question's boundary, at least. metrics: of the evaluation that
        the question names. A callback that raises stops the run, and none is told of anything after that."""
        self.note_last(question)
        if self.error is not None:
            return Decision(stop=True)
        self._metrics = metrics or self._metrics
        try:
            decision = self._tell(question.boundary, question.epochs, losses, question.takes_effect)
            if decision.rate_factor != 1.0 and self.why_rates_are_fixed:
                raise ValueError(
                    f"a callback wants its learning rates times {decision.rate_factor:g}, and"
                    f" {self.why_rates_are_fixed}"
                )
            return decision
        except Exception as error:
            self.error = error
            return Decision(stop=True)

    def end_with(self, result: Any) -> None:
        """The run is over, with this RunResult: what was not told yet is told, and decides nothing."""
        losses, sizes = result.losses, result.epoch_sizes
        if self.error is not None:  # as all that ends a run early
            self.error.losses, self.error.minibatch = losses, len(losses)  # type: ignore[attr-defined]
            return
        self._samples += [1] * (len(losses) - len(self._samples))
        ends = [sum(sizes[: epoch + 1]) for epoch in range(len(sizes))]
        left = [(epoch, end) for epoch, end in enumerate(ends) if epoch >= self._num_epochs]
        if result.validation:
            newest = result.validation[-1]
            self._metrics = {"loss": newest.loss, **newest.metrics}
        try:
            self._tell(len(losses), left, losses, None, is_end=True)
        except Exception as error:
            self.error = error
            return
        self.end(EndReport(result, None))

    def end(self, report: EndReport) -> None:
        for callback in self._callbacks:
            callback.on_end(report)

    def _tell(
        self,
        boundary: int,
        epochs: Sequence[tuple[int, int]],
        losses: Sequence[float],
        takes_effect: int | None,
        *,
        is_end: bool = False,
    ) -> Decision:
        decision = Decision()
        for index, callback in enumerate(self._callbacks):
            begin, every = self._told_to[index], callback.every
            if every is None or boundary == begin or not (is_end or begin // every != boundary // every):
                continue
            now_s = time.monotonic()
            seconds, self._told_to[index], self._told_s[index] = now_s - self._told_s[index], boundary, now_s
            report = MinibatchReport(*self._between(begin, boundary, losses), takes_effect, seconds)
            decision |= decision_of(callback, callback.on_minibatches(report))
        for epoch, end in epochs:
            begin, now_s = self._epoch_begin, time.monotonic()
            seconds, self._epoch_begin, self._epoch_s = now_s - self._epoch_s, end, now_s
            self._num_epochs = epoch + 1
            of_epoch = EpochReport(
                *self._between(begin, end, losses), takes_effect, seconds, epoch, self._metrics
            )
            for callback in self._callbacks:
                decision |= decision_of(callback, callback.on_epoch(of_epoch))
        return decision

    def _between(
        self, begin: int, end: int, losses: Sequence[float]
    ) -> tuple[int, Sequence[float], Sequence[int], Sequence[float]]:
        return begin, list(losses[begin:end]), self._samples[begin:end], self._rates
