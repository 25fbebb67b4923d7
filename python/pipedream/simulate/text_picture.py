"""A simulated schedule in ASCII: a row per worker and per link, time to the right. Pure; any thread; needs no
torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipedream.planning.simulator import Simulation, TimedInstruction
from pipedream.simulate.step_labels import StepLabels, computed, name_replicas, name_rows

__all__ = ["draw_text"]

_COLUMNS_MAX = 2_000

_LINK_LEGEND = ",   a activation,   g gradient, on their way"
_SYNC_LEGEND = ",   p push or pull"


def draw_text(
    simulation: Simulation, title: str, subtitle: str = "", *, show_versions: bool | None = None
) -> str:
    """The picture in ASCII, at most 2,000 columns wide; lines end in a newline."""
    labels = StepLabels(simulation, show_versions)
    columns_per_ms = _scale(simulation, labels)
    num_columns = round(simulation.makespan_ms * columns_per_ms) + 1
    has_replicas = any(name_replicas(simulation))
    names = name_rows(simulation) if has_replicas else [f"worker {w}" for w in range(simulation.num_workers)]
    rows = {
        name: _row(row, labels, columns_per_ms, num_columns)
        for name, row in zip(names, simulation.timeline, strict=True)
    }
    links = _links(simulation, labels, columns_per_ms, num_columns)
    rows |= links
    width = max(map(len, rows), default=0)
    lines = [title, *([subtitle] if subtitle else []), ""]
    lines += [f"{name:{width}}  {row}" for name, row in rows.items()]
    legend = labels.text_legend()
    if links:
        legend += (_SYNC_LEGEND if has_replicas else "") + _LINK_LEGEND
    return "\n".join([*lines, "", legend, ""])


def _scale(simulation: Simulation, labels: StepLabels) -> float:
    """Columns per millisecond at which every label and the bar before it fit, if the width allows it."""
    wanted = [
        (len(labels.text(timed.instruction)) + 1) / (timed.end_ms - timed.begin_ms)
        for row in simulation.timeline
        for timed in row
        if timed.end_ms > timed.begin_ms and timed.instruction.opcode != "UPDATE"
    ]
    if not simulation.makespan_ms:
        return 1.0
    return min(max(wanted, default=1.0), _COLUMNS_MAX / simulation.makespan_ms)


def _row(row: Sequence[TimedInstruction], labels: StepLabels, columns_per_ms: float, num_columns: int) -> str:
    cells = ["."] * num_columns
    for instruction, begin_ms, end_ms in computed(row):
        first, last = round(begin_ms * columns_per_ms), round(end_ms * columns_per_ms)
        cells[last] = "|"
        if instruction.opcode == "UPDATE":
            cells[first : last + 1] = "*" * (last + 1 - first)
            continue
        room = last - first - 1
        if room >= 0:
            cells[first] = "*" if cells[first] == "*" else "|"
            cells[first + 1 : last] = labels.text(instruction)[:room].ljust(room)
    return "".join(cells)


def _links(
    simulation: Simulation, labels: StepLabels, columns_per_ms: float, num_columns: int
) -> dict[str, str]:
    """A row per link that something takes time on: "a3" the activation of minibatch 3, "g" a gradient."""
    rows: dict[str, list[str]] = {}
    for transfer in simulation.transfers:
        first, last = round(transfer.begin_ms * columns_per_ms), round(transfer.end_ms * columns_per_ms)
        if first == last:
            continue
        cells = rows.setdefault(f"{transfer.from_worker} to {transfer.to_worker}", ["."] * num_columns)
        text = f"{transfer.what[0]}{labels.item_name(transfer.minibatch, transfer.microbatch)}"
        cells[first:last] = ("|" + text)[: last - first].ljust(last - first)
        cells[last] = "|"
    return {name: "".join(rows[name]) for name in sorted(rows)}
