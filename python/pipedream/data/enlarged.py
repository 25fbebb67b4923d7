"""Makes a minibatch of the largest shapes that will come, out of a smaller one.

The values are repeated along every dimension, so that they stay valid for the model: indices in range, masks
of 0 and 1, labels. The model's results for these values have no meaning. A rehearsal only measures the memory
that the minibatch takes and the sizes that cross the cuts. Pure; any thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipedream.common.microbatches import Microbatches
from pipedream.model.batches import Keywords, first_microbatch
from pipedream.model.boundary import replaced
from pipedream.model.tensor_spec import as_sent, as_used, order_in_memory
from pipedream.planning.shapes import larger_of, named_tensors, shapes_of_parts

__all__ = ["enlarged", "shaped"]


def enlarged(inputs: Any, targets: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, Any]:
    """Returns (inputs, targets) in which each tensor has at least the shape that `shapes` gives for its name
    (planning/shapes.py).

    Tensors that are large enough stay the same objects. A tensor that occurs twice is enlarged once. Names
    that the minibatch lacks, and shapes with another number of dimensions, are ignored, because the shapes
    may come from other data. If the inputs are Microbatches, each becomes as large as the largest of them.
    """
    if isinstance(inputs, Microbatches):
        shapes = larger_of(shapes, shapes_of_parts(inputs, targets))
    return _made(inputs, targets, shapes, cuts=False)


def shaped(inputs: Any, targets: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, Any]:
    """Works as enlarged(), but tensors named in `shapes` get exactly these shapes: larger tensors are cut."""
    return _made(inputs, targets, shapes, cuts=True)


def _made(inputs: Any, targets: Any, shapes: Mapping[str, tuple[int, ...]], *, cuts: bool) -> tuple[Any, Any]:
    if type(first_microbatch(inputs)) is Keywords and not any(name.startswith("inputs.") for name in shapes):
        # The shapes are named after the entries of a batch: "input_ids". In a pair whose inputs are such a
        # batch, the same tensors are named "inputs.input_ids".
        shapes = {f"inputs.{name}": shape for name, shape in shapes.items()} | {**shapes}
    pairs = zip(inputs, targets, strict=True) if isinstance(inputs, Microbatches) else [(inputs, targets)]
    made: dict[int, Tensor] = {}
    for name, tensor in itertools.chain.from_iterable(map(named_tensors, pairs)):
        if isinstance(tensor, Tensor) and id(tensor) not in made:
            made[id(tensor)] = _repeated(tensor, shapes.get(name, ()), cuts)
    large = replaced(inputs, made)
    return large, large if targets is inputs else replaced(targets, made)


def _repeated(tensor: Tensor, shape: tuple[int, ...], cuts: bool) -> Tensor:
    if len(shape) != tensor.dim() or tensor.numel() == 0:
        return tensor
    made = tensor
    for dim, size in enumerate(shape):
        if size > made.shape[dim] or (cuts and size < made.shape[dim]):
            indices = torch.arange(size, device=tensor.device) % made.shape[dim]
            made = made.index_select(dim, indices)
    order = order_in_memory(tensor.shape, tensor.stride())
    return tensor if made is tensor else as_used(as_sent(made, order).contiguous(), order)
