"""What a module keeps is put back after it has run for other reasons than training: to be traced, checked,
profiled or rehearsed. Stateless; the thread that runs the module.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.common.errors import afterwards
from pipedream.model.seeding import RngState

__all__ = ["attributes_kept", "hooks_of", "restore_hooks", "untouched"]

# Of a module's attributes, what cannot change but by being replaced.
_PLAIN = (bool, int, float, complex, str, type(None))
# Those that every module has, which are kept in ways of their own, but for flags such as `training`.
_OF_ANY_MODULE = frozenset(vars(nn.Module()))
# What is followed into where it is not long: a long one is what a model looks up, as a vocabulary, and not
# what it remembers of its minibatches.
_CONTAINERS = {list, tuple, deque, dict, OrderedDict, defaultdict, Counter, set}
_LENGTH_MAX = 1024
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
    inside), training flags, and what else a module has in attributes, as a counter, `initialised` or the
    tensors of a memory bank, without which a layer would take its next minibatch for another than the first.
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
    """What modules keep in attributes inside is gone afterwards: new ones, changed ones, hooks. Tensors,
    generators, lists and the like get their contents back, other objects do not."""
    before = [(module, type(module), dict(vars(module)), hooks_of(module)) for module in modules]
    contents = _Contents()
    for _, _, attributes, _ in before:
        contents.keep(attributes[name] for name in attributes.keys() - _OF_ANY_MODULE)

    def restore() -> None:
        contents.restore()
        for module, kind, attributes, hooks in before:
            restore_hooks(module, hooks)
            if type(module) is kind:  # a lazy module has become another, with attributes of its own
                for name in vars(module).keys() - attributes.keys():
                    del vars(module)[name]
                vars(module).update(_replaceable(attributes))

    with afterwards(restore):
        yield


def _replaceable(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in attributes.items()
        if name not in _OF_ANY_MODULE or isinstance(value, _PLAIN)
    }


class _Contents:
    """What is in objects that change without being replaced."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, Callable[[], object]]] = {}  # by id; alive, so that ids stay theirs

    def keep(self, values: Iterable[Any]) -> None:
        pending = list(values)
        while pending:
            value = pending.pop()
            if id(value) in self._kept:
                continue
            if type(value) in _CONTAINERS and len(value) <= _LENGTH_MAX:
                self._kept[id(value)] = value, _refilling(value)
                pending += value.values() if isinstance(value, dict) else value
            elif isinstance(value, torch.Generator):
                self._kept[id(value)] = value, functools.partial(value.set_state, value.get_state())
            elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self._kept[id(value)] = value, _overwriting(value)

    def restore(self) -> None:
        for _, restore in self._kept.values():
            restore()


def _refilling(container: Any) -> Callable[[], object]:
    """Gives a container the entries back that it has now."""
    entries = copy.copy(container)

    def refill() -> None:
        if isinstance(container, tuple):
            return
        container.clear()
        if isinstance(container, (list, deque)):
            container.extend(entries)
        else:
            container.update(entries)

    return refill


def _overwriting(tensor: Tensor) -> Callable[[], object]:
    """Gives a tensor the values back that it has now."""
    content, version = tensor.detach().clone(), tensor._version

    @torch.no_grad()
    def overwrite() -> None:
        if tensor._version != version:
            tensor.copy_(content)

    return overwrite


def hooks_of(module: nn.Module) -> Hooks:
    return {name: dict(vars(module)[name]) for name in _HOOKS if name in vars(module)}


def restore_hooks(module: nn.Module, hooks: Hooks) -> None:
    """Makes what hooks_of gave the module's hooks again."""
    for name, table in hooks.items():
        now = vars(module)[name]
        if len(now) != len(table) or any(key not in table for key in now):
            now.clear()
            now.update(table)
