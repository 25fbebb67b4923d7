"""Makes the names of rows and the labels of instructions for pictures of a simulated schedule. Pure; any
thread; needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipedream.planning.simulator import Simulation, TimedInstruction

if TYPE_CHECKING:
    from pipedream import _core

__all__ = ["StepLabels", "computed", "name_replicas", "name_rows"]


class StepLabels:
    """Labels of the instructions of one simulation."""

    def __init__(self, simulation: Simulation, show_versions: bool | None) -> None:
        from pipedream import _core

        steps = [timed.instruction for row in simulation.timeline for timed in computed(row)]
        names = {step.opcode for step in steps}
        self.opcodes = [traits for name, traits in _core.OPCODES.items() if name in names]
        self.has_microbatches = any(step.microbatch > 0 for step in steps)
        if show_versions is None:
            show_versions = any(step.version != step.minibatch for step in steps if not is_mark(step))
        self.shows_versions = show_versions

    def name(self, step: _core.Instruction) -> str:
        return self.item_name(step.minibatch, step.microbatch)

    def item_name(self, minibatch: int, microbatch: int) -> str:
        return f"{minibatch}.{microbatch}" if self.has_microbatches else f"{minibatch}"

    def version(self, step: _core.Instruction) -> str:
        return f"v{step.version}" if self.shows_versions else ""

    def text(self, step: _core.Instruction) -> str:
        return f"{step.traits.letter}{self.name(step)}{self.version(step)}"

    def name_legend(self) -> str:
        parts = ["3.1  minibatch 3, microbatch 1"] if self.has_microbatches else ["3  minibatch 3"]
        return ",   ".join([*parts, "v2  reads weight version 2"] if self.shows_versions else parts)

    def text_legend(self) -> str:
        letters = [f"{one.letter} {one.meaning}" for one in self.opcodes if not one.writes_version]
        return ",   ".join([*letters, "* update", ". idle", self.name_legend()])


def computed(row: Sequence[TimedInstruction]) -> list[TimedInstruction]:
    """Returns the instructions that a worker computes, without transfers."""
    return [timed for timed in row if timed.instruction.edge is None]


def is_mark(step: _core.Instruction) -> bool:
    """Whether the instruction is drawn as a mark without a label, as updates are."""
    return step.traits.writes_version


def name_rows(simulation: Simulation) -> list[str]:
    """Returns a name for each worker, such as "stage 1" or "stage 1 replica 2". It begins with the worker's
    number if the worker has several stages, or if nothing is replicated and this number differs from the
    stage's.
    """
    replicas = name_replicas(simulation)
    names = []
    for worker, row in enumerate(simulation.timeline):
        stages = sorted({timed.instruction.stage for timed in row})
        if stages == [worker] or (len(stages) == 1 and any(replicas)):
            names.append(f"stage {stages[0]}{replicas[worker]}")
        else:
            plural = "stage" if len(stages) == 1 else "stages"
            names.append(f"worker {worker}: {plural} {', '.join(map(str, stages))}")
    return names


def name_replicas(simulation: Simulation) -> list[str]:
    """Returns a suffix for the name of each worker: " replica 1" or " spare 0" if its stage has several
    workers, or else an empty text.
    """
    rows = [row[0].instruction if row else None for row in simulation.timeline]
    replicated = {step.stage for step in rows if step is not None and step.replica > 0}
    num_replicas = {
        stage: sum(
            step is not None and step.stage == stage and not _is_spare(row)
            for step, row in zip(rows, simulation.timeline, strict=True)
        )
        for stage in replicated
    }
    names = []
    for step, row in zip(rows, simulation.timeline, strict=True):
        if step is None or step.stage not in replicated:
            names.append("")
        elif _is_spare(row):
            names.append(f" spare {step.replica - num_replicas[step.stage]}")
        else:
            names.append(f" replica {step.replica}")
    return names


def _is_spare(row: Sequence[TimedInstruction]) -> bool:
    """Whether the worker is a spare: it receives pushes and pulls nothing."""
    received = {step.edge.kind for step, _, _ in row if step.opcode == "RECV" and step.edge is not None}
    return "push" in received and "pull" not in received
