"""Tensor spec: what is planned of one tensor that crosses a cut, or travels otherwise. Pure; any thread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipedream import _core
from pipedream.model.layers import dtype_name

__all__ = ["TensorSpec", "whole"]

# Of the wire (csrc/base/dtype.h).
_WIRE_DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a boundary, as planned: the largest that may cross."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    """Whether a gradient comes back for it."""
    others: tuple[tuple[int, ...], ...] = ()
    """Shapes that it may have instead."""

    @classmethod
    def of(cls, tensor: Tensor, place: str) -> TensorSpec:
        """Raises ValueError, naming the place, for a tensor that cannot cross."""
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
        return cls(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)

    @property
    def num_bytes(self) -> int:
        return max(map(math.prod, (self.shape, *self.others))) * self.dtype.itemsize

    def is_exceeded_by(self, shape: Sequence[int]) -> bool:
        """Of as many dimensions: by more elements, or more in the first dimension."""
        return all(
            math.prod(shape) > math.prod(planned) or (bool(shape) and shape[0] > planned[0])
            for planned in (self.shape, *self.others)
        )

    def or_as(self, other: TensorSpec) -> TensorSpec:
        """Of one tensor, that may also be as the other says."""
        return replace(
            self,
            others=(*self.others, other.shape, *other.others),
            requires_grad=self.requires_grad or other.requires_grad,
        )

    def misfit(self, tensor: Tensor) -> str | None:
        """Why the tensor is not as planned."""
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

    # A tensor of the first minibatch may be None in a later one, for which a tensor without extent crosses.

    def for_none(self, device: torch.device) -> Tensor | None:
        """What crosses for None; None where nothing can, as a tensor of no dimensions always has a value."""
        can = any(self.shape)
        return torch.empty((0,) * len(self.shape), dtype=self.dtype, device=device) if can else None

    def is_for_none(self, tensor: Tensor) -> bool:
        return tensor.numel() == 0 and not any(tensor.shape) and any(self.shape)

    def to_fields(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "dtype": dtype_name(self.dtype),
            "shape": list(self.shape),
            "requires_grad": self.requires_grad,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> TensorSpec:
        """The inverse of to_fields. Raises KeyError, TypeError or ValueError for what that does not give."""
        shape = tuple(whole(size) for size in fields["shape"])
        return cls(_WIRE_DTYPES[fields["dtype"]], shape, fields["requires_grad"] is True)


def whole(number: Any) -> int:
    """The number, if it is a count."""
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a count")
    return number
