"""Makes texts and pictures of a RunResult: a few lines, tables of all figures, and a picture of the losses.
Only plot_losses() writes a file. Any thread.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pipedream.common.figure_file import FIGURE_SUFFIXES, import_figure, save_figure
from pipedream.common.table import format_table
from pipedream.common.units import format_bytes, format_figure
from pipedream.data.stream import FORWARDED

if TYPE_CHECKING:
    from pipedream.report.result import RunResult

__all__ = ["describe_data_waits", "describe_result", "plot_losses", "summarize"]

_DATA_SHARE_MIN = 0.1  # a worker that spends a smaller share of its time on reading data gets no line
_EPOCHS_SHOWN = 6
_LOSSES_COLOUR, _SMOOTHED_COLOUR, _MEANS_COLOUR = "#56b4e9", "#0072b2", "#d55e00"  # Okabe-Ito colours
_SMOOTHED_MIN = 20  # minibatches; a shorter run gets no running mean
_SMOOTHED_SHARE = 0.05  # share of the run that the running mean remembers


def describe_result(result: RunResult) -> str:
    """Returns five lines, and a sixth one about validation if there was any."""
    name, peak, predicted = max(_memory_of_workers(result), key=lambda w: w[1], default=("no worker", 0, 0))
    transports = ", ".join(sorted(set(result.transports.values()))) or "nothing"
    synced = f"; {format_bytes(result.bytes_synced)} between replicas" if result.bytes_synced else ""
    lines = [
        f"RunResult: {_title(result)}",
        f"  loss     {_describe_losses(result)}",
        f"  time     {format_figure(result.samples_per_s)} samples/s; {_describe_time(result)} per minibatch;"
        f" bubble share {_percent(result.bubble_share)}",
        f"  traffic  {format_bytes(result.bytes_sent)} by {transports}{synced}",
        f"  memory   {format_bytes(peak)} at most, at {name}; {format_bytes(predicted)} predicted",
    ]
    if result.validation:
        newest = result.validation[-1]
        named = {"loss": newest.loss, **newest.metrics}
        text = ", ".join(f"{name} {format_figure(figure)}" for name, figure in named.items())
        lines.insert(2, f"  held out {text}; after {newest.minibatch} minibatches")
    return "\n".join(lines)


def summarize(result: RunResult) -> str:
    parts = [
        _title(result),
        _epoch_table(result),
        _validation_table(result),
        _figure_table(result),
        _worker_table(result),
        result.describe_channels(),
    ]
    return "\n\n".join(part for part in parts if part)


def describe_data_waits(result: RunResult) -> Iterator[str]:
    """Yields a line for each worker that spent a large part of its time reading data."""
    for name, share, source in zip(
        result.worker_names, result.data_wait_share, result.data_sources, strict=True
    ):
        if share >= _DATA_SHARE_MIN:
            yield f"{name} waited {_percent(share)} of its time for its data ({source}): {_remedy(source)}"


def plot_losses(result: RunResult, path: str | os.PathLike[str]) -> None:
    """Draws each minibatch's loss, a running mean, and the means of epochs if there are several epochs."""
    name = os.fspath(path)
    if not name.endswith(FIGURE_SUFFIXES):
        raise ValueError(f"plot is {name!r}: its name must end in one of {', '.join(FIGURE_SUFFIXES)}")
    figure = import_figure(path, " (the extra plot)")(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    marker = "o" if len(result.losses) == 1 else None  # a line with a single point is invisible
    axes.plot(result.losses, color=_LOSSES_COLOUR, linewidth=0.8, marker=marker, label="minibatch")
    if len(result.losses) >= _SMOOTHED_MIN:
        label = "running mean"
        axes.plot(_running_mean(result.losses), color=_SMOOTHED_COLOUR, linewidth=1.4, label=label)
    if len(result.epoch_sizes) > 1:
        for epoch, (begin, end) in enumerate(_epoch_ranges(result)):
            label = "mean of an epoch" if epoch == 0 else "_"  # the legend leaves "_" out
            mean = result.epoch_losses[epoch]
            axes.hlines(mean, begin, end - 1, color=_MEANS_COLOUR, linewidth=1.6, label=label)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(frameon=False)
    axes.set_title(_title(result), fontsize="medium")
    axes.set_xlabel("minibatch")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel("loss")
    if _spans_decades(result.losses):
        axes.set_yscale("log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    save_figure(figure, path)


def _running_mean(losses: Sequence[float]) -> list[float]:
    """Returns the exponential mean of the finite losses up to each loss. The mean starts from zero and is
    corrected for that, as Adam's moments are.
    """
    kept = 1 - 1 / max(_SMOOTHED_SHARE * len(losses), 1.0)
    mean, weight, means = 0.0, 0.0, []
    for loss in losses:
        if math.isfinite(loss):
            mean, weight = kept * mean + (1 - kept) * loss, kept * weight + (1 - kept)
        means.append(mean / weight if weight else math.nan)
    return means


def _spans_decades(losses: Sequence[float]) -> bool:
    finite = [loss for loss in losses if math.isfinite(loss)]
    return bool(finite) and min(finite) > 0 and max(finite) > 100 * min(finite)


def _title(result: RunResult) -> str:
    epochs, workers = len(result.epoch_losses), len(result.worker_pids)
    again = ""
    if result.drained_at:
        first, times = result.drained_at[0], _count(len(result.drained_at), "time", "times")
        again = f", planned again {times} for larger minibatches, first before minibatch {first}"
    return (
        f"{_count(len(result.losses), 'minibatch', 'minibatches')} in {_count(epochs, 'epoch', 'epochs')}"
        f" by {_count(workers, 'worker', 'workers')}{again}"
    )


def _describe_losses(result: RunResult) -> str:
    if not result.losses:
        return "none"
    means = [format_figure(loss) for loss in result.epoch_losses]
    if len(means) > _EPOCHS_SHOWN:
        means[_EPOCHS_SHOWN - 2 : -1] = [".."]
    first, last = format_figure(result.losses[0]), format_figure(result.losses[-1])
    return f"{first} -> {last}; mean by epoch {', '.join(means)}"


def _describe_time(result: RunResult) -> str:
    predicted = "" if result.predicted_ms is None else f" ({format_figure(result.predicted_ms)} ms predicted)"
    return f"{format_figure(result.measured_ms)} ms{predicted}"


def _epoch_ranges(result: RunResult) -> Iterator[tuple[int, int]]:
    """Yields (first minibatch, last minibatch + 1) of each epoch."""
    begin = 0
    for size in result.epoch_sizes:
        yield begin, begin + size
        begin += size


def _epoch_table(result: RunResult) -> str:
    rows = [
        (str(epoch + 1), str(end - begin), *(format_figure(loss) for loss in losses))
        for epoch, (begin, end) in enumerate(_epoch_ranges(result))
        for losses in [(result.losses[begin], result.losses[end - 1], result.epoch_losses[epoch])]
    ]
    return format_table(("epoch", "minibatches", "first loss", "last loss", "mean loss"), rows, ">>>>>")


def _validation_table(result: RunResult) -> str:
    if not result.validation:
        return ""
    names = list(result.validation[0].metrics)
    rows = [
        (
            str(each.minibatch),
            *(format_figure(figure) for figure in (each.loss, *(each.metrics[name] for name in names))),
            str(each.samples),
        )
        for each in result.validation
    ]
    headings = ("validation after", "loss", *names, "samples")
    return format_table(headings, rows, ">" * len(headings))


def _figure_table(result: RunResult) -> str:
    predicted = "not predicted" if result.predicted_ms is None else format_figure(result.predicted_ms)
    rows = [
        ("samples/s", format_figure(result.samples_per_s)),
        ("ms per minibatch, measured", format_figure(result.measured_ms)),
        ("ms per minibatch, predicted", predicted),
        ("bubble share", _percent(result.bubble_share)),
        ("bytes sent", format_bytes(result.bytes_sent)),
    ]
    if result.bytes_synced:
        rows.append(("bytes between replicas", format_bytes(result.bytes_synced)))
    return format_table(("figure", "of the run"), rows, "<>")


def _worker_table(result: RunResult) -> str:
    headings = ("worker", "reads", "waited for peers", "for data", "overhead", "memory", "predicted")
    rows = [
        (
            *(name, source, _percent(wait), _percent(data_wait) if source else "", f"{overhead:.1f} us"),
            *map(format_bytes, (peak, predicted)),
        )
        for source, wait, data_wait, overhead, (name, peak, predicted) in zip(
            result.data_sources,
            result.wait_share,
            result.data_wait_share,
            result.overhead_us,
            _memory_of_workers(result),
            strict=True,
        )
    ]
    return format_table(headings, rows, "<<>>>>>")


def _memory_of_workers(result: RunResult) -> Iterator[tuple[str, int, int]]:
    """Yields (name, peak bytes, predicted bytes) of each worker. Each sum leaves out the terms that lack the
    figure.
    """
    for name, terms in zip(result.worker_names, result.memory, strict=True):
        peak, predicted = (
            sum(figures[kind] or 0 for figures in terms.values()) for kind in ("peak", "predicted")
        )
        yield name, peak, predicted


def _remedy(source: str) -> str:
    if not source.startswith("DataLoader"):
        return "a DataLoader with num_workers reads ahead"
    if source.endswith("num_workers=0"):
        return "with num_workers above 0 other processes read ahead"
    if source.endswith(FORWARDED):
        return "more num_workers, or a dataset that can be pickled, which the workers read themselves"
    return "more num_workers, and persistent_workers=True where there are several epochs"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
