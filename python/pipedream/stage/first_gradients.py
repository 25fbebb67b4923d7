"""Writes the norms of the gradients of minibatch 0. With PIPEDREAM_CHECK=1 the caller compares them with
norms that it computes without a pipeline.

Owned by the worker's compute thread.
"""

from __future__ import annotations

import math
from pathlib import Path

from pipedream import _core
from pipedream.report.first_figures import FirstFigures, compares_gradients
from pipedream.stage.stage_runner import StageRunner
from pipedream.update.gradients import figures_of

__all__ = ["FirstGradients", "make_first_gradients"]


class FirstGradients:
    """Writes the norm of the gradients of each stage's own parameters. Tied parameters belong to several
    stages, so they are left out."""

    def __init__(self, figures: FirstFigures, num_microbatches: int) -> None:
        self._figures = figures
        self._last_microbatch = num_microbatches - 1

    def note(self, work: _core.WorkItem, runner: StageRunner) -> None:
        """Writes the norm after the last backward of minibatch 0. Call it before an update takes the
        gradients."""
        if work.minibatch == 0 and work.microbatch == self._last_microbatch:
            leaves = runner.prepared.weights.own.leaves(runner.gradient_slot)
            norm = math.sqrt(figures_of([leaf.grad for leaf in leaves]).squared_norm)
            self._figures.write_gradient_norm(work.stage, norm / runner.loss_scale)


def make_first_gradients(folder: Path | None, num_microbatches: int) -> FirstGradients | None:
    """Makes the writer. Returns None without PIPEDREAM_CHECK=1 or without a folder. folder: the run's folder;
    None under torchrun, where nothing is compared."""
    if folder is None or not compares_gradients():
        return None
    return FirstGradients(FirstFigures(folder), num_microbatches)
