"""Writes a run's figures into event files for TensorBoard, by torch's SummaryWriter."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pipedream.callbacks.callback import (
    Callback,
    EndReport,
    EpochReport,
    EvaluationReport,
    MinibatchReport,
    StartReport,
)

__all__ = ["TensorBoard"]


class TensorBoard(Callback):
    """Writes figures of the run into `path`; `tensorboard --logdir path` shows them.

    During the run it writes loss, learning rate, samples/s, the norm of the gradients if it is measured, and
    validation figures. At the end it writes the share of bubbles, the bytes sent, each worker's peak memory
    and each stage's delay.

    every: minibatches between two writes. Each write has the losses of all minibatches since the previous
    write. Raises ValueError if `every` is less than 1, or if the package tensorboard is missing."""

    decides = False

    def __init__(self, path: str | os.PathLike[str], *, every: int = 50) -> None:
        if every < 1:
            raise ValueError(f"every of TensorBoard is {every}: use 1 or more minibatches")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("TensorBoard needs the package tensorboard: pip install tensorboard") from None
        self.path = os.fspath(path)
        self.every = every
        self._make_writer = SummaryWriter
        self._writer: Any = None

    def on_start(self, report: StartReport) -> None:
        self._writer = self._make_writer(self.path)

    def on_minibatches(self, report: MinibatchReport) -> None:
        if report.is_past:
            return  # the earlier run has written these figures
        for minibatch, loss in enumerate(report.losses, start=report.first):
            self._add(minibatch, {"loss": loss})
        figures = {"samples_per_s": report.samples_per_s}
        for group, rate in enumerate(report.rates):
            figures["rate" if len(report.rates) == 1 else f"rate/{group}"] = rate
        if report.gradient_norms:
            figures["gradient_norm"] = report.gradient_norms[-1]
        self._add(report.end - 1, figures)
        self._writer.flush()

    def on_epoch(self, report: EpochReport) -> None:
        if report.is_past:
            return
        self._add(report.end - 1, {"epoch/loss": report.loss})
        self._writer.flush()

    def on_evaluation(self, report: EvaluationReport) -> None:
        if report.is_past:
            return
        figures = {f"validation/{name}": value for name, value in report.metrics.items()}
        self._add(report.minibatch - 1, figures)
        self._writer.flush()

    def on_end(self, report: EndReport) -> None:
        result = report.result
        if result is not None and result.losses:
            self._add(len(result.losses) - 1, _figures_of(result))
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, step: int, figures: Mapping[str, float]) -> None:
        for tag, value in figures.items():
            self._writer.add_scalar(tag, value, step)


def _figures_of(result: Any) -> dict[str, float]:
    figures = {"bubble_share": result.bubble_share, "bytes_sent": float(result.bytes_sent)}
    for name, terms in zip(result.worker_names, result.memory, strict=True):
        peaks = [figures["peak"] for figures in terms.values() if figures["peak"] is not None]
        figures[f"memory_bytes/{name}"] = float(sum(peaks))
    for stage, reads in enumerate(result.versions):
        delays = [minibatch - forward for minibatch, (forward, _) in enumerate(reads)]
        figures[f"delay/stage {stage}"] = sum(delays) / max(len(delays), 1)
    return figures
