"""Programs that no schedule's name gives, and a generator of others."""

from __future__ import annotations

import random
from collections.abc import Iterable

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
    """short: "F0 F1 B0 U0 B1 U1"; versions: those of its steps, "0 0 0 1 0 2"."""
    opcodes = {"F": "FORWARD", "B": "BACKWARD", "U": "UPDATE"}
    pairs = zip(short.split(), versions.split(), strict=True)
    return [(opcodes[name[0]], int(name[1:]), 0, int(version)) for name, version in pairs]


_PAIR = _steps("F0 F1 B0 U0 B1 U1", "0 0 0 1 0 2")
BY_PAIRS = Program(_text([_PAIR, _PAIR, _PAIR], 2))
"""Two forwards, two backwards, an update after each of these."""

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


def drawn_program(seed: int) -> Program:
    """Bodies that drain, in which stages go on in a random order, as far as they can, and read any version of
    the body that is there, or at some stages one version, which is always the newest."""
    draw = random.Random(seed)
    num_stages, minibatches, m = draw.randint(2, 4), draw.randint(1, 4), draw.randint(1, 3)
    total = minibatches * m
    keeps_one = [draw.random() < 0.3 for _ in range(num_stages)]
    steps: list[list[Step]] = [[] for _ in range(num_stages)]
    forwards: list[list[int]] = [[] for _ in range(num_stages)]
    num_backwards = [0] * num_stages
    while min(num_backwards) < total:
        stage = draw.randrange(num_stages)
        updates = num_backwards[stage] // m
        can_forward = len(forwards[stage]) < (total if stage == 0 else len(forwards[stage - 1]))
        arrived = len(forwards[stage]) if stage == num_stages - 1 else num_backwards[stage + 1]
        if can_forward and draw.random() < 0.6:
            number = len(forwards[stage])
            version = updates if keeps_one[stage] else draw.randint(0, updates)
            forwards[stage].append(version)
            steps[stage].append(("FORWARD", number // m, number % m, version))
        elif num_backwards[stage] < arrived:
            number = num_backwards[stage]
            version = updates if keeps_one[stage] else forwards[stage][number]
            steps[stage].append(("BACKWARD", number // m, number % m, version))
            num_backwards[stage] += 1
            if num_backwards[stage] % m == 0:
                steps[stage].append(("UPDATE", number // m, 0, number // m + 1))
    return Program(_text(steps, minibatches))
