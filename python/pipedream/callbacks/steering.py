"""Calls the callbacks of a run. At a boundary it gives the callbacks a report of the time since the boundary
before, and joins their decisions. It runs in the caller's process, or under torchrun at rank 0, on the thread
that calls.
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
    """The points at which a run calls its callbacks. Workers need this, because they have no callbacks."""

    everys: tuple[int, ...] = ()
    """Minibatches between two calls of on_minibatches, for each callback that has `every`."""
    at_epochs: bool = False
    at_evaluations: bool = False
    decides: bool = False
    """Whether the pipeline waits for an answer."""
    gradient_norms: bool = False
    """Whether the norms of gradients are measured for a callback."""
    ema_decay: float | None = None
    """The decay of the averages of weights that the stages compute; None without averages."""

    def is_due(self, begin: int, end: int, *, has_ended_epoch: bool) -> bool:
        """Whether a point lies after the boundary `begin`, up to and including the boundary `end`."""
        return (self.at_epochs and has_ended_epoch) or any(
            begin // every != end // every for every in self.everys
        )


@dataclass(frozen=True)
class Question:
    """The message of the first stage at a boundary. If the run continues another run, the numbers of
    minibatches do not start again from 0."""

    boundary: int
    takes_effect: int | None
    """The boundary at which the answer is due. None if the data are over, so that no answer is needed."""
    epochs: list[tuple[int, int]]
    """(epoch, end) for each epoch that has ended since the question before. The end is the minibatch after
    the epoch's last one."""
    samples: list[int]
    """Samples of each minibatch since the question before, up to the boundary."""
    rates: list[float]
    evaluations: list[int] = field(default_factory=list)
    """Evaluations that were not reported to the callbacks yet. Each is given by the minibatch before which it
    took place."""

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Question:
        """Makes a question from its JSON form, in which tuples have become lists."""
        return cls(**fields | {"epochs": [(epoch, end) for epoch, end in fields["epochs"]]})


class Evaluated(NamedTuple):
    """An evaluation as the last stage reports it."""

    minibatch: int
    samples: int
    figures: Mapping[str, float]


@dataclass(frozen=True)
class History:
    """Reports of the minibatches before the checkpoint from which the run continues, by minibatch."""

    losses: Sequence[float]
    samples: Sequence[int]
    epochs: Sequence[int]
    """The epoch of each minibatch. The last entry is of the first minibatch after the checkpoint."""
    evaluations: Sequence[Evaluated]
    is_evaluated_next: bool
    """Whether the weights of the checkpoint are evaluated when the run continues."""
    group_size: int
    """Minibatches between two boundaries."""


class Steering:
    """The callbacks of one run."""

    def __init__(self, callbacks: Iterable[Callback], metrics: Iterable[str] = ()) -> None:
        """metrics: names of the metrics that evaluations will have. Their values are NaN until there is an
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
        """The exception that a callback raised. The run stops, and then raises it to the user."""
        self.why_rates_are_fixed = ""
        """The reason why no callback may change the rates; empty if callbacks may."""
        self.norms: Sequence[float] = ()
        """Norms of the gradients of all updates of the first stage so far, where they are measured."""
        self._origin = 0
        """The minibatch that reports count as 0."""
        self._per_update = 1
        self._first_update = 0  # the number of the run's first update
        self._losses_before: Sequence[float] = ()
        self._is_past = False
        self._held_epochs: list[tuple[int, int]] = []
        """Epochs that ended at the checkpoint, if its weights are still to be evaluated. Callbacks are told
        of these epochs after that evaluation."""
        self._samples: list[int] = []
        self._told_to = [0] * len(self._callbacks)  # by callback: the boundary of its last on_minibatches
        self._told_s = [0.0] * len(self._callbacks)
        self._epoch_begin, self._epoch_s, self._num_epochs = 0, 0.0, 0
        self._rates: list[float] = []
        self._metrics: Mapping[str, float] = dict.fromkeys(metrics, math.nan)
        self._validates = bool(self._metrics)
        self._num_evaluations = 0  # that callbacks were told of
        self._checkpoints: Path | None = None
        self._watches = any(defines(callback, "on_checkpoint") for callback in self._callbacks)
        self._seen: set[Path] = set()  # checkpoints that callbacks were told of, or that were there before
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
        """Tells the callbacks of the start. If the run continues from a checkpoint, also tells them again of
        everything before it. An exception of a callback ends the run before it begins. checkpoints: the
        folder into which the run saves itself.

        Returns (minibatch, decision) for each decision that was made before the checkpoint and takes effect
        after it, or stops the run there."""
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
        """Goes through the boundaries up to the checkpoint at `end`, and gives the callbacks the same reports
        as the earlier run. If the weights of the checkpoint are still to be evaluated, the last boundary is
        left to the run, which asks there again after the evaluation."""
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
            evaluations = [each for each in left if each.minibatch <= boundary]
            left = left[len(evaluations) :]
            is_due = self.points.is_due(begin, boundary, has_ended_epoch=bool(epochs))
            if is_due or (evaluations and self.points.at_evaluations):
                decision = self._tell(boundary, epochs, before.losses, evaluations, boundary + lead)
                if boundary + lead > end or (boundary + lead == end and decision.stop):
                    later.append((boundary + lead, decision))
            elif evaluations:
                self._metrics = evaluations[-1].figures
                self._num_evaluations += len(evaluations)
        self._is_past = False
        return later

    def updates_before(self, boundary: int) -> int:
        """Returns how many updates the first stage makes in this run before the boundary. The boundary is
        numbered like the minibatches of a Question."""
        return boundary // self._per_update - self._first_update

    def begin(self) -> None:
        """Starts the clocks of the reports when the training begins. Later calls do nothing."""
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
        """Tells the callbacks of a boundary and returns their joint decision. losses: the losses of at least
        all minibatches up to the question's boundary. evaluations: the evaluations that the question names.

        If a callback raises, the run stops. After that no callback gets a report."""
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
            return self._checked(
                self._tell(boundary, epochs, losses, evaluations, takes_effect - self._origin)
            )
        except Exception as error:
            self.error = error
            return Decision(stop=True)

    def tell_of_checkpoints(self, period_s: float = 0.0) -> None:
        """Tells the callbacks of complete checkpoints, but looks for new ones only every period_s."""
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
        """Gives the callbacks all reports that are still missing, after a run with this RunResult. Their
        answers are ignored. Checkpoints come after evaluations, so that a callback can pin the last
        checkpoint if the last evaluation is the best."""
        if self.error is None:
            self._tell_of_the_rest(result)
        self.tell_of_checkpoints()
        if self.error is not None:  # like every error that ends a run early
            losses = result.losses
            self.error.losses, self.error.minibatch = losses, len(losses)  # type: ignore[attr-defined]
            return
        self.end(EndReport(result, None))

    def _tell_of_the_rest(self, result: Any) -> None:
        """Tells the callbacks of all minibatches, epochs and evaluations that they have not heard of."""
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
        update may have fewer minibatches than the others."""
        return -(-(self._origin + minibatch) // self._per_update)

    def _new_checkpoints(self) -> list[Path]:
        if self._checkpoints is None:
            return []
        complete = filter(is_complete, checkpoints_in(self._checkpoints))
        return [path for path in complete if path not in self._seen]

    def _checked(self, decision: Decision) -> Decision:
        """Returns the decision. Raises ValueError if the run cannot carry it out."""
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
