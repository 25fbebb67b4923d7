"""The check of cuts computes in float64 where it can. Owned by the thread that profiles.

In float32 a sum in another order may differ by rounding as much as a slightly stale value does. In float64
rounding is more than eight orders of magnitude smaller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipedream.model.boundary import map_tensors, tensors_of
from pipedream.model.initial_weights import NUM_COPIES, free_host_bytes
from pipedream.model.references import places_of, tensors_carried_by

__all__ = ["NotInFloat64Error", "PrecisionSeen", "as_float64", "fits_in_float64", "in_float64"]

# Compute capabilities of GPUs whose float64 is half as fast as their float32: P100, V100, A100, H100, B200.
# On most other GPUs float64 is 32 or 64 times slower.
_WITH_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
_WIDER = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
_WIDER_COMPLEX = {torch.complex64: torch.complex128}


class NotInFloat64Error(Exception):
    """The model does not compute in float64."""


class PrecisionSeen(TorchDispatchMode):
    """Records the coarsest floating-point dtype that any operation in the with block returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.coarsest = torch.float64

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_of(output):
            if tensor.is_floating_point() and torch.finfo(tensor.dtype).eps > torch.finfo(self.coarsest).eps:
                self.coarsest = tensor.dtype
        return output


def fits_in_float64(roots: Sequence[tuple[str, nn.Module]], device: torch.device) -> bool:
    """Whether the device has the memory for a check in float64, and is not many times slower in float64."""
    tensors = {id(t): t for _, root in roots for t in (*root.parameters(), *root.buffers())}
    needed_bytes = NUM_COPIES * 8 * sum(tensor.numel() for tensor in tensors.values())
    if device.type == "cpu":
        return needed_bytes <= free_host_bytes()
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) in _WITH_FLOAT64
        and needed_bytes <= torch.cuda.mem_get_info(device)[0]
    )


def as_float64(value: Any) -> Any:
    """Returns the value with its floating-point tensors in float64 and its complex tensors in complex128."""
    return map_tensors(lambda tensor: tensor.to(_wide(tensor)), value)


@contextlib.contextmanager
def in_float64(roots: Iterable[tuple[str, nn.Module]], loss_fn: Any) -> Iterator[None]:
    """In the with block, all floating-point tensors of the modules and the loss are float64, and so is the
    default dtype. Raises NotInFloat64Error if they cannot be converted.
    """
    held = [place.tensor for place in places_of(roots)]
    held += [tensor for _, tensor in tensors_carried_by("loss_fn", loss_fn)]
    narrow = [t for t in {id(t): t for t in held}.values() if t.dtype != _wide(t)]
    default = torch.get_default_dtype()
    before: list[tuple[Tensor, Tensor]] = []
    try:
        try:
            for tensor in narrow:
                content = tensor.data
                tensor.data = content.to(_wide(tensor))
                before.append((tensor, content))
        except Exception as error:  # a tensor of an unusual class, or too little memory
            raise NotInFloat64Error from error
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        torch.set_default_dtype(default)
        for tensor, content in before:
            tensor.data = content


def _wide(tensor: Tensor) -> torch.dtype:
    table = _WIDER_COMPLEX if tensor.is_complex() else _WIDER
    return table.get(tensor.dtype, tensor.dtype)
