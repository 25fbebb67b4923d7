"""Finds parameters and buffers that the traced minibatch did not use, and the place in the forward where a
later minibatch may use them. Examples are experts that no token chose, and a layer that was dropped.

An unused parameter or buffer is placed where its module's code would run, at the end of the module's calls. A
module that was not called is placed after the module that its parent registers before it:

    encoder(x)                      called; the cut is inside this call
      layers.0   called             ... end of layers.0
      layers.1   not called         placed here, and so upstream of a cut after layers.2
      layers.2   called             ...

A tick is a time in the trace (model/trace.py). Pure; any thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pipedream.model.trace import INPUTS, ROOT, Trace

__all__ = ["Unused", "unused_of"]


@dataclass(frozen=True)
class Unused:
    """A parameter or buffer of the model that no operation read or wrote."""

    ticks: tuple[float, ...]
    """Ticks at which the code of the parameter's module would have run. There is one tick for each call of
    the innermost called module around the parameter.
    """
    windows: tuple[tuple[float, float], ...]
    """Begin and end of each of those calls."""
    module: str = ""
    """The outermost module around the parameter that was not called; empty if the parameter's own module was
    called.
    """

    def is_in(self, begin: float, end: float) -> bool:
        """Whether its code would run between these ticks."""
        return any(begin < tick <= end for tick in self.ticks)

    def is_passed_in(self, begin: float, end: float) -> bool:
        """Whether code of the innermost called module around the parameter runs between these ticks."""
        return any(first < end and last > begin for first, last in self.windows)


def unused_of(trace: Trace) -> dict[str, Unused]:
    """Returns the unused parameters and buffers, by full name."""
    used = {version.storage for op in trace.operations for version in (*op.reads, *op.writes)}
    places = _Places(trace)
    return {
        name: places.of(name)
        for name, storage in {**trace.parameters, **trace.buffers}.items()
        if storage not in used
    }


class _Places:
    def __init__(self, trace: Trace) -> None:
        self._calls = trace.calls
        self._modules = trace.modules
        self._order = {name: index for index, name in enumerate(trace.modules)}
        self._calls_of: dict[str, list[int]] = {}
        for index, call in enumerate(trace.calls):
            if call.key != INPUTS:
                self._calls_of.setdefault(call.key.module, []).append(index)
        self._found: dict[str, Unused] = {}  # by the module's path

    def of(self, name: str) -> Unused:
        path = name.rpartition(".")[0]
        if path not in self._found:
            self._found[path] = self._of_module(path)
        return self._found[path]

    def _of_module(self, path: str) -> Unused:
        absent = ""
        around = path
        while around and around not in self._calls_of:
            if around in self._order:
                absent = around
            around = around.rpartition(".")[0]
        calls = self._calls_of.get(around, [ROOT]) if around else [ROOT]
        windows = tuple(self._window(call) for call in calls)
        if not absent:
            return Unused(tuple(end for _, end in windows), windows)
        return Unused(tuple(self._tick_in(call, around, absent) for call in calls), windows, absent)

    def _window(self, call: int) -> tuple[float, float]:
        return (0, math.inf) if call == ROOT else (self._calls[call].begin, self._calls[call].end)

    def _tick_in(self, call: int, around: str, absent: str) -> float:
        """Returns the tick at which the call would have called the absent module: just after the calls of the
        nearest module registered before it, or just before the calls of the nearest module registered after
        it. Only modules that the call did call count. The search starts in the absent module's container and
        goes outward. If it finds nothing, the tick is the call's end.
        """
        position = self._order[absent]
        container = absent
        while container != around:
            container = container.rpartition(".")[0]
            before = self._calls_in(call, container, reversed(self._modules[:position]), absent)
            behind = self._calls_in(call, container, self._modules[position + 1 :], absent)
            end = max((self._calls[index].end for index in before), default=None)
            begin = min((self._calls[index].begin for index in behind), default=None)
            if end is not None and (begin is None or end < begin):
                return end + 0.5
            if begin is not None:
                return begin - 0.5
        return self._window(call)[1]

    def _calls_in(self, call: int, container: str, modules: Iterable[str], absent: str) -> list[int]:
        """Takes the first of `modules` that lies in the container and was called inside `call`. Returns the
        calls directly inside `call` that are calls of this module or contain them. Empty if there is no such
        module.
        """
        prefix = f"{container}." if container else ""
        for module in modules:
            if module.startswith(prefix) and not module.startswith(f"{absent}."):
                inside = [self._child_of(call, index) for index in self._calls_of.get(module, ())]
                found = [index for index in inside if index is not None]
                if found:
                    return found
        return []

    def _child_of(self, call: int, index: int) -> int | None:
        """Returns the call directly inside `call` that is the call `index` or contains it; None if `index` is
        not inside `call`.
        """
        while index != ROOT:
            parent = self._calls[index].parent
            if parent == call:
                return index
            index = parent
        return None
