"""Which versions a schedule reads, and which minibatches make one. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from pipedream.common.checks import check_choice
from pipedream.model.precision import num_steps_in_flight

__all__ = ["SCHEDULES", "Versions", "WrittenVersions"]

DRAINING = ("flush", "gpipe", "model_parallel", "data_parallel", "interleaved")
SCHEDULES = ("pipedream", "vertical_sync", "unstashed", "naive", "2bw", *DRAINING)


class Versions:
    """The table of design.md, section 4: which version each microbatch reads, and what makes it.

    k is a microbatch counted through the run. It goes to replica k mod r of a stage, as number floor(k / r)
    of that replica's own."""

    def __init__(
        self,
        schedule: str,
        in_flight: Sequence[int],
        num_replicas: Sequence[int],
        staleness: int,
        num_microbatches: int = 1,
        drained_at: Sequence[int] = (),
    ) -> None:
        """drained_at: minibatches before which everything had been updated, beside the first."""
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
        """By how many versions a read may be older than a read before it."""
        return 0

    def stashes(self, stage_index: int) -> bool:
        """Whether each backward reads what its forward has read."""
        return self.schedule != "unstashed"

    def minibatches_per_round(self, stage_index: int) -> int:
        replicas = self._num_replicas if self.drains else self._num_replicas[stage_index : stage_index + 1]
        return math.lcm(self.num_microbatches, *replicas) // self.num_microbatches

    def num_replicas(self, stage_index: int) -> int:
        return self._num_replicas[stage_index]

    def own_per_round(self, stage_index: int) -> int:
        """Microbatches that each replica of the stage has of a round."""
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
        """Of a parameter that several stages use: at each of them the same, forward and backward. It counts
        the rounds of its owner, whose update makes it: what vertical sync would read there, the staleness
        older, where stages read different versions, else what the owner reads."""
        if self.drains or self.schedule == "2bw":
            return self.of_forward(owner, minibatch, microbatch)
        seen = self._seen_at_input(self._number(minibatch, microbatch))
        seen //= self._microbatches_per_round(owner)
        return max(self._oldest(owner, minibatch), seen - self._staleness)

    def mean_delay(self, stage_index: int) -> float:
        """In updates of the stage, from the version that a microbatch's forward reads to the one that its
        gradient changes: in the mean over whole rounds, long after the start."""
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
        """Microbatches in whose updates the input stage has been when it forwards this one."""
        own = k // self._num_replicas[0] - self._in_flight[0] + 1
        return max(0, own // self.own_per_round(0)) * self._microbatches_per_round(0)

    def _oldest(self, stage_index: int, minibatch: int) -> int:
        """The version that was there when the pipeline last began, before the minibatch."""
        begun = max((first for first in self.drained_at if first <= minibatch), default=0)
        return begun // self.minibatches_per_round(stage_index)

    @property
    def num_scales_in_flight(self) -> int:
        """How many scales of the loss a backoff waits for before the next one."""
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
        """Minibatches in a row that have one scale of the loss."""
        return self.minibatches_per_round(len(self._num_replicas) - 1)

    def overflows_known(self, minibatch: int) -> set[tuple[int, int]]:
        """The (stage, round) whose overflow decides on the scale of the minibatch, the first that has it, and
        has decided on none before.

        The activation of a microbatch tells the last stage of the rounds that each stage has updated since
        the activation before. Replicas of the last stage, which have different ones, tell each other with
        their update.
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
        """(stage, round) of what the stage has updated when it forwards microbatch k, and had not when it
        forwarded the one so many before; None: the same replica's one before."""
        before = k - (microbatches or self._num_replicas[stage_index])
        known = self._newest_updated(stage_index, before) if before >= 0 else -1
        return {(stage_index, i) for i in range(known + 1, self._newest_updated(stage_index, k) + 1)}

    def _newest_updated(self, stage_index: int, k: int) -> int:
        """The newest round that the stage has updated when it forwards microbatch k; -1 is none."""
        replicas = self._num_replicas[stage_index]
        own = k // replicas - self._in_flight[stage_index] + 1
        newest = own // self.own_per_round(stage_index) - 1
        if replicas > 1:  # where updates wait for half of the staleness
            newest -= (self._staleness + 1) // 2
        return max(self._oldest(stage_index, k // self.num_microbatches) - 1, newest)


class WrittenVersions(Versions):
    """The versions that a program's text states line by line. Without replicas."""

    _SECTION = re.compile(r"^(?:worker \d+|warm-up|cool-down|body every (\d+) minibatch(?:es)?)$", re.ASCII)
    _READ = re.compile(
        r"^(FORWARD|BACKWARD) stage (\d+) minibatch (\d+) microbatch (\d+) reads version (\d+)$", re.ASCII
    )

    def __init__(self, text: str, num_stages: int, drained_at: Sequence[int] = ()) -> None:
        self._reads: dict[tuple[str, int, int, int], int] = {}
        """Opcode, stage, minibatch and microbatch -> version."""
        self._per_body = 1
        section = ""
        for line in text.splitlines():
            if found := self._SECTION.match(line):
                section = line.split()[0]
                self._per_body = int(found[1] or self._per_body)
            elif (found := self._READ.match(line)) and section != "cool-down":
                opcode, *numbers = found.groups()
                stage, minibatch, microbatch, version = map(int, numbers)
                self._reads[opcode, stage, minibatch, microbatch] = version
        self._num_listed = 1 + max(minibatch for _, _, minibatch, _ in self._reads)
        num_microbatches = 1 + max(microbatch for *_, microbatch in self._reads)
        super().__init__(
            "pipedream", [1] * num_stages, [1] * num_stages, 0, num_microbatches, drained_at=drained_at
        )
        listed = [*itertools.product(range(self._num_listed + self._per_body), range(num_microbatches))]
        self._stashes = [
            all(self.of_forward(stage, *at) == self.of_backward(stage, *at) for at in listed)
            for stage in range(num_stages)
        ]

    def mean_delay(self, stage_index: int) -> float:
        first = self._per_body * self._num_listed
        delays = [
            minibatch - self.of_forward(stage_index, minibatch, microbatch)
            for minibatch in range(first, first + self._per_body)
            for microbatch in range(self.num_microbatches)
        ]
        return sum(delays) / len(delays)

    @property
    def versions_back(self) -> int:
        return max(minibatch - version for (_, _, minibatch, _), version in self._reads.items())

    def stashes(self, stage_index: int) -> bool:
        return self._stashes[stage_index]

    def of_forward(self, stage_index: int, minibatch: int, microbatch: int = 0) -> int:
        return self._of("FORWARD", stage_index, minibatch, microbatch)

    def of_backward(self, stage_index: int, minibatch: int, microbatch: int = 0) -> int:
        return self._of("BACKWARD", stage_index, minibatch, microbatch)

    def _of(self, opcode: str, stage_index: int, minibatch: int, microbatch: int) -> int:
        """The program begins anew where the pipeline has drained."""
        begun = max((first for first in self.drained_at if first <= minibatch), default=0)
        # A body later than those that all stages list by far.
        bodies = max(0, (minibatch - begun - self._num_listed) // self._per_body)
        listed = minibatch - begun - bodies * self._per_body
        while (opcode, stage_index, listed, microbatch) not in self._reads:
            bodies, listed = bodies + 1, listed - self._per_body
        return begun + bodies * self._per_body + self._reads[opcode, stage_index, listed, microbatch]
