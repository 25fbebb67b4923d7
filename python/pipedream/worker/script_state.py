"""Holds the values that a script has set since its modules were imported. A worker imports the modules again,
and ScriptState then sets these values in the worker.

launch/script_capture.py finds the values. task_files.py sends them in the same graph of objects as the model.
A worker applies them on its main thread, before its model runs.
"""

from __future__ import annotations

import importlib
import types
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.nn.modules.module as hooks_of_all
from torch import Tensor, nn

from pipedream.worker.local_functions import namespace_of

__all__ = ["ScriptState"]

_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__", "__closure__", "__dict__")


@dataclass
class ScriptState:
    """Values as they are in the caller's process."""

    names: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values of global names, by module and name. A library's module is included if the script has replaced a
    function in it."""
    attributes: list[tuple[type, str, Any]] = field(default_factory=list)
    """Attributes of classes: (class, name, value)."""
    hooks: dict[str, dict[int, Any]] = field(default_factory=dict)
    """Hooks that torch calls for all modules: {name of torch's table: {key: hook}}."""

    def apply(self) -> None:
        for module_name, values in self.names.items():
            try:
                module = importlib.import_module(module_name)
            except ImportError:  # code that needs the module raises the error again
                continue
            namespace = namespace_of(module)
            for name, value in values.items():
                if name not in namespace or not _is_same(namespace[name], value):
                    namespace[name] = _placed_as(namespace.get(name), value)
                    setattr(module, name, namespace[name])
        for kind, name, value in self.attributes:
            if name not in vars(kind) or not _is_same(vars(kind)[name], value):
                setattr(kind, name, value)
        for table, hooks in self.hooks.items():
            getattr(hooks_of_all, table).update(hooks)


def _is_same(own: Any, sent: Any) -> bool:
    """Whether the sent value equals the worker's own value. Then the worker keeps its own object, because
    functions may hold the object as a default. Tensors and modules never count as equal, because a sent
    tensor or module may be part of the sent model."""
    try:
        return _is_equal(own, sent)
    except Exception:  # a user's object may raise anything, and a list that holds itself has no end
        return False


def _is_equal(own: Any, sent: Any) -> bool:
    if own is sent:
        return True
    if type(own) is not type(sent) or isinstance(own, (Tensor, nn.Module)):
        return False
    if isinstance(own, (list, tuple, deque)):
        return len(own) == len(sent) and all(map(_is_equal, own, sent))
    if isinstance(own, dict):
        return own.keys() == sent.keys() and all(_is_equal(own[key], sent[key]) for key in own)
    if isinstance(own, types.FunctionType):
        return all(_is_equal(getattr(own, name), getattr(sent, name)) for name in _OF_FUNCTIONS)
    if isinstance(own, types.CellType):
        return _is_equal(own.cell_contents, sent.cell_contents)
    if isinstance(own, (staticmethod, classmethod)):
        return _is_equal(own.__func__, sent.__func__)
    if isinstance(own, property):
        return all(_is_equal(getattr(own, name), getattr(sent, name)) for name in ("fget", "fset", "fdel"))
    if isinstance(own, np.ndarray):
        return bool(own.dtype == sent.dtype and np.array_equal(own, sent))
    if own != own and sent != sent:  # two NaN count as equal
        return True
    compare: Any = type(own).__eq__
    if compare is object.__eq__:
        return _is_equal(own.__reduce_ex__(2), sent.__reduce_ex__(2))
    same: bool = own == sent
    return bool(same)


def _placed_as(own: Any, sent: Any) -> Any:
    """Returns the sent value. A sent tensor is in host memory, so it is moved to the device of the worker's
    own value."""
    return sent.to(own.device) if isinstance(own, Tensor) and isinstance(sent, Tensor) else sent
