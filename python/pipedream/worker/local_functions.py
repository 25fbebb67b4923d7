"""Sends functions that a worker cannot import by their names: lambdas, functions made inside other functions,
and functions that the script defines under its guard (`if __name__ == "__main__"`). Such a function is sent
as its code. In the worker it reads the globals of the worker's own copy of its module.

A function holds its defaults, its attributes, and the variables that it reads from a surrounding function.
Only plain values, tuples, functions, classes and methods of modules are allowed there. A tensor, a model or a
list is refused, because each worker would silently get its own copy. Stateless; any thread.
"""

from __future__ import annotations

import importlib
import marshal
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["namespace_of", "reduced_function"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def reduced_function(function: types.FunctionType) -> tuple[Any, ...] | None:
    """Returns the function in the form of pickle's __reduce__: a callable for the worker, and its arguments.
    Returns None if pickle shall send the function's name instead, because the name is enough or because the
    function cannot be sent in any form. Raises ValueError for the first value that the function holds and
    that is not allowed."""
    module = sys.modules.get(function.__module__ or "")
    if module is None or vars(module) is not function.__globals__:
        return None
    is_scripts = module.__name__ == "__main__"
    if is_scripts and not hasattr(module, "__file__"):
        return None  # workers do not run the cells of a notebook
    if not _is_local(function) and not (is_scripts and _is_simple(function)):
        name = function.__qualname__
        return None if _found(module, name) is function else (_as_imported, (module.__name__, name))
    for what, value in _held_by(function):
        if value is function:
            raise ValueError(
                f"{function.__qualname__} holds itself {what}: define it at the top level of a module"
            )
        if not _is_plain(value):
            raise ValueError(
                f"{function.__qualname__} holds {_described(value)} {what}, of which each worker would have a"
                " copy of its own"
            )
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    settings = {"__qualname__": function.__qualname__, "__kwdefaults__": function.__kwdefaults__}
    code = marshal.dumps(function.__code__)
    arguments = (module.__name__, code, function.__defaults__, cells, settings, vars(function))
    return _made_again, arguments


def _found(module: types.ModuleType, qualified_name: str) -> Any:
    """Returns the object of this name in the module; None if there is none."""
    found: Any = module
    for name in qualified_name.split("."):
        found = getattr(found, name, None)
    return getattr(found, "__func__", found)  # a classmethod has its function in __func__


def _as_imported(module_name: str, qualified_name: str) -> Any:
    """Returns the function that the import of the module defines. The caller's script has put another
    function under this name, but the worker has not done so yet."""
    return _found(importlib.import_module(module_name), qualified_name)


def namespace_of(module: types.ModuleType) -> dict[str, Any]:
    """Returns the dictionary in which a module's functions look up their globals. It may differ from
    vars(module), because multiprocessing gives an imported script a copy of the dictionary."""
    for value in vars(module).values():
        held = vars(value).values() if isinstance(value, type) else (value,)
        for function in held:
            if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                return function.__globals__
    return vars(module)


def _is_simple(function: types.FunctionType) -> bool:
    """Whether the function is at the top level of its module and holds only plain values."""
    is_open = "." in function.__qualname__ or function.__closure__
    return not is_open and all(_is_plain(value) for _, value in _held_by(function))


def _held_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields (text that says how the function holds a value, the value). Raises ValueError for a variable
    that has no value yet."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            raise ValueError(
                f"{function.__qualname__} reads {name!r} of the function around it, which has no value yet"
            ) from None
        yield f"as {name!r} of the function around it", value
    defaults = function.__defaults__ or ()
    with_default = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    for name, value in (*zip(with_default, defaults, strict=True), *(function.__kwdefaults__ or {}).items()):
        yield f"as the default of {name!r}", value
    for name, value in vars(function).items():
        yield f"as its attribute {name!r}", value


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return "a tuple with " + next(_described(item) for item in value if not _is_plain(item))
    return f"a {type(value).__name__}"


def _is_local(function: types.FunctionType) -> bool:
    return "<" in function.__qualname__  # such names contain <lambda> or <locals>


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    # Methods of modules are allowed, because a function that patches a module often holds its old method.
    if isinstance(value, types.MethodType):
        return isinstance(value.__self__, nn.Module)
    # A held function counts as plain here. The pickler checks it when it pickles that function.
    return isinstance(value, (*_PLAIN, type, types.FunctionType, types.BuiltinFunctionType))


def _made_again(
    module_name: str,
    code: bytes,
    defaults: tuple[Any, ...] | None,
    cells: list[Any],
    settings: dict[str, Any],
    attributes: dict[str, Any],
) -> Callable[..., Any]:
    namespace = namespace_of(importlib.import_module(module_name))
    own = namespace.get(settings["__qualname__"])
    if isinstance(own, types.FunctionType) and own.__code__ == marshal.loads(code):
        own.__defaults__, own.__kwdefaults__ = defaults, settings["__kwdefaults__"]
        vars(own).update(attributes)
        return own
    held = tuple(map(types.CellType, cells))
    function = types.FunctionType(marshal.loads(code), namespace, None, defaults, held)
    for name, value in settings.items():
        setattr(function, name, value)
    function.__module__ = module_name
    vars(function).update(attributes)
    return function
