"""A run has boundaries between groups of minibatches. At a boundary events may be due, such as an evaluation
or a checkpoint. At boundary N a stage has made the updates of minibatches 0 to N - 1, and no update of
minibatch N. A group is the minibatches between two boundaries, and N is a multiple of its size
(`minibatches_between_drains`). The rounds of all stages end at a boundary.

    stage 0     decides which events are due at N, once it has read the group that begins with minibatch N,
                or has found the end of the data there
    messages    carry the decision downstream: all activations of that group, or the end of the data
    stage s     if events are due, calls its listeners twice: forwards change buffers, updates weights
                begin   before its first FORWARD of the group: the buffers have their state of the boundary
                reach   later, after UPDATE N - 1 and before UPDATE N: the weights have theirs
    STOP        the run ends at N, so minibatch N is not trained

An example for the boundary N = 5 at stage 0, with two minibatches in flight (F5 is the forward of minibatch
5, B a backward, U an update):

    F4 B3 U3 | F5    B4 U4      B5 U5      U4 makes version 5
           begin       reach

A boundary may begin before the previous boundary is reached. At a boundary stage 0 waits for other stages
only if it needs a callback's answer, which may depend on their evaluations. The last group may be incomplete.
Then some replicas get none of its microbatches, and so no decision. Therefore the evaluations and checkpoints
that are due before an incomplete group are made at the end of the data. Owned by the worker's compute thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipedream import _core
from pipedream.data.minibatch_source import MinibatchSource
from pipedream.stage.decisions import EVALUATE, RATE, SNAPSHOT, STOP, Asking, Stopping

__all__ = [
    "EVALUATE",
    "RATE",
    "SNAPSHOT",
    "STOP",
    "Boundaries",
    "BoundaryListener",
    "Planned",
    "StageZeroGate",
]


class BoundaryListener(Protocol):
    """Does work at the boundaries of a worker. Each call is for one stage and one boundary, and names the
    boundary by the minibatch after it. events: the events that are due, as bits such as EVALUATE."""

    def begin(self, stage: int, minibatch: int, events: int) -> None:
        """Called before the stage's forward of this minibatch, after all its earlier forwards. At the end of
        the data there is no such forward."""

    def reach(self, stage: int, minibatch: int, events: int) -> None:
        """Called after begin(), between the stage's update of minibatch - 1 and the update of `minibatch`. A
        replica has then updated its own shard, but may not have pulled the shards of the other replicas
        yet."""


@dataclass(frozen=True)
class Planned:
    """An event whose boundaries follow from the position in the data. So all replicas of stage 0 plan the
    same boundaries."""

    event: int
    every: int | str
    """A number of minibatches, "epoch" for the end of each epoch, or "end" for the end of the data."""


class StageZeroGate:
    """Decides at a replica of stage 0 which minibatches are trained, and which events are due at boundaries.
    Each segment of a run, a part with one memory plan (worker/segment.py), has a gate of its own."""

    def __init__(
        self,
        source: MinibatchSource,
        group_size: int,
        planned: Sequence[Planned],
        *,
        stopping: Stopping | None,
        asking: Asking | None,
        evaluates: bool,
        saves_before: Callable[[int], bool] | None,
        first_of_run: int,
        begins_with: int,
    ) -> None:
        """evaluates: whether this replica runs the evaluations.
        saves_before: returns whether a SNAPSHOT is due at this boundary for a reason that does not follow
        from the data, such as the time.
        first_of_run: the boundary at which the run begins.
        begins_with: the events that are due at first_of_run, without those that callbacks ask for there."""
        self._source = source
        self._group_size = group_size
        self._planned = planned
        self._stopping = stopping
        self._asking = asking
        self._evaluates = evaluates
        self._saves_before = saves_before
        self._first_of_run = first_of_run
        self._begins_with = begins_with
        self._group = -1
        self._evaluated = -1  # the last group whose first forward waited for an evaluation
        self._late = 0  # events that are moved to the end of the data
        self.evaluates_first = False
        """Whether admits() refused the newest minibatch only because an evaluation comes before it. Then
        admits() is called for the minibatch again after the evaluation."""
        self.events = 0
        """Events that are due at the boundary before the current group."""
        self.end = (0, 0)
        """(number of minibatches, events at the end), once admits() has found the end."""

    def admits(self, minibatch: int, fetch: Callable[[int], bool]) -> bool:
        """Reads the minibatch and returns True. Returns False if the data or the run end before it (`end`),
        or if an evaluation comes before it (evaluates_first). fetch: reads a minibatch, and returns whether
        it exists."""
        self.evaluates_first = False
        group = minibatch - minibatch % self._group_size
        if group == self._group:
            return fetch(minibatch) or self._end(self._source.num_minibatches, self._events_of_end())
        is_first = group == self._first_of_run
        if self._group_size == 1 and not is_first and self._stops_before(group):
            return self._end(group, STOP | self._saved_at_stop())  # the group's data need not be read
        if not fetch(minibatch):
            return self._end(self._source.num_minibatches, self._events_of_end())
        self._group, self.events = group, 0
        if is_first:
            return self._begin_run(group)
        # A run is not stopped before a short last group: a replica without microbatches in that group would
        # not learn of the stop.
        is_whole = self._source.num_minibatches >= group + self._group_size
        if self._group_size > 1 and is_whole and self._stops_before(group):
            return self._end(group, STOP | self._saved_at_stop())
        events = self._planned_in(group - self._group_size, group) if self._planned else 0
        if self._asking is not None:
            epochs, evaluates = self._epochs_ended_in(group), is_whole and bool(events & EVALUATE)
            is_held = self._asking.holds_at(group, epochs, evaluates=evaluates)
            if is_held and evaluates and self._puts_off(group):
                return False
            events |= self._asking.events_at(group, epochs, self._source, evaluates=evaluates)
            if is_held and evaluates:
                events &= ~EVALUATE  # the evaluation is done
        if self._saves_before is not None and is_whole and self._saves_before(group):
            events |= SNAPSHOT
        if not is_whole:
            self._late = events & (EVALUATE | SNAPSHOT)
            return True
        if events & STOP:
            return self._end(group, events | self._saved_at_stop())
        self.events = events
        return True

    def _begin_run(self, group: int) -> bool:
        """Decides which events are due before the first group of the run. Returns True if the group may
        begin. Returns False if the run ends here, or if an evaluation comes first."""
        if self._begins_with & STOP:
            return self._end(group, self._begins_with)
        if self._source.num_minibatches < group + self._group_size:
            self._late = self._begins_with
            return True
        self.events = self._begins_with
        if self.events & EVALUATE and self._asking is not None:
            if self._asking.tells_later:
                self._asking.note_evaluation(group)
                return True
            if self._asking.answers_at_once:
                if self._puts_off(group):
                    return False
                self.events &= ~EVALUATE  # the evaluation is done
            self.events |= self._asking.ask_again(group, self._source)
            if self.events & STOP:
                return self._end(group, self.events | self._saved_at_stop())
        return True

    def _puts_off(self, group: int) -> bool:
        """Whether an evaluation has to run before the group's first forward. Once it has run, the call
        returns False for the group."""
        if not self._evaluates or self._evaluated == group:
            return False
        self._evaluated, self._group, self.evaluates_first = group, -1, True
        return True

    def note_loss(self, minibatch: int, part: float) -> None:
        if self._asking is not None:
            self._asking.note_loss(minibatch, part)

    def _saved_at_stop(self) -> int:
        """Returns SNAPSHOT if the run writes checkpoints. Such a run also writes one where it is stopped."""
        return SNAPSHOT if any(planned.event == SNAPSHOT for planned in self._planned) else 0

    def _stops_before(self, group: int) -> bool:
        return self._stopping is not None and self._stopping.stops_before(group)

    def _end(self, num_minibatches: int, events: int) -> bool:
        self.end = (num_minibatches, events)
        # Whether the run is over, and not only this segment.
        is_over = events & STOP or self._source.larger is None
        if is_over and self._asking is not None:
            self._asking.finish(num_minibatches, self._source)
        return False

    def _events_of_end(self) -> int:
        """Returns the events at the end of the data of this segment."""
        end = self._source.num_minibatches
        if self._source.larger is not None or end == self._first_of_run:
            # If the segment ends before a minibatch larger than planned, the next segment begins at this
            # boundary and decides about its events. If the data end at the run's first boundary, the events
            # of that boundary are due.
            return self._begins_with if end == self._first_of_run and self._source.larger is None else 0
        begin = (end - 1) - (end - 1) % self._group_size  # the last boundary before the end
        if end % self._group_size and begin > self._first_of_run:
            # Events that are planned for the boundary before a short last group are made at the end instead.
            begin -= self._group_size
        return self._planned_in(begin, end, is_end=True) | self._late

    def _planned_in(self, begin: int, end: int, *, is_end: bool = False) -> int:
        """Returns the events that are planned after minibatch `begin`, up to and including `end`."""
        events = 0
        for planned in self._planned:
            if planned.every == "epoch":
                is_due = is_end or bool(self._epochs_ended_in(end))
            elif planned.every == "end":
                is_due = is_end
            else:
                assert isinstance(planned.every, int)
                is_due = begin // planned.every != end // planned.every
            events |= planned.event if is_due else 0
        return events

    def _epochs_ended_in(self, group: int) -> list[tuple[int, int]]:
        """Returns (epoch, end) of each epoch that ends after the previous boundary, and at or before the
        boundary `group`. end: the minibatch after the epoch."""
        epoch_of = self._source.epoch_of
        return [
            (epoch_of(end - 1), end)
            for end in range(group - self._group_size + 1, group + 1)
            if epoch_of(end - 1) != epoch_of(end)
        ]


class Boundaries:
    """The events that are due at the stages of one worker."""

    def __init__(
        self,
        schedule: _core.ScheduleOptions,
        stages: Sequence[int],
        listeners: Sequence[BoundaryListener],
    ) -> None:
        self._listeners = listeners
        self.group_size = _core.minibatches_between_drains(schedule)
        self._round_size = {stage: _core.rounds_of(schedule, stage).minibatches_per_round for stage in stages}
        first = schedule.first_minibatch
        self._begun = dict.fromkeys(stages, -1)
        self._updated_to = dict.fromkeys(stages, first)
        """By stage: the minibatch before which all updates are done."""
        self._due: dict[int, list[tuple[int, int]]] = {stage: [] for stage in stages}
        """By stage, in order: (boundary, events) of the boundaries for which begin() was called, and reach()
        not yet."""
        self._newest = (-1, 0)
        """(boundary, events) of the boundary that began last at any stage of this worker."""

    def has_stage(self, stage: int) -> bool:
        return stage in self._begun

    def events_in_hand(self, minibatch: int) -> int:
        """Returns the events of the boundary before the minibatch's group, if it is the newest that has begun
        at this worker; otherwise 0. A stage uses them if the previous stage is at the same worker."""
        group, events = self._newest
        return events if minibatch - minibatch % self.group_size == group else 0

    def begin(self, stage: int, minibatch: int, events: int) -> None:
        """Tells the listeners that a boundary begins. Call it before each forward of a group before which
        events are due; only the stage's first call for a group has an effect."""
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
        """Notes that the stage has made the update of the minibatch's round."""
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
        """Tells the listeners of the events at the end of the data. Call it when all other work is done."""
        for stage in self._begun if events else ():
            for listener in self._listeners:
                listener.begin(stage, num_minibatches, events)
                listener.reach(stage, num_minibatches, events)
