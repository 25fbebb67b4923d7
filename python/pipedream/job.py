"""What is to be trained and where this process stands in it. Plain values; any thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .plan import Plan
from .rendezvous import Rendezvous
from .status import StatusBoard

__all__ = ["JobOptions", "TorchSettings", "WorkerPlace", "check_plan_is_built"]


@dataclass(frozen=True)
class JobOptions:
    """What to train and how: equal at all workers but for what rank 0 overrides (plan, base_seed)."""

    plan: Plan
    loss_fn: Callable[[Any, Any], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    schedule: str
    epochs: int
    seed: int | None
    transport: str
    peer_timeout_s: float
    on_nonfinite: str
    gather: str
    progress: bool
    num_threads: int
    """Of torch, per worker."""


@dataclass(frozen=True)
class WorkerPlace:
    """Where this worker stands among the others."""

    rank: int
    world_size: int
    local_rank: int
    run_id: int
    """64 random bits, so that no other run has them; rank 0's are everybody's."""
    incarnation: int
    """How often the run was restarted."""
    rendezvous: Rendezvous
    board: StatusBoard | None


@dataclass(frozen=True)
class TorchSettings:
    """The switches of torch that decide what a model computes: local workers take the caller's."""

    default_dtype: torch.dtype
    deterministic: bool
    deterministic_warn_only: bool
    matmul_precision: str
    cudnn_benchmark: bool
    cudnn_deterministic: bool

    @classmethod
    def capture(cls) -> TorchSettings:
        return cls(
            default_dtype=torch.get_default_dtype(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            matmul_precision=torch.get_float32_matmul_precision(),
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            cudnn_deterministic=torch.backends.cudnn.deterministic,
        )

    def apply(self) -> None:
        torch.set_default_dtype(self.default_dtype)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warn_only)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic


def check_plan_is_built(plan: Plan) -> None:
    """Raises ValueError for a plan that needs what is not built yet."""
    for stage_index, stage in enumerate(plan.stages):
        if stage.num_replicas > 1:
            raise ValueError(
                f"stage {stage_index} has {stage.num_replicas} replicas: replicated stages are not built yet;"
                " use partition(..., straight=True)"
            )
