"""Decides whether a run ends early, and which changes its callbacks make. These decisions do not follow from
the data. They take effect at boundaries, which lie between groups of minibatches (boundaries.py).

    a wish to end   Rank 0 ends the run at its next boundary. If stage 0 has replicas, rank 0 names a later
                    boundary, which no replica has passed.
    a callback      is asked at a boundary. If the schedule drains, its answer takes effect at that boundary.
                    Otherwise the answer takes effect `lead` minibatches later: there each replica of stage 0
                    waits for the answer.

These objects serve all segments of a run, the parts with one memory plan each (worker/segment.py). Owned by
the worker's compute thread.
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
    "Steered",
    "StopOrder",
    "Stopping",
    "answer_lead",
    "bits_of_loss",
    "loss_of_bits",
    "stop_lead",
]

# The events that may be due at a boundary, as bits.
EVALUATE = 1
SNAPSHOT = 2
STOP = 4  # the run ends here, although there are more data
RATE = 8  # the learning rate changes

_BITS, _DOUBLE = struct.Struct("<Q"), struct.Struct("<d")


class StopOrder(Protocol):
    """A request to end the run early, and the boundary at which the run ends then."""

    @property
    def is_stop_asked(self) -> bool: ...
    def ask_for_stop(self) -> None: ...

    stop_at: int
    """The boundary; -1 while it is not known. Rank 0 writes it, and the other replicas of stage 0 read it."""


class Stopping:
    """Decides at which boundary a run ends if the user asks to end it early. With one replica of stage 0 it
    is rank 0's next boundary.

    If stage 0 has replicas, rank 0 names a boundary that no replica has passed. Rank 0 writes the order
    before it sends the replicas gradients or weights again. No replica gets so far ahead without them, so
    each reads the order in time."""

    def __init__(self, order: StopOrder, *, decides: bool, lead: int) -> None:
        """decides: whether this is rank 0. lead: number of minibatches from the boundary at which rank 0
        decides to the boundary at which the run ends.
        """
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


class AnswerWay(Protocol):
    """Carries questions to the callbacks, and answers to the stages. A boundary is given as the number of the
    minibatch after it. If a run continues earlier runs, minibatches are counted from the first run on."""

    def ask(self, question: Question) -> None:
        """Asks the callbacks. Only rank 0 calls it."""

    def note_norm(self, norm: float) -> None:
        """Notes the norm of the gradients of stage 0's next update. Only rank 0 calls it."""

    waits: bool
    """Whether the run has to wait for answers that decide nothing, too."""

    def wait(self, boundary: int, losses: list[float], check: Callable[[], None]) -> int:
        """Waits for the answer that is due at this boundary, and returns its events. Each replica of stage 0
        calls it.

        losses: this replica's parts of the losses of the question's minibatches. A minibatch's loss is the
        sum of all replicas' parts.
        check: called during the wait. It raises the error that ends the run."""

    def rate_factor(self, boundary: int) -> float:
        """Returns the factor by which the answer that was due at this boundary changes the learning rates.
        Any worker may call it, after wait()."""


