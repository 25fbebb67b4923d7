"""Callbacks follow a run while it goes on, and may steer it: `run(callbacks=[...])`.

    class Printer(pipedream.callbacks.Callback):
        def on_epoch(self, report):
            print(report.epoch, report.loss)
            return report.loss > 0.1          # False stops the run

Callbacks run in the process that called `run`. Under torchrun they run in the process of rank 0.
"""

from __future__ import annotations

from pipedream.callbacks.callback import (
    Callback,
    CheckpointReport,
    Decision,
    EndReport,
    EpochReport,
    EvaluationReport,
    MinibatchReport,
    StartReport,
)
from pipedream.callbacks.ema import EMA
from pipedream.callbacks.plateau import EarlyStopping, ReduceLROnPlateau
from pipedream.callbacks.tensorboard import TensorBoard

__all__ = [
    "EMA",
    "Callback",
    "CheckpointReport",
    "Decision",
    "EarlyStopping",
    "EndReport",
    "EpochReport",
    "EvaluationReport",
    "MinibatchReport",
    "ReduceLROnPlateau",
    "StartReport",
    "TensorBoard",
]
