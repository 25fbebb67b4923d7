"""Computes which weight version each microbatch reads, and which minibatches make a version.

A round is the minibatches of one update of a stage. Round j makes version j + 1 of the stage. A microbatch is
in flight at a replica between its forward and its backward. Pure.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from pipedream.common.checks import check_choice
from pipedream.model.precision import num_steps_in_flight

__all__ = ["SCHEDULES", "Versions", "WrittenVersions"]

DRAINING = ("flush", "gpipe", "model_parallel", "data_parallel", "interleaved")
SCHEDULES = ("pipedream", "vertical_sync", "unstashed", "naive", "2bw", *DRAINING)


class Versions:
    """Computes the table of weight versions in docs/schedules.md.

    In the code k is the number of a microbatch, counted through the run. At a stage with r replicas,
    microbatch k goes to replica k mod r. `own` counts the microbatches of one replica: microbatch k is number
    floor(k / r) there.
    """

    def __init__(
        self,
        schedule: str,
        in_flight: Sequence[int],
        num_replicas: Sequence[int],
        staleness: int,
        num_microbatches: int = 1,
        drained_at: Sequence[int] = (),
    ) -> None:
        """in_flight: the most microbatches in flight at a replica of each stage. drained_at: minibatches
        before which the pipeline had drained, without minibatch 0."""
        check_choice("schedule", schedule, SCHEDULES)
        self.schedule = "unstashed" if schedule == "naive" else schedule
        self._in_flight = in_flight
        self._num_replicas = num_replicas
        self._staleness = staleness
        self.num_microbatches = num_microbatches
        self.drained_at = drained_at

    @property
    def drains(self) -> bool:
        return self.schedule in DRAINING

    @property
    def versions_back(self) -> int:
        """How far the forwards may go back. With 1, version 4 can still be read after version 5 has been
        read."""
        return 0

    def stashes(self, stage_index: int) -> bool:
        """Whether each backward reads the version that its forward read."""
        return self.schedule != "unstashed"

    def minibatches_per_round(self, stage_index: int) -> int:
        replicas = self._num_replicas if self.drains else self._num_replicas[stage_index : stage_index + 1]
        return math.lcm(self.num_microbatches, *replicas) // self.num_microbatches

    def num_replicas(self, stage_index: int) -> int:
        return self._num_replicas[stage_index]

    def own_per_round(self, stage_index: int) -> int:
        """Returns the number of microbatches that each replica of the stage has in a round."""
        return self._microbatches_per_round(stage_index) // self._num_replicas[stage_index]

    def replica_of(self, stage_index: int, minibatch: int, microbatch: int) -> int:
        return self._number(minibatch, microbatch) % self._num_replicas[stage_index]

    def of_forward(self, stage_index: int, minibatch: int, microbatch: int = 0) -> int:
        rounds = minibatch // self.minibatches_per_round(stage_index)
        if self.drains:
            return rounds
        oldest = self._oldest(stage_index, minibatch)
        if self.schedule == "2bw":
            return max(oldest, rounds - 1)
        k = self._number(minibatch, microbatch)
        if self.schedule == "vertical_sync":
            return max(oldest, self._seen_at_input(k) // self._microbatches_per_round(stage_index))
        own = k // self._num_replicas[stage_index] - self._in_flight[stage_index] + 1
        return max(oldest, own // self.own_per_round(stage_index) - self._staleness)

    def of_backward(self, stage_index: int, minibatch: int, microbatch: int = 0) -> int:
        if self.schedule == "unstashed":
            return minibatch // self.minibatches_per_round(stage_index)
        return self.of_forward(stage_index, minibatch, microbatch)

    def of_tied(self, owner: int, minibatch: int, microbatch: int = 0) -> int:
        """Returns the version of tied parameters, which the owner shares with other stages. All these stages
        read the same version, in forward and backward. The version counts the owner's rounds.

        If the schedule drains or is 2bw, it is the version that the owner reads. Otherwise it is the version
        that vertical sync would read at the owner, minus the staleness.
        """
        if self.drains or self.schedule == "2bw":
            return self.of_forward(owner, minibatch, microbatch)
        seen = self._seen_at_input(self._number(minibatch, microbatch))
        seen //= self._microbatches_per_round(owner)
        return max(self._oldest(owner, minibatch), seen - self._staleness)

    def mean_delay(self, stage_index: int) -> float:
        """Returns the stage's mean delay in updates. The delay of a microbatch is the number of updates
        between the version that its forward reads and the version that its gradient updates. The mean is over
        a period in which the rounds of all stages end together, long after the start.
        """
        per_round = [self.minibatches_per_round(index) for index in range(len(self._num_replicas))]
        period = math.lcm(*per_round)
        first = period * (2 + max(self._in_flight) * max(self._num_replicas) + self._staleness)
        m, of_stage = self.num_microbatches, per_round[stage_index]
        delays = [
            minibatch // of_stage - self.of_forward(stage_index, minibatch, microbatch)
            for minibatch in range(first, first + period)
            for microbatch in range(m)
        ]
        return sum(delays) / len(delays)

    def _number(self, minibatch: int, microbatch: int) -> int:
        return minibatch * self.num_microbatches + microbatch

    def _microbatches_per_round(self, stage_index: int) -> int:
        return self.minibatches_per_round(stage_index) * self.num_microbatches

    def _seen_at_input(self, k: int) -> int:
        """Returns the number of microbatches whose gradients are in the input stage's weights when it
        forwards microbatch k."""
        own = k // self._num_replicas[0] - self._in_flight[0] + 1
        return max(0, own // self.own_per_round(0)) * self._microbatches_per_round(0)

    def _oldest(self, stage_index: int, minibatch: int) -> int:
        """Returns the stage's version at the last drain before the minibatch. The minibatch reads no older
        version."""
        begun = max((first for first in self.drained_at if first <= minibatch), default=0)
        return begun // self.minibatches_per_round(stage_index)

    @property
    def num_scales_in_flight(self) -> int:
        """The number of loss scales that must pass after a backoff (a lower scale) before the next
        backoff."""
        if self.drains:
            return 1
        last = len(self._num_replicas) - 1
        return num_steps_in_flight(
            self._in_flight[0],
            self._num_replicas[0],
            self._num_replicas[last],
            self._microbatches_per_round(last),
        )

    @property
    def minibatches_per_scale(self) -> int:
        """The number of consecutive minibatches that have the same loss scale."""
        return self.minibatches_per_round(len(self._num_replicas) - 1)

    def overflows_known(self, minibatch: int) -> set[tuple[int, int]]:
        """Returns the updates whose overflows count for the loss scale that begins with this minibatch. An
        update is a pair (stage, round), and counts for one scale only.

        If the schedule drains, the updates of the previous round count. Otherwise each activation that
        reaches the last stage reports the updates that earlier stages have made since the previous
        activation. Replicas of the last stage receive different activations, so they exchange these reports
        with their updates.
        """
        last = len(self._num_replicas) - 1
        if self.drains:
            return {(stage, minibatch // self.minibatches_per_scale - 1) for stage in range(last + 1)}
        per_scale = self._microbatches_per_round(last)
        k = self._number(minibatch, 0)
        if self._num_replicas[last] == 1:
            forwarded = range(max(0, k - per_scale + 1), k + 1)
            stages = range(last + 1)
            return {known for i in forwarded for stage in stages for known in self._updated_since(stage, i)}
        of_last = self._updated_since(last, k, microbatches=per_scale)
        told_with = [i for _, r in of_last for i in range(r * per_scale, (r + 1) * per_scale)]
        told = (known for i in told_with for stage in range(last) for known in self._updated_since(stage, i))
        return {*of_last, *told}

    def _updated_since(
        self, stage_index: int, k: int, *, microbatches: int | None = None
    ) -> set[tuple[int, int]]:
        """Returns (stage, round) of each update that the stage makes between two forwards: that of microbatch
        k - `microbatches` and that of microbatch k. None takes the previous microbatch of the same replica.
        """
        before = k - (microbatches or self._num_replicas[stage_index])
        known = self._newest_updated(stage_index, before) if before >= 0 else -1
        return {(stage_index, i) for i in range(known + 1, self._newest_updated(stage_index, k) + 1)}

    def _newest_updated(self, stage_index: int, k: int) -> int:
        """Returns the newest round whose update the stage has made when it forwards microbatch k; -1 before
        the first update.
        """
        replicas = self._num_replicas[stage_index]
        own = k // replicas - self._in_flight[stage_index] + 1
        newest = own // self.own_per_round(stage_index) - 1
        if replicas > 1:  # an update of replicas comes ceil(staleness / 2) rounds later (schedule/program.h)
            newest -= (self._staleness + 1) // 2
        return max(self._oldest(stage_index, k // self.num_microbatches) - 1, newest)


class _Step(NamedTuple):
    """A line of a program's text."""

    is_in_body: bool
    opcode: str
    stage: int
    minibatch: int
    microbatch: int
    version: int


