"""Finds the layers of a model, the units between which a plan may cut. Stateless; any thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = [
    "CutForward",
    "Layer",
    "Model",
    "check_parameters",
    "check_shapes",
    "dtype_name",
    "flat_view",
    "is_list_of_layers",
    "layers_of",
    "model_name",
    "named_layers",
    "roots_of",
    "shares_memory",
]

_TRAINABLE_DTYPES = (torch.float32, torch.float64, torch.bfloat16)

_storage_use_count = torch._C._storage_Use_Count
_USES_OF_AN_UNSHARED_STORAGE = 2  # the tensor, and the Python object that asks


class CutForward:
    """The base of cut_model.CutModel: a module whose layers are spans of its own forward."""

    module: nn.Module


# Users may pass any module or a list of layers. A run turns a module that is no list of layers into a
# CutForward.
Model = nn.Module | Sequence[nn.Module] | CutForward


class Layer(NamedTuple):
    name: str
    prefix: str  # of the parameters' full names in the model: "" or "name."
    module: nn.Module


def layers_of(model: Model) -> list[tuple[str, nn.Module]]:
    """Returns (name, layer) for each layer, in the order in which the layers run. The profiler times these
    layers, and a plan may cut after each.

    The layers are the children of an nn.Sequential, or the entries of a list, tuple or nn.ModuleList. Any
    other module is a single layer until it is cut (cut_model.py). An nn.Sequential with a forward or hooks of
    its own is also a single layer. Raises TypeError if the model is of another type, and ValueError if it has
    no layers or a module that torch.jit compiled.
    """
    return [(layer.name, layer.module) for layer in named_layers(model)]


def model_name(model: Model) -> str:
    """Returns the name of the model's class; "layers" for a list."""
    if isinstance(model, CutForward):
        model = model.module
    return type(model).__name__ if isinstance(model, nn.Module) else "layers"


def roots_of(model: Model) -> list[tuple[str, nn.Module]]:
    """Returns the modules that together are the whole model, as pairs (prefix, module). A parameter's full
    name in the model is the prefix and its name in the module. Raises the errors of layers_of().
    """
    return [(layer.prefix, layer.module) for layer in named_layers(model)]


def is_list_of_layers(model: nn.Module) -> bool:
    """Whether the module's children are its layers, which run one after the other."""
    return isinstance(model, nn.ModuleList) or (isinstance(model, nn.Sequential) and _is_plain(model))


def named_layers(model: Model) -> list[Layer]:
    """Returns the model's layers. Raises the errors of layers_of()."""
    if isinstance(model, CutForward):
        model = model.module
        named = [(model_name(model), "", model)]
    elif isinstance(model, nn.Module) and is_list_of_layers(model):
        named = [(name, f"{name}.", module) for name, module in _children(model)]
    elif isinstance(model, nn.Module):
        named = [(model_name(model), "", model)]
    elif isinstance(model, (list, tuple)):
        named = [(str(layer_index), f"{layer_index}.", module) for layer_index, module in enumerate(model)]
    elif isinstance(model, type):
        raise TypeError(
            f"model is the class {model.__name__}: make a model of it, as {model.__name__}(...) does"
        )
    else:
        raise TypeError(f"model is a {type(model).__name__}: give an nn.Module or a list of layers")
    for name, _, module in named:
        if not isinstance(module, nn.Module):
            raise TypeError(f"layer {name!r} is a {type(module).__name__}, not an nn.Module: wrap it in one")
    if not named:
        raise ValueError("the model has no layers: give at least one")
    for _, prefix, module in named:
        _check_not_scripted(module, prefix)
    return [Layer(name, prefix, module) for name, prefix, module in named]


def _check_not_scripted(layer: nn.Module, prefix: str) -> None:
    for name, module in layer.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"module {(prefix + name).removesuffix('.')!r} is compiled by torch.jit, so its weights can"
                " have no versions: give the module that it was made of, or torch.compile of that"
            )


def _children(model: nn.Module) -> Iterable[tuple[str, Any]]:
    # The table itself is read, because named_children() drops the second use of a layer.
    return model._modules.items()


def _is_plain(model: nn.Sequential) -> bool:
    # Running the children one by one would skip code that a subclass or a hook adds around them.
    hooks = (
        model._forward_hooks,
        model._forward_pre_hooks,
        model._backward_hooks,
        model._backward_pre_hooks,
    )
    return type(model).forward is nn.Sequential.forward and not any(hooks)


def check_parameters(module: nn.Module, prefix: str = "") -> None:
    """Raises ValueError for parameters that cannot be trained. prefix: text before a parameter's name in
    errors.
    """
    check_shapes(module, prefix)
    for name, parameter in module.named_parameters(prefix=prefix.removesuffix(".")):
        if parameter.requires_grad and parameter.dtype not in _TRAINABLE_DTYPES:
            remedy = (
                "keep its real and imaginary part in it and take torch.view_as_complex of it in the forward"
                if parameter.dtype.is_complex
                else "use model.float() or model.to(torch.bfloat16)"
            )
            raise ValueError(
                f"parameter {name!r} has dtype {dtype_name(parameter.dtype)}: only float32, float64 and"
                f" bfloat16 can be trained; {remedy}, or freeze it with requires_grad_(False)"
            )


def check_shapes(module: nn.Module, prefix: str = "") -> None:
    """Raises ValueError for parameters without a shape. prefix: text before a parameter's name in errors."""
    for name, parameter in module.named_parameters(prefix=prefix.removesuffix(".")):
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} has no shape yet (a lazy module): pass one minibatch through the model"
                f" before it is split"
            )


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name on the wire and in errors, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether another tensor has the same memory. Autograd gives two parameters gradients in one memory if
    they are added as views, as in p.view(-1) + q.view(-1).
    """
    if tensor.layout != torch.strided:
        return False
    storage = tensor.untyped_storage()
    return _storage_use_count(storage._cdata) > _USES_OF_AN_UNSHARED_STORAGE


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a dense tensor in the order in which they lie in memory, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
