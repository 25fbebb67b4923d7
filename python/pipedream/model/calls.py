"""Calls of modules, seen from outside: each goes through a function, which may make it, or give something
back without it.

All hooks lie within the call. It goes the way that torch has for a compiled call, so a module stays of its
class, for which forwards ask. Only where a class has a `__call__` of its own (checkpointing), which lies
within the call too, the module is meanwhile of another that differs in it alone. Owned by the thread that
runs the forward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

__all__ = ["CallHandler", "calls_seen", "is_compiled", "module_names", "visible_modules"]

CallHandler = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(module, the call itself, its arguments) -> what the caller gets."""

_HANDLER = "_pipedream_call_handler_"  # in the module's own table: other threads have modules of their own
_DEPTH = "_pipedream_call_depth"  # of a class: how many handlers see its calls
_BEFORE = "_pipedream_call_before"  # of a function that sees calls: the compiled call in whose place it is


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile compiled the module, so that its calls run generated code. A module whose calls
    are only watched is not compiled."""
    call = module._compiled_call_impl
    while hasattr(call, _BEFORE):
        call = getattr(call, _BEFORE)
    return type(module).__name__ == "OptimizedModule" or call is not None


def visible_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of those inside whose calls can be seen, each once: none inside a compiled one."""
    found: dict[int, tuple[str, nn.Module]] = {}
    pending = [("", model)]
    while pending:
        name, module = pending.pop()
        if id(module) in found:
            continue
        found[id(module)] = (name, module)
        if not is_compiled(module):
            prefix = f"{name}." if name else ""
            pending += [(prefix + child, inner) for child, inner in module.named_children()][::-1]
    del found[id(model)]
    return list(found.values())


def module_names(model: nn.Module) -> dict[int, str]:
    """Returns the names of the modules whose calls can be seen, by id()."""
    return {id(module): name for name, module in visible_modules(model)}


@contextlib.contextmanager
def calls_seen(modules: Iterable[nn.Module], handler: CallHandler) -> Iterator[None]:
    """Inside, every call of one of the modules goes through the handler. Not again inside itself."""
    with contextlib.ExitStack() as seen:
        for module in modules:
            plain = type(module).__call__ is nn.Module.__call__
            seen.callback(_see_call(module, handler) if plain else _see_class(module, handler))
        yield


_COMPILED_CALL = "_compiled_call_impl"  # what nn.Module.__call__ calls in the place of the hooks and forward


def _see_call(module: nn.Module, handler: CallHandler) -> Callable[[], None]:
    """Gives what undoes it."""
    before = vars(module).get(_COMPILED_CALL)
    call = before or module._call_impl

    def seen(*arguments: Any, **keywords: Any) -> Any:
        return handler(module, call, arguments, keywords)

    setattr(seen, _BEFORE, before)

    def undo() -> None:
        vars(module).pop(_COMPILED_CALL, None)
        if before is not None:
            vars(module)[_COMPILED_CALL] = before

    vars(module)[_COMPILED_CALL] = seen
    return undo


def _see_class(module: nn.Module, handler: CallHandler) -> Callable[[], None]:
    """Gives what undoes it."""
    kind = type(module)
    name = _handler_name(kind)

    def undo() -> None:
        module.__class__ = kind
        vars(module).pop(name, None)

    vars(module)[name] = handler
    module.__class__ = _seen_kind(kind)  # type: ignore[arg-type]  # a class is hashable
    return undo


def _handler_name(kind: type[nn.Module]) -> str:
    """The attribute of the next handler, which may see calls that others see already."""
    return f"{_HANDLER}{getattr(kind, _DEPTH, 0)}"


@functools.cache
def _seen_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """The class with its calls seen; by the same name, as user code may ask for it."""

    name = _handler_name(kind)

    def call(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        handler: CallHandler = vars(self)[name]
        return handler(self, functools.partial(kind.__call__, self), arguments, keywords)

    depth = getattr(kind, _DEPTH, 0) + 1
    table = {
        "__call__": call,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        _DEPTH: depth,
    }
    metaclass: Any = type(kind)
    seen: type[nn.Module] = metaclass(kind.__name__, (kind,), table)
    return seen
