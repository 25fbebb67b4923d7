"""Draws a simulated schedule as a matplotlib figure: one row per worker, time to the right. The figure shows
as many rows as a person can read, and as much time as fits in the width.

One thread; needs no torch. The caller passes matplotlib's Figure type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from pipedream.planning.simulator import Simulation, TimedInstruction
from pipedream.simulate.step_labels import StepLabels, computed, is_mark, name_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pipedream import _core

__all__ = ["ROWS_MAX", "DrawnPart", "PhaseSpan", "ScheduleDrawing", "drawn_part"]

_CHART_WIDTH_MAX = 30.0  # inches of the time axis

# Forward and backward have the light blue and the orange of the Okabe-Ito palette. These differ in lightness
# and for every kind of colour vision, so forwards and backwards can always be told apart.
_COLOURS = {  # by OpcodeTraits.duration
    "forward": (0.34, 0.71, 0.91),
    "recompute": (0.75, 0.88, 0.95),
    "backward": (0.95, 0.67, 0.18),
}
_BOUNDARY_COLOUR = (0.80, 0.60, 0.70)
_DARKEST, _DARKEST_RECOMPUTE = 0.62, 0.84  # factors for the colour of a worker's last stage
_IDLE_COLOUR = "#f1f1f1"
_UPDATE_COLOUR = "#303030"
_QUIET_COLOUR = "#666666"
_INK = "#111111"

# Inches, and points for text.
_MARGIN = 0.22
_ROW = 0.40
_ROW_GAP = 0.09
_TITLE = 0.50
_PHASES = 0.30
_TIME = 0.34
_LEGEND = 0.30
_UPDATE_MARK = 0.018
_CHART_WIDTH_MIN = 5.2
_TEXT_PT = 9.0
_TEXT_PT_MIN = 3.5
_SMALL_PT = 7.5
_VERSION_PT = 6.0
_INCHES_PER_CHARACTER_PT = 0.62 / 72  # width of a digit, per point of the font's size


class PhaseSpan(NamedTuple):
    """A phase of the first worker, in milliseconds."""

    name: str
    begin_ms: float
    end_ms: float


class ScheduleDrawing:
    """A figure with one Axes. The units of its coordinates are inches from the lower left corner."""

    def __init__(
        self,
        figure_type: type[Figure],
        simulation: Simulation,
        labels: StepLabels,
        titles: tuple[str, str],
        phases: Sequence[PhaseSpan],
        time_unit: str,
    ) -> None:
        self.labels = labels
        part = drawn_part(simulation, self._narrowest, _CHART_WIDTH_MAX)
        self.simulation = simulation = part.simulation
        self.row_names = part.row_names
        title, subtitle = titles
        self.titles = (title, "; ".join(filter(None, (subtitle, part.note))))
        self.phases = [
            span._replace(end_ms=min(span.end_ms, simulation.makespan_ms))
            for span in phases
            if span.begin_ms < simulation.makespan_ms
        ]
        self.stages_of_worker = [
            sorted({timed.instruction.stage for timed in row}) for row in simulation.timeline
        ]
        self.num_chunks = max((len(stages) for stages in self.stages_of_worker), default=1)
        self.time_name = f"time, {time_unit}"
        row_name = max(self.row_names, key=len, default="")
        self.left = _MARGIN + 0.08
        self.left += max(_text_width(row_name, _TEXT_PT), _text_width(self.time_name, _SMALL_PT))
        self.inches_per_ms = self._scale()
        self.right = self.left + max(_CHART_WIDTH_MIN, simulation.makespan_ms * self.inches_per_ms)
        self.rows_bottom = _MARGIN + _LEGEND + _TIME
        rows_height = len(self.row_names) * (_ROW + _ROW_GAP) - _ROW_GAP
        self.rows_top = self.rows_bottom + max(_ROW, rows_height)
        width = self.right + _MARGIN
        height = self.rows_top + (_PHASES if phases else 0.0) + _TITLE + _MARGIN
        self.figure = figure_type(figsize=(width, height))
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(0, height)
        self.axes.axis("off")
        self.height = height

    def draw(self) -> Figure:
        title, subtitle = self.titles
        top = self.height - _MARGIN
        self._write(_MARGIN, top - 0.08, title, _TEXT_PT + 2, weight="bold")
        self._write(_MARGIN, top - 0.30, subtitle, _TEXT_PT - 0.5, colour=_QUIET_COLOUR)
        for worker, row in enumerate(self.simulation.timeline):
            self._draw_row(worker, row)
        self._draw_transfers()
        self._draw_phases()
        self._draw_time()
        self._draw_legend()
        return self.figure

    def _scale(self) -> float:
        """Returns the inches per millisecond at which every label fits, if the width allows it."""
        wanted = [
            (self._label_width(timed.instruction) + 0.07) / (timed.end_ms - timed.begin_ms)
            for row in self.simulation.timeline
            for timed in row
            if timed.end_ms > timed.begin_ms and not is_mark(timed.instruction)
        ]
        makespan_ms = self.simulation.makespan_ms
        if not makespan_ms:
            return 1.0
        roomy = max(max(wanted, default=0.0), _CHART_WIDTH_MIN / makespan_ms)
        return min(roomy, _CHART_WIDTH_MAX / makespan_ms)

    def _narrowest(self, step: _core.Instruction) -> float:
        """Returns the width in inches of the narrowest box in which the label can be read."""
        return _text_width(self.labels.name(step), _TEXT_PT_MIN) + 0.03

    def _label_width(self, step: _core.Instruction) -> float:
        return max(
            _text_width(self.labels.name(step), _TEXT_PT),
            _text_width(self.labels.version(step), _VERSION_PT),
        )

    def _x(self, time_ms: float) -> float:
        return self.left + time_ms * self.inches_per_ms

    def _draw_row(self, worker: int, row: Sequence[TimedInstruction]) -> None:
        bottom = self._bottom(worker)
        self._write(self.left - 0.08, bottom + _ROW / 2, self.row_names[worker], _TEXT_PT, align="right")
        self._fill(self.left, self._x(self.simulation.makespan_ms), bottom, _IDLE_COLOUR)
        for timed in computed(row):
            if not is_mark(timed.instruction):
                self._draw_box(worker, timed, bottom)
        for timed in row:  # above the boxes' edges
            if is_mark(timed.instruction):
                self._draw_update(timed, bottom)

    def _draw_box(self, worker: int, timed: TimedInstruction, bottom: float) -> None:
        step = timed.instruction
        begin, end = self._x(timed.begin_ms), self._x(timed.end_ms)
        colour = self._colour(step.traits, self.stages_of_worker[worker].index(step.stage))
        self._fill(begin, end, bottom, colour, is_hatched=step.traits.stash == "restored")
        name, version = self.labels.name(step), self.labels.version(step)
        points = min(_TEXT_PT, (end - begin - 0.03) / (len(name) * _INCHES_PER_CHARACTER_PT))
        if points < _TEXT_PT_MIN:
            return
        ink = _ink_on(colour)
        middle = (begin + end) / 2
        if not version:
            self._write(middle, bottom + _ROW / 2, name, points, align="center", colour=ink)
            return
        self._write(middle, bottom + _ROW * 0.64, name, points, align="center", colour=ink)
        small = min(
            _VERSION_PT, 0.75 * points, (end - begin - 0.03) / (len(version) * _INCHES_PER_CHARACTER_PT)
        )
        self._write(middle, bottom + _ROW * 0.23, version, small, align="center", colour=ink)

    def _draw_update(self, timed: TimedInstruction, bottom: float) -> None:
        begin, end = self._x(timed.begin_ms), self._x(timed.end_ms)
        half_mark = max(0.0, _UPDATE_MARK - (end - begin)) / 2  # makes an update without duration visible
        self._fill(begin - half_mark, end + half_mark, bottom - 0.03, _UPDATE_COLOUR, height=_ROW + 0.06)

    def _draw_transfers(self) -> None:
        for transfer in self.simulation.transfers:
            if transfer.end_ms == transfer.begin_ms:
                continue
            is_downward = transfer.to_worker > transfer.from_worker
            edges = (0.0, _ROW) if is_downward else (_ROW, 0.0)
            x = [self._x(transfer.begin_ms), self._x(transfer.end_ms)]
            y = [
                self._bottom(transfer.from_worker) + edges[0],
                self._bottom(transfer.to_worker) + edges[1],
            ]
            self.axes.plot(x, y, color=_QUIET_COLOUR, lw=0.5, alpha=0.6)

    def _bottom(self, worker: int) -> float:
        return self.rows_top - _ROW - worker * (_ROW + _ROW_GAP)

    def _draw_phases(self) -> None:
        y = self.rows_top + 0.10
        free_x = 0.0
        for name, begin_ms, end_ms in self.phases:
            begin, end = self._x(begin_ms) + 0.02, self._x(end_ms) - 0.02
            self.axes.plot([begin, begin, end, end], [y - 0.05, y, y, y - 0.05], color=_QUIET_COLOUR, lw=0.9)
            width = _text_width(name, _SMALL_PT)
            x = max(begin, (begin + end - width) / 2)  # the name of a short phase extends to the right
            if x >= free_x:
                self._write(x, y + 0.10, name, _SMALL_PT, colour=_QUIET_COLOUR)
                free_x = x + width + 0.05

    def _draw_time(self) -> None:
        y = self.rows_bottom - 0.10
        end = self._x(self.simulation.makespan_ms)
        arrow = {"arrowstyle": "-|>", "color": _QUIET_COLOUR, "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate("", xy=(end, y), xytext=(self.left, y), arrowprops=arrow)
        step_ms = _tick_step(self.simulation.makespan_ms, (end - self.left) / 0.7)
        num_ticks = int(self.simulation.makespan_ms / step_ms) + 1 if step_ms else 0
        for position in range(num_ticks):
            x = self._x(position * step_ms)
            if x < end - 0.05:
                self.axes.plot([x, x], [y - 0.035, y + 0.035], color=_QUIET_COLOUR, lw=0.9)
                text = f"{position * step_ms:g}"
                self._write(x, y - 0.12, text, _SMALL_PT - 1, align="center", colour=_QUIET_COLOUR)
        self._write(self.left - 0.08, y, self.time_name, _SMALL_PT, align="right", colour=_QUIET_COLOUR)

    def _draw_legend(self) -> None:
        x, bottom, height = self.left, _MARGIN, 0.15
        for traits in self.labels.opcodes:
            is_update = traits.writes_version
            for chunk in range(1 if is_update else self.num_chunks):
                width = 0.02 if is_update else 0.24
                colour = _UPDATE_COLOUR if is_update else self._colour(traits, chunk)
                is_hatched = traits.stash == "restored"
                self._fill(x, x + width, bottom, colour, height=height, is_hatched=is_hatched)
                x += width
            x = self._legend_text(x, traits.meaning)
        self._fill(x, x + 0.24, bottom, _IDLE_COLOUR, height=height)
        x = self._legend_text(x + 0.24, "idle")
        text = self.labels.name_legend()
        if self.num_chunks > 1:
            text += ",   darker: the worker's later stage"
        self._legend_text(x, text)

    def _legend_text(self, x: float, text: str) -> float:
        """Writes the text, and returns where the next entry begins."""
        self._write(x + 0.06, _MARGIN + 0.075, text, _SMALL_PT, colour=_QUIET_COLOUR)
        return x + 0.06 + _text_width(text, _SMALL_PT) + 0.16

    def _colour(self, traits: _core.OpcodeTraits, chunk: int) -> tuple[float, float, float]:
        base = _BOUNDARY_COLOUR if traits.scope == "boundary" else _COLOURS[traits.duration]
        if self.num_chunks == 1:
            return base
        # Each stage of a worker has a shade, from lighter than the base colour to darker.
        share = chunk / (self.num_chunks - 1)
        light = tuple(1 - 0.5 * (1 - part) for part in base)
        darkest = _DARKEST_RECOMPUTE if traits.stash == "restored" else _DARKEST
        dark = tuple(darkest * part for part in base)
        red, green, blue = (a + share * (b - a) for a, b in zip(light, dark, strict=True))
        return red, green, blue

    def _fill(
        self,
        begin: float,
        end: float,
        bottom: float,
        colour: str | tuple[float, float, float],
        *,
        height: float = _ROW,
        is_hatched: bool = False,
    ) -> None:
        from matplotlib.patches import Rectangle

        has_edge = not isinstance(colour, str)
        self.axes.add_patch(
            Rectangle(
                (begin, bottom),
                end - begin,
                height,
                facecolor=colour,
                edgecolor="white" if has_edge else "none",
                linewidth=0.8 if has_edge else 0.0,
                hatch="////" if is_hatched else None,
            )
        )

    def _write(
        self,
        x: float,
        y: float,
        text: str,
        points: float,
        *,
        align: str = "left",
        colour: str = _INK,
        weight: str = "normal",
    ) -> None:
        self.axes.text(
            *(x, y, text), fontsize=points, ha=align, va="center_baseline", color=colour, weight=weight
        )


def _text_width(text: str, points: float) -> float:
    """Returns the text's approximate width in inches. The exact width would need a renderer. It would not
    help, because viewers of an SVG have other fonts.
    """
    return len(text) * points * _INCHES_PER_CHARACTER_PT


def _ink_on(colour: tuple[float, float, float]) -> str:
    red, green, blue = colour
    return _INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.45 else "white"


def _tick_step(length_ms: float, num_ticks_max: float) -> float:
    """Returns the distance between ticks: 1, 2 or 5 times a power of ten, for at most this many ticks; 0 for
    no length.
    """
    if length_ms <= 0:
        return 0.0
    least = length_ms / max(1.0, num_ticks_max)
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


ROWS_MAX = 40
_READABLE_SHARE = 0.9  # share of the boxes whose labels must be readable


class DrawnPart(NamedTuple):
    simulation: Simulation
    """The simulation, reduced to the rows and the time that are shown. Figures other than makespan_ms, such
    as bubble_share, are still those of the whole simulation.
    """
    row_names: list[str]
    note: str
    """A line that says which rows and how much time are left out; empty if all are shown."""


def drawn_part(
    simulation: Simulation, narrowest_inches: Callable[[_core.Instruction], float], width_max: float
) -> DrawnPart:
    """Returns the part of a simulation that a figure can show.

    narrowest_inches: function that returns the width of the narrowest box in which an instruction's label can
    be read. width_max: inches available for the time that is shown.
    """
    rows = _drawn_rows(simulation)
    shown = simulation
    notes = []
    if len(rows) < simulation.num_workers:
        shown = _of_rows(shown, rows)
        notes.append(f"{len(rows)} of {simulation.num_workers} workers are drawn")
    end_ms = _drawn_ms(shown, narrowest_inches, width_max)
    if end_ms < simulation.makespan_ms:
        shown = _until(shown, end_ms)
        notes.append(f"the first {end_ms:.4g} of {simulation.makespan_ms:.4g} are drawn")
    names = name_rows(simulation)
    return DrawnPart(shown, [names[worker] for worker in rows], "; ".join(notes))


def _drawn_rows(simulation: Simulation) -> list[int]:
    """Returns the workers to draw: the first workers of each stage, up to the same number for all stages. If
    there are too many stages, only the first stages and the last stages are drawn.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for worker, row in enumerate(simulation.timeline):
        groups.setdefault(tuple(sorted({timed.instruction.stage for timed in row})), []).append(worker)
    of_stages = list(groups.values())
    if len(of_stages) > ROWS_MAX:
        of_stages = of_stages[: ROWS_MAX // 2] + of_stages[-(ROWS_MAX // 2) :]
    count = max(map(len, of_stages), default=1)
    while count > 1 and sum(min(count, len(workers)) for workers in of_stages) > ROWS_MAX:
        count -= 1
    return sorted(worker for workers in of_stages for worker in workers[:count])


def _drawn_ms(
    simulation: Simulation, narrowest_inches: Callable[[_core.Instruction], float], width_max: float
) -> float:
    """Returns the time to draw: all of it, or a beginning in which most labels can be read."""
    wanted = sorted(
        narrowest_inches(timed.instruction) / (timed.end_ms - timed.begin_ms)
        for row in simulation.timeline
        for timed in row
        if timed.end_ms > timed.begin_ms and not is_mark(timed.instruction)
    )
    inches_per_ms = wanted[int(_READABLE_SHARE * (len(wanted) - 1))] if wanted else 0.0
    if inches_per_ms * simulation.makespan_ms <= width_max:
        return simulation.makespan_ms
    return width_max / inches_per_ms


def _of_rows(simulation: Simulation, rows: Sequence[int]) -> Simulation:
    places = {worker: place for place, worker in enumerate(rows)}
    return replace(
        simulation,
        timeline=tuple(simulation.timeline[worker] for worker in rows),
        transfers=tuple(
            one._replace(from_worker=places[one.from_worker], to_worker=places[one.to_worker])
            for one in simulation.transfers
            if one.from_worker in places and one.to_worker in places
        ),
    )


def _until(simulation: Simulation, end_ms: float) -> Simulation:
    def cut(row: Sequence[TimedInstruction]) -> tuple[TimedInstruction, ...]:
        return tuple(
            timed._replace(end_ms=min(timed.end_ms, end_ms)) for timed in row if timed.begin_ms < end_ms
        )

    return replace(
        simulation,
        timeline=tuple(map(cut, simulation.timeline)),
        transfers=tuple(one for one in simulation.transfers if one.end_ms <= end_ms),
        makespan_ms=end_ms,
    )
