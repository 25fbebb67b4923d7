"""Program is a schedule as a value that a user can write, change and run. rules_of() gives the rules of a
named schedule (its row in csrc/schedule/schedule_rules.cc). Pure except for files; any thread; needs no
torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipedream.common.errors import FileFormatError

if TYPE_CHECKING:
    from pipedream import _core

__all__ = ["PROGRAM", "Program", "rules_of", "schedule_name"]

PROGRAM = "program"
"""The schedule's name in a run that executes a Program."""


class Program:
    """A schedule as a value. It lists each worker's FORWARDs, BACKWARDs and UPDATEs, with the weight versions
    that they read or write. run(schedule=program) runs it. reference.run(schedule=program) computes the same
    training in one process, for comparison.

        program = pipedream.Program.of("pipedream", num_stages=2, microbatches=4)
        program.save("mine.txt")      # change the file by hand
        pipedream.run(model, plan, schedule=pipedream.Program.load("mine.txt"), ...)

    The text has one instruction per line. Each worker has two lists:

        worker 0
        warm-up                       # once; may be left out
        FORWARD stage 0 minibatch 0 microbatch 0 reads version 0
        ...
        body every 1 minibatch        # repeated, each time with minibatches and versions larger by 1
        FORWARD stage 0 minibatch 2 microbatch 0 reads version 1
        BACKWARD stage 0 minibatch 1 microbatch 0 reads version 0
        UPDATE stage 0 minibatch 1 writes version 2

    Version v is the state after v updates. There is one update per minibatch, or one per round if a stage has
    replicas. Every replica has its own worker. If no stage has replicas, stages may share W workers: stage s
    runs at worker s mod W. The runtime adds sends, receives and recomputing.

    The forwards of a stage are in the order of their microbatches, and so are its backwards. A forward may
    read any version that has been written by then. The stage keeps every version until its last read. A
    backward reads the version that its forward read. At a stage that keeps one version, a backward reads the
    newest.
    """

    def __init__(self, text: str) -> None:
        """Raises ValueError, with a message of one line, if the text is no program or if the program cannot
        run. If one line of the text is wrong, the message names it. For a deadlock it names all instructions
        that wait. Raises TypeError for a value that is no text.
        """
        from pipedream import _core

        if not isinstance(text, str):
            raise TypeError(
                f"text is a {type(text).__name__}: give a program's text, or use Program.load(file)"
            )
        self._listed = _core.ListedProgram(text)

    @classmethod
    def of(
        cls,
        schedule: str,
        num_stages: int | None = None,
        *,
        microbatches: int = 1,
        in_flight: Sequence[int] | None = None,
        replicas: Sequence[int] | None = None,
        workers: int | None = None,
    ) -> Program:
        """Returns the program of a named schedule. Raises ValueError for arguments that the schedule does not
        allow.

        in_flight: microbatches in flight at each replica of each stage. None: a plan's default, which is
            num_stages, ..., 2, 1 without replicas.
        replicas: number of replicas of each stage. None: one each.
        workers: number of workers, if fewer than stages, for "interleaved".
        """
        from pipedream import _core

        lengths = {
            name: length
            for name, length in (
                ("num_stages", num_stages),
                ("in_flight", None if in_flight is None else len(in_flight)),
                ("replicas", None if replicas is None else len(replicas)),
            )
            if length is not None
        }
        if len({*lengths.values()}) != 1 or min(lengths.values()) < 1:
            said = ", ".join(f"{name} says {length}" for name, length in lengths.items()) or "nothing says it"
            raise ValueError(f"the number of stages is not clear, {said}: give num_stages, 1 or more")
        count = lengths.popitem()[1]
        replicas = [1] * count if replicas is None else list(replicas)
        if in_flight is None:
            in_flight = _core.derive_in_flight(replicas)
        if workers is None:
            placement = _core.Placement.in_order(replicas)
        elif workers < 1 or max(replicas) > 1:
            raise ValueError(f"workers is {workers}: give at least 1, and leave it out with replicas")
        else:
            placement = _core.Placement.at_ranks([stage % workers for stage in range(count)])
        options = _core.ScheduleOptions(schedule, list(in_flight), microbatches, placement)
        made = cls.__new__(cls)
        made._listed = _core.ListedProgram.of(options)
        return made

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Program:
        """Reads a program. Raises FileFormatError naming the file and the line, and OSError if it cannot be
        read.
        """
        try:
            return cls(Path(path).read_text(encoding="utf-8-sig"))
        except ValueError as error:
            raise FileFormatError(f"{os.fspath(path)}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(str(self), encoding="utf-8")

    @property
    def num_stages(self) -> int:
        return self._listed.num_stages

    @property
    def replicas(self) -> list[int]:
        """Replicas of each stage."""
        placement = self._listed.placement
        return [placement.num_replicas(stage) for stage in range(self.num_stages)]

    @property
    def num_workers(self) -> int:
        return self._listed.placement.num_ranks

    @property
    def microbatches(self) -> int:
        """The number of microbatches of every minibatch."""
        return self._listed.num_microbatches

    @property
    def in_flight(self) -> list[int]:
        """For each stage, the largest number of microbatches in flight at one replica: forward begun,
        backward not finished.
        """
        return self._listed.in_flight

    @property
    def versions_kept(self) -> list[int]:
        """For each stage, the number of weight versions that it holds at once."""
        return self._listed.versions_kept

    @property
    def listed(self) -> _core.ListedProgram:
        return self._listed

    def __str__(self) -> str:
        return self._listed.text

    def __repr__(self) -> str:
        stages = "-".join(map(str, self.replicas))
        return f"<Program of stages {stages} on {self.num_workers} workers, microbatches={self.microbatches}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[type[Program], tuple[str]]:
        return Program, (str(self),)


def rules_of(schedule: str) -> _core.ScheduleRules:
    """Returns the rules of a named schedule. Raises ValueError for an unknown name."""
    from pipedream import _core

    rules = _core.find_schedule_rules(schedule)
    if rules is None:
        raise ValueError(f"schedule is {schedule!r}: it is one of {', '.join(_core.schedule_names())}")
    return rules


def schedule_name(name: str) -> str:
    """Returns the present name of a schedule that was renamed, and any other name unchanged."""
    from pipedream import _core

    rules = _core.find_schedule_rules(name)
    return name if rules is None else rules.name
