"""Carries the residuals of the codec topk from one segment of a run to the next. A segment is the part of a
run that is trained with one memory plan (worker/segment.py).

topk sends only the largest elements of a tensor. The sender adds the unsent elements to the tensor's
residual, element by element. A set of residuals has one residual per tensor of an item. A channel has one or
more sets, and its items use the sets in turn. If a tensor is larger in the next segment, its new elements
begin with residual 0. Runs on the worker's compute thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pipedream import _core
from pipedream.links.channels import RunChannel

__all__ = ["Residuals", "by_name", "from_names", "keep_residuals", "restore_residuals"]

Residuals = dict[str, list[Tensor]]
"""Maps a channel's name to the channel's residuals, in host memory. The list has the tensors of the first
set, then those of the second, and so on."""


def keep_residuals(core: _core.Worker, rank: int, channels: Iterable[RunChannel]) -> Residuals:
    """Returns copies of the residuals of the channels on which this rank sends. First waits until all items
    of these channels are sent."""
    kept: Residuals = {}
    for channel in channels:
        if channel.sender == rank and channel.codec.startswith("topk"):
            core.wait_until_sent(channel.name)
            kept[channel.name] = [
                torch.empty_like(residual, device="cpu").copy_(residual)
                for residual in _residuals_of(core, channel.name)
            ]
    return kept


def by_name(residuals: Residuals) -> dict[str, Tensor]:
    """Returns each residual under its name in a snapshot, such as "activations of stage 0 to stage 1 / 0"."""
    return {
        f"{channel} / {index}": residual
        for channel, of_channel in residuals.items()
        for index, residual in enumerate(of_channel)
    }


def from_names(named: Mapping[str, Tensor]) -> Residuals:
    """Turns the result of by_name() back into residuals."""
    by_index: dict[str, dict[int, Tensor]] = {}
    for name, residual in named.items():
        channel, _, index = name.rpartition(" / ")
        by_index.setdefault(channel, {})[int(index)] = residual
    return {channel: [found[index] for index in sorted(found)] for channel, found in by_index.items()}


def restore_residuals(core: _core.Worker, kept: Mapping[str, Iterable[Tensor]]) -> None:
    """Copies the residuals into the channels of a sealed core. Call it before the first item."""
    on_device = False
    for name, of_channel in kept.items():
        for residual, before in zip(_residuals_of(core, name), of_channel, strict=True):
            residual[: before.numel()].copy_(before)
            on_device = residual.is_cuda
    if on_device:
        torch.cuda.synchronize()  # the channels read the residuals on their own streams


def _residuals_of(core: _core.Worker, channel: str) -> Iterator[Tensor]:
    for of_item in core.residuals(channel):
        yield from map(from_dlpack, of_item)
