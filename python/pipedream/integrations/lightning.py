"""Trains a LightningModule as a pipeline: call `fit` in place of `Trainer(...).fit(...)`.

    import lightning as L
    from pipedream.integrations import lightning as pipeline

    if __name__ == "__main__":
        pipeline.fit(module, loader, val_loader, workers=2, max_epochs=10)

Lightning's own Trainer runs its loops, callbacks, loggers and checkpoints. Its strategy, defined here,
computes no step. Workers have computed all steps up to the next point at which Lightning looks at the module.
The strategy then returns the steps' logged values, one step after another. Works with lightning and
pytorch_lightning. docs/lightning.md.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import pipedream
from pipedream.common.own_rank import is_rank_0
from pipedream.integrations.lightning_pipeline import Pipeline, Settings, shared
from pipedream.integrations.lightning_steps import Row

__all__ = ["HONOURED", "MEANINGLESS", "REFUSED", "fit"]

HONOURED = {
    *("accumulate_grad_batches", "callbacks", "check_val_every_n_epoch", "default_root_dir", "deterministic"),
    *("enable_autolog_hparams", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"),
    *("fast_dev_run", "gradient_clip_algorithm", "gradient_clip_val", "limit_train_batches"),
    *("limit_val_batches", "log_every_n_steps", "logger", "max_epochs", "max_steps", "min_epochs"),
    *("min_steps", "model_registry", "num_sanity_val_steps", "overfit_batches", "precision", "profiler"),
    *("reload_dataloaders_every_n_epochs", "val_check_interval"),
}
"""Arguments of Trainer that work as in Lightning."""

MEANINGLESS = {
    "accelerator": "workers compute on GPUs where there are any",
    "benchmark": "set torch.backends.cudnn.benchmark, which workers take over",
    "inference_mode": "a validation in the pipeline has no gradients anyway",
    "limit_test_batches": "fit tests nothing",
    "limit_predict_batches": "fit predicts nothing",
    "use_distributed_sampler": "every worker reads the same batches",
}
"""Arguments of Trainer that are accepted and change nothing, with the reason."""

REFUSED = {
    "barebones": "leave it out",
    "detect_anomaly": "call torch.autograd.set_detect_anomaly(True), which workers take over",
    "devices": "give workers=N",
    "max_time": "give max_epochs or max_steps",
    "num_nodes": "start the script with torchrun on each machine",
    "plugins": "leave them out",
    "strategy": "the pipeline is the strategy: leave it out",
    "sync_batchnorm": "batch norm counts whole batches anyway: leave it out",
}
"""Arguments of Trainer that raise an error, with the remedy."""

_OF_FIT = {
    "autocast": "precision",
    "data": "train_dataloaders",
    "loss_fn": "training_step",
    "lr_scheduler": "configure_optimizers",
    "max_grad_norm": "gradient_clip_val",
    "microbatches": "fit(microbatches=...)",
    "optimizer": "configure_optimizers",
    "schedule": "fit(schedule=...)",
    "state": "ckpt_path",
    "validation": "val_dataloaders",
}
"""Arguments of pipedream.run() that fit() sets itself, with their source."""

_PRECISIONS = {
    None: (None, "32-true"),
    32: (None, "32-true"),
    "32": (None, "32-true"),
    "32-true": (None, "32-true"),
    64: (None, "64-true"),
    "64": (None, "64-true"),
    "64-true": (None, "64-true"),
    "bf16": ("bfloat16", "32-true"),
    "bf16-mixed": ("bfloat16", "32-true"),
    16: ("float16", "32-true"),
    "16": ("float16", "32-true"),
    "16-mixed": ("float16", "32-true"),
}
"""Lightning's name of a precision -> (autocast of the run, precision of the caller's Trainer)."""

_HOOKS = {
    "backward": "pipedream makes the backward",
    "configure_gradient_clipping": "give gradient_clip_val",
    "on_after_backward": "gradients are in the workers",
    "on_after_batch_transfer": "do its work in training_step or in the data",
    "on_before_backward": "pipedream makes the backward",
    "on_before_batch_transfer": "do its work in training_step or in the data",
    "on_before_optimizer_step": "gradients are in the workers",
    "on_before_zero_grad": "gradients are in the workers",
    "optimizer_step": "give a scheduler with interval 'step'",
    "optimizer_zero_grad": "gradients are in the workers",
    "transfer_batch_to_device": "do its work in training_step or in the data",
}
"""Hooks that a pipeline could not call at the right time, with the remedy."""

_HOOKS_OF_MODULES = dict.fromkeys(
    (f"on_{kind}_batch_{end}" for kind in ("train", "validation") for end in ("start", "end")),
    "workers take their steps before it: do its work in the step",
)
"""Hooks that a callback may have and a module may not, because the module's steps would not see their
effect.
"""

_BETWEEN_BATCHES = "works on weights or gradients between batches: leave it out"
_CALLBACKS = {
    **dict.fromkeys(("BaseFinetuning", "BatchSizeFinder", "GradientAccumulationScheduler"), _BETWEEN_BATCHES),
    **dict.fromkeys(("LearningRateFinder", "ModelPruning"), _BETWEEN_BATCHES),
    **dict.fromkeys(("StochasticWeightAveraging", "WeightAveraging"), _BETWEEN_BATCHES),
    "ProgressBar": "shows batches late. Leave it out: pipedream shows epoch, loss and samples/s",
    "Timer": "stops between batches, when the workers are ahead: give max_epochs or max_steps",
}
"""Lightning's callbacks that are refused, by class, with the remedy."""