class WrittenVersions(Versions):
    """The versions that a user's own program reads, taken from the lines of its text."""

    _SECTION = re.compile(r"^(?:worker \d+|warm-up|cool-down|body every (\d+) minibatch(?:es)?)$", re.ASCII)
    _STEP = re.compile(
        r"^(\w+) stage (\d+) (?:replica \d+ )?minibatch (\d+)(?: microbatch (\d+))?"
        r" (?:reads|writes) version (\d+)$",
        re.ASCII,
    )

    def __init__(self, text: str, num_replicas: Sequence[int], drained_at: Sequence[int] = ()) -> None:
        self._stated: dict[tuple[str, int, int, int], int] = {}
        """(opcode, stage, minibatch, microbatch) -> the version in the program's line. An additional opcode,
        "UPDATED", has the number of updates that the worker makes at the stage before this forward.
        """
        self._per_body = 1
        workers = self._workers_of(text)
        steps = [step for worker in workers for step in worker]
        super().__init__(
            "pipedream",
            [1] * len(num_replicas),
            num_replicas,
            0,
            1 + max(step.microbatch for step in steps),
            drained_at=drained_at,
        )
        self._num_listed = 1 + max(step.minibatch for step in steps)
        updates = [
            sum(step.opcode == "UPDATE" and step.stage == stage and step.is_in_body for step in steps)
            for stage in range(len(num_replicas))
        ]
        self._rounds = [
            self._per_body * replicas // count for replicas, count in zip(num_replicas, updates, strict=True)
        ]
        self._in_flight = [max(map(self._walk, workers))] * len(num_replicas)
        self._drains = len({*self._rounds}) == 1 and all(map(self._is_drained, workers))
        listed = [*itertools.product(range(self._num_listed + self._per_body), range(self.num_microbatches))]
        self._stashes = [
            all(self.of_forward(stage, *at) == self.of_backward(stage, *at) for at in listed)
            for stage in range(len(num_replicas))
        ]

    def _workers_of(self, text: str) -> list[list[_Step]]:
        workers: list[list[_Step]] = []
        section = ""
        for line in (line.partition("#")[0].strip() for line in text.splitlines()):
            if found := self._SECTION.match(line):
                section = line.split()[0]
                self._per_body = int(found[1] or self._per_body)
                if section == "worker":
                    workers.append([])
            elif (found := self._STEP.match(line)) and section != "cool-down":
                opcode, *numbers = found.groups(default="0")
                workers[-1].append(_Step(section == "body", opcode, *map(int, numbers)))
        return workers

    def _walk(self, steps: Sequence[_Step]) -> int:
        """Notes the versions in a worker's lines. Returns the most microbatches that the worker has in flight
        at stage 0; returns 0 for a worker without stage 0.
        """
        updated: dict[int, int] = {}
        in_flight = in_flight_max = 0
        for _, opcode, stage, minibatch, microbatch, version in steps:
            if opcode == "UPDATE":
                updated[stage] = version
                continue
            self._stated[opcode, stage, minibatch, microbatch] = version
            if opcode == "FORWARD":
                self._stated["UPDATED", stage, minibatch, microbatch] = updated.get(stage, 0)
            in_flight += (stage == 0) * (1 if opcode == "FORWARD" else -1)
            in_flight_max = max(in_flight_max, in_flight)
        return in_flight_max

    def _is_drained(self, steps: Sequence[_Step]) -> bool:
        """Whether each round ends at all stages of the worker before the next round begins. The backwards of
        a round must come before its updates. The updates must come in the order of the stages.
        """
        newest = dict.fromkeys(sorted({step.stage for step in steps}), 0)
        num_backwards = 0
        per_round = self._rounds[0] * self.num_microbatches * len(newest)
        for step in steps:
            in_round = step.minibatch // self._rounds[0]
            if step.opcode == "FORWARD" and not (newest[step.stage] == in_round == step.version):
                return False
            num_backwards += step.opcode == "BACKWARD"
            if step.opcode == "UPDATE":
                replicas = self._num_replicas[step.stage]
                is_whole = num_backwards * replicas >= step.version * per_round
                before = [updated for stage, updated in newest.items() if stage < step.stage]
                if not is_whole or step.version > min(before, default=step.version):
                    return False
                newest[step.stage] = step.version
        return True

    @property
    def drains(self) -> bool:
        return self._drains

    def minibatches_per_round(self, stage_index: int) -> int:
        return self._rounds[stage_index]

    def mean_delay(self, stage_index: int) -> float:
        first = self._per_body * self._num_listed
        delays = [
            minibatch // self._rounds[stage_index] - self.of_forward(stage_index, minibatch, microbatch)
            for minibatch in range(first, first + self._per_body)
            for microbatch in range(self.num_microbatches)
        ]
        return sum(delays) / len(delays)

    @property
    def versions_back(self) -> int:
        return 1 + max(
            minibatch - version * self._rounds[stage]
            for (_, stage, minibatch, _), version in self._stated.items()
        )

    def stashes(self, stage_index: int) -> bool:
        return self._stashes[stage_index]

    def of_forward(self, stage_index: int, minibatch: int, microbatch: int = 0) -> int:
        return self._of("FORWARD", stage_index, minibatch, microbatch)

    def of_backward(self, stage_index: int, minibatch: int, microbatch: int = 0) -> int:
        return self._of("BACKWARD", stage_index, minibatch, microbatch)

    def of_tied(self, owner: int, minibatch: int, microbatch: int = 0) -> int:
        """Returns the lower one of two versions. One is the version that the owner's forward read. The other
        is the version that the input stage's forward read, counted in the owner's rounds.
        """
        seen = self.of_forward(0, minibatch, microbatch) * self._rounds[0] // self._rounds[owner]
        return min(seen, self.of_forward(owner, minibatch, microbatch))

    def _newest_updated(self, stage_index: int, k: int) -> int:
        return self._of("UPDATED", stage_index, *divmod(k, self.num_microbatches)) - 1

    def _of(self, opcode: str, stage_index: int, minibatch: int, microbatch: int) -> int:
        """Returns the version that the program's text states. After a drain the program starts again from its
        beginning.
        """
        begun = max((first for first in self.drained_at if first <= minibatch), default=0)
        # `bodies` is the number of repeated bodies before the minibatch. This first value may be too low, and
        # the loop raises it until the text has the line.
        bodies = max(0, (minibatch - begun - self._num_listed) // self._per_body)
        listed = minibatch - begun - bodies * self._per_body
        while (opcode, stage_index, listed, microbatch) not in self._stated:
            bodies, listed = bodies + 1, listed - self._per_body
        stated = self._stated[opcode, stage_index, listed, microbatch]
        return (begun + bodies * self._per_body) // self._rounds[stage_index] + stated
