"""The study's figures, and its tables between the markers of the document."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import findings
import matplotlib
from findings import Finding
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sweep import DEPTHS, NUM_MINIBATCHES_PER_POINT, OPTIMIZERS, RATES, Results, Setting
from tasks import Task

# Okabe and Ito's, which the colour-blind tell apart.
_COLOURS = {
    "flush": "#000000",
    "pipedream": "#0072B2",
    "vertical_sync": "#D55E00",
    "2bw": "#009E73",
    "naive": "#CC79A7",
    "flush, microbatches": "#999999",
}
_LINES = {4: "--", 8: "-"}
# Of the smallest error that is drawn: the axis is logarithmic.
_SMALLEST_ERROR = 0.001


Workloads = dict[str, dict[tuple[str, int], Finding]]
"""What was found of each row and depth, by task and optimizer."""


def rows(task: Task) -> list[str]:
    names = ["flush", "pipedream", "vertical_sync", "2bw", "naive"]
    return names if task.cuts_alike else ["flush", "flush, microbatches", *names[1:]]


def setting_of(task: Task, row: str, depth: int) -> Setting:
    """The run that stands for a row at a depth."""
    if row == "flush":
        return Setting("flush", 1)
    if row in ("2bw", "flush, microbatches"):
        return Setting(row.split(",")[0], 1, 1 if task.cuts_alike else depth)
    return Setting(row, depth)


def find_all(task: Task, optimizer: str, results: Results) -> dict[tuple[str, int], Finding]:
    """By row and depth."""
    plain = findings.collect(task, optimizer, Setting("flush", 1), results)
    target = findings.target_loss(findings.best_of(task, plain))
    return {
        (row, depth): findings.find(
            task, findings.collect(task, optimizer, setting_of(task, row, depth), results), target
        )
        for row in rows(task)
        for depth in DEPTHS
    }


def write(tasks: Iterable[Task], results: Results, document: Path, images: Path) -> None:
    """Draws the figures and fills in the document's tables."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "study", "font.size": 9})
    text = document.read_text()
    everything: Workloads = {}
    for task in tasks:
        found = {name: find_all(task, name, results) for name in OPTIMIZERS if (task.name, name) in RATES}
        for optimizer, of_optimizer in found.items():
            everything[f"{task.name}, {optimizer}"] = of_optimizer
            text = _replace(text, f"{task.name}, {optimizer}", _table(task, of_optimizer))
        _save(_rates_figure(task, found), images / f"{task.name}_rates.svg")
        _save(_losses_figure(task, found), images / f"{task.name}_losses.svg")
    text = _replace(text, "minibatches over flush's", _summary(everything, _minibatches_over))
    text = _replace(text, "stable rates over flush's", _summary(everything, _stable_rate_over))
    text = _replace(text, "limits of a quadratic over flush's", _quadratic_limits())
    document.write_text(text)


def _replace(text: str, name: str, table: str) -> str:
    """Between `<!-- begin: name -->` and `<!-- end: name -->`."""
    begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
    if begin not in text or end not in text:
        raise SystemExit(f"the document has no line '{begin.strip()}' followed by '{end}'")
    before, rest = text.split(begin, 1)
    return before + begin + table + end + rest.split(end, 1)[1]