class Asking:
    """Asks the callbacks questions on behalf of one replica of stage 0."""

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
        tells_later: bool = False,
    ) -> None:
        """asks: whether this object asks the callbacks: at rank 0 only.
        rates: returns the present learning rates.
        first_minibatch: the run's first minibatch.
        origin: the minibatch from which callbacks count.
        answered: the events on which callbacks decided before this run began, by the boundary at which they
            take effect.
        tells_later: whether callbacks have yet to be told of an evaluation at the run's first boundary. The
            question at the next boundary tells them."""
        self._way = way
        self._points = points
        self._lead = lead
        self._group_size = group_size
        self._rates = rates
        self._origin = origin
        self._answered = answered or {}
        self._asks = asks
        self.check: Callable[[], None] = lambda: None
        """Raises the failure of a link, if the segment has had one."""
        self.tells_later = tells_later
        self._told_to = first_minibatch
        self._evaluations: list[int] = []
        """Boundaries of evaluations that no question has reported to the callbacks yet."""
        self._due: list[tuple[int, int]] = []
        """(boundary of the answer, boundary of the question) of the answers that are still due."""
        self._losses: dict[int, float] = {}
        """This replica's losses by minibatch. A microbatch's part is added when its gradient has come back to
        stage 0."""
        self._waited_to = first_minibatch

    def note_loss(self, minibatch: int, part: float) -> None:
        """Adds a microbatch's part of the loss of its minibatch. Call it when the microbatch's gradient has
        come back to stage 0."""
        self._losses[minibatch] = self._losses.get(minibatch, 0.0) + part

    def note_norm(self, norm: float) -> None:
        """Tells the callbacks the norm of an update's gradients. Does nothing except at rank 0."""
        if self._asks:
            self._way.note_norm(norm)

    def holds_at(self, group: int, ended_epochs: Sequence[tuple[int, int]], *, evaluates: bool) -> bool:
        """Whether this group's minibatches have to wait for the answer to a question at the boundary before
        them. evaluates: whether the weights are evaluated at that boundary."""
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
        """Asks the callbacks if a question is due. Returns the events that the callbacks want at the boundary
        before this group.
        evaluates: as in holds_at(). If holds_at() returned True, call this after the evaluation."""
        if evaluates:
            self._evaluations.append(group)
        if self._asks_at(group, ended_epochs, evaluates=evaluates):
            self._ask(group, ended_epochs, source)
        events = self._answered.get(group, 0) | self._due_events(group)
        if events & EVALUATE and not evaluates:
            self._evaluations.append(group)
        return events

    def note_evaluation(self, group: int) -> None:
        """Notes the evaluation with which the run begins, so that the next question tells of it."""
        self._evaluations.append(group)

    def ask_again(self, group: int, source: MinibatchSource) -> int:
        """Asks the question of the run's first group again. Call it if the run continues from a checkpoint
        whose evaluation was still due; if answers_at_once, call it after that evaluation. Returns the events
        of an answer that is due at once."""
        self._evaluations.append(group)
        self._ask(group, (), source)
        return self._due_events(group)

    def _due_events(self, group: int) -> int:
        """Waits for the answers that are due before this group, and returns their events."""
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
        self._evaluations, self.tells_later = [], False
        if self._waits:
            self._due.append((takes_effect, group))

    def finish(self, num_minibatches: int, source: MinibatchSource) -> None:
        """Tells the callbacks at the end of the run about the minibatches since the last question."""
        if self._asks:
            samples = self._samples_to(num_minibatches, source)
            self._way.ask(Question(num_minibatches, None, [], samples, self._rates()))

    @property
    def _waits(self) -> bool:
        return self._points.decides or self._way.waits

    def _asks_at(self, group: int, ended_epochs: Sequence[tuple[int, int]], *, evaluates: bool) -> bool:
        if self._points.at_evaluations and (evaluates or self._evaluations or self.tells_later):
            return True
        end = group - self._origin
        return self._points.is_due(end - self._group_size, end, has_ended_epoch=bool(ended_epochs))

    def _samples_to(self, minibatch: int, source: MinibatchSource) -> list[int]:
        first = source.first_minibatch
        samples = source.samples[self._told_to - first : minibatch - first]
        self._told_to = minibatch
        return samples


class RateChanges:
    """A BoundaryListener that changes the learning rates of this worker's stages if an answer of the
    callbacks asks for it."""

    def __init__(
        self,
        way: AnswerWay,
        scale_rates: Callable[[int, float], None],
        answered: Mapping[int, float],
    ) -> None:
        """scale_rates: called with a stage and a factor. answered: by boundary, the factors that callbacks
        decided on before this run began."""
        self._way = way
        self._answered = answered
        self._scale_rates = scale_rates

    def begin(self, stage: int, minibatch: int, events: int) -> None: ...

    def reach(self, stage: int, minibatch: int, events: int) -> None:
        if events & RATE:
            factor = self._answered.get(minibatch)
            self._scale_rates(stage, self._way.rate_factor(minibatch) if factor is None else factor)


@dataclass(frozen=True)
class Steered:
    """The objects through which callbacks and users change a run. One that this worker or run does not need
    is None."""

    stopping: Stopping | None = None
    asking: Asking | None = None
    rate_changes: RateChanges | None = None


def bits_of_loss(loss: float) -> int:
    """Returns the bits of the loss as an integer. The field data_fingerprint of a gradient's header carries
    it."""
    (bits,) = _BITS.unpack(_DOUBLE.pack(loss))
    return int(bits)


def loss_of_bits(bits: int) -> float:
    (loss,) = _DOUBLE.unpack(_BITS.pack(bits))
    return float(loss)


def stop_lead(schedule: _core.ScheduleOptions, *, sync_every: int) -> int:
    """Returns the number of minibatches by which a replica of stage 0 may be ahead of rank 0, rounded up to
    whole groups; 0 without other replicas."""
    rounds = _core.rounds_of(schedule, 0)
    if rounds.num_replicas == 1:
        return 0
    # The 2 counts the round that rank 0 has pushed last, and the round that another replica has begun. The
    # other terms count the rounds by which that replica's weights may be old.
    num_rounds = 2 + schedule.staleness + sync_every
    return _in_groups(schedule, _in_flight(schedule) + num_rounds * rounds.minibatches_per_round)


def answer_lead(schedule: _core.ScheduleOptions) -> int:
    """Returns the number of minibatches from a question's boundary to the boundary of its answer; 0 if the
    schedule drains. When stage 0 reaches the answer's boundary, it has done the backwards of all minibatches
    before the question. So it knows their losses, and waits only for the callbacks."""
    if _core.drains_every_minibatch(schedule):
        return 0
    return _in_groups(schedule, _in_flight(schedule))


def _in_flight(schedule: _core.ScheduleOptions) -> float:
    """Returns the number of minibatches in flight at all replicas of stage 0 together."""
    return schedule.in_flight[0] * _core.rounds_of(schedule, 0).num_replicas / schedule.num_microbatches


def _in_groups(schedule: _core.ScheduleOptions, num_minibatches: float) -> int:
    group_size = _core.minibatches_between_drains(schedule)
    return math.ceil(num_minibatches / group_size) * group_size
