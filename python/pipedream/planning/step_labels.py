"""Labels that a picture writes on the instructions of a simulation. Pure; any thread; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipedream.planning.simulator import Simulation, TimedInstruction
from pipedream.planning.step_times import TRANSFERS

if TYPE_CHECKING:
    from pipedream import _core

__all__ = ["MEANINGS", "StepLabels", "computed"]

MEANINGS = {
    "FORWARD": "forward",
    "RECOMPUTE": "recompute",
    "BACKWARD": "backward",
    "UPDATE": "update",
    "EVALUATE": "evaluation",
}
_LETTERS = {"FORWARD": "F", "BACKWARD": "B", "RECOMPUTE": "R", "UPDATE": "U", "EVALUATE": "E"}


class StepLabels:
    """Labels of the instructions of one simulation."""

    def __init__(self, simulation: Simulation, show_versions: bool | None) -> None:
        steps = [timed.instruction for row in simulation.timeline for timed in computed(row)]
        self.opcodes = {step.opcode for step in steps}
        self.has_microbatches = any(step.microbatch > 0 for step in steps)
        if show_versions is None:
            show_versions = any(step.version != step.minibatch for step in steps if step.opcode != "UPDATE")
        self.shows_versions = show_versions

    def name(self, step: _core.Instruction) -> str:
        return self.item_name(step.minibatch, step.microbatch)

    def item_name(self, minibatch: int, microbatch: int) -> str:
        return f"{minibatch}.{microbatch}" if self.has_microbatches else f"{minibatch}"

    def version(self, step: _core.Instruction) -> str:
        return f"v{step.version}" if self.shows_versions else ""

    def text(self, step: _core.Instruction) -> str:
        return f"{_LETTERS[step.opcode]}{self.name(step)}{self.version(step)}"

    def name_legend(self) -> str:
        parts = ["3.1  minibatch 3, microbatch 1"] if self.has_microbatches else ["3  minibatch 3"]
        return ",   ".join([*parts, "v2  reads weight version 2"] if self.shows_versions else parts)

    def text_legend(self) -> str:
        letters = [f"{_LETTERS[o]} {MEANINGS[o]}" for o in MEANINGS if o in self.opcodes and o != "UPDATE"]
        return ",   ".join([*letters, "* update", ". idle", self.name_legend()])


def computed(row: Sequence[TimedInstruction]) -> list[TimedInstruction]:
    """Returns the instructions that keep the worker, not the links."""
    return [timed for timed in row if timed.instruction.opcode not in TRANSFERS]
