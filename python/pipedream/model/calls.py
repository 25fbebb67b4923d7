"""Intercepts calls of modules. Each call goes through a handler. The handler makes the call, or returns
something else without making it.

A handler is installed in the attribute in which torch keeps a module's compiled call. The call that the
handler gets includes the module's hooks. A module keeps its class, because user code may check it. Only
modules whose class defines `__call__` itself (checkpointing) temporarily get a subclass of the same name.
Owned by the thread that runs the forward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["CallHandler", "calls_seen", "is_compiled", "module_names", "uncompiled", "visible_modules"]

CallHandler = Callable[[nn.Module, Callable[[], Any]], Any]
"""A function of (module, function that makes the call). The module's caller gets the function's result as the
result of the call.
"""

_HANDLER = "_pipedream_call_handler_"  # attribute of a module: its handler (threads share the subclass)
_DEPTH = "_pipedream_call_depth"  # attribute of a class: how many handlers see its calls
_BEFORE = "_pipedream_call_before"  # attribute of an intercepting function: the compiled call it replaces


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile compiled the module, so that its calls run generated code. A module whose calls
    are intercepted here does not count as compiled.
    """
    call = module._compiled_call_impl
    while hasattr(call, _BEFORE):
        call = getattr(call, _BEFORE)
    return type(module).__name__ == "OptimizedModule" or call is not None


def uncompiled(modules: Iterable[nn.Module]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which compiled modules run eagerly, because compiled code hides its operations."""
    if not any(is_compiled(module) for root in modules for module in root.modules()):
        return contextlib.nullcontext()  # set_stance imports the compiler, which takes seconds
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def visible_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns (name, module) for the modules whose calls can be intercepted, each once. Calls inside a
    compiled module cannot be intercepted.
    """
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
    """Returns the names of the modules whose calls can be intercepted, by id()."""
    return {id(module): name for name, module in visible_modules(model)}


@contextlib.contextmanager
def calls_seen(modules: Iterable[nn.Module], handler: CallHandler) -> Iterator[None]:
    """In the with block every call of these modules goes through the handler, except calls that the handler
    itself makes.
    """
    with contextlib.ExitStack() as seen:
        for module in modules:
            plain = type(module).__call__ is nn.Module.__call__
            seen.callback(_see_call(module, handler) if plain else _see_class(module, handler))
        yield


_COMPILED_CALL = "_compiled_call_impl"  # nn.Module.__call__ calls this, if set, in place of hooks and forward


def _see_call(module: nn.Module, handler: CallHandler) -> Callable[[], None]:
    """Intercepts a module's calls. Returns a function that ends the interception."""
    before = vars(module).get(_COMPILED_CALL)
    call = before or module._call_impl

    def seen(*arguments: Any, **keywords: Any) -> Any:
        return handler(module, functools.partial(call, *arguments, **keywords))

    setattr(seen, _BEFORE, before)

    def undo() -> None:
        vars(module).pop(_COMPILED_CALL, None)
        if before is not None:
            vars(module)[_COMPILED_CALL] = before

    vars(module)[_COMPILED_CALL] = seen
    return undo


def _see_class(module: nn.Module, handler: CallHandler) -> Callable[[], None]:
    """Intercepts a module's calls by a subclass. Returns a function that ends the interception."""
    kind = type(module)
    name = _handler_name(kind)

    def undo() -> None:
        module.__class__ = kind
        vars(module).pop(name, None)

    vars(module)[name] = handler
    module.__class__ = _seen_kind(kind)  # type: ignore[arg-type]  # a class is hashable
    return undo


def _handler_name(kind: type[nn.Module]) -> str:
    """Returns the name of the attribute for the next handler. Each handler of a class has an attribute of its
    own.
    """
    return f"{_HANDLER}{getattr(kind, _DEPTH, 0)}"


@functools.cache
def _seen_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns a subclass whose calls are intercepted. It has the same name, because user code may check
    it.
    """

    name = _handler_name(kind)

    def call(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        handler: CallHandler = vars(self)[name]
        return handler(self, functools.partial(kind.__call__, self, *arguments, **keywords))

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
