"""Instruction lists as text, in which spares have names of their own. Pure; any thread; needs no torch.

The core counts a stage's spares on from its replicas (csrc/schedule/placement.h), and prints them so: of two
replicas "stage 0 replica 2". A person reads "stage 0 spare 0", and may write it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipedream import _core

__all__ = ["parse_programs", "print_programs"]

_REPLICA = re.compile(r"\bstage (\d+) replica (\d+)\b", re.ASCII)
_SPARE = re.compile(r"\bstage (\d+) spare (\d+)\b", re.ASCII)


def print_programs(programs: Sequence[Sequence[_core.Instruction]], placement: _core.Placement) -> str:
    from pipedream import _core

    def named(found: re.Match[str]) -> str:
        stage, owner = int(found[1]), int(found[2])
        spare = owner - placement.num_replicas(stage)
        return found[0] if spare < 0 else f"stage {stage} spare {spare}"

    return _REPLICA.sub(named, _core.print_programs(programs))


def parse_programs(text: str) -> list[list[_core.Instruction]]:
    """Reads the lists in a text that names all replicas of stages with spares. Raises ValueError naming the
    line."""
    from pipedream import _core

    num_replicas: dict[int, int] = {}
    for stage, replica in _REPLICA.findall(text):
        num_replicas[int(stage)] = max(num_replicas.get(int(stage), 1), 1 + int(replica))

    def counted(found: re.Match[str]) -> str:
        stage, spare = int(found[1]), int(found[2])
        return f"stage {stage} replica {num_replicas.get(stage, 1) + spare}"

    return _core.parse_programs(_SPARE.sub(counted, text))
