"""Programs that no named schedule gives, and a function that draws random programs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence

from pipedream import Program

__all__ = ["BY_PAIRS", "DRAINS_AFTER_THREE", "drawn_program"]

Step = tuple[str, int, int, int]
"""Opcode, minibatch, microbatch, version."""


def _text(workers: Iterable[list[Step]], minibatches_per_body: int) -> str:
    lines = []
    for stage, steps in enumerate(workers):
        lines += [f"worker {stage}", f"body every {minibatches_per_body} minibatches"]
        for opcode, minibatch, microbatch, version in steps:
            how = "writes" if opcode == "UPDATE" else f"microbatch {microbatch} reads"
            lines.append(f"{opcode} stage {stage} minibatch {minibatch} {how} version {version}")
    return "\n".join(lines)


def _steps(short: str, versions: str) -> list[Step]:
    """Returns steps. `short` is such as "F0 B0 U0": the forward, the backward and the update of minibatch 0.
    `versions` names the version of each step, such as "0 0 0 1 0 2".
    """
    opcodes = {"F": "FORWARD", "B": "BACKWARD", "U": "UPDATE"}
    pairs = zip(short.split(), versions.split(), strict=True)
    return [(opcodes[name[0]], int(name[1:]), 0, int(version)) for name, version in pairs]


_PAIR = _steps("F0 F1 B0 U0 B1 U1", "0 0 0 1 0 2")
BY_PAIRS = Program(_text([_PAIR, _PAIR, _PAIR], 2))
"""Each body has two forwards, and then two backwards, each followed by its update."""

DRAINS_AFTER_THREE = Program(
    _text(
        [
            _steps("F0 F1 F2 B0 U0 B1 U1 B2 U2", "0 0 0 0 1 0 2 0 3"),
            _steps("F0 F1 B0 U0 F2 B1 U1 B2 U2", "0 0 0 1 1 0 2 1 3"),
            _steps("F0 B0 U0 F1 B1 U1 F2 B2 U2", "0 0 1 1 1 2 2 2 3"),
        ],
        3,
    )
)
"""1F1B that drains after every third minibatch."""


def drawn_program(seed: int, replicas: Sequence[int] = (), workers: int | None = None) -> Program:
    """Draws a program. A program repeats its body, the steps of some minibatches. Here the stages finish all
    minibatches of the body before its next repetition begins.

    Each step is done by a random stage that can go on. A forward reads any version of its body that exists by
    then. Some stages without replicas keep only the newest version. `replicas` has the number of replicas of
    each stage; () draws a number of stages without replicas. `workers` is the number of workers that share
    the stages; None gives each replica a worker.
    """
    draw = random.Random(seed)
    replicas = replicas or [1] * draw.randint(2, 4)
    m = draw.randint(1, 3)
    of_all = math.lcm(m, *replicas) // m
    minibatches = of_all * draw.randint(1, 4 if max(replicas) == 1 else 2)
    stages = [
        _Drawn(stage, count, m, draw.choice([of_all, math.lcm(m, count) // m]), minibatches)
        for stage, count in enumerate(replicas)
    ]
    for stage in stages:
        stage.keeps_one = stage.num_replicas == 1 and draw.random() < 0.3
    rank = itertools.count()
    rank_of = {
        (stage.index, replica): next(rank) if workers is None else stage.index % workers
        for stage in stages
        for replica in range(stage.num_replicas)
    }
    lists: list[list[str]] = [[] for _ in {*rank_of.values()}]
    while not all(stage.is_over for stage in stages):
        index, replica = draw.choice(list(rank_of))
        upstream = None if index == 0 else stages[index - 1]
        downstream = None if index == len(stages) - 1 else stages[index + 1]
        lists[rank_of[index, replica]] += stages[index].go_on(draw, replica, upstream, downstream)
    lines = [
        [f"worker {worker}", f"body every {minibatches} minibatches", *steps]
        for worker, steps in enumerate(lists)
    ]
    return Program("\n".join(itertools.chain(*lines)))


class _Drawn:
    """A stage of a program that is being drawn. Microbatches are numbered from the beginning of the body."""

    def __init__(self, index: int, num_replicas: int, m: int, per_round: int, minibatches: int) -> None:
        self.index = index
        self.num_replicas = num_replicas
        self.keeps_one = False
        self.read: dict[int, int] = {}
        """For each microbatch, the version that its forward has read."""
        self.done: set[int] = set()
        """Microbatches whose backward is done."""
        self._m = m
        self._per_round = per_round
        self._total = minibatches * m
        self._updates = [0] * num_replicas

    @property
    def is_over(self) -> bool:
        return min(self._updates) * self._per_round * self._m == self._total

    def go_on(
        self, draw: random.Random, replica: int, upstream: _Drawn | None, downstream: _Drawn | None
    ) -> list[str]:
        """Returns a list with the replica's next line, or [] if the replica does nothing this time."""
        own = range(replica, self._total, self.num_replicas)
        updated, of_round = self._updates[replica], self._per_round * self._m
        forward = next((k for k in own if k not in self.read), None)
        backward = next((k for k in own if k not in self.done), None)
        round_is_over = backward is None or backward >= (updated + 1) * of_round
        if not self.is_over and round_is_over and updated * of_round < self._total:
            if not all(k in self.done for k in range(updated * of_round, (updated + 1) * of_round)):
                return []
            if draw.random() < 0.5:
                self._updates[replica] += 1
                return [self._line("UPDATE", replica, updated * of_round, updated + 1)]
        newest = min(self._updates)
        if forward is not None and (upstream is None or forward in upstream.read) and draw.random() < 0.6:
            self.read[forward] = newest if self.keeps_one else draw.randint(0, newest)
            return [self._line("FORWARD", replica, forward, self.read[forward])]
        is_there = backward in self.read and (downstream is None or backward in downstream.done)
        if backward is None or round_is_over or not is_there:
            return []
        self.done.add(backward)
        return [self._line("BACKWARD", replica, backward, newest if self.keeps_one else self.read[backward])]

    def _line(self, opcode: str, replica: int, number: int, version: int) -> str:
        minibatch, microbatch = divmod(number, self._m)
        how = "writes" if opcode == "UPDATE" else f"microbatch {microbatch} reads"
        where = f"stage {self.index}" + (f" replica {replica}" if replica else "")
        return f"{opcode} {where} minibatch {minibatch} {how} version {version}"
