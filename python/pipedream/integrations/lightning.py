"""Trains a LightningModule as a pipeline: call `fit` in place of `Trainer(...).fit(...)`.

    import lightning as L
    from pipedream.integrations import lightning as pipeline

    if __name__ == "__main__":
        pipeline.fit(module, loader, val_loader, workers=2, max_epochs=10)

Lightning's own Trainer runs its loops, callbacks, loggers and checkpoints, with the strategy that this module
defines. When Lightning asks for a step, workers compute all steps up to the next point at which Lightning
reads the module. The strategy then gives Lightning the logged values of one step after another. The values of
one step are a row. Works with lightning and pytorch_lightning. docs/lightning.md has more.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import pipedream
from pipedream.common.own_rank import is_rank_0
from pipedream.data.stream import num_minibatches_of
from pipedream.integrations.asked_plan import AskedPlan
from pipedream.integrations.lightning_checks import (
    DEVICES,
    HONOURED,
    MEANINGLESS,
    ON_ONE_DEVICE,
    PRECISIONS,
    REFUSED,
    check_arguments,
    check_callbacks,
    check_module,
)
from pipedream.integrations.lightning_pipeline import Pipeline, shared
from pipedream.integrations.lightning_steps import Row
from pipedream.worker.devices import device_wanted

__all__ = ["HONOURED", "MEANINGLESS", "REFUSED", "fit"]

_OF_FIT = {
    "autocast": "precision",
    "callbacks": "fit(callbacks=...)",
    "checkpoints": "ModelCheckpoint",
    "data": "train_dataloaders",
    "epochs": "max_epochs",
    "gather": "the module of rank 0",
    "loss_fn": "training_step",
    "lr_scheduler": "configure_optimizers",
    "max_grad_norm": "gradient_clip_val",
    "microbatches": "fit(microbatches=...)",
    "on_epoch_end": "fit(callbacks=...)",
    "optimizer": "configure_optimizers",
    "schedule": "fit(schedule=...)",
    "state": "ckpt_path",
    "validation": "val_dataloaders",
}
"""Arguments of pipedream.run() that fit() sets itself, each with the place where the user gives the value
instead.
"""


def fit(
    module: Any,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    *,
    datamodule: Any = None,
    ckpt_path: Any = None,
    plan: pipedream.Plan | str | os.PathLike[str] | None = None,
    workers: int = 2,
    bandwidth: str | float = "10Gbit/s",
    schedule: str = "flush",
    microbatches: int | None = None,
    run: Mapping[str, Any] | None = None,
    **trainer_arguments: Any,
) -> Any:
    """Trains `module` as a pipeline. Returns Lightning's Trainer, with its metrics, loggers and best
    checkpoint.

    module, train_dataloaders, val_dataloaders, datamodule, ckpt_path: as in Trainer.fit. ckpt_path may be a
        checkpoint of fit() or of Lightning's own Trainer, which can also continue a checkpoint of fit().
    plan: a Plan, the path of a plan's file, or the replicas of every stage, such as "1-1" for two stages.
        None: the planner chooses the stages. For replicas and None the module is profiled and the plan is
        printed. The last stage must have one replica.
    workers: the most workers that the planner may use. Under torchrun the ranks are the workers.
    bandwidth: the bandwidth of the link between two workers, for the planner.
    schedule: "flush" trains as Lightning does. docs/schedules.md has schedules that keep every worker busy.
    microbatches: the number of pieces into which a batch is cut. None: as many as divide the batch evenly, up
        to four per stage, or per worker if the planner chooses the stages. But None means one piece if there
        is one stage, if the module has batch norm, if training_step changes a buffer or fails with a piece,
        or if the loss of the first batch is not the mean over its pieces. With accumulate_grad_batches each
        batch is one piece. With schedule="auto" the planner chooses the number.
    run: further arguments of pipedream.run by name, such as {"codec": "bf16"}. A "weight_fn" is called with a
        dict whose "batch" is the piece. It returns how much the piece counts.
    trainer_arguments: arguments of Trainer. docs/lightning.md lists which arguments work, which change
        nothing, and which are refused.

    Raises ValueError for arguments that a pipeline cannot honour, before a worker starts, and TypeError for
    unknown arguments and for a module that is no LightningModule.
    """
    library = _library_of(module)
    check_module(module, library)
    check_arguments(trainer_arguments)
    check_callbacks(trainer_arguments.get("callbacks"), library)
    for name in _OF_FIT.keys() & (run or {}).keys():
        raise ValueError(f"run has {name!r}, which fit gives itself: use {_OF_FIT[name]}")
    asked_plan = AskedPlan.of(plan, workers, bandwidth)
    if asked_plan.replicas_of_last_stage > 1:
        raise ValueError(
            "the last stage of plan has replicas, of which none knows all that is logged: give one with a"
            " last stage of one worker"
        )
    autocast, precision = PRECISIONS[trainer_arguments.pop("precision", None)]
    clip = trainer_arguments.pop("gradient_clip_val", None)
    if trainer_arguments.pop("gradient_clip_algorithm", None) not in (None, "norm"):
        raise ValueError("gradient_clip_algorithm is 'value': use 'norm'")
    run_arguments = {
        "schedule": schedule,
        "autocast": autocast,
        "max_grad_norm": clip or None,
        "progress": trainer_arguments.pop("enable_progress_bar", None) is not False,
        **(run or {}),
    }
    device = DEVICES[trainer_arguments.pop("accelerator", None)]
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("accelerator is 'gpu', and torch finds no GPU here: use 'cpu' or 'auto'")
    for name in (*MEANINGLESS, *ON_ONE_DEVICE):
        trainer_arguments.pop(name, None)
    check = functools.partial(check_callbacks, library=library)
    pipeline = Pipeline(asked_plan, microbatches, run_arguments, check)
    strategy = _strategy_class(library)(pipeline)
    trainer = library.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        precision=precision,
        enable_progress_bar=False,
        **{"num_sanity_val_steps": 0} | trainer_arguments,
    )
    with device_wanted(device):
        trainer.fit(module, train_dataloaders, val_dataloaders, datamodule=datamodule, ckpt_path=ckpt_path)
    if pipeline.is_interrupted:  # Ctrl-C came after Lightning had asked for the last steps
        raise KeyboardInterrupt
    strategy.warn_of_a_late_stop()
    trainer.pipeline_result = pipeline.result
    return trainer


def _library_of(module: Any) -> Any:
    """Returns the library whose LightningModule the module is: lightning.pytorch or pytorch_lightning."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        library = sys.modules.get(name)
        if library is not None and isinstance(module, library.LightningModule):
            return library
    raise TypeError(
        f"module is a {type(module).__name__}: give a LightningModule, of lightning or pytorch_lightning"
    )


