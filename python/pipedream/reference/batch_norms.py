"""The running statistics of batch norms under microbatches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["MinibatchStatistics"]


class MinibatchStatistics:
    """Batch norms of a stage under microbatches: each microbatch is normalised by its own statistics, and the
    running ones take one step per minibatch, by the mean and variance over all its microbatches.

    Source: GPipe (NeurIPS'19), section 2.2.
    """

    def __init__(self, module: nn.Module) -> None:
        self._norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]
        self._inputs: dict[_BatchNorm, list[Tensor]] = {}

    @contextlib.contextmanager
    def microbatch(self, *, collect: bool) -> Iterator[None]:
        """Around a forward; collect: its inputs count."""
        tracking = [norm for norm in self._norms if norm.training and norm.track_running_stats]
        hooks = [norm.register_forward_pre_hook(self._collect) for norm in tracking if collect]
        for norm in tracking:
            norm.track_running_stats = False
        try:
            yield
        finally:
            for norm in tracking:
                norm.track_running_stats = True
            for hook in hooks:
                hook.remove()

    def _collect(self, norm: Any, arguments: tuple[Any, ...]) -> None:
        self._inputs.setdefault(norm, []).append(arguments[0].detach().clone())

    def update(self) -> None:
        for norm, inputs in self._inputs.items():
            assert norm.running_mean is not None
            momentum = norm.momentum
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked += 1
                if momentum is None:
                    momentum = 1 / float(norm.num_batches_tracked)
            # (samples, channels): positions of an image count as samples too.
            values = torch.cat([x.transpose(0, 1).flatten(1) for x in inputs], dim=1).t()
            with torch.no_grad():
                F.batch_norm(
                    values.to(norm.running_mean.dtype),
                    norm.running_mean,
                    norm.running_var,
                    training=True,
                    momentum=momentum or 0.0,
                )
        self._inputs.clear()
