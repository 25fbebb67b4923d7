"""Pictures of a simulated schedule, as the papers print them: a row per worker, time to the right.

Pure but for the file; one thread; needs no torch, and matplotlib only for .svg, .png and .pdf.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipedream.common.figure_file import FIGURE_SUFFIXES, import_figure, save_figure
from pipedream.planning.simulator import Simulation
from pipedream.simulate.schedule_drawing import PhaseSpan, ScheduleDrawing
from pipedream.simulate.step_labels import MEANINGS, StepLabels, computed
from pipedream.simulate.text_picture import draw_text
from pipedream.simulate.trace import Counter, Span, write_trace

__all__ = ["check_picture_path", "is_drawn", "make_spans", "write_picture"]

_TRACE_SUFFIXES = (".json", ".json.gz")
_TEXT_SUFFIX = ".txt"
_OTHERWISE = ", or name a .txt or .json file"

# Beyond this nobody can read a picture, and drawing takes minutes; a trace may hold any number.
_DRAWN_BOXES_MAX = 20_000


def check_picture_path(path: str | os.PathLike[str]) -> None:
    """Refuses, before any work, a name whose ending says no form, and one that needs a missing matplotlib."""
    name = os.fspath(path)
    known = (*FIGURE_SUFFIXES, _TEXT_SUFFIX, *_TRACE_SUFFIXES)
    if not name.endswith(known):
        raise ValueError(f"picture file is {name!r}: its name must end in one of {', '.join(known)}")
    if name.endswith(FIGURE_SUFFIXES):
        import_figure(name, _OTHERWISE)


def is_drawn(path: str | os.PathLike[str]) -> bool:
    """Whether the ending names a picture, in which a person sees but a few minibatches, and no trace."""
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
    """Writes the picture in the form that the file's ending names: .svg, .png, .pdf (matplotlib), .txt, or a
    Perfetto trace, .json or .json.gz.

    Boxes carry the minibatch, `3`, or minibatch and microbatch, `3.1`, and the weight version they read
    where `show_versions` says so; None: where a version is not simply the minibatch's number. Several
    stages of one worker differ in shade, the later the darker. `phases` are marked above the first row.
    counters: of a trace alone. Raises ValueError for another ending, too many instructions to draw, and a
    missing matplotlib. A figure of many workers, or of a long time, shows a part, and says which
    (drawn_part.py).
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
    """The spans of a trace: every worker computes on one track and sends on one for each neighbour."""
    for worker, row in enumerate(simulation.timeline):
        for instruction, begin_ms, end_ms in computed(row):
            args = {
                "stage": instruction.stage,
                "replica": instruction.replica,
                "minibatch": instruction.minibatch,
                "microbatch": instruction.microbatch,
                "version": instruction.version,
            }
            name = f"{MEANINGS[instruction.opcode]} {instruction.minibatch}"
            if instruction.opcode != "UPDATE":
                name += f".{instruction.microbatch}"
            yield Span(f"worker {worker}", "compute", name, _ns(begin_ms), _ns(end_ms), args)
    for what, from_worker, to_worker, minibatch, microbatch, begin_ms, end_ms in simulation.transfers:
        track = f"send to worker {to_worker}"
        name = f"{what} {minibatch}.{microbatch}"
        yield Span(f"worker {from_worker}", track, name, _ns(begin_ms), _ns(end_ms))


def _ns(time_ms: float) -> int:
    return round(time_ms * 1e6)
