"""TensorSpec is the plan of one tensor that is sent to another worker.

Tensors are sent as contiguous memory. A tensor that is not row-major (channels_last, a transposed one) is
sent in the order of its memory, without a copy. The receiver restores its strides. Pure; any thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipedream import _core
from pipedream.model.layers import dtype_name

__all__ = ["DimOrder", "TensorSpec", "as_sent", "as_used", "order_in_memory", "whole"]

_WIRE_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _core.DTYPES}


DimOrder = tuple[int, ...]
"""The dimensions from the slowest to the fastest in memory. () is row-major."""


@dataclass(frozen=True)
class TensorSpec:
    """The plan of one tensor of a boundary: dtype and shape of the largest tensor that may cross."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    """Whether a gradient is sent back for it."""
    others: tuple[tuple[int, ...], ...] = ()
    """Shapes that it may have instead of `shape`."""
    order: DimOrder = ()
    """The order of dimensions in the memory of the first minibatch's tensor. The tensors of later minibatches
    are sent in this order.
    """

    @classmethod
    def of(cls, tensor: Tensor, place: str) -> TensorSpec:
        """Makes the spec of a tensor. Raises ValueError, naming the place, for a tensor that cannot cross."""
        if tensor.layout != torch.strided:
            raise ValueError(f"{place} is a {tensor.layout} tensor: only dense tensors can cross a cut")
        if dtype_name(tensor.dtype) not in _WIRE_DTYPES:
            raise ValueError(
                f"{place} has dtype {dtype_name(tensor.dtype)}, which cannot cross a cut: cast it first"
            )
        most = _core.NUM_DIMS_MAX
        if tensor.ndim > most:
            raise ValueError(
                f"{place} has {tensor.ndim} dimensions: at most {most} can cross a cut, so reshape it"
            )
        order = order_in_memory(tensor.shape, tensor.stride())
        return cls(tensor.dtype, tuple(tensor.shape), tensor.requires_grad, order=order)

    @property
    def num_bytes(self) -> int:
        return max(map(math.prod, (self.shape, *self.others))) * self.dtype.itemsize

    def is_exceeded_by(self, shape: Sequence[int]) -> bool:
        """Whether `shape` has more elements, or a larger first dimension, than each planned shape. The shapes
        have the same number of dimensions.
        """
        return all(
            math.prod(shape) > math.prod(planned) or (bool(shape) and shape[0] > planned[0])
            for planned in (self.shape, *self.others)
        )

    def or_as(self, other: TensorSpec) -> TensorSpec:
        """Returns a spec with room for the tensors of either spec, `self` or `other`."""
        return replace(
            self,
            others=(*self.others, other.shape, *other.others),
            requires_grad=self.requires_grad or other.requires_grad,
        )

    def misfit(self, tensor: Tensor) -> str | None:
        """Returns why the tensor does not fit the plan; None if it fits."""
        shape = tuple(tensor.shape)
        if tensor.dtype != self.dtype:
            return (
                f"is {dtype_name(tensor.dtype)}, planned {dtype_name(self.dtype)}: use one dtype in all "
                f"minibatches"
            )
        if len(shape) != len(self.shape):
            return (
                f"has shape {shape} of rank {len(shape)}, planned {self.shape} of rank {len(self.shape)}:"
                f" use one rank in all minibatches"
            )
        if self.is_exceeded_by(shape):
            return (
                f"has shape {shape}, larger than the planned {self.shape}: name the largest minibatch before"
                f" the run, plan = plan.fitting(batch), and memory is planned for it"
            )
        return None

    # A tensor of the first minibatch may be None in a later one. Then a tensor of size 0 in every dimension
    # is sent.

    def for_none(self, device: torch.device) -> Tensor | None:
        """Returns the tensor that stands for None; None if the planned shape allows no such tensor."""
        can = any(self.shape)
        return torch.empty((0,) * len(self.shape), dtype=self.dtype, device=device) if can else None

    def is_for_none(self, tensor: Tensor) -> bool:
        return tensor.numel() == 0 and not any(tensor.shape) and any(self.shape)

    def to_fields(self) -> dict[str, Any]:
        """Returns the spec as a value for JSON."""
        return {
            "dtype": dtype_name(self.dtype),
            "shape": list(self.shape),
            "requires_grad": self.requires_grad,
            "order": list(self.order),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> TensorSpec:
        """Reads the fields of to_fields(). Raises KeyError, TypeError or ValueError for any other fields."""
        shape = tuple(whole(size) for size in fields["shape"])
        order = tuple(whole(dim) for dim in fields["order"])
        if order and sorted(order) != [*range(len(shape))]:
            raise ValueError(f"{order} are not the dimensions of {shape}")
        return cls(_WIRE_DTYPES[fields["dtype"]], shape, fields["requires_grad"] is True, order=order)


def order_in_memory(shape: Sequence[int], stride: Sequence[int]) -> DimOrder:
    """Returns the order of a tensor's dimensions in memory. Gaps and expanded dimensions are left out of
    account, because a copy of the tensor has none.
    """
    row_major, num_entries = [0] * len(shape), 1
    for dim in reversed(range(len(shape))):
        row_major[dim] = num_entries
        num_entries *= max(shape[dim], 1)
    if num_entries == 1 or list(stride) == row_major:
        return ()
    steps: list[int] = []
    for step in stride:  # 0 is an expanded dimension; it keeps its place
        steps.append(step or (steps[-1] if steps else num_entries))
    # A dimension of size 1 counts as faster than another dimension with an equal stride. So a tensor of shape
    # (N, 1, H, W) counts as channels_last.
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-steps[dim], shape[dim] == 1, dim)))
    return () if order == tuple(range(len(shape))) else order


def as_sent(tensor: Tensor, order: DimOrder) -> Tensor:
    """Returns the tensor with its dimensions in this order, contiguous if its memory is as planned."""
    return tensor.permute(order) if order else tensor


def as_used(sent: Tensor, order: DimOrder) -> Tensor:
    """Returns the tensor as the stage uses it; the inverse of as_sent(), in the same memory."""
    return sent.permute(sorted(range(len(order)), key=order.__getitem__)) if order else sent


def whole(number: Any) -> int:
    """Returns the number. Raises ValueError unless it is a count."""
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a count")
    return number
