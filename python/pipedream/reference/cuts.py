"""A tensor between two stages, and its gradient on the way back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipedream.model.boundary import map_tensors

__all__ = ["CutFunction", "cross"]

CutFunction = Callable[[int, int, int, Tensor], Tensor]


class _Cut(torch.autograd.Function):
    """A tensor between two stages, and its gradient on the way back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, sender: int, receiver: int, tensor_index: int, across_cut: CutFunction
    ) -> Tensor:
        ctx.back = (receiver, sender, tensor_index, across_cut)
        return across_cut(sender, receiver, tensor_index, tensor.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        receiver, sender, tensor_index, across_cut = ctx.back
        return across_cut(receiver, sender, tensor_index, gradients[0]), None, None, None, None


def cross(value: Any, sender: int, receiver: int, across_cut: CutFunction) -> Any:
    """The value with what its floating-point tensors become. All tensors count, in the structure's order."""
    indices = itertools.count()

    def cross(tensor: Tensor) -> Tensor:
        tensor_index = next(indices)
        if not tensor.is_floating_point():
            return tensor
        crossed: Tensor = _Cut.apply(tensor, sender, receiver, tensor_index, across_cut)  # type: ignore[no-untyped-call]
        return crossed

    return map_tensors(cross, value)
