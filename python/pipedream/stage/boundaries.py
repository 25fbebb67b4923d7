"""Boundaries of a run, at one worker: the places before a minibatch N where every stage has made the updates
of the minibatches 0 to N - 1 and none of N. N is a multiple of the group, of `minibatches_between_drains`.

    stage 0     decides what is due there, once it has read the group of N, or found that there is none
    the items   carry the decision: all activations of that group, or the end of the data
    stage s     begin   before its first FORWARD of the group: buffers are those of the boundary
                reach   UPDATE N - 1 is done, too, and UPDATE N is not
    STOP        there is no minibatch N

        stage 0   F4 B3 U3 | F5    B4 U4      B5 U5      the boundary N = 5, two in flight:
                             begin       reach           what U4 has made is version N

A boundary may begin before the one before it is reached. No stage waits for another, and none looks ahead
into its data. A replica that has no microbatch of the last, incomplete group would not hear of it, so what is
due before such a group is due at the end of the data. Owned by the worker's compute thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipedream import _core
from pipedream.data.minibatch_source import MinibatchSource

__all__ = [
    "EVALUATE",
    "RATE",
    "SNAPSHOT",
    "STOP",
    "Boundaries",
    "BoundaryListener",
    "Decisions",
    "Planned",
    "StageZeroGate",
    "StopOrder",
    "Stopping",
    "stop_lead",
]

EVALUATE = 1
SNAPSHOT = 2
STOP = 4  # with an end of data alone: the data would go on
RATE = 8  # the learning rate changes


class BoundaryListener(Protocol):
    """What a worker does at boundaries. Each call is of one stage and boundary; events: the bits above."""

    def begin(self, stage: int, minibatch: int, events: int) -> None:
        """The stage has run no forward of the minibatch, and all of those before it."""

    def reach(self, stage: int, minibatch: int, events: int) -> None:
        """Between the stage's updates of the minibatch before and of this one; after begin(). A replica's own
        shard is updated; it may not have pulled the others' yet."""


@dataclass(frozen=True)
class Planned:
    """An event that follows from the position alone, so that all replicas of stage 0 plan it alike."""

    event: int
    every: int | str
    """Minibatches, or "epoch"."""


class Decisions(Protocol):
    """What is decided outside the data, such as an interrupt and the answers of callbacks; at stage 0."""

    def stops_before(self, group: int) -> bool:
        """Before the group's data are read: whether the run ends there."""

    def events_at(self, group: int, ended_epochs: Sequence[tuple[int, int]]) -> int:
        """Once they are read. ended_epochs: (epoch, its end) of those that have ended in the group before;
        the end is the first minibatch of the next one. May wait for an answer."""


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
        order = self._order
        if self._decides and order.stop_at < 0 and order.is_stop_asked:
            order.stop_at = group + self._lead
        return 0 <= order.stop_at <= group

    def events_at(self, group: int, ended_epochs: Sequence[tuple[int, int]]) -> int:
        return 0


def stop_lead(schedule: _core.ScheduleOptions, *, sync_every: int) -> int:
    """Minibatches, in whole groups, by which a replica of stage 0 may be ahead of rank 0."""
    rounds = _core.rounds_of(schedule, 0)
    if rounds.num_replicas == 1:
        return 0
    in_flight = schedule.in_flight[0] * rounds.num_replicas / schedule.num_microbatches
    # The round that rank 0 has pushed last, and the one that the other has begun, and what may be older.
    num_rounds = 2 + schedule.staleness + sync_every
    group_size = _core.minibatches_between_drains(schedule)
    return math.ceil((in_flight + num_rounds * rounds.minibatches_per_round) / group_size) * group_size


