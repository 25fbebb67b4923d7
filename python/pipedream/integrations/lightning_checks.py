"""Lists the arguments of Lightning's Trainer that fit() (lightning.py) supports, ignores or refuses, and the
hooks and callbacks that it refuses. Tests compare the tables with the installed Lightning. Imports no
Lightning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "DEVICES",
    "HONOURED",
    "MEANINGLESS",
    "ON_ONE_DEVICE",
    "PRECISIONS",
    "REFUSED",
    "REFUSED_HOOKS",
    "check_arguments",
    "check_callbacks",
    "check_module",
]

HONOURED = {
    *("accelerator", "accumulate_grad_batches", "callbacks", "check_val_every_n_epoch"),
    *("default_root_dir", "deterministic"),
    *("enable_autolog_hparams", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"),
    *("fast_dev_run", "gradient_clip_algorithm", "gradient_clip_val", "limit_train_batches"),
    *("limit_val_batches", "log_every_n_steps", "logger", "max_epochs", "max_steps", "min_epochs"),
    *("min_steps", "model_registry", "num_sanity_val_steps", "overfit_batches", "precision", "profiler"),
    *("reload_dataloaders_every_n_epochs", "val_check_interval"),
}
"""Arguments of Trainer that work as in Lightning, some of them with fewer values."""

MEANINGLESS = {
    "benchmark": "set torch.backends.cudnn.benchmark, which workers take over",
    "inference_mode": "a validation in the pipeline has no gradients anyway",
    "limit_test_batches": "fit tests nothing",
    "limit_predict_batches": "fit predicts nothing",
    "use_distributed_sampler": "every worker reads the same batches",
}
"""Arguments of Trainer that are accepted and change nothing. Each has the reason."""

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
"""Arguments of Trainer that raise an error, unless the value is None, False or in ON_ONE_DEVICE. Each has the
remedy."""

ON_ONE_DEVICE: dict[str, tuple[Any, ...]] = {
    "devices": (1, "1", [0], "auto"),
    "num_nodes": (1,),
    "plugins": ([],),
    "strategy": ("auto",),
}
"""Values of refused arguments that are accepted, because a script for one device may give them."""

DEVICES = {None: None, "auto": None, "cpu": "host", "gpu": "cuda", "cuda": "cuda"}
"""Lightning's name of an accelerator -> the kind of device on which workers compute. None lets the workers
choose: GPUs if there are any."""

PRECISIONS = {
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
"""Lightning's name of a precision -> (autocast of the run, precision that Lightning's Trainer gets)."""

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
"""Hooks of modules and callbacks that a pipeline could not call at the right time. Each has the remedy."""

REFUSED_HOOKS = {
    **_HOOKS,
    **dict.fromkeys(
        (f"on_{kind}_batch_{end}" for kind in ("train", "validation") for end in ("start", "end")),
        "workers take their steps before it: do its work in the step",
    ),
    **dict.fromkeys(
        (f"on_validation_model_{what}" for what in ("eval", "train", "zero_grad")),
        "workers evaluate, and put all of the module in eval mode: leave it out",
    ),
}
"""All hooks of a module that are refused, each with the remedy. The workers' steps would not see what such a
hook changes."""

_BETWEEN_BATCHES = "works on weights or gradients between batches: leave it out"
_CALLBACKS = {
    **dict.fromkeys(("BaseFinetuning", "BatchSizeFinder", "GradientAccumulationScheduler"), _BETWEEN_BATCHES),
    **dict.fromkeys(("LearningRateFinder", "ModelPruning"), _BETWEEN_BATCHES),
    **dict.fromkeys(("StochasticWeightAveraging", "WeightAveraging"), _BETWEEN_BATCHES),
    "ProgressBar": "shows batches late. Leave it out: pipedream shows epoch, loss and samples/s",
    "Timer": "stops between batches, when the workers are ahead: give max_epochs or max_steps",
}
"""Lightning's callbacks that are refused. Each has the reason or the remedy."""


def check_module(module: Any, library: Any) -> None:
    name, base = type(module).__name__, library.LightningModule
    if not module.automatic_optimization:
        raise ValueError(
            f"{name} has automatic_optimization = False: pipedream makes the steps of its optimizer"
        )
    for hook, remedy in REFUSED_HOOKS.items():
        if getattr(type(module), hook) is not getattr(base, hook):
            raise ValueError(f"{name}.{hook} would not be called in a pipeline: {remedy}")


def check_arguments(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in REFUSED and value not in (None, False, *ON_ONE_DEVICE.get(name, ())):
            raise ValueError(f"{name} is {value!r}, which a pipeline does not honour: {REFUSED[name]}")
        if name not in HONOURED | REFUSED.keys() | MEANINGLESS.keys():
            raise TypeError(f"fit() got {name!r}, which is no argument of it or of lightning.Trainer")
    accelerator = given.get("accelerator")
    if not isinstance(accelerator, (str, type(None))) or accelerator not in DEVICES:
        raise ValueError(f"accelerator is {accelerator!r}: use 'cpu', 'gpu' or 'auto'")
    precision = given.get("precision")
    if precision not in PRECISIONS:
        known = ", ".join(repr(name) for name in PRECISIONS if isinstance(name, str))
        raise ValueError(f"precision is {precision!r}: use one of {known}")
    every = given.get("val_check_interval")
    if not isinstance(every, (int, float, type(None))):
        raise ValueError(f"val_check_interval is {every!r}: use a share of the epoch or a number of batches")


def check_callbacks(given: Any, library: Any) -> None:
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