class _Place:
    """Takes the place of a batch in Lightning's loops. The workers have the batch itself."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"<batch {self.number}, which the workers have read>"


class _Places:
    """Takes the place of a loader in Lightning's loops."""

    def __init__(self, loader: Any, more: Any) -> None:
        """more: returns whether there is a batch of a given number. It is called only if the loader has no
        length."""
        self._loader, self._more = loader, more
        self.sampler = getattr(loader, "sampler", None)
        self.batch_sampler = getattr(loader, "batch_sampler", None)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[_Place]:
        length = num_minibatches_of(self._loader, 1)
        number = 0
        while self._more(number) if length is None else number < length:
            yield _Place(number)
            number += 1


class _PipelineStrategy:
    """Gives Lightning the rows that workers have computed. _strategy_class() combines it with Lightning's
    SingleDeviceStrategy.
    """

    lightning_module: Any
    strategy_name = "pipedream"

    def __init__(self, pipeline: Pipeline) -> None:
        self._base.__init__(device="cpu")
        rank_zero = importlib.import_module("lightning_utilities.core.rank_zero")
        rank_zero.rank_zero_only.rank = int(os.environ.get("RANK", "0"))  # only rank 0's loggers write
        self.pipeline = pipeline
        self._has_warned = False
        self._val_batches: Any = None

    @property
    def _base(self) -> Any:
        """Lightning's SingleDeviceStrategy, which is the next base class."""
        return super()

    @property
    def is_global_zero(self) -> bool:
        return is_rank_0()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return shared(obj)

    # Data.

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self.lightning_module.trainer
        if trainer.state.fn != "fit":
            return dataloader
        if trainer.training:
            self.pipeline.train_loader = dataloader
            return _Places(dataloader, self._has_train_batch)
        self.pipeline.val_loader = dataloader
        return _Places(dataloader, self._has_val_batch)

    def _has_train_batch(self, number: int) -> bool:
        if number == 0:
            return True
        if number == 1:
            self.pipeline.ensure_rows(self.lightning_module.trainer, 0)
        # After Ctrl-C Lightning must get one more batch, because the first batch without a row raises
        # KeyboardInterrupt.
        num_batches = self.pipeline.num_batches
        return self.pipeline.is_interrupted or num_batches is None or number < num_batches

    def _has_val_batch(self, number: int) -> bool:
        return number < self.pipeline.num_val_batches

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, _Place):
            return batch
        return self._base.batch_to_device(batch, device, dataloader_idx)

    # Steps.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        trainer = self.lightning_module.trainer
        row = self.pipeline.train_row(trainer, trainer.fit_loop.epoch_loop.batch_idx)
        self._log(row, is_training=True)
        return torch.tensor(row.loss, dtype=torch.float64)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(args[0], _Place):
            return self._base.validation_step(*args, **kwargs)
        row = self.pipeline.val_row()
        if row is None:
            return self._validate_here(*args, **kwargs)
        self._log(row, is_training=False)
        return None

    def _validate_here(self, place: _Place, *args: Any, **kwargs: Any) -> Any:
        """Validates with the whole module in this process. This is needed if the pipeline has evaluated
        nothing, for example before the first batch.
        """
        if place.number == 0:
            self._val_batches = iter(self.pipeline.val_loader)
        trainer = self.lightning_module.trainer
        batch = trainer.precision_plugin.convert_input(next(self._val_batches))
        trainer._results.batch = batch  # self.log reads the batch's size from it
        return self._base.validation_step(batch, *args, **kwargs)

    def _log(self, row: Row, *, is_training: bool) -> None:
        module, steps = self.lightning_module, self.pipeline.steps
        assert steps is not None
        layout = steps.layouts[is_training]
        for states in row.states:
            for name, (num_updates, parts) in states.items():
                _add_to_metric(module.get_submodule(name), num_updates, parts)
        for name, (value, batch_size) in row.values.items():
            call = layout.calls[name]
            logged: Any = torch.tensor(value, dtype=call.dtype)
            if call.metric is not None:
                metric = module.get_submodule(call.metric)
                metric._forward_cache, logged = logged, metric
            module.log(name, logged, batch_size=batch_size, **call.options)

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        return closure()

    # Checkpoints.

    def optimizer_state(self, optimizer: Any) -> Any:
        trainer = self.lightning_module.trainer
        self.pipeline.fill(trainer.optimizers[0], Path(trainer.default_root_dir))
        return self._base.optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if num_ahead := self.pipeline.num_batches_ahead:
            trainer = self.lightning_module.trainer
            if not (trainer.should_stop and trainer.fit_loop._can_stop_early):
                raise ValueError(
                    f"a checkpoint was asked for at step {trainer.global_step}, whose weights are gone: the"
                    f" workers are {num_ahead} batches ahead: use ModelCheckpoint(every_n_train_steps=...)"
                )
            self.warn_of_a_late_stop()
        if self.is_global_zero:
            self._base.save_checkpoint(checkpoint, filepath, storage_options)

    def warn_of_a_late_stop(self) -> None:
        """Warns once if the workers have trained on batches after the point at which a callback stopped the
        training."""
        num_ahead = self.pipeline.num_batches_ahead
        if num_ahead and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"trainer.should_stop was set between batches: the weights are those of {num_ahead} batches"
                " past the stop: set it at the end of an epoch or a validation, or give max_steps",
                stacklevel=2,
            )

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self._base.remove_checkpoint(filepath)


@functools.cache
def _strategy_class(library: Any) -> Any:
    return type("PipelineStrategy", (_PipelineStrategy, library.strategies.SingleDeviceStrategy), {})


def _add_to_metric(metric: Any, num_updates: int, parts: Mapping[str, Any]) -> None:
    """Adds states, which a worker's updates have made, to a metric of torchmetrics. parts: values by the
    state's name. Raises ValueError if such states cannot be joined."""
    before = metric._update_count
    for state, value in parts.items():
        mine, reduction = getattr(metric, state), metric._reductions[state]
        kind = getattr(reduction, "__name__", "")
        if kind == "dim_zero_sum":
            joined = mine + value
        elif kind == "dim_zero_mean":
            joined = (mine * before + value * num_updates) / max(before + num_updates, 1)
        elif kind in ("dim_zero_max", "dim_zero_min"):
            joined = torch.maximum(mine, value) if kind == "dim_zero_max" else torch.minimum(mine, value)
        else:
            raise ValueError(
                f"{type(metric).__name__}.{state} cannot be joined across steps ({kind or reduction})"
            )
        setattr(metric, state, joined)
    metric._update_count = before + num_updates
    metric._computed = None