class StageZeroGate:
    """Decides at a replica of stage 0, before it forwards a group. Lives as long as a segment."""

    def __init__(
        self,
        source: MinibatchSource,
        group_size: int,
        planned: Sequence[Planned] = (),
        decisions: Decisions | None = None,
        *,
        first_of_run: int = 0,
    ) -> None:
        """first_of_run: the boundary with which it begins, at which nothing is due."""
        self._source = source
        self._group_size = group_size
        self._planned = planned
        self._decisions = decisions
        self._first_of_run = first_of_run
        self._group = -1
        self.events = 0
        """Due at the boundary before the group that is forwarded now."""
        self.end = (0, 0)
        """Once it admits no more: how many minibatches there were, and what is due at their end."""

    def admits(self, minibatch: int, fetch: Callable[[int], bool]) -> bool:
        """False: there is no such minibatch. fetch: reads it."""
        group = minibatch - minibatch % self._group_size
        is_new = group != self._group and group > self._first_of_run
        decisions = self._decisions
        if is_new and decisions is not None and decisions.stops_before(group):
            self.end = (group, STOP)
            return False
        if not fetch(minibatch):
            self.end = (self._source.num_minibatches, self._events_of_end())
            return False
        if group == self._group:
            return True
        self._group, self.events = group, 0
        if not is_new:
            return True
        events = self._planned_in(group - self._group_size, group)
        if decisions is not None:
            events |= decisions.events_at(group, self._epochs_ended_in(group))
        if events & STOP:
            self.end = (group, events)
            return False
        if self._source.num_minibatches >= group + self._group_size:  # else they are due at the end
            self.events = events
        return True

    def _events_of_end(self) -> int:
        end = self._source.num_minibatches
        if self._source.larger is not None or end == self._first_of_run:
            return 0  # the next segment begins there
        begin = (end - 1) - (end - 1) % self._group_size  # the boundary before
        if end % self._group_size and begin > self._first_of_run:
            begin -= self._group_size  # what was due before a short group is due here
        return self._planned_in(begin, end, is_end=True)

    def _planned_in(self, begin: int, end: int, *, is_end: bool = False) -> int:
        """Events whose place is after the one minibatch and not after the other."""
        events = 0
        for planned in self._planned:
            if planned.every == "epoch":
                is_due = is_end or bool(self._epochs_ended_in(end))
            else:
                assert isinstance(planned.every, int)
                is_due = begin // planned.every != end // planned.every
            events |= planned.event if is_due else 0
        return events

    def _epochs_ended_in(self, group: int) -> list[tuple[int, int]]:
        """Those whose ends lie after the boundary before the group's and not after the group's."""
        epochs = self._source.epochs
        return [
            (epochs[end - 1], end)
            for end in range(group - self._group_size + 1, group + 1)
            if epochs[end - 1] != epochs[end]
        ]


class Boundaries:
    """What is due at the stages of one worker."""

    def __init__(
        self,
        schedule: _core.ScheduleOptions,
        stages: Sequence[int],
        listeners: Sequence[BoundaryListener] = (),
    ) -> None:
        self._listeners = listeners
        self.group_size = _core.minibatches_between_drains(schedule)
        self._round_size = {stage: _core.rounds_of(schedule, stage).minibatches_per_round for stage in stages}
        first = schedule.first_minibatch
        self._begun = dict.fromkeys(stages, -1)
        self._updated_to = dict.fromkeys(stages, first)
        """By stage: the updates of all minibatches before it are done."""
        self._due: dict[int, list[tuple[int, int]]] = {stage: [] for stage in stages}
        """By stage, the boundaries that have begun and are not reached, in order, and what is due there."""
        self._newest = (-1, 0)
        """The boundary that began last at any stage here, and what is due there."""

    def has_stage(self, stage: int) -> bool:
        return stage in self._begun

    def events_in_hand(self, minibatch: int) -> int:
        """What an activation carries that goes from one stage of this worker to another."""
        group, events = self._newest
        return events if minibatch - minibatch % self.group_size == group else 0

    def begin(self, stage: int, minibatch: int, events: int) -> None:
        """Before a forward of this minibatch that carries events, which are not none."""
        group = minibatch - minibatch % self.group_size
        if self._begun[stage] == group:
            return
        self._begun[stage] = group
        self._newest = (group, events)
        for listener in self._listeners:
            listener.begin(stage, group, events)
        self._due[stage].append((group, events))
        self._reach(stage)

    def note_update(self, stage: int, minibatch: int) -> None:
        """The version is there that the round of this minibatch makes."""
        self._updated_to[stage] = minibatch - minibatch % self._round_size[stage] + self._round_size[stage]
        if self._due[stage]:
            self._reach(stage)

    def _reach(self, stage: int) -> None:
        due = self._due[stage]
        while due and self._updated_to[stage] >= due[0][0]:
            group, events = due.pop(0)
            for listener in self._listeners:
                listener.reach(stage, group, events)

    def end(self, num_minibatches: int, events: int) -> None:
        """All is done."""
        for stage in self._begun if events else ():
            for listener in self._listeners:
                listener.begin(stage, num_minibatches, events)
                listener.reach(stage, num_minibatches, events)
