"""Calls the callbacks of a run. At a boundary (callback.py) it gives the callbacks their reports, and joins
their decisions into one. It runs on the thread that called run(); under torchrun, on that of rank 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pipedream.callbacks.callback import (
    Callback,
    CheckpointReport,
    Decision,
    EndReport,
    EpochReport,
    EvaluationReport,
    MinibatchReport,
    StartReport,
    decision_of,
    defines,
)
from pipedream.callbacks.ema import EMA
from pipedream.checkpoint.checkpoint_folder import checkpoints_in, is_complete

__all__ = ["CallPoints", "Evaluated", "History", "Question", "Steering"]


@dataclass(frozen=True)
class CallPoints:
    """The boundaries at which a run calls its callbacks. Workers get it, because they do not have the
    callbacks themselves."""

    everys: tuple[int, ...] = ()
    """The different values of `every` of the callbacks, in minibatches."""
    at_epochs: bool = False
    at_evaluations: bool = False
    decides: bool = False
    """Whether some callback may return decisions, so that the pipeline waits for its answers."""
    gradient_norms: bool = False
    """Whether some callback needs the norms of gradients."""
    ema_decay: float | None = None
    """The decay of callbacks.EMA; None without an EMA."""

    def is_due(self, begin: int, end: int, *, has_ended_epoch: bool) -> bool:
        """Whether on_minibatches or on_epoch must be called at boundary `end`. `begin` is the boundary before
        `end`."""
        return (self.at_epochs and has_ended_epoch) or any(
            begin // every != end // every for every in self.everys
        )


@dataclass(frozen=True)
class Question:
    """The first stage's message at a boundary, in which it asks for the callbacks' decision. Minibatches are
    counted through this run and the runs that it continues."""

    boundary: int
    takes_effect: int | None
    """The boundary at which the answer is due; None if the data have ended, so that no answer is needed."""
    epochs: list[tuple[int, int]]
    """(epoch, end) for each epoch that has ended since the previous question. The end is the minibatch after
    the epoch's last minibatch."""
    samples: list[int]
    """The samples of each minibatch since the previous question, up to the boundary."""
    rates: list[float]
    evaluations: list[int] = field(default_factory=list)
    """The boundaries of evaluations that callbacks have not been told of."""

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Question:
        """Makes a question from its JSON form, in which tuples have become lists."""
        return cls(**fields | {"epochs": [(epoch, end) for epoch, end in fields["epochs"]]})


class Evaluated(NamedTuple):
    """The figures of one evaluation, as the last stage reports them."""

    minibatch: int
    samples: int
    figures: Mapping[str, float]


@dataclass(frozen=True)
class History:
    """Figures of the minibatches before the checkpoint from which the run continues. Each sequence has one
    entry per minibatch, except for the evaluations."""

    losses: Sequence[float]
    samples: Sequence[int]
    epochs: Sequence[int]
    """The epoch of each minibatch, and of the first minibatch after the checkpoint."""
    evaluations: Sequence[Evaluated]
    is_evaluated_next: bool
    """Whether the run begins with an evaluation of the checkpoint's weights."""
    group_size: int
    """Minibatches between two boundaries."""
    evaluates_every: int | str | None = None
    """Validation's `every`; None without validation."""

    def plans_evaluation(self, begin: int, boundary: int, *, has_ended_epoch: bool) -> bool:
        """Whether an evaluation at the boundary is planned. Otherwise a callback has asked for it. begin: the
        boundary before this one."""
        every = self.evaluates_every
        return begin // every != boundary // every if isinstance(every, int) else has_ended_epoch


