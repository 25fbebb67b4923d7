"""Decisions about a run that do not follow from its data: where it ends early, and what its callbacks want.

    a wish to end   rank 0 chooses its next boundary, or one that no replica of stage 0 has passed
    a callback      asked at a boundary; its answer is due at the same one where the schedule drains, and the
                    lead later where it does not: each replica of stage 0 waits for it there

Outlives the segments of a run; owned by the worker's compute thread.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
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


class AnswerWay(Protocol):
    """How questions come to the callbacks, and answers to the stages."""

    def ask(self, question: Question) -> None:
        """At rank 0."""

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
    ) -> None:
        """asks: at rank 0. rates: the learning rates now."""
        self._way = way
        self._points = points
        self._asks = asks
        self._lead = lead
        self._group_size = group_size
        self._rates = rates
        self.check: Callable[[], None] = lambda: None
        """Raises what the links of the segment know."""
        self._num_told = 0  # minibatches
        self._evaluated_at = -1
        self._due: list[tuple[int, int]] = []
        """Boundaries at which answers are due, and those of their questions."""
        self._losses: dict[int, float] = {}
        """By minibatch, of this replica's microbatches, in part for those that are not back yet."""
        self._num_waited = 0  # minibatches

    def note_loss(self, minibatch: int, part: float) -> None:
        """The gradient of a microbatch has come back. part: what its loss is in that of its minibatch."""
        self._losses[minibatch] = self._losses.get(minibatch, 0.0) + part

    def note_evaluation(self, group: int) -> None:
        """The weights before this minibatch are evaluated."""
        self._evaluated_at = group

    def events_at(
        self,
        group: int,
        ended_epochs: Sequence[tuple[int, int]],
        source: MinibatchSource,
        *,
        is_evaluated: bool = False,
    ) -> int:
        """Callbacks count from the beginning of the run, which may go on from another's state. is_evaluated:
        the weights before this group will be, which an answer that is due at once cannot wait for."""
        evaluated_at = group if is_evaluated and self._lead > 0 else self._evaluated_at
        first = source.first_minibatch
        boundary = group - first
        begin = boundary - self._group_size
        if self._points.is_due(begin, boundary, has_ended_epoch=bool(ended_epochs)):
            takes_effect = boundary + self._lead
            if self._asks:
                samples = source.samples[self._num_told : boundary]
                self._num_told = boundary
                epochs = [(epoch, end - first) for epoch, end in ended_epochs]
                rates = self._rates()
                self._way.ask(Question(boundary, takes_effect, epochs, samples, rates, evaluated_at))
            if self._points.decides or self._way.waits:
                self._due.append((takes_effect, boundary))
        events = 0
        while self._due and self._due[0][0] <= boundary:
            due, asked = self._due.pop(0)
            asked_of = range(self._num_waited, asked)
            self._num_waited = asked
            losses = [self._losses.pop(first + minibatch, 0.0) for minibatch in asked_of]
            events |= self._way.wait(due, losses, self.check)
        return events

    def finish(self, num_minibatches: int, source: MinibatchSource) -> None:
        """There are no more; what nobody was asked about is told."""
        if self._asks:
            boundary = num_minibatches - source.first_minibatch
            samples = source.samples[self._num_told : boundary]
            self._way.ask(Question(boundary, None, [], samples, self._rates()))


class RateChanges:
    """Changes the learning rates of this worker's stages where an answer wants that (BoundaryListener)."""

    def __init__(
        self, way: AnswerWay, scale_rates: Callable[[int, float], None], first_minibatch: int = 0
    ) -> None:
        """scale_rates: (stage, factor). first_minibatch: of the run."""
        self._way = way
        self._first_minibatch = first_minibatch
        self._scale_rates = scale_rates

    def begin(self, stage: int, minibatch: int, events: int) -> None: ...

    def reach(self, stage: int, minibatch: int, events: int) -> None:
        if events & RATE:
            self._scale_rates(stage, self._way.rate_factor(minibatch - self._first_minibatch))


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
