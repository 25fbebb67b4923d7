"""What a module keeps is put back after it has run for other reasons than training: to be traced, checked,
profiled or rehearsed. Stateless; the thread that runs the module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from pipedream.common.errors import afterwards
from pipedream.model.seeding import RngState

__all__ = ["attributes_kept", "hooks_of", "restore_hooks", "untouched"]

# Of a module's attributes, what cannot change but by being replaced.
_PLAIN = (bool, int, float, complex, str, type(None))
# Its tables of hooks: transformers' models install some in a first forward, and remember so in an attribute.
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)

Hooks = dict[str, dict[int, Any]]


@contextlib.contextmanager
def untouched(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Layers may run inside; afterwards everything is as it was.

    Kept: all random number generators, buffers (contents and objects), each parameter's .grad (None
    inside), training flags, and what else a module has as plain numbers, flags and texts, as a counter or
    `initialised`, without which a layer would take its next minibatch for another than the first.
    """
    all_modules = list({id(m): m for module in modules for m in module.modules()}.values())
    parameters = {id(p): p for module in all_modules for p in module.parameters(recurse=False)}
    rng_state = RngState.capture()
    buffers = [(module, dict(module._buffers)) for module in all_modules if module._buffers]
    contents = {
        id(buffer): (buffer, buffer.detach().clone())
        for _, named in buffers
        for buffer in named.values()
        if buffer is not None
    }
    gradients = [(parameter, parameter.grad) for parameter in parameters.values()]
    for parameter, _ in gradients:
        parameter.grad = None

    def restore() -> None:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, content in contents.values():
                buffer.copy_(content)
        for module, named in buffers:
            module._buffers.clear()
            module._buffers.update(named)
        rng_state.restore()

    with afterwards(restore), attributes_kept(all_modules):
        yield


@contextlib.contextmanager
def attributes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """What modules keep in attributes inside is gone afterwards: new ones, changes of plain ones, hooks."""
    before = [
        (module, type(module), set(vars(module)), _plain(vars(module)), hooks_of(module))
        for module in modules
    ]

    def restore() -> None:
        for module, kind, names, plain, hooks in before:
            restore_hooks(module, hooks)
            if type(module) is kind:  # a lazy module has become another, with attributes of its own
                for name in vars(module).keys() - names:
                    del vars(module)[name]
                vars(module).update(plain)

    with afterwards(restore):
        yield


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if isinstance(value, _PLAIN)}


def hooks_of(module: nn.Module) -> Hooks:
    return {name: dict(vars(module)[name]) for name in _HOOKS if name in vars(module)}


def restore_hooks(module: nn.Module, hooks: Hooks) -> None:
    """Makes what hooks_of gave the module's hooks again."""
    for name, table in hooks.items():
        now = vars(module)[name]
        if len(now) != len(table) or any(key not in table for key in now):
            now.clear()
            now.update(table)
