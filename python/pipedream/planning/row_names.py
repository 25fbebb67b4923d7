"""Names of the rows of a simulated schedule's picture. Pure; any thread; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from pipedream.planning.simulator import Simulation, TimedInstruction

__all__ = ["name_replicas", "name_rows"]


def name_rows(simulation: Simulation) -> list[str]:
    """ "stage 1", "stage 1 replica 2"; with the worker where it has several or is not the one that it should
    be without replicas."""
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
    """Per worker " replica 1", or " spare 0", where its stage has several, else nothing."""
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
    """Who is pushed to and pulls nothing."""
    received = {step.edge.kind for step, _, _ in row if step.opcode == "RECV" and step.edge is not None}
    return "push" in received and "pull" not in received
