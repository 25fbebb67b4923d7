"""Which versions a schedule reads, and which minibatches make one. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipedream.common.checks import check_choice
from pipedream.model.precision import num_steps_in_flight

__all__ = ["SCHEDULES", "Versions"]

DRAINING = ("flush", "gpipe", "model_parallel", "data_parallel", "interleaved")
SCHEDULES = ("pipedream", "vertical_sync", "naive", "2bw", *DRAINING)


class Versions:
    """Which versions a schedule reads, and which minibatches make one: the table of design.md, section 4."""

    def __init__(
        self,
        schedule: str,
        in_flight: Sequence[int],
        num_replicas: Sequence[int],
        staleness: int,
        drained_at: Sequence[int] = (),
    ) -> None:
        """drained_at: minibatches before which everything had been updated, beside the first."""
        check_choice("schedule", schedule, SCHEDULES)
        self._schedule = schedule
        self._in_flight = in_flight
        self._num_replicas = num_replicas
        self._staleness = staleness
        self.drained_at = drained_at

    @property
    def drains(self) -> bool:
        return self._schedule in DRAINING

    def minibatches_per_round(self, stage_index: int) -> int:
        return math.lcm(*self._num_replicas) if self.drains else self._num_replicas[stage_index]

    def of_forward(self, stage_index: int, minibatch: int) -> int:
        replicas, in_flight = self._num_replicas[stage_index], self._in_flight[stage_index]
        if self.drains:
            return minibatch // self.minibatches_per_round(stage_index)
        oldest = self._oldest(stage_index, minibatch)
        if self._schedule == "2bw":
            return max(oldest, minibatch // replicas - 1)
        if self._schedule == "vertical_sync":
            return max(oldest, self._seen_at_input(minibatch) // replicas)
        return max(oldest, minibatch // replicas - in_flight + 1 - self._staleness)

    def of_backward(self, stage_index: int, minibatch: int) -> int:
        if self._schedule == "naive":
            return minibatch // self._num_replicas[stage_index]
        return self.of_forward(stage_index, minibatch)

    def of_tied(self, owner: int, minibatch: int) -> int:
        """Of a parameter that several stages use: at each of them the same, forward and backward. It counts
        the rounds of its owner, whose update makes it: what vertical sync would read there, the staleness
        older, where stages read different versions, else what the owner reads."""
        if self.drains or self._schedule == "2bw":
            return self.of_forward(owner, minibatch)
        seen = self._seen_at_input(minibatch) // self._num_replicas[owner]
        return max(self._oldest(owner, minibatch), seen - self._staleness)

    def _seen_at_input(self, minibatch: int) -> int:
        """Minibatches whose updates the input stage has made when it forwards this one."""
        input_replicas = self._num_replicas[0]
        return max(0, minibatch // input_replicas - self._in_flight[0] + 1) * input_replicas

    def _oldest(self, stage_index: int, minibatch: int) -> int:
        """The version that was there when the pipeline last began, before the minibatch."""
        begun = max((first for first in self.drained_at if first <= minibatch), default=0)
        return begun // self.minibatches_per_round(stage_index)

    @property
    def num_scales_in_flight(self) -> int:
        """How many scales of the loss a backoff waits for before the next one."""
        if self.drains:
            return 1
        return num_steps_in_flight(self._in_flight[0], self._num_replicas[0], self._num_replicas[-1])

    @property
    def minibatches_per_scale(self) -> int:
        """Minibatches in a row that have one scale of the loss."""
        return self.minibatches_per_round(len(self._num_replicas) - 1)

    def overflows_known(self, minibatch: int) -> set[tuple[int, int]]:
        """The (stage, round) whose overflow decides on the scale of the minibatch, the first that has it, and
        has decided on none before.

        The activation of a minibatch tells the last stage of the rounds that each stage has updated since
        the activation before. Replicas of the last stage, where they have one minibatch of a round each, tell
        each other with their update.
        """
        last = len(self._num_replicas) - 1
        if self.drains:
            return {(stage, minibatch // self.minibatches_per_scale - 1) for stage in range(last + 1)}
        if self.minibatches_per_scale == 1:
            return {known for stage in range(last + 1) for known in self._updated_since(stage, minibatch)}
        of_last, per_round = self._updated_since(last, minibatch), self.minibatches_per_scale
        told_with = [i for _, r in of_last for i in range(r * per_round, (r + 1) * per_round)]
        told = (known for i in told_with for stage in range(last) for known in self._updated_since(stage, i))
        return {*of_last, *told}

    def _updated_since(self, stage_index: int, minibatch: int) -> set[tuple[int, int]]:
        """(stage, round) of what the stage has updated when it forwards the minibatch, and had not when the
        same replica forwarded the one before. One round, but for the first after the pipeline had drained."""
        before = minibatch - self._num_replicas[stage_index]
        known = self._newest_updated(stage_index, before) if before >= 0 else -1
        return {(stage_index, i) for i in range(known + 1, self._newest_updated(stage_index, minibatch) + 1)}

    def _newest_updated(self, stage_index: int, minibatch: int) -> int:
        """The newest round that the stage has updated when it forwards the minibatch; -1 is none."""
        replicas = self._num_replicas[stage_index]
        delay = self._in_flight[stage_index]
        if self._schedule == "2bw":
            # in_flight counts microbatches here, and the one before the first of a minibatch is the last of
            # the minibatch before: only where none else is in flight has that one been updated.
            delay = 1 if self._in_flight[stage_index] == 1 else 2
        if replicas > 1:  # where updates wait for half of the staleness
            delay += (self._staleness + 1) // 2
        return max(self._oldest(stage_index, minibatch) - 1, minibatch // replicas - delay)
