"""Replaces the contents of parameters by stand-ins, which need almost no memory. This is for parameters whose
values a process does not need.

    zeroed      for tracing a model on the meta device. Data flow does not depend on values, but any kernel
                may run, so there must be values.
    poisoned    for parameters of other stages. Code that reads one reads NaN, and the loss shows it.
                Parameters that the code is known to read get memory of their own, because the code may view
                such a parameter in another shape.

The parameter object stays in place; only its contents are exchanged. Owned by the thread that runs the model.

This module also has the helpers for models on the meta device, whose parameters have a shape and no memory.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.model.factories import parameter_like

__all__ = ["exchange", "is_on_meta", "parameters_on_meta", "poison", "poisoned", "zeroed"]


def poison(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a flat tensor of values that reveal a read: NaN, the smallest integer of the dtype (the largest
    if it has no negative ones), or alternating booleans.
    """
    if dtype == torch.bool:
        return torch.arange(size, device=device) % 2 == 0
    return torch.full((size,), _poison_of(dtype), dtype=dtype, device=device)


def _poison_of(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    if dtype == torch.bool:
        return 1
    info = torch.iinfo(dtype)
    return info.min or info.max


def exchange(tensor: Tensor, content: Tensor) -> Tensor:
    """Gives a parameter or buffer the memory and device of `content`, which nobody else may hold. Returns a
    tensor with the former memory, with which a second exchange() restores the parameter or buffer.
    """
    content = content.detach().requires_grad_(tensor.requires_grad)
    # torch.utils.swap_tensors would refuse while a graph holds the tensor. After an error an unused graph may
    # still hold it.
    torch._C._swap_tensor_impl(tensor, content)
    return content


def poisoned(
    tensors: Iterable[Tensor], device: torch.device, read: Iterable[Tensor] = ()
) -> contextlib.AbstractContextManager[None]:
    """In the with block, the tensors contain poison on the device: one element, expanded to the tensor's
    shape. read: the tensors that get memory for all of their elements.
    """
    in_memory = {id(tensor) for tensor in read}
    return _exchanged(tensors, functools.partial(_poison_like, device=device, in_memory=in_memory))


def zeroed(tensors: Iterable[Tensor]) -> contextlib.AbstractContextManager[None]:
    """In the with block, the tensors are zeros in the host's address space, which take no memory until they
    are written.
    """
    return _exchanged(tensors, _zeros_like)


@contextlib.contextmanager
def _exchanged(tensors: Iterable[Tensor], make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    former = [(tensor, exchange(tensor, make(tensor))) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, content in former:
            exchange(tensor, content)


def _poison_like(tensor: Tensor, device: torch.device, in_memory: set[int]) -> Tensor:
    value = _poison_of(tensor.dtype)
    if id(tensor) in in_memory:
        return torch.full_like(tensor, value, device=device, requires_grad=False)
    return torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)


def _zeros_like(tensor: Tensor) -> Tensor:
    if tensor.numel() == 0:
        return torch.empty_like(tensor, device="cpu", requires_grad=False)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, tensor.numel() * tensor.element_size(), flags=flags)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


_ON_META = "_pipedream_on_meta"  # attribute of a parameter: the meta parameter that was registered instead


def is_on_meta(modules: Iterable[nn.Module]) -> bool:
    """Whether any parameter or buffer has no values."""
    return any(tensor.is_meta for module in modules for tensor in (*module.parameters(), *module.buffers()))


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are made in the with block have parameters on the meta device, as under
    torch.device("meta"). Their buffers have the values that the constructors compute.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = _on_meta(parameter)

    _set_register(register_on_meta)
    try:
        yield
    finally:
        _set_register(register)


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Returns a parameter on meta. For a parameter that is registered in several places, it returns the same
    object each time.
    """
    made: nn.Parameter | None = vars(parameter).get(_ON_META)
    if made is None:
        content = torch.empty_like(parameter, device="meta").detach()
        made = parameter_like(parameter, content, requires_grad=parameter.requires_grad)
        vars(parameter)[_ON_META] = made
    return made


def _set_register(function: Callable[..., Any]) -> None:
    nn.Module.register_parameter = function  # type: ignore[method-assign]
