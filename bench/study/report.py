"""Writes the study's tables between the markers of the document, and draws its figure of learning rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import findings
import matplotlib
from matplotlib.figure import Figure
from simulator import Setting
from sweep import ACCEPTED_WITH, FLUSH, OPTIMIZERS, TWO_BW, Results, deep_settings, digits_settings, settings

# These are Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = {
    "flush": "#000000",
    "pipedream": "#0072B2",
    "unstashed": "#CC79A7",
    "2bw": "#009E73",
    "torch 1F1B": "#E69F00",
}
_LINES = {1: ":", 4: "-.", 8: "--", 16: "-"}
BOUNDS = {8: 0.03, 16: 0.02}
"""The nats by which the held-out loss of `pipedream` may be above that of `flush`, in addition to two
standard errors, by the number of microbatches."""
_NOT_RUN = "not run"


def write(results: Results, document: Path, images: Path) -> None:
    """Fills in the document's tables and draws the figure."""
    text = document.read_text(encoding="utf-8")
    text = replace(
        text, "characters, 8 stages", _losses_table(results, "characters", OPTIMIZERS, settings(8))
    )
    text = replace(text, "paired", _paired_table(results))
    text = replace(
        text, "characters, 4 stages", _losses_table(results, "characters", OPTIMIZERS, settings(4))
    )
    text = replace(text, "three times as long", _long_table(results))
    text = replace(text, "digits", _digits_table(results))
    text = replace(text, "16 and 32 stages", _deep_table(results))
    document.write_text(text, encoding="utf-8")
    use_plain_svg()
    save(_rates_figure(results), images / "learning_rates.svg")


def replace(text: str, name: str, table: str) -> str:
    """Returns the text with the table between `<!-- begin: name -->` and `<!-- end: name -->`."""
    begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
    if begin not in text or end not in text:
        raise SystemExit(f"the document has no line '{begin.strip()}' followed by '{end}'")
    before, rest = text.split(begin, 1)
    return before + begin + table + end + rest.split(end, 1)[1]


def table_of(heads: Sequence[str], rows: Sequence[Sequence[str]], num_keys: int = 1) -> str:
    """Returns a Markdown table, without rows of which nothing was run. The first num_keys cells of a row name
    it.
    """
    known = [row for row in rows if set(row[num_keys:]) != {_NOT_RUN}]
    if not known:
        return "Not run yet.\n"
    lines = [heads, ["---"] * len(heads), *known]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def label(setting: Setting) -> str:
    if setting == FLUSH:
        return "`flush`, any m"
    if setting == TWO_BW:
        return "`2bw`, any m >= S - 1"
    return f"`{setting.schedule}`, m = {setting.microbatches}"


def use_plain_svg() -> None:
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "study", "font.size": 9})


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # The file has no date, so that the same results give the same file.
    figure.savefig(path, metadata={"Date": None})


def _losses_table(results: Results, task: str, optimizers: Sequence[str], rows: Sequence[Setting]) -> str:
    """Returns a table with two figures for each setting and optimizer. The first is the held-out loss at the
    best learning rate. The second is the number of minibatches until the loss that plain training has after a
    third of its run, divided by plain training's number."""
    cells = [
        [label(setting), *(_loss_cell(results, task, optimizer, setting) for optimizer in optimizers)]
        for setting in rows
    ]
    return table_of(["schedule", *optimizers], cells)


def _loss_cell(results: Results, task: str, optimizer: str, setting: Setting) -> str:
    found = findings.find(results, task, optimizer, setting)
    plain = findings.find(results, task, _compared_with(optimizer), FLUSH)
    if found is None or plain is None:
        return _NOT_RUN
    return f"{found.held_out:.3f} @ {found.trial.rate:g}{_edge(found)}, {_ratio(found, plain, 1 / 3)}"


def _ratio(found: findings.Finding, plain: findings.Finding, share: float) -> str:
    """Returns the minibatches that `found` needs divided by those that plain training needs. Both are counted
    until the loss that plain training has after this share of its run.
    """
    target = findings.target_loss(plain, share)
    ratio = found.minibatches_to(target) / plain.minibatches_to(target)
    return "never" if math.isinf(ratio) else f"{ratio:.2f}"


