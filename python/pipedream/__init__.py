"""PipeDream: pipeline-parallel training of PyTorch models.

    profile = pipedream.profile(model, batches, loss_fn)
    plan = pipedream.partition(profile, num_workers=4, bandwidth="10Gbit/s", straight=True, schedule="auto")
    arguments = {"data": batches, "loss_fn": loss_fn, "optimizer": make_optimizer, "schedule": "auto"}
    result = pipedream.run(model, plan, **arguments)

Names are loaded at their first use (PEP 562). Parts that need no torch, such as planning, do not import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipedream import callbacks, optim
    from pipedream.checkpoint.checkpoints import Checkpoints
    from pipedream.checkpoint.whole_model import load_checkpoint
    from pipedream.common.errors import (
        DataMismatch,
        FileFormatError,
        NonFiniteLoss,
        PeerLost,
        PipelineError,
        WorkerLost,
    )
    from pipedream.common.microbatches import Microbatches
    from pipedream.launch.calibration import calibrate
    from pipedream.launch.link_profiling import profile_links
    from pipedream.launch.profiling import profile
    from pipedream.launch.runner import run
    from pipedream.model.initial_weights import materialise
    from pipedream.model.stand_ins import parameters_on_meta
    from pipedream.model.validation import Validation
    from pipedream.planning.layer_profile import LayerProfile, Profile
    from pipedream.planning.link_profile import LinkProfile, MeasuredLink
    from pipedream.planning.partitioner import partition
    from pipedream.planning.plan import Plan, Stage
    from pipedream.planning.program import Program
    from pipedream.report.result import RunResult

__version__ = "0.1.0"

__all__ = [
    "Checkpoints",
    "DataMismatch",
    "FileFormatError",
    "LayerProfile",
    "LinkProfile",
    "MeasuredLink",
    "Microbatches",
    "NonFiniteLoss",
    "PeerLost",
    "PipelineError",
    "Plan",
    "Profile",
    "Program",
    "RunResult",
    "Stage",
    "Validation",
    "WorkerLost",
    "__version__",
    "calibrate",
    "callbacks",
    "load_checkpoint",
    "materialise",
    "optim",
    "parameters_on_meta",
    "partition",
    "profile",
    "profile_links",
    "run",
]

# Public name -> its module, which is imported when the name is first used. Some of them import torch.
_MODULES = {
    "Checkpoints": "checkpoint.checkpoints",
    "DataMismatch": "common.errors",
    "FileFormatError": "common.errors",
    "LayerProfile": "planning.layer_profile",
    "LinkProfile": "planning.link_profile",
    "MeasuredLink": "planning.link_profile",
    "Microbatches": "common.microbatches",
    "NonFiniteLoss": "common.errors",
    "PeerLost": "common.errors",
    "PipelineError": "common.errors",
    "Plan": "planning.plan",
    "Profile": "planning.layer_profile",
    "Program": "planning.program",
    "RunResult": "report.result",
    "Stage": "planning.plan",
    "Validation": "model.validation",
    "WorkerLost": "common.errors",
    "calibrate": "launch.calibration",
    "load_checkpoint": "checkpoint.whole_model",
    "materialise": "model.initial_weights",
    "parameters_on_meta": "model.stand_ins",
    "partition": "planning.partitioner",
    "profile": "launch.profiling",
    "profile_links": "launch.link_profiling",
    "run": "launch.runner",
}


def __getattr__(name: str) -> Any:
    if name in ("callbacks", "optim"):
        return importlib.import_module(f".{name}", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value  # the next use does not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
