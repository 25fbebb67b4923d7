"""Calls of modules, seen from outside: each goes through a function, which may make it, or give something
back without it.

Meanwhile a module's class is another one that differs in `__call__` alone, so what a class does around its
forward (checkpointing) and all hooks lie within the call. Owned by the thread that runs the forward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

__all__ = ["CallHandler", "calls_seen", "is_compiled", "visible_modules"]

CallHandler = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(module, the call itself, its arguments) -> what the caller gets."""

_HANDLER = "_pipedream_call_handler"  # in the module's own table: other threads have modules of their own


def is_compiled(module: nn.Module) -> bool:
    """By torch.compile: its calls run code that was made of it, and of the modules inside."""
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


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


@contextlib.contextmanager
def calls_seen(modules: Iterable[nn.Module], handler: CallHandler) -> Iterator[None]:
    """Inside, every call of one of the modules goes through the handler. Not again inside itself."""
    kinds = [(module, type(module)) for module in modules]
    try:
        for module, kind in kinds:
            vars(module)[_HANDLER] = handler
            module.__class__ = _seen_kind(kind)  # type: ignore[arg-type]  # a class is hashable
        yield
    finally:
        for module, kind in kinds:
            module.__class__ = kind
            vars(module).pop(_HANDLER, None)


@functools.cache
def _seen_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """The class with its calls seen; by the same name, as user code may ask for it."""

    def call(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        handler: CallHandler = vars(self)[_HANDLER]
        return handler(self, functools.partial(kind.__call__, self), arguments, keywords)

    table = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    metaclass: Any = type(kind)
    seen: type[nn.Module] = metaclass(kind.__name__, (kind,), table)
    return seen