def fit(
    module: Any,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    *,
    datamodule: Any = None,
    ckpt_path: Any = None,
    plan: pipedream.Plan | None = None,
    workers: int = 2,
    bandwidth: str | float = "10Gbit/s",
    schedule: str = "flush",
    microbatches: int | None = None,
    run: Mapping[str, Any] | None = None,
    **trainer_arguments: Any,
) -> Any:
    """Trains `module` as a pipeline. Returns Lightning's Trainer, with its metrics, loggers and best
    checkpoint.

    module, train_dataloaders, val_dataloaders, datamodule, ckpt_path: as in Trainer.fit. A checkpoint of
        Lightning's own Trainer can be continued here, and the other way round.
    plan: how the module is cut. None: profiles the module, plans for `workers` on links of `bandwidth`, and
        prints the plan. Under torchrun the ranks are the workers.
    schedule: "flush" trains as Lightning does. docs/schedules.md has schedules that keep every worker busy.
    microbatches: number of pieces of a batch. None: up to four per stage, as many as divide the batch evenly;
        or one, if the loss of the first batch is not the mean over its pieces. With accumulate_grad_batches
        each batch is one piece.
    run: further arguments of pipedream.run by name, such as {"codec": "bf16"}. A weight_fn gets dicts with
        the piece as "batch".
    trainer_arguments: arguments of Trainer. docs/lightning.md lists those that work, those that change
        nothing, and those that are refused.

    Raises ValueError for arguments that a pipeline cannot honour, before a worker starts.
    """
    library = _library_of(module)
    _check_module(module, library)
    _check_arguments(trainer_arguments)
    _check_callbacks(trainer_arguments.get("callbacks"), library)
    for name in _OF_FIT.keys() & (run or {}).keys():
        raise ValueError(f"run has {name!r}, which fit gives itself: use {_OF_FIT[name]}")
    if plan is not None and plan.stages[-1].num_replicas > 1:
        raise ValueError(
            "the last stage of plan has replicas, of which none knows all that is logged: give one with a"
            " last stage of one worker"
        )
    autocast, precision = _PRECISIONS[trainer_arguments.pop("precision", None)]
    clip = trainer_arguments.pop("gradient_clip_val", None)
    if trainer_arguments.pop("gradient_clip_algorithm", None) not in (None, "norm"):
        raise ValueError("gradient_clip_algorithm is 'value': use 'norm'")
    settings = Settings(
        plan=plan,
        workers=workers,
        bandwidth=bandwidth,
        schedule=schedule,
        microbatches=microbatches,
        autocast=autocast,
        max_grad_norm=clip or None,
        progress=trainer_arguments.pop("enable_progress_bar", None) is not False,
        run=dict(run or {}),
    )
    for name in MEANINGLESS:
        trainer_arguments.pop(name, None)
    pipeline = Pipeline(settings)
    strategy = _strategy_class(library)(pipeline)
    trainer = library.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        precision=precision,
        enable_progress_bar=False,
        **{"num_sanity_val_steps": 0} | trainer_arguments,
    )
    trainer.fit(module, train_dataloaders, val_dataloaders, datamodule=datamodule, ckpt_path=ckpt_path)
    strategy.warn_of_a_late_stop()
    trainer.pipeline_result = pipeline.result
    return trainer


