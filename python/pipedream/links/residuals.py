"""The residuals of topk: what it has left out of the tensors sent so far. They go from one segment of a run
to the next (worker/segment.py).

The sender keeps residuals element by element, for each tensor of an item. A channel has one or more sets of
residuals, which its items take in turn. If a tensor grows, its additional elements begin without a
residual. On the worker's compute thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pipedream import _core
from pipedream.links.channels import RunChannel

__all__ = ["Residuals", "keep_residuals", "restore_residuals"]

Residuals = dict[str, list[Tensor]]
"""By channel, in host memory: of the items in turn, each tensor's."""


def keep_residuals(core: _core.Worker, rank: int, channels: Iterable[RunChannel]) -> Residuals:
    """Keeps the residuals of the channels that this rank sends by; waits until all has left."""
    kept: Residuals = {}
    for channel in channels:
        if channel.sender == rank and channel.codec.startswith("topk"):
            core.wait_until_sent(channel.name)
            kept[channel.name] = [
                torch.empty_like(residual, device="cpu").copy_(residual)
                for residual in _residuals_of(core, channel.name)
            ]
    return kept


def restore_residuals(core: _core.Worker, kept: Mapping[str, Iterable[Tensor]]) -> None:
    """Puts the residuals into the channels of a sealed core, before the first item."""
    on_device = False
    for name, of_channel in kept.items():
        for residual, before in zip(_residuals_of(core, name), of_channel, strict=True):
            residual[: before.numel()].copy_(before)
            on_device = residual.is_cuda
    if on_device:
        torch.cuda.synchronize()  # the channels have streams of their own


def _residuals_of(core: _core.Worker, channel: str) -> Iterator[Tensor]:
    for of_item in core.residuals(channel):
        yield from map(from_dlpack, of_item)
