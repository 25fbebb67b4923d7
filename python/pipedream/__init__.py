"""PipeDream: pipeline-parallel training of PyTorch models.

    profile = pipedream.profile(model, batches, loss_fn)
    plan = pipedream.partition(profile, num_workers=4, bandwidth="10Gbit/s", straight=True)
    result = pipedream.run(model, plan, data=batches, loss_fn=loss_fn, optimizer=make_optimizer)

Names are loaded at their first use (PEP 562), so that what needs no torch, such as planning, imports none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import optim
    from .errors import DataMismatch, FileFormatError, NonFiniteLoss, PeerLost, PipelineError, WorkerLost
    from .layer_profile import LayerProfile, Profile
    from .partitioner import partition
    from .plan import Plan, Stage
    from .profiler import profile
    from .result import RunResult
    from .runner import run

__version__ = "0.1.0"

__all__ = [
    "DataMismatch",
    "FileFormatError",
    "LayerProfile",
    "NonFiniteLoss",
    "PeerLost",
    "PipelineError",
    "Plan",
    "Profile",
    "RunResult",
    "Stage",
    "WorkerLost",
    "__version__",
    "optim",
    "partition",
    "profile",
    "run",
]

# Public name -> module that has it; the modules of profile, run, RunResult and optim may import torch.
_MODULES = {
    "DataMismatch": "errors",
    "FileFormatError": "errors",
    "LayerProfile": "layer_profile",
    "NonFiniteLoss": "errors",
    "PeerLost": "errors",
    "PipelineError": "errors",
    "Plan": "plan",
    "Profile": "layer_profile",
    "RunResult": "result",
    "Stage": "plan",
    "WorkerLost": "errors",
    "partition": "partitioner",
    "profile": "profiler",
    "run": "runner",
}


def __getattr__(name: str) -> Any:
    if name == "optim":
        return importlib.import_module(".optim", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
