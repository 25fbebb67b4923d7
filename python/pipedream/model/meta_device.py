"""The meta device: models whose parameters have a shape and no memory. Stateless; any thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from pipedream.model.factories import parameter_like

__all__ = ["is_on_meta", "parameters_on_meta"]

_ON_META = "_pipedream_on_meta"  # of a parameter: what was registered in its place


def is_on_meta(modules: Iterable[nn.Module]) -> bool:
    """Whether any parameter or buffer has no values."""
    return any(tensor.is_meta for module in modules for tensor in (*module.parameters(), *module.buffers()))


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside modules that are made have their parameters on the meta device, as under torch.device("meta"),
    and their buffers with the values that their constructors compute."""
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
    """The same for the same parameter, which may be registered in several places."""
    made: nn.Parameter | None = vars(parameter).get(_ON_META)
    if made is None:
        content = torch.empty_like(parameter, device="meta").detach()
        made = parameter_like(parameter, content, requires_grad=parameter.requires_grad)
        vars(parameter)[_ON_META] = made
    return made


def _set_register(function: Callable[..., Any]) -> None:
    nn.Module.register_parameter = function  # type: ignore[method-assign]
