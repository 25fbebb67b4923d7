"""Makes a minibatch of the largest shapes that will come, out of a smaller one.

The values are repeated along every dimension, so that they stay valid for the model: indices in range, masks
of 0 and 1, labels. The model's results for these values have no meaning. A rehearsal only measures the memory
that the minibatch takes and the sizes that cross the cuts. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipedream.common.microbatches import Microbatches
from pipedream.model.batches import Keywords
from pipedream.model.tensor_spec import as_sent, as_used, order_in_memory
from pipedream.planning.shapes import larger_of, shapes_of_parts

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
    return _made(inputs, targets, _Maker(shapes, cuts=False))


def _made(inputs: Any, targets: Any, maker: _Maker) -> tuple[Any, Any]:
    if isinstance(inputs, Microbatches):
        pairs = [_made(*pair, maker) for pair in zip(inputs, targets, strict=True)]
        first = Microbatches(each for each, _ in pairs)
        return first, first if targets is inputs else Microbatches(each for _, each in pairs)
    if type(inputs) is Keywords:
        # If the targets are separate, the shapes of inputs are named "inputs.KEY". If the caller forwards one
        # batch as inputs and targets, its shapes are named KEY.
        prefix = "inputs." if targets is not inputs and maker.knows("inputs.") else ""
        large = Keywords({key: maker.make(prefix + key, value) for key, value in inputs.items()})
        return large, large if targets is inputs else maker.make("targets", targets)
    return maker.make("inputs", inputs), maker.make("targets", targets)


def shaped(inputs: Any, targets: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, Any]:
    """Works as enlarged(), but tensors named in `shapes` get exactly these shapes: larger tensors are cut."""
    return _made(inputs, targets, _Maker(shapes, cuts=True))


class _Maker:
    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, cuts: bool) -> None:
        self._shapes = shapes
        self._cuts = cuts
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        """Pairs (original, result) by the original's id. The original is kept alive, so that its id stays
        unique.
        """

    def knows(self, prefix: str) -> bool:
        """Whether `shapes` has a name with this prefix."""
        return any(name.startswith(prefix) for name in self._shapes)

    def make(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(name, value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
            return type(value)(*(self.make(f"{name}[{i}]", item) for i, item in enumerate(value)))
        if isinstance(value, (tuple, list)):
            return type(value)(self.make(f"{name}[{i}]", item) for i, item in enumerate(value))
        if isinstance(value, dict):
            return type(value)({key: self.make(f"{name}.{key}", item) for key, item in value.items()})
        return value

    def _tensor(self, name: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, _repeated(tensor, self._shapes.get(name, ()), self._cuts)
        return self._made[id(tensor)][1]


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
