"""Saves and restores the contents of objects that change in place. Stateless; used on the thread that runs
the module.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Contents", "attributes_of", "is_of_the_users", "overwriting", "refilling"]

_LENGTH_MAX = 1024
"""Containers with more entries than this are taken for data, not for a layer's memory. Their entries are
restored, but the contents of each entry are not.
"""
_CONTAINERS = (list, deque, dict, set)
# Objects of these libraries hold threads, files and caches, which must not be restored.
_LIBRARIES = {"torch", "numpy", "pipedream", "lightning", "pytorch_lightning", *sys.stdlib_module_names}
_NOTHING = object()
_ATOMS = {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device}


class Contents:
    """The saved contents of containers, tensors, arrays, generators, and objects of the user's classes."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """modules: modules that are not saved here, because the caller saves them in another way."""
        # By id(). Each object is kept alive with its function, so that its id stays its own.
        self._kept: dict[int, tuple[Any, Callable[[], object]]] = {
            id(module): (module, _nothing) for module in modules
        }

    def keep(self, values: Iterable[Any]) -> None:
        """Saves the values, and everything inside them."""
        pending = [value for value in values if type(value) not in _ATOMS]
        while pending:
            value = pending.pop()
            if id(value) in self._kept:
                continue
            restore = _restoring(value)
            if restore is not None:
                self._kept[id(value)] = value, restore
                pending += [inner for inner in _inside(value) if type(inner) not in _ATOMS]

    def restore(self) -> None:
        for _, restore in self._kept.values():
            restore()


def _nothing() -> None:
    pass


def _restoring(value: Any) -> Callable[[], object] | None:
    """Returns a function that restores the value's present contents later. Returns None for values that are
    not restored: parameters, memory-mapped arrays, and unknown kinds of objects."""
    if isinstance(value, Tensor):
        return None if isinstance(value, nn.Parameter) else overwriting(value)
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if _is_of_numpy(value):
        return _restoring_of_numpy(value)
    if isinstance(value, tuple):
        return _nothing
    of_class = _refilling_attributes(value) if is_of_the_users(value) else None
    of_container = refilling(value) if isinstance(value, _CONTAINERS) else None
    if of_class is None or of_container is None:
        return of_class or of_container

    def both() -> None:
        of_container()
        of_class()

    return both


def _inside(value: Any) -> list[Any]:
    inside: list[Any] = []
    if isinstance(value, (tuple, *_CONTAINERS)) and len(value) <= _LENGTH_MAX:
        inside += dict.values(value) if isinstance(value, dict) else value
    if is_of_the_users(value):
        inside += attributes_of(value).values()
    return inside


def is_of_the_users(value: Any) -> bool:
    """Whether the object counts as the user's: its class is of none of _LIBRARIES, or it is an nn.Module or a
    SimpleNamespace. Classes, Python modules, functions and tensors do not count.
    """
    if isinstance(value, (type, types.ModuleType, types.FunctionType, Tensor)):
        return False
    if isinstance(value, (nn.Module, types.SimpleNamespace)):  # a module that is registered nowhere
        return True
    return (type(value).__module__ or "").partition(".")[0] not in _LIBRARIES


def attributes_of(target: Any) -> dict[str, Any]:
    """Returns an object's attributes, from its dictionary and its slots. The object's own look-up is
    bypassed, because it may run code or raise.
    """
    try:
        attributes = dict(object.__getattribute__(target, "__dict__"))
    except AttributeError:
        attributes = {}
    for name, slot in _slots(target).items():
        with contextlib.suppress(AttributeError):  # an empty slot
            attributes[name] = slot.__get__(target)
    return attributes


def _slots(target: Any) -> dict[str, types.MemberDescriptorType]:
    members = (item for kind in type(target).__mro__ for item in vars(kind).items())
    return {name: slot for name, slot in members if isinstance(slot, types.MemberDescriptorType)}


def _refilling_attributes(target: Any) -> Callable[[], None]:
    attributes = attributes_of(target)

    def refill() -> None:
        now, slots = attributes_of(target), _slots(target)
        for name in now.keys() - attributes.keys():
            object.__delattr__(target, name)
        for name, value in attributes.items():
            if name in now and now[name] is value:
                continue
            if name in slots:
                slots[name].__set__(target, value)
            else:
                object.__getattribute__(target, "__dict__")[name] = value

    return refill


def refilling(container: Any) -> Callable[[], None]:
    """Returns a function that restores the container's present entries later. The function uses methods of
    the base class, because a subclass may override them with code that computes or refuses.
    """
    base: Any = next(kind for kind in (OrderedDict, *_CONTAINERS) if isinstance(container, kind))
    is_dict = issubclass(base, dict)
    entries = list(base.__iter__(container))
    values = list(base.values(container)) if is_dict else []

    def refill() -> None:
        now = base.values(container) if is_dict else ()
        if _are_these(base.__iter__(container), entries) and _are_these(now, values):
            return  # nothing changed, as in a vocabulary
        base.clear(container)
        if is_dict:
            for key, value in zip(entries, values, strict=True):
                base.__setitem__(container, key, value)
        else:
            (base.update if base is set else base.extend)(container, entries)

    return refill


def _are_these(found: Iterable[Any], objects: list[Any]) -> bool:
    return all(one is other for one, other in itertools.zip_longest(found, objects, fillvalue=_NOTHING))


def overwriting(tensor: Tensor) -> Callable[[], None]:
    """Returns a function that restores the tensor's present memory and values later. It compares values,
    because writes through `.data` do not increase the tensor's version.
    """
    memory, version = tensor.data, tensor._version
    is_plain = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_nested
    content = tensor.detach().clone()

    @torch.no_grad()
    def overwrite() -> None:
        if is_plain and (tensor.shape != memory.shape or tensor.data_ptr() != memory.data_ptr()):
            tensor.data = memory
        if tensor._version != version or (is_plain and not _is_same(tensor, content)):
            tensor.copy_(content)

    return overwrite


def _is_same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _is_of_numpy(value: Any) -> bool:
    return (type(value).__module__ or "").partition(".")[0] == "numpy"


def _restoring_of_numpy(value: Any) -> Callable[[], object] | None:
    import numpy as np  # imported already: the value is numpy's

    if isinstance(value, np.memmap):  # the file may be larger than memory
        return None
    if isinstance(value, np.ndarray):
        content = value.copy()

        def overwrite() -> None:
            if value.tobytes() != content.tobytes():
                value[...] = content

        return overwrite
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        state = copy.deepcopy(value.bit_generator.state)
        return functools.partial(setattr, value.bit_generator, "state", state)
    return None
