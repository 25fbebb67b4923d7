"""Implements the codecs of csrc/codec/codec.h a second time, in plain torch, for
reference.run(across_cut=...).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pipedream.model.tensor_spec import DimOrder, as_sent, as_used, order_in_memory
from pipedream.planning.codec_choice import codec_between, parse_codec

__all__ = ["CodecOracle", "encoded_bytes"]

_INT8_BLOCK = 256
_FLOAT32_BYTES = 4
_INDEX_BYTES = 4


class CodecOracle:
    """Encodes and decodes the tensors that cross between stages. With topk it keeps a residual for each of
    these tensors.
    """

    def __init__(self, codec: Any) -> None:
        """codec: as in run()."""
        self._choice = parse_codec(codec)
        self._residuals: dict[Any, torch.Tensor] = {}
        self._orders: dict[tuple[frozenset[int], int], DimOrder] = {}

    def __call__(self, sender: int, receiver: int, tensor_index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Passes a tensor through the codec of its cut.

        Elements are encoded in the order in which the first activation at this cut lies in memory. Gradients
        have the same order.
        """
        place = (frozenset({sender, receiver}), tensor_index)
        order = self._orders.setdefault(place, order_in_memory(tensor.shape, tensor.stride()))
        codec = codec_between(self._choice, sender, receiver)
        received = self.through(codec, (sender, receiver, tensor_index), as_sent(tensor, order).contiguous())
        return as_used(received, order)

    def through(self, name: str, key: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Encodes and decodes a tensor. `key` is equal for tensors that share a residual."""
        if not tensor.is_floating_point() or name == "none":
            return tensor.clone()
        if tensor.itemsize == 2 and name in ("bf16", "fp16"):
            return tensor.clone()
        if name == "bf16":
            return _rounded(tensor, num_mantissa_bits=7, smallest_exponent=-126)
        if name == "fp16":
            return _rounded(tensor, num_mantissa_bits=10, smallest_exponent=-14)
        if name == "int8":
            return _through_int8(tensor)
        share = float(name.removeprefix("topk:"))
        return self._through_topk(key, share, tensor)

    def _through_topk(self, key: Any, share: float, tensor: torch.Tensor) -> torch.Tensor:
        """Sends the largest elements. Values that are left out or rounded away are the residual, which is
        added to the next tensor.

        An element that is not finite leaves no residual, whether it is sent or not.
        """
        total = tensor.flatten().to(_sum_dtype(tensor.dtype), copy=True)
        kept = self._residuals.get(key, torch.zeros_like(total))
        if len(kept) < len(total):  # the residual comes from a smaller minibatch
            kept = torch.cat([kept, total.new_zeros(len(total) - len(kept))])
        self._residuals[key] = kept
        kept = kept[: len(total)]
        total += kept
        # Among equal magnitudes the first elements are sent. Equal parts of an image have equal activations,
        # so this happens.
        magnitudes = total.abs().nan_to_num(nan=math.inf, posinf=math.inf)
        largest_first = magnitudes.sort(descending=True, stable=True).indices
        chosen = largest_first[: max(1, math.ceil(share * len(total)))]
        sent = torch.zeros_like(total)
        sent[chosen] = total[chosen].to(_sent_dtype(tensor.dtype)).to(total.dtype)
        kept.copy_((total - sent).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
        return sent.view(tensor.shape).to(tensor.dtype, copy=True)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which topk adds up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _sent_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which topk sends values."""
    return torch.float32 if dtype == torch.float64 else dtype


def _rounded(tensor: torch.Tensor, *, num_mantissa_bits: int, smallest_exponent: int) -> torch.Tensor:
    """Rounds once, to nearest even. torch converts float64 by way of float32, and so rounds twice."""
    wide = tensor.double()
    exponent = (torch.frexp(wide).exponent - 1).clamp(min=smallest_exponent)
    unit = torch.ldexp(torch.ones_like(wide), exponent - num_mantissa_bits)
    return (torch.round(wide / unit) * unit).to(tensor.dtype)


def _through_int8(tensor: torch.Tensor) -> torch.Tensor:
    """Encodes and decodes in blocks. Each block has a scale: its largest magnitude / 127."""
    values = tensor.flatten()
    blocks = [_block_through_int8(block) for block in values.float().split(_INT8_BLOCK)]
    wide = _sum_dtype(tensor.dtype)
    decoded = [scale.to(wide) * steps.to(wide) for scale, steps in blocks]
    return torch.cat(decoded).to(tensor.dtype).view(tensor.shape).clone()


def _block_through_int8(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = block.abs().max() / 127
    return scale, (block / scale).round() if scale > 0 else torch.zeros_like(block)


def encoded_bytes(name: str, num_elements: int, dtype: torch.dtype) -> int:
    """Returns the bytes of an encoded tensor on the wire."""
    if name in ("bf16", "fp16"):
        return 2 * num_elements
    if name == "int8":
        return num_elements + _FLOAT32_BYTES * math.ceil(num_elements / _INT8_BLOCK)
    share = float(name.removeprefix("topk:"))
    entry_bytes = _INDEX_BYTES + _sent_dtype(dtype).itemsize
    return entry_bytes * max(1, math.ceil(share * num_elements))
