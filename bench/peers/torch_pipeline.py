"""Calls Schedule1F1B of torch.distributed.pipelining as a training script would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def step_of_1f1b(
    module: nn.Module, loss_fn: Callable[..., Tensor], make_optimizer: Callable[..., Any], microbatches: int
) -> Callable[[Tensor, Tensor], None]:
    """Returns a function that trains on (inputs, targets), which all ranks must call. `module` has this
    rank's layers.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    optimizer = make_optimizer(module.parameters())
    stage = PipelineStage(module, rank, num_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_fn)

    def step(inputs: Tensor, targets: Tensor) -> None:
        if rank == 0:
            schedule.step(inputs)
        elif rank == num_ranks - 1:
            losses: list[Tensor] = []
            schedule.step(target=targets, losses=losses)
            torch.stack(losses).mean().item()
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    return step