def _library_of(module: Any) -> Any:
    """Returns lightning.pytorch or pytorch_lightning, whichever the module's class is from."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        library = sys.modules.get(name)
        if library is not None and isinstance(module, library.LightningModule):
            return library
    raise TypeError(
        f"module is a {type(module).__name__}: give a LightningModule, of lightning or pytorch_lightning"
    )


def _check_module(module: Any, library: Any) -> None:
    name, base = type(module).__name__, library.LightningModule
    if not module.automatic_optimization:
        raise ValueError(
            f"{name} has automatic_optimization = False: pipedream makes the steps of its optimizer"
        )
    for hook, remedy in (_HOOKS | _HOOKS_OF_MODULES).items():
        if getattr(type(module), hook) is not getattr(base, hook):
            raise ValueError(f"{name}.{hook} would not be called in a pipeline: {remedy}")


def _check_arguments(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in REFUSED and value not in (None, False):
            raise ValueError(f"{name} is {value!r}, which a pipeline does not honour: {REFUSED[name]}")
        if name not in HONOURED | REFUSED.keys() | MEANINGLESS.keys():
            raise TypeError(f"fit() got {name!r}, which is no argument of it or of lightning.Trainer")
    precision = given.get("precision")
    if precision not in _PRECISIONS:
        known = ", ".join(repr(name) for name in _PRECISIONS if isinstance(name, str))
        raise ValueError(f"precision is {precision!r}: use one of {known}")
    every = given.get("val_check_interval")
    if not isinstance(every, (int, float, type(None))):
        raise ValueError(f"val_check_interval is {every!r}: use a share of the epoch or a number of batches")


def _check_callbacks(given: Any, library: Any) -> None:
    if given is None:
        return
    for callback in given if isinstance(given, (list, tuple)) else [given]:
        kind = type(callback)
        for base in kind.__mro__:
            if base.__name__ in _CALLBACKS:
                raise ValueError(f"the callback {kind.__name__} {_CALLBACKS[base.__name__]}")
        for hook in _HOOKS.keys() & vars(library.Callback).keys():
            if getattr(kind, hook) is not getattr(library.Callback, hook):
                raise ValueError(
                    f"{kind.__name__}.{hook} would not be called in a pipeline: leave the callback out"
                )
        if getattr(callback, "_train_time_interval", None) is not None:
            raise ValueError(
                "ModelCheckpoint has train_time_interval: give every_n_train_steps or every_n_epochs"
            )


class _Place:
    """The object that Lightning's loops get in place of a batch. The batch itself is in the workers."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"<batch {self.number}, which the workers have read>"


class _Places:
    """The object that Lightning's loops get in place of a loader."""

    def __init__(self, loader: Any, more: Any) -> None:
        """more: for a loader without a length, tells whether there is a batch of this number."""
        self._loader, self._more = loader, more
        self.sampler = getattr(loader, "sampler", None)
        self.batch_sampler = getattr(loader, "batch_sampler", None)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[_Place]:
        try:
            length: float = len(self._loader)
        except (TypeError, NotImplementedError):
            length = math.inf
        number = 0
        while number < length and (length < math.inf or self._more(number)):
            yield _Place(number)
            number += 1


class _PipelineStrategy:
    """Returns to Lightning what the workers of a pipeline computed. A base class beside Lightning's
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
        """Lightning's own strategy, the next base class."""
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
        return number < (self.pipeline.num_batches or 0)

    def _has_val_batch(self, number: int) -> bool:
        return self.pipeline.has_val_row

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
        """Validates with the whole module in this process, if the pipeline evaluated nothing, as before the
        first batch.
        """
        if place.number == 0:
            self._val_batches = iter(self.pipeline.val_loader)
        return self._base.validation_step(next(self._val_batches), *args, **kwargs)

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
        """Warns, once, if workers have trained on batches after a callback stopped the training."""
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
    """Adds the states of other updates to a metric."""
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
