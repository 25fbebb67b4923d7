"""Functions that a worker cannot import by their name, lambdas and those made inside of others: sent as their
code, with the globals of their module as the worker has it.

Only those that hold nothing but plain values, of the function around them, as defaults or as attributes: of a
tensor, a model or a list that they share with the caller each worker would have a copy, and nobody would be
told. Stateless; any thread.
"""

from __future__ import annotations

import importlib
import marshal
import sys
import types
from collections.abc import Callable
from typing import Any

__all__ = ["reduced_function"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def reduced_function(function: types.FunctionType) -> tuple[Any, ...] | None:
    """For a pickler; None for a function that can be imported by its name, or that holds other values."""
    module = sys.modules.get(function.__module__ or "")
    if not _is_local(function) or module is None or vars(module) is not function.__globals__:
        return None
    if module.__name__ == "__main__" and not hasattr(module, "__file__"):
        return None  # a notebook's: a worker has nothing of what its cells have defined
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a name that has no value yet
        return None
    settings = {"__qualname__": function.__qualname__, "__kwdefaults__": function.__kwdefaults__}
    defaults = (function.__defaults__ or (), *(function.__kwdefaults__ or {}).values())
    if not all(map(_is_plain, (*cells, *defaults, *vars(function).values()))):
        return None
    code = marshal.dumps(function.__code__)
    arguments = (module.__name__, code, function.__defaults__, cells, settings, vars(function))
    return _made_again, arguments


def _is_local(function: types.FunctionType) -> bool:
    return "<" in function.__qualname__  # <lambda>, <locals>


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, types.FunctionType):
        return not _is_local(value)
    return isinstance(value, (*_PLAIN, type, types.BuiltinFunctionType))


def _made_again(
    module_name: str,
    code: bytes,
    defaults: tuple[Any, ...] | None,
    cells: list[Any],
    settings: dict[str, Any],
    attributes: dict[str, Any],
) -> Callable[..., Any]:
    namespace = vars(importlib.import_module(module_name))
    held = tuple(map(types.CellType, cells))
    function = types.FunctionType(marshal.loads(code), namespace, None, defaults, held)
    for name, value in settings.items():
        setattr(function, name, value)
    function.__module__ = module_name
    vars(function).update(attributes)
    return function
