"""Prepares the tensors that a stage sends. Their memory must not change until it has been sent. The core
copies tensors that are not plain contiguous memory (exportable() in model/boundary.py). Stateless."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from pipedream.model.boundary import Boundary, exportable

__all__ = ["gradients_of", "memory_of", "nothing_like", "settled"]

_storage_use_count = torch._C._storage_Use_Count
_USES_OF_AN_UNSHARED_STORAGE = 2  # the tensor, and the Python object that asks


def settled(tensor: Tensor, buffer_memory: Container[int]) -> Tensor:
    """Returns the output, or a copy if it lies in a buffer's memory. buffer_memory: memory_of() each buffer
    of the stage."""
    # The next forward may write into a buffer, and the send reads without a copy.
    if buffer_memory and memory_of(tensor) in buffer_memory:
        return exportable(tensor).clone()
    return tensor


def gradients_of(leaves: list[Tensor], device: torch.device) -> list[Tensor]:
    """Returns the gradients of the received tensors that can have one. A tensor without a gradient in this
    backward gets an empty tensor, or zeros if it has no dimensions. There is always at least one tensor,
    because its arrival
    upstream says that the backward is done."""
    gradients = [_gradient_of(leaf) for leaf in leaves if leaf.requires_grad]
    return gradients or [_no_gradient(device)]


def nothing_like(boundary: Boundary, device: torch.device, *, gradients: bool) -> list[Tensor]:
    """Returns empty tensors, which an empty microbatch sends in place of a boundary's tensors."""
    specs = [spec for spec in boundary.tensors if spec.requires_grad or not gradients]
    if not specs:
        return [_no_gradient(device)]
    shapes = [(0, *spec.shape[1:]) if spec.shape else () for spec in specs]
    return [
        torch.zeros(shape, dtype=spec.dtype, device=device) for shape, spec in zip(shapes, specs, strict=True)
    ]


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _gradient_of(leaf: Tensor) -> Tensor:
    gradient = leaf.grad
    if gradient is None:  # the loss may not depend on every received tensor
        # Zeros would be wrong: with a gradient of zeros, momentum and weight decay still change the
        # parameters upstream.
        return leaf.new_empty((0, *leaf.shape[1:])) if leaf.dim() > 0 else torch.zeros_like(leaf)
    # Autograd may have given a parameter the memory of this gradient (x + p.unsqueeze(0) with one sample).
    # The next backward
    # would add to that memory while it is being sent.
    storage = gradient.untyped_storage()
    is_shared = _storage_use_count(storage._cdata) > _USES_OF_AN_UNSHARED_STORAGE
    return exportable(gradient).clone() if is_shared else gradient


def _no_gradient(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.uint8, device=device)
