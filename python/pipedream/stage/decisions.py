"""Decisions about a run that do not follow from its data: where it ends early, and what its callbacks want.

    a wish to end   rank 0 chooses its next boundary, or one that no replica of stage 0 has passed
    a callback      asked at a boundary; its answer is due at the same one where the schedule drains, and the
                    lead later where it does not: each replica of stage 0 waits for it there

Outlives the segments of a run; owned by the worker's compute thread.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipedream import _core
from pipedream.callbacks.steering import CallPoints, Question
from pipedream.data.minibatch_source import MinibatchSource

__all__ = [
    "EVALUATE",
    "RATE",
    "SNAPSHOT",
    "STOP",
    "AnswerWay",
    "Asking",
    "RateChanges",
    "SaveOrder",
    "Saving",
    "Steered",
    "StopOrder",
    "Stopping",
    "answer_lead",
    "bits_of_loss",
    "loss_of_bits",
    "stop_lead",
]

# What may be due at a boundary, as bits.
EVALUATE = 1
SNAPSHOT = 2
STOP = 4  # with an end of data alone: the data would go on
RATE = 8  # the learning rate changes

_BITS, _DOUBLE = struct.Struct("<Q"), struct.Struct("<d")


class StopOrder(Protocol):
    """The wish to end the run early, and the boundary at which that happens."""

    @property
    def is_stop_asked(self) -> bool: ...
    def ask_for_stop(self) -> None: ...

    stop_at: int
    """-1: not known yet. Rank 0 writes it, the other replicas of stage 0 read it."""


class Stopping:
    """Decides where a run ends whose end was asked for: at rank 0's next boundary. Where stage 0 has replicas
    it is one that none of them has passed: each needs what rank 0 pushes of every round, and so it reads the
    order, which was written before, before it gets there."""

    def __init__(self, order: StopOrder, *, decides: bool, lead: int) -> None:
        """decides: at rank 0. lead: minibatches from the boundary where it decides to the one it names."""
        self._order = order
        self._decides = decides
        self._lead = lead

    def stops_before(self, group: int) -> bool:
        stop_at = self._order.stop_at
        if stop_at < 0:
            if not (self._decides and self._order.is_stop_asked):
                return False
            stop_at = self._order.stop_at = group + self._lead
        return stop_at <= group


class SaveOrder(Protocol):
    """The boundary at which the run is saved, beside what is planned."""

    save_at: int
    """-1: none yet. Rank 0 writes it, the other replicas of stage 0 read it."""


class Saving:
    """Decides where a run is saved when that does not follow from its data: at rank 0's next boundary, or
    where stage 0 has replicas at one that none of them has passed, as Stopping has it."""

    def __init__(self, order: SaveOrder, *, is_due: Callable[[], bool] | None, lead: int) -> None:
        """is_due: at rank 0, asked at boundaries. lead: as Stopping's."""
        self._order = order
        self._is_due = is_due
        self._lead = lead

    def saves_before(self, group: int) -> bool:
        order = self._order
        has_passed = order.save_at < 0 or order.save_at + self._lead <= group  # every replica, the last order
        if self._is_due is not None and has_passed and self._is_due():
            order.save_at = group + self._lead
        return order.save_at == group


class AnswerWay(Protocol):
    """How questions come to the callbacks, and answers to the stages. Boundaries count through all runs."""

    def ask(self, question: Question) -> None:
        """Asks the callbacks, at rank 0."""

    def note_norm(self, norm: float) -> None:
        """Notes the norm of the next update's gradients, at rank 0."""

    waits: bool
    """Whether somebody has to wait for an answer that decides nothing, too."""

    def wait(self, boundary: int, losses: list[float], check: Callable[[], None]) -> int:
        """The events that the answer which is due there wants; at any replica of stage 0. losses: of the
        minibatches of the question, as far as this replica knows them: those of all replicas add up. check:
        is called meanwhile, and raises what ends the run."""

    def rate_factor(self, boundary: int) -> float:
        """Returns the factor of the answer that was due there; at any worker, once it is there."""