def _table(task: Task, found: dict[tuple[str, int], Finding]) -> str:
    heads = ["schedule", f"best {task.metric}", "at rate", "largest stable rate", "minibatches to target"]
    lines = [heads, ["---"] * len(heads)]
    for row in rows(task):
        for depth in DEPTHS:
            if not _is_shown(task, row, depth):
                continue
            finding = found[row, depth]
            lines.append(
                [
                    _label(task, row, depth),
                    _held_out(task, finding),
                    f"{finding.best.rate:g}" + (" (edge)" if finding.is_best_at_edge else ""),
                    f"{finding.largest_stable_rate:g}",
                    _count(finding.minibatches_to_target),
                ]
            )
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _summary(everything: Workloads, over: Callable[[Finding, Finding], str]) -> str:
    """One column per workload, over its plain training."""
    lines = [["schedule", *everything], ["---"] * (1 + len(everything))]
    for row, depth in itertools.product(("pipedream", "2bw", "naive", "vertical_sync"), DEPTHS):
        cells = [over(found[row, depth], found["flush", depth]) for found in everything.values()]
        lines.append([f"{row}, {depth} stages", *cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _minibatches_over(finding: Finding, plain: Finding) -> str:
    if math.isinf(finding.minibatches_to_target):
        run = NUM_MINIBATCHES_PER_POINT * len(plain.lowest.losses)
        return f"over {run / plain.minibatches_to_target:.1f}"
    return f"{finding.minibatches_to_target / plain.minibatches_to_target:.1f}"


def _stable_rate_over(finding: Finding, plain: Finding) -> str:
    return f"{finding.largest_stable_rate / plain.largest_stable_rate:.2g}"


def _quadratic_limits() -> str:
    momenta = (0.0, 0.9)
    lines = ["| schedule | delay, minibatches | SGD | SGD, momentum 0.9 |", "| --- | --- | --- | --- |"]
    schedules = [("2bw", 1), *((f"vertical_sync, {depth} stages", depth - 1) for depth in DEPTHS)]
    for schedule, delay in schedules:
        ratios = [findings.quadratic_limit(delay, mu) / findings.quadratic_limit(0, mu) for mu in momenta]
        lines.append(f"| {schedule} | {delay} | " + " | ".join(f"{ratio:.2g}" for ratio in ratios) + " |")
    return "\n".join(lines) + "\n"


def _held_out(task: Task, finding: Finding) -> str:
    digits = 3 if task.higher_is_better else 2
    values = finding.best.held_out
    return f"{finding.best.mean:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _count(minibatches: float) -> str:
    return "never" if math.isinf(minibatches) else f"{minibatches:.0f}"


def _rates_figure(task: Task, found: dict[str, dict[tuple[str, int], Finding]]) -> Figure:
    figure = Figure(figsize=(4 * len(found), 3.6), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (optimizer, of_optimizer) in zip(panels, found.items(), strict=True):
        for (row, depth), finding in of_optimizer.items():
            if _is_shown(task, row, depth):
                axes.plot(
                    [at.rate for at in finding.at_rates],
                    [_drawn_value(task, at.mean) for at in finding.at_rates],
                    color=_COLOURS[row],
                    linestyle=_LINES[depth],
                    marker=".",
                    label=_label(task, row, depth),
                    **_weight(row),
                )
        axes.set(xscale="log", title=f"{task.name}, {optimizer}", xlabel="learning rate")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    if task.higher_is_better:
        panels[0].set(yscale="log", ylabel="held-out error")
    else:
        panels[0].set(ylabel=f"held-out {task.metric}")
    _legend(figure, panels[0])
    return figure


def _losses_figure(task: Task, found: dict[str, dict[tuple[str, int], Finding]]) -> Figure:
    figure = Figure(figsize=(4 * len(found), 5.6), layout="constrained")
    panels = figure.subplots(len(DEPTHS), len(found), sharex=True, sharey=True, squeeze=False)
    for line_of_panels, depth in zip(panels, DEPTHS, strict=True):
        for axes, (optimizer, of_optimizer) in zip(line_of_panels, found.items(), strict=True):
            for row in rows(task):
                losses = of_optimizer[row, depth].lowest.losses
                minibatches = [NUM_MINIBATCHES_PER_POINT * (index + 1) for index in range(len(losses))]
                axes.plot(minibatches, losses, color=_COLOURS[row], label=row, **_weight(row))
            axes.set(title=f"{task.name}, {optimizer}, {depth} stages")
            axes.grid(alpha=0.3)
            if task.higher_is_better:
                axes.set_yscale("log")
                axes.minorticks_off()
        line_of_panels[0].set_ylabel("training loss")
    for axes in panels[-1]:
        axes.set_xlabel("minibatches")
    _legend(figure, panels[0][0])
    return figure


def _is_shown(task: Task, row: str, depth: int) -> bool:
    """One line stands for all depths whose runs are the same."""
    return depth == DEPTHS[-1] or setting_of(task, row, depth) != setting_of(task, row, DEPTHS[-1])


def _label(task: Task, row: str, depth: int) -> str:
    if setting_of(task, row, DEPTHS[0]) == setting_of(task, row, DEPTHS[-1]):
        return f"{row}, any depth"
    return f"{row.split(',')[0]}, {depth} {'microbatches' if row.endswith('microbatches') else 'stages'}"


def _weight(row: str) -> dict[str, float]:
    # Naive lies under pipedream, which often hides it.
    return {"linewidth": 3, "alpha": 0.6, "zorder": 1} if row == "naive" else {"linewidth": 1.1, "zorder": 2}


def _drawn_value(task: Task, value: float) -> float:
    return max(1 - value, _SMALLEST_ERROR) if task.higher_is_better else value


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the date: the same results give the same file.
    figure.savefig(path, metadata={"Date": None})
