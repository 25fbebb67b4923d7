"""Makes pictures of a simulated schedule in the form of the papers: one row per worker, time to the right.

Pure except for the file; one thread; needs no torch. Only .svg, .png and .pdf need matplotlib.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipedream.common.figure_file import FIGURE_SUFFIXES, import_figure, save_figure
from pipedream.planning.simulator import Simulation, TimedInstruction
from pipedream.simulate.schedule_drawing import PhaseSpan, ScheduleDrawing
from pipedream.simulate.step_labels import StepLabels, computed, is_mark, name_replicas, name_rows
from pipedream.simulate.trace import Counter, Span, write_trace

__all__ = ["check_picture_path", "draw_text", "is_drawn", "make_spans", "write_picture"]

_TRACE_SUFFIXES = (".json", ".json.gz")
_TEXT_SUFFIX = ".txt"
_OTHERWISE = ", or name a .txt or .json file"

# With more boxes a figure is unreadable, and drawing it takes minutes. A text or a trace may have any number.
_DRAWN_BOXES_MAX = 20_000


def check_picture_path(path: str | os.PathLike[str]) -> None:
    """Raises ValueError for a name with an unknown ending, and for a missing matplotlib if the ending needs
    it.
    """
    name = os.fspath(path)
    known = (*FIGURE_SUFFIXES, _TEXT_SUFFIX, *_TRACE_SUFFIXES)
    if not name.endswith(known):
        raise ValueError(f"picture file is {name!r}: its name must end in one of {', '.join(known)}")
    if name.endswith(FIGURE_SUFFIXES):
        import_figure(name, _OTHERWISE)


def is_drawn(path: str | os.PathLike[str]) -> bool:
    """Whether the file's ending is that of a drawn picture, in which only a few minibatches can be read. A
    trace may have any number of minibatches.
    """
    return not os.fspath(path).endswith(_TRACE_SUFFIXES)


def write_picture(
    path: str | os.PathLike[str],
    simulation: Simulation,
    title: str,
    subtitle: str = "",
    *,
    phases: Sequence[PhaseSpan] = (),
    time_unit: str = "ms",
    show_versions: bool | None = None,
    counters: Sequence[Counter] = (),
) -> None:
    """Writes the picture in the form of the file's ending: .svg, .png and .pdf (by matplotlib), .txt, or a
    Perfetto trace, .json or .json.gz.

    A box is labelled with its minibatch, as `3`, or with minibatch and microbatch, as `3.1`. show_versions:
    whether the label has the weight version, too; None: if any version differs from the minibatch's number.
    Stages of one worker differ in shade: later stages are darker. `phases` are marked above the first row.
    counters: figures that only a trace shows.

    Raises ValueError for another ending, for too many instructions to draw, and for a missing matplotlib. A
    figure of many workers, or of a long time, shows a part and says which.
    """
    check_picture_path(path)
    name = os.fspath(path)
    if name.endswith(_TRACE_SUFFIXES):
        write_trace(path, make_spans(simulation), counters=counters)
        return
    if name.endswith(_TEXT_SUFFIX):
        Path(path).write_text(
            draw_text(simulation, title, subtitle, show_versions=show_versions), encoding="utf-8"
        )
        return
    labels = StepLabels(simulation, show_versions)
    figure_type = import_figure(name, _OTHERWISE)
    drawing = ScheduleDrawing(figure_type, simulation, labels, (title, subtitle), phases, time_unit)
    num_boxes = sum(len(computed(row)) for row in drawing.simulation.timeline)
    if num_boxes > _DRAWN_BOXES_MAX:
        raise ValueError(
            f"{name}: {num_boxes} instructions are too many to draw (at most {_DRAWN_BOXES_MAX}): take fewer"
            " minibatches, or a .json trace"
        )
    save_figure(drawing.draw(), path)


def make_spans(simulation: Simulation) -> Iterator[Span]:
    """Yields the spans of a trace. Each worker computes on one track, and sends on one track per
    neighbour.
    """
    for worker, row in enumerate(simulation.timeline):
        for instruction, begin_ms, end_ms in computed(row):
            args = {
                "stage": instruction.stage,
                "replica": instruction.replica,
                "minibatch": instruction.minibatch,
                "microbatch": instruction.microbatch,
                "version": instruction.version,
            }
            name = f"{instruction.traits.meaning} {instruction.minibatch}"
            if not is_mark(instruction):
                name += f".{instruction.microbatch}"
            yield Span(f"worker {worker}", "compute", name, _ns(begin_ms), _ns(end_ms), args)
    for what, from_worker, to_worker, minibatch, microbatch, begin_ms, end_ms in simulation.transfers:
        track = f"send to worker {to_worker}"
        name = f"{what} {minibatch}.{microbatch}"
        yield Span(f"worker {from_worker}", track, name, _ns(begin_ms), _ns(end_ms))


def _ns(time_ms: float) -> int:
    return round(time_ms * 1e6)


_COLUMNS_MAX = 2_000

_LINK_LEGEND = ",   a activation,   g gradient, on their way"
_SYNC_LEGEND = ",   p push or pull"


def draw_text(
    simulation: Simulation, title: str, subtitle: str = "", *, show_versions: bool | None = None
) -> str:
    """Returns the picture as ASCII text. Time takes at most 2,001 columns. Every line ends in a newline."""
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
    """Returns the columns per millisecond at which every label and the bar before it fit, if the width allows
    it.
    """
    wanted = [
        (len(labels.text(timed.instruction)) + 1) / (timed.end_ms - timed.begin_ms)
        for row in simulation.timeline
        for timed in row
        if timed.end_ms > timed.begin_ms and not is_mark(timed.instruction)
    ]
    if not simulation.makespan_ms:
        return 1.0
    return min(max(wanted, default=1.0), _COLUMNS_MAX / simulation.makespan_ms)


def _row(row: Sequence[TimedInstruction], labels: StepLabels, columns_per_ms: float, num_columns: int) -> str:
    cells = ["."] * num_columns
    for instruction, begin_ms, end_ms in computed(row):
        first, last = round(begin_ms * columns_per_ms), round(end_ms * columns_per_ms)
        cells[last] = "|"
        if is_mark(instruction):
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
    """Returns a row for each link whose transfers take time. In a row "a3" is the activation of minibatch 3,
    and "g3" its gradient.
    """
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
