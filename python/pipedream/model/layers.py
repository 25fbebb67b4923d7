"""Layers: what a model is made of, and what a plan may cut after. Stateless; any thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipedream.model.stage_module import StageModule

__all__ = [
    "CutForward",
    "Layer",
    "Model",
    "check_parameters",
    "check_shapes",
    "dtype_name",
    "is_list_of_layers",
    "layers_of",
    "model_name",
    "named_layers",
    "outline_of",
    "roots_of",
]

_TRAINABLE_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class CutForward(ABC):
    """A module whose layers are spans of its own forward; cut_model.CutModel is one."""

    module: nn.Module

    @property
    @abstractmethod
    def layer_names(self) -> list[str]:
        """One per layer."""

    @abstractmethod
    def stage(self, stage_index: int, first_layer: int, last_layer: int) -> StageModule:
        """The stage of these layers."""

    @property
    @abstractmethod
    def outline(self) -> list[str]:
        """A line per layer, equal where two processes cut the module in the same way."""

    @abstractmethod
    def at(self, names: Sequence[str]) -> CutForward:
        """The same with these cuts alone. Raises ValueError for one that there is not."""

    @abstractmethod
    def explain(self) -> str:
        """Why there are no more layers, or nothing."""


# What users may pass as a model, any module or a list of layers; and what a run makes of some modules.
Model = nn.Module | Sequence[nn.Module] | CutForward


@dataclass(frozen=True)
class Layer:
    name: str
    prefix: str  # of its parameters' full names in the model: "" or "name."
    module: nn.Module


def layers_of(model: Model) -> list[tuple[str, nn.Module]]:
    """(name, layer) in the order they run; what the profiler times and a plan may cut after.

    The children of an nn.Sequential, the entries of a list, tuple or nn.ModuleList; any other module,
    also an nn.Sequential with a forward or hooks of its own, is one single layer until it is cut
    (cut_model.py). Raises TypeError for anything else and ValueError for a model without layers.
    """
    return [(layer.name, layer.module) for layer in named_layers(model)]


def model_name(model: Model) -> str:
    """The class's name; "layers" for a list."""
    if isinstance(model, CutForward):
        model = model.module
    return type(model).__name__ if isinstance(model, nn.Module) else "layers"


def roots_of(model: Model) -> list[tuple[str, nn.Module]]:
    """(prefix of the full names of its parameters and buffers, module): all that there is of the model.

    Raises as layers_of does."""
    return [(layer.prefix, layer.module) for layer in named_layers(model)]


def outline_of(model: Model) -> list[str]:
    """A line per layer, by which two processes find out whether they have the same layers."""
    return model.outline if isinstance(model, CutForward) else [name for name, _ in layers_of(model)]


def is_list_of_layers(model: nn.Module) -> bool:
    """Whether the module's children are its layers, run one after the other."""
    return isinstance(model, nn.ModuleList) or (isinstance(model, nn.Sequential) and _is_plain(model))


def named_layers(model: Model) -> list[Layer]:
    """Raises as layers_of does."""
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
    # As they are in the table: named_children() would drop a layer that is used twice.
    return model._modules.items()


def _is_plain(model: nn.Sequential) -> bool:
    # Running the children one by one would skip what a subclass or a hook adds around them.
    hooks = (
        model._forward_hooks,
        model._forward_pre_hooks,
        model._backward_hooks,
        model._backward_pre_hooks,
    )
    return type(model).forward is nn.Sequential.forward and not any(hooks)


def check_parameters(module: nn.Module, prefix: str = "") -> None:
    """Raises ValueError for parameters that cannot be trained. prefix: of their full names."""
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
    """Raises ValueError for parameters without a shape. prefix: of their full names."""
    for name, parameter in module.named_parameters(prefix=prefix.removesuffix(".")):
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} has no shape yet (a lazy module): pass one minibatch through the model"
                f" before it is split"
            )


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32", as the wire and the errors write it."""
    return str(dtype).removeprefix("torch.")