class Asking:
    """Asks the callbacks at a replica of stage 0."""

    def __init__(
        self,
        way: AnswerWay,
        points: CallPoints,
        *,
        asks: bool,
        lead: int,
        group_size: int,
        rates: Callable[[], list[float]],
        first_minibatch: int = 0,
        origin: int = 0,
        answered: Mapping[int, int] | None = None,
    ) -> None:
        """asks: at rank 0. rates: the learning rates now. first_minibatch: of the run. origin: the minibatch
        from which callbacks count. answered: by boundary, events of answers from before the run."""
        self._way = way
        self._points = points
        self._lead = lead
        self._group_size = group_size
        self._rates = rates
        self._origin = origin
        self._answered = answered or {}
        self._asks = asks
        self.check: Callable[[], None] = lambda: None
        """Raises what the links of the segment know."""
        self._told_to = first_minibatch
        self._evaluations: list[int] = []
        """Boundaries whose evaluations no question has named."""
        self._due: list[tuple[int, int]] = []
        """Boundaries at which answers are due, and those of their questions."""
        self._losses: dict[int, float] = {}
        """By minibatch, of this replica's microbatches, in part for those that are not back yet."""
        self._waited_to = first_minibatch

    def note_loss(self, minibatch: int, part: float) -> None:
        """The gradient of a microbatch has come back. part: what its loss is in that of its minibatch."""
        self._losses[minibatch] = self._losses.get(minibatch, 0.0) + part

    def note_norm(self, norm: float) -> None:
        """The gradients of the next update have this norm."""
        if self._asks:
            self._way.note_norm(norm)

    def holds_at(self, group: int, ended_epochs: Sequence[tuple[int, int]], *, evaluates: bool) -> bool:
        """Whether no minibatch from this group on is admitted before the answer to a question there.
        evaluates: the weights before it are evaluated."""
        return self.answers_at_once and self._asks_at(group, ended_epochs, evaluates=evaluates)

    @property
    def answers_at_once(self) -> bool:
        """Whether an answer takes effect at the boundary of its question."""
        return self._lead == 0 and self._waits

    def events_at(
        self,
        group: int,
        ended_epochs: Sequence[tuple[int, int]],
        source: MinibatchSource,
        *,
        evaluates: bool = False,
    ) -> int:
        """The events that callbacks want before this group. evaluates: of holds_at(); such an evaluation is
        over where that is True."""
        if evaluates:
            self._evaluations.append(group)
        if self._asks_at(group, ended_epochs, evaluates=evaluates):
            self._ask(group, ended_epochs, source)
        events = self._answered.get(group, 0) | self._due_events(group)
        if events & EVALUATE and not evaluates:
            self._evaluations.append(group)
        return events

    def ask_again(self, group: int, source: MinibatchSource) -> int:
        """Asks the questions of the run's first group again, where the run continues before an evaluation
        that is still due. Returns the events of an answer that is due at once; such an evaluation is over."""
        self._evaluations.append(group)
        self._ask(group, (), source)
        return self._due_events(group)

    def _due_events(self, group: int) -> int:
        """Waits for the answers that are due before this group."""
        events = 0
        while self._due and self._due[0][0] <= group:
            due, asked = self._due.pop(0)
            asked_of = range(self._waited_to, asked)
            self._waited_to = asked
            losses = [self._losses.pop(minibatch, 0.0) for minibatch in asked_of]
            events |= self._way.wait(due, losses, self.check)
        return events

    def _ask(self, group: int, ended_epochs: Sequence[tuple[int, int]], source: MinibatchSource) -> None:
        takes_effect = group + self._lead
        if self._asks:
            samples, evaluations = self._samples_to(group, source), self._evaluations
            self._way.ask(Question(group, takes_effect, [*ended_epochs], samples, self._rates(), evaluations))
        self._evaluations = []
        if self._waits:
            self._due.append((takes_effect, group))

    def finish(self, num_minibatches: int, source: MinibatchSource) -> None:
        """There are no more; what nobody was asked about is told."""
        if self._asks:
            samples = self._samples_to(num_minibatches, source)
            self._way.ask(Question(num_minibatches, None, [], samples, self._rates()))

    @property
    def _waits(self) -> bool:
        return self._points.decides or self._way.waits

    def _asks_at(self, group: int, ended_epochs: Sequence[tuple[int, int]], *, evaluates: bool) -> bool:
        if self._points.at_evaluations and (evaluates or self._evaluations):
            return True
        end = group - self._origin
        return self._points.is_due(end - self._group_size, end, has_ended_epoch=bool(ended_epochs))

    def _samples_to(self, minibatch: int, source: MinibatchSource) -> list[int]:
        first = source.first_minibatch
        samples = source.samples[self._told_to - first : minibatch - first]
        self._told_to = minibatch
        return samples


class RateChanges:
    """Changes the learning rates of this worker's stages where an answer wants that (BoundaryListener)."""

    def __init__(
        self,
        way: AnswerWay,
        scale_rates: Callable[[int, float], None],
        answered: Mapping[int, float] | None = None,
    ) -> None:
        """scale_rates: (stage, factor). answered: by boundary, factors of answers from before the run."""
        self._way = way
        self._answered = answered or {}
        self._scale_rates = scale_rates

    def begin(self, stage: int, minibatch: int, events: int) -> None: ...

    def reach(self, stage: int, minibatch: int, events: int) -> None:
        if events & RATE:
            factor = self._answered.get(minibatch)
            self._scale_rates(stage, self._way.rate_factor(minibatch) if factor is None else factor)


@dataclass(frozen=True)
class Steered:
    """The steering of a worker, in all segments of a run."""

    stopping: Stopping | None = None
    asking: Asking | None = None
    rate_changes: RateChanges | None = None


def bits_of_loss(loss: float) -> int:
    """Returns the loss as ItemFields.data_fingerprint of a gradient carries it."""
    (bits,) = _BITS.unpack(_DOUBLE.pack(loss))
    return int(bits)


def loss_of_bits(bits: int) -> float:
    (loss,) = _DOUBLE.unpack(_BITS.pack(bits))
    return float(loss)


def stop_lead(schedule: _core.ScheduleOptions, *, sync_every: int) -> int:
    """Minibatches, in whole groups, by which a replica of stage 0 may be ahead of rank 0."""
    rounds = _core.rounds_of(schedule, 0)
    if rounds.num_replicas == 1:
        return 0
    # The round that rank 0 has pushed last, and the one that the other has begun, and what may be older.
    num_rounds = 2 + schedule.staleness + sync_every
    return _in_groups(schedule, _in_flight(schedule) + num_rounds * rounds.minibatches_per_round)


def answer_lead(schedule: _core.ScheduleOptions) -> int:
    """Minibatches from a question's boundary to that of its answer: when stage 0 gets there, all before the
    first one have come back to it, so their losses are known and it waits for the callbacks alone."""
    if _core.drains_every_minibatch(schedule):
        return 0
    return _in_groups(schedule, _in_flight(schedule))


def _in_flight(schedule: _core.ScheduleOptions) -> float:
    """Minibatches, at all replicas of stage 0."""
    return schedule.in_flight[0] * _core.rounds_of(schedule, 0).num_replicas / schedule.num_microbatches


def _in_groups(schedule: _core.ScheduleOptions, num_minibatches: float) -> int:
    group_size = _core.minibatches_between_drains(schedule)
    return math.ceil(num_minibatches / group_size) * group_size
