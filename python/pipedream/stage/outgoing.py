"""Prepares the tensors that a stage sends. The memory of such a tensor must not change until the tensor has
been sent. Tensors that are not plain contiguous memory are copied (exportable() in model/boundary.py).
Stateless."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

from pipedream.model.boundary import Boundary, exportable
from pipedream.model.layers import shares_memory
from pipedream.model.references import places_of
from pipedream.model.stage_module import StageModule

__all__ = ["gradients_of", "memory_of", "nothing_like", "settled", "written_memory"]


def settled(tensor: Tensor, memory: Container[int]) -> Tensor:
    """Returns the output itself, or a copy if it lies in memory that the stage keeps. memory: the result of
    written_memory() for the stage."""
    # The next forward may write into such memory while the output is being sent from it.
    if memory and memory_of(tensor) in memory:
        return exportable(tensor).clone()
    return tensor


def written_memory(stage: StageModule) -> set[int]:
    """Returns the memory_of() of each tensor that the stage keeps between forwards and that a forward may
    write. These are buffers, and tensors in attributes, such as a workspace."""
    kept = [buffer for _, buffer in stage.stage_buffers()]
    kept += [place.tensor for place in places_of(stage.roots())]
    return {
        memory_of(tensor)
        for tensor in kept
        if not isinstance(tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested
    }


def gradients_of(leaves: list[Tensor], device: torch.device) -> list[Tensor]:
    """Returns the gradients of the received tensors that need one. For a tensor that got no gradient in this
    backward, the list has an empty tensor of another shape. There is always at least one tensor, because its
    arrival upstream says that the backward is done."""
    gradients = [_gradient_of(leaf) for leaf in leaves if leaf.requires_grad]
    return gradients or [_no_gradient(device)]


def nothing_like(boundary: Boundary, device: torch.device, *, gradients: bool) -> list[Tensor]:
    """Returns tensors without samples, which an empty microbatch sends in place of a boundary's tensors.
    gradients: whether they are sent upstream, in place of gradients. If the boundary has no tensor to
    replace, returns one byte."""
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
        return leaf.new_empty((0, *leaf.shape[1:]) if leaf.numel() > 0 else (0, *leaf.shape))
    # Autograd may have given a parameter the memory of this gradient (x + p.unsqueeze(0) with one sample).
    # The next backward would add to that memory while it is being sent.
    return exportable(gradient).clone() if shares_memory(gradient) else gradient


def _no_gradient(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.uint8, device=device)
