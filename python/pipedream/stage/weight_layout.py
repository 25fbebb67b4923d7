"""The layout of one weight version's parameters in a flat slot. Stateless."""

from __future__ import annotations

import torch
from torch import Tensor

from pipedream import _core
from pipedream.model.factories import NamedParameters
from pipedream.model.layers import dtype_name
from pipedream.optim.master_weights import has_master, master_dtype

__all__ = ["masters_layout", "state_layout", "view_like", "weight_layout"]


def weight_layout(named: NamedParameters) -> tuple[int, list[int]]:
    """(bytes of one version, offset of each parameter) in a flat slot."""
    return _core.weight_layout([(name, dtype_name(p.dtype), p.numel()) for name, p in named])


def state_layout(named: NamedParameters) -> tuple[int, list[int]]:
    """The same of a slot with one of an optimizer's state tensors for each parameter."""
    return _core.weight_layout([(name, dtype_name(master_dtype(p.dtype)), p.numel()) for name, p in named])


def masters_layout(named: NamedParameters) -> tuple[int, list[int]]:
    """The same of a slot with the masters of those parameters that have one, and nothing for the others."""
    return _core.weight_layout(
        [(name, dtype_name(master_dtype(p.dtype)), p.numel() if has_master(p) else 0) for name, p in named]
    )


def view_like(slot: Tensor, offset: int, original: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor at that byte of a slot, as the original lies in memory. dtype: None: the original's."""
    dtype = dtype or original.dtype
    flat = slot[offset : offset + original.numel() * dtype.itemsize].view(dtype)
    # The strides of the original too: kernels choose by them (channels_last), and so do their roundings.
    view = (
        flat.as_strided(original.shape, original.stride())
        if _is_dense(original)
        else flat.view(original.shape)
    )
    # .data: a tensor with a version counter of its own. Plain views share their base's, and writing one
    # slot would make the backward of another fail falsely.
    return view.data


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill the memory from first to last without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