def _compared_with(optimizer: str) -> str:
    """Returns the optimizer of the plain training to compare with. NAdamW is compared with AdamW."""
    return "AdamW" if optimizer.startswith("NAdamW") else optimizer


def _edge(found: findings.Finding) -> str:
    return " (edge)" if found.is_best_at_edge and len(found.by_rate) > 1 else ""


def _paired_table(results: Results) -> str:
    rows = []
    for optimizer in ACCEPTED_WITH:
        for m, bound in BOUNDS.items():
            found = findings.paired(results, optimizer, Setting("pipedream", 8, m))
            name = [f"{optimizer}, m = {m}"]
            if found is None:
                rows.append([*name, *[_NOT_RUN] * 4])
                continue
            allowed = bound + 2 * found.standard_error
            rows.append(
                [
                    f"{optimizer} @ {found.rate:g}, m = {m}",
                    " ".join(f"{difference:+.3f}" for difference in found.differences),
                    f"{found.mean:+.3f}",
                    f"{found.standard_error:.3f}",
                    f"{allowed:.3f}: {'met' if found.mean <= allowed else 'missed'}",
                ]
            )
    heads = ["`pipedream` over `flush`", "by seed", "mean", "standard error", "allowed"]
    return table_of(heads, rows)


def _long_table(results: Results) -> str:
    rows = []
    for setting in settings(8):
        rows.append([label(setting), *(_long_cell(results, optimizer, setting) for optimizer in OPTIMIZERS)])
    return table_of(["schedule, 8 stages", *OPTIMIZERS], rows)


def _long_cell(results: Results, optimizer: str, setting: Setting) -> str:
    found = findings.find_long(results, optimizer, setting)
    plain = findings.find_long(results, _compared_with(optimizer), FLUSH)
    if found is None or plain is None:
        return _NOT_RUN
    return f"{found.held_out:.3f}, {_ratio(found, plain, 1 / 2)}"


def _digits_table(results: Results) -> str:
    rows = []
    for setting in digits_settings():
        cells = []
        for optimizer in OPTIMIZERS[:2]:
            found = findings.find(results, "digits", optimizer, setting)
            told = f"{found.held_out:.3f} @ {found.trial.rate:g}{_edge(found)}" if found else _NOT_RUN
            cells.append(told)
        rows.append([f"`{setting.schedule}`, m = {setting.microbatches}", *cells])
    return table_of(["schedule, 8 stages", *OPTIMIZERS[:2]], rows)


def _deep_table(results: Results) -> str:
    rows = []
    for depth in (16, 32):
        task = f"characters, {depth} layers"
        for setting in deep_settings(depth):
            rows.append([str(depth), label(setting), _loss_cell(results, task, "AdamW", setting)])
    return table_of(["stages", "schedule", "AdamW"], rows, num_keys=2)


def _rates_figure(results: Results) -> Figure:
    """Draws the held-out loss against the learning rate, for 8 stages."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, len(OPTIMIZERS), sharey=True)
    task = findings.make_task("characters")
    for axes, optimizer in zip(panels, OPTIMIZERS, strict=True):
        tried = (findings.find(results, "characters", optimizer, setting) for setting in settings(8))
        shown = [found for found in tried if found is not None]
        for found in shown:
            setting = found.trial.setting
            alone = setting in (FLUSH, TWO_BW)
            axes.plot(
                list(found.by_rate),
                [outcome.mean(task) for outcome in found.by_rate.values()],
                color=COLOURS[setting.schedule],
                linestyle="-" if alone else _LINES[setting.microbatches],
                marker=".",
                linewidth=1.1,
                label=setting.schedule if alone else f"{setting.schedule}, m = {setting.microbatches}",
            )
        rates = sorted({rate for found in shown for rate in found.by_rate})
        axes.set(xscale="log", title=optimizer, xlabel="learning rate", ylim=(2.15, 2.8))
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates], fontsize=6)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="held-out loss, nats per character")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    return figure
