"""Data sizes: which dimensions of tensors are as long as the contents of others say, as after `x[mask]`.

    mask = x > 0             (6, 5)      no dimension
    rows = x[mask]           (17,)       17, which nonzero, unique, packed sequences and the like make, too
    relu(rows), rows[:, None] * w        17, wherever an operation reads one and makes one as long
    out.index_put_(mask, rows)           none: out is as long as before

Followed by length, so a dimension that happens to be as long counts as well; a slice by a number that Python
got from a tensor (`x[:n.item()]`) is not seen. Owned by the thread that traces.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["AS_LONG_AS_FIRST", "Sizes", "data_sizes"]

AS_LONG_AS_FIRST = {
    "aten::index_add",
    "aten::index_copy",
    "aten::index_fill",
    "aten::index_put",
    "aten::masked_scatter",
    "aten::scatter",
    "aten::scatter_add",
}
"""Operations whose result is as long as their first argument, whatever the others are."""

_JOINING = {"aten::cat", "aten::concat", "aten::_cat"}
_PACKING = {"aten::_pack_padded_sequence"}
_MASKS = (torch.bool, torch.uint8)

Sizes = frozenset[int]


def data_sizes(func: Any, args: Sequence[Any], output: Tensor, known: Sizes) -> Sizes:
    """Those of the output of one of torch's operations. known: those of all that it is given."""
    name = func._schema.name
    shape = output.shape
    found = known.intersection(shape)
    if not shape:
        return Sizes()
    if known and name in _JOINING:
        dim = args[1] if len(args) > 1 else 0
        return found | {shape[dim]}
    if name == "aten::index":
        kept = list(itertools.takewhile(lambda index: index is None, args[1]))
        is_masked = any(index is not None and index.dtype in _MASKS for index in args[1])
        return found | {shape[len(kept)]} if is_masked else found
    if name in _PACKING or torch.Tag.dynamic_output_shape in func.tags:
        return found | {shape[0]}
    return found