class Steering:
    """The callbacks of one run."""

    def __init__(self, callbacks: Iterable[Callback], metrics: Iterable[str] = ()) -> None:
        """metrics: names of the metrics that evaluations will have. Their values are NaN until the first
        evaluation."""
        given = list(callbacks)
        decays = [callback.decay for callback in given if isinstance(callback, EMA)]
        if len(decays) > 1:
            raise ValueError(f"callbacks has {len(decays)} EMAs: give one")
        # An EMA gets no reports, because the stages do its work.
        self._callbacks = [callback for callback in given if not isinstance(callback, EMA)]
        numbers = [callback.every for callback in self._callbacks]
        self.points = CallPoints(
            everys=tuple(sorted({every for every in numbers if every is not None})),
            at_epochs=bool(self._callbacks),
            at_evaluations=any(defines(callback, "on_evaluation") for callback in self._callbacks),
            decides=any(callback.decides for callback in self._callbacks),
            gradient_norms=any(callback.wants_gradient_norms for callback in self._callbacks),
            ema_decay=decays[0] if decays else None,
        )
        self.error: Exception | None = None
        """The exception that a callback raised. The run stops, then raises it to the user."""
        self.why_rates_are_fixed = ""
        """The reason why no callback may change the learning rates; empty if callbacks may."""
        self.norms: Sequence[float] = ()
        """Norms of the gradients of this run's updates (MinibatchReport.gradient_norms), if they are
        measured."""
        self._origin = 0
        """The minibatch that reports count as 0."""
        self._per_update = 1
        self._first_update = 0  # the number of the run's first update
        self._losses_before: Sequence[float] = ()
        self._is_past = False
        self._held_epochs: list[tuple[int, int]] = []
        """Epochs that ended at the checkpoint, if the run begins with an evaluation of its weights. Callbacks
        are told of these epochs after that evaluation."""
        self._held_evaluations: list[Evaluated] = []
        """Evaluations before the checkpoint of which callbacks are told at the first question."""
        self._samples: list[int] = []
        # The boundary of each callback's last call of on_minibatches.
        self._told_to = [0] * len(self._callbacks)
        self._told_s = [0.0] * len(self._callbacks)
        self._epoch_begin, self._epoch_s, self._num_epochs = 0, 0.0, 0
        self._rates: list[float] = []
        self._metrics: Mapping[str, float] = dict.fromkeys(metrics, math.nan)
        self._validates = bool(self._metrics)
        self._num_evaluations = 0  # the number of evaluations that callbacks were told of
        self._checkpoints: Path | None = None
        self._watches = any(defines(callback, "on_checkpoint") for callback in self._callbacks)
        self._seen: set[Path] = set()  # checkpoints that existed at the start or that callbacks were told of
        self._looked_s = 0.0
        self._has_begun = False

    def start(
        self,
        report: StartReport,
        *,
        first_minibatch: int = 0,
        checkpoints: Path | None = None,
        before: History | None = None,
    ) -> list[tuple[int, Decision]]:
        """Gives the callbacks the start report. If the run continues from a checkpoint, gives them the
        reports of all earlier minibatches again. An exception of a callback ends the run before it begins.

        checkpoints: the folder into which the run saves checkpoints. before: figures of the earlier
        minibatches. Returns (minibatch, decision) for each earlier decision that takes effect after the
        checkpoint, or that stops the run at it."""
        self._origin = first_minibatch if before is None else 0
        self._per_update = report.minibatches_per_update
        self._first_update = first_minibatch // self._per_update
        self._checkpoints = checkpoints
        self._seen = set(self._new_checkpoints())
        for callback in self._callbacks:
            callback.on_start(report)
        if before is None or not self._callbacks:
            return []
        return self._tell_again(before, first_minibatch, report.decision_lead)

    def _tell_again(self, before: History, end: int, lead: int) -> list[tuple[int, Decision]]:
        """Gives the callbacks the reports of all boundaries up to the checkpoint at boundary `end`. If the
        run begins with an evaluation of the checkpoint's weights, it leaves the reports of boundary `end`
        out, because the run makes them after the evaluation."""
        self._losses_before, self._samples, self._is_past = before.losses, [*before.samples], True
        left = [*before.evaluations]
        later: list[tuple[int, Decision]] = []
        for boundary in range(before.group_size, end + 1, before.group_size):
            begin = boundary - before.group_size
            epochs = [
                (before.epochs[last - 1], last)
                for last in range(begin + 1, boundary + 1)
                if before.epochs[last - 1] != before.epochs[last]
            ]
            if boundary == end and before.is_evaluated_next:
                self._held_epochs = epochs
                break
            # The question at a boundary comes before an evaluation there that a callback has asked for.
            is_planned = before.plans_evaluation(begin, boundary, has_ended_epoch=bool(epochs))
            evaluations = [each for each in left if each.minibatch <= (boundary if is_planned else begin)]
            left = left[len(evaluations) :]
            is_due = self.points.is_due(begin, boundary, has_ended_epoch=bool(epochs))
            if is_due or (evaluations and self.points.at_evaluations):
                decision = self._tell(boundary, epochs, before.losses, evaluations, boundary + lead)
                if boundary + lead > end or (boundary + lead == end and decision.stop):
                    later.append((boundary + lead, decision))
            elif evaluations:
                self._metrics = evaluations[-1].figures
                self._num_evaluations += len(evaluations)
        self._is_past, self._held_evaluations = False, left
        return later

    def updates_before(self, boundary: int) -> int:
        """Returns how many updates the first stage makes in this run before the boundary. The boundary counts
        minibatches as a Question does."""
        return boundary // self._per_update - self._first_update

    def begin(self) -> None:
        """Starts the clocks of the reports, at the first minibatch. Later calls do nothing."""
        if not self._has_begun:
            self._has_begun = True
            self._epoch_s = time.monotonic()
            self._told_s = [self._epoch_s] * len(self._callbacks)

    def note_last(self, question: Question) -> None:
        self._samples += question.samples
        self._rates = question.rates

    def tell(
        self, question: Question, losses: Sequence[float], evaluations: Sequence[Evaluated] = ()
    ) -> Decision:
        """Gives the callbacks the reports of a boundary, and returns their joint decision. If a callback
        raises, the decision stops the run, and no callback gets another report.

        losses: the losses of this run's minibatches, at least up to the boundary. evaluations: the
        evaluations that the question names."""
        self.note_last(question)
        self.tell_of_checkpoints()
        if self.error is not None:
            return Decision(stop=True)
        try:
            boundary, takes_effect = question.boundary - self._origin, question.takes_effect
            assert takes_effect is not None
            epochs = [(epoch, end - self._origin) for epoch, end in question.epochs]
            losses = [*self._losses_before, *losses] if self._losses_before else losses
            epochs, self._held_epochs = [*self._held_epochs, *epochs], []
            evaluations, self._held_evaluations = [*self._held_evaluations, *evaluations], []
            return self._checked(
                self._tell(boundary, epochs, losses, evaluations, takes_effect - self._origin)
            )
        except Exception as error:
            self.error = error
            return Decision(stop=True)

    def tell_of_checkpoints(self, period_s: float = 0.0) -> None:
        """Tells the callbacks of checkpoints that have become complete. Does nothing if the last call that
        looked for them was less than period_s seconds ago."""
        now_s = time.monotonic()
        if not self._watches or self.error is not None or now_s < self._looked_s + period_s:
            return
        self._looked_s = now_s
        try:
            for path in self._new_checkpoints():
                self._seen.add(path)
                for callback in self._callbacks:
                    callback.on_checkpoint(CheckpointReport(path))
        except Exception as error:
            self.error = error

    def end_with(self, result: Any) -> None:
        """Gives the callbacks the last reports of a run that has ended. Their answers are ignored. Reports of
        checkpoints come after those of evaluations. So a callback can pin the last checkpoint if the last
        evaluation is the best."""
        if self.error is None:
            self._tell_of_the_rest(result)
        self.tell_of_checkpoints()
        if self.error is not None:  # every error that ends a run early has `losses` and `minibatch`
            losses = result.losses
            self.error.losses, self.error.minibatch = losses, len(losses)  # type: ignore[attr-defined]
            return
        self.end(EndReport(result, None))

    def _tell_of_the_rest(self, result: Any) -> None:
        """Gives the callbacks the reports of minibatches, epochs and evaluations that they have not had."""
        losses, sizes = result.losses, result.epoch_sizes
        self._samples += [1] * (len(losses) - len(self._samples))
        ends = [sum(sizes[: epoch + 1]) for epoch in range(len(sizes))]
        left = [(epoch, end) for epoch, end in enumerate(ends) if epoch >= self._num_epochs]
        evaluations = [
            Evaluated(each.minibatch, each.samples, {"loss": each.loss, **each.metrics})
            for each in result.validation[self._num_evaluations :]
        ]
        try:
            self._tell(len(losses), left, losses, evaluations, None, is_end=True)
        except Exception as error:
            self.error = error

    def end(self, report: EndReport) -> None:
        for callback in self._callbacks:
            callback.on_end(report)

    def _tell(
        self,
        boundary: int,
        epochs: Sequence[tuple[int, int]],
        losses: Sequence[float],
        evaluations: Sequence[Evaluated],
        takes_effect: int | None,
        *,
        is_end: bool = False,
    ) -> Decision:
        decision = Decision()
        for evaluated in evaluations:
            self._metrics = evaluated.figures
            self._num_evaluations += 1
            of_evaluation = EvaluationReport(
                evaluated.minibatch, evaluated.figures, evaluated.samples, takes_effect, self._is_past
            )
            decision |= self._ask_all("on_evaluation", of_evaluation)
        for index, callback in enumerate(self._callbacks):
            begin, every = self._told_to[index], callback.every
            if every is None or boundary == begin or not (is_end or begin // every != boundary // every):
                continue
            now_s = time.monotonic()
            seconds = math.nan if self._is_past else now_s - self._told_s[index]
            self._told_to[index], self._told_s[index] = boundary, now_s
            report = MinibatchReport(**self._between(begin, boundary, losses, takes_effect, seconds))
            decision |= decision_of(callback, callback.on_minibatches(report))
        for epoch, end in epochs:
            begin, now_s = self._epoch_begin, time.monotonic()
            seconds = math.nan if self._is_past else now_s - self._epoch_s
            self._epoch_begin, self._epoch_s = end, now_s
            self._num_epochs = epoch + 1
            fields = self._between(begin, end, losses, takes_effect, seconds)
            of_epoch = EpochReport(**fields, epoch=epoch, metrics=self._metrics)
            decision |= self._ask_all("on_epoch", of_epoch)
        return decision

    def _ask_all(self, method: str, report: EvaluationReport | EpochReport) -> Decision:
        decision = Decision()
        for callback in self._callbacks:
            decision |= decision_of(callback, getattr(callback, method)(report))
        return decision

    def _between(
        self, begin: int, end: int, losses: Sequence[float], takes_effect: int | None, seconds: float
    ) -> dict[str, Any]:
        """Returns the fields of a MinibatchReport."""
        first, last = (max(self._updates_by(m), self._first_update) for m in (begin, end))
        return {
            "first": begin,
            "losses": list(losses[begin:end]),
            "samples": self._samples[begin:end],
            "rates": self._rates,
            "takes_effect": takes_effect,
            "seconds": seconds,
            "version": self._updates_by(end),
            "is_past": self._is_past,
            "gradient_norms": list(self.norms[first - self._first_update : last - self._first_update]),
        }

    def _updates_by(self, minibatch: int) -> int:
        """Returns how many updates the first stage makes from the minibatches before this one. The last
        update may have fewer minibatches than other updates, so the division rounds up."""
        return -(-(self._origin + minibatch) // self._per_update)

    def _new_checkpoints(self) -> list[Path]:
        if self._checkpoints is None:
            return []
        complete = filter(is_complete, checkpoints_in(self._checkpoints))
        return [path for path in complete if path not in self._seen]

    def _checked(self, decision: Decision) -> Decision:
        """Returns the decision, or raises ValueError if the run cannot carry it out."""
        why = ""
        if decision.rate_factor != 1.0 and self.why_rates_are_fixed:
            why = f"its learning rates times {decision.rate_factor:g}, and {self.why_rates_are_fixed}"
        elif decision.evaluate and not self._validates:
            why = "an evaluation, and run has no validation: give run(validation=...)"
        elif decision.checkpoint and self._checkpoints is None:
            why = "a checkpoint, and run has no checkpoints: give run(checkpoints=...)"
        if why:
            raise ValueError(f"a callback wants {why}")
        return decision
