"""Saves and restores global names in which a model's code counts or keeps something. So a forward that is run
to trace, check or measure a model does not change them.

    global step; step += 1            the name itself
    counts["step"] += 1               a key of a dict under a global name
    count[0] += 1, log.append(0.5)    all entries of a list, deque or dict of numbers and tensors only
    state.step += 1, Layer.step += 1  an attribute of a user's object, class or module
    step.add_(1)                      the values of a small tensor

Only numbers and tensors are restored, so that objects loaded on first use stay. Stateless; used on the thread
that runs the module.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from pipedream.model.contents import attributes_of, is_of_the_users, overwriting, refilling
from pipedream.model.references import is_name_of_a_library, objects_carried_by

__all__ = ["GlobalNames"]

_LENGTH_MAX = 1024  # a longer list or dict is a table of data, not a counter
_TENSOR_BYTES_MAX = 64 * 1024
_CONTAINERS = {list, deque, dict, OrderedDict, defaultdict, Counter}
_NUMBERS = (bool, int, float, complex)
_ATOMS = {type(None), bool, int, float, complex, str, bytes}
_SETS_GLOBAL = dis.opmap["STORE_GLOBAL"]
_MISSING = object()

_Restore = Callable[[], None]


class GlobalNames:
    """Finds the places where code changes global names. It searches the code of modules, of a function or
    object, and of functions that this code names. The search runs once. The places can then be saved as often
    as needed.
    """

    def __init__(self, modules: Iterable[nn.Module], function: Any = None) -> None:
        self._entries: dict[tuple[int, Any], tuple[Any, Any]] = {}  # (holder, name), by (id of holder, name)
        self._tallies: dict[int, Any] = {}
        self._tensors: dict[int, Tensor] = {}
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that ids stay unique
        objects = [value for _, value in objects_carried_by("", function)]
        kinds = dict.fromkeys(type(value) for value in (*modules, *objects))
        pending = [value for value in objects if isinstance(value, types.FunctionType)]
        for base in dict.fromkeys(base for kind in kinds for base in kind.__mro__):
            if not is_name_of_a_library(base.__module__):
                self._look_into(base)
                pending += [value for value in vars(base).values() if isinstance(value, types.FunctionType)]
        while pending:
            one = pending.pop()
            if id(one) in self._seen or is_name_of_a_library(one.__module__):
                continue
            self._seen[id(one)] = one
            sets, names = _names_in(one.__code__)
            for name in sets:
                self._add(one.__globals__, name)
            for value in _read(one.__globals__, names):
                if isinstance(value, types.FunctionType):
                    pending.append(value)
                elif type(value) not in _ATOMS and id(value) not in self._seen:
                    self._seen[id(value)] = value
                    self._look_into(value)

    def kept(self) -> _Restore:
        """Returns a function that restores the present values of all places later."""
        entries = [
            (holder, name, _entries_of(holder).get(name, _MISSING)) for holder, name in self._entries.values()
        ]
        tallies = [(value, refilling(value)) for value in self._tallies.values() if _is_tally(value)]
        overwrites = [overwriting(tensor) for tensor in self._tensors.values()]

        def restore() -> None:
            for holder, name, value in entries:
                now = _entries_of(holder).get(name, _MISSING)
                if now is not value and _is_counted(now):
                    _put(holder, name, value)
            for value, refill in tallies:
                if _is_tally(value):
                    refill()
            for overwrite in overwrites:
                overwrite()

        return restore

    def _add(self, holder: Any, name: Any) -> None:
        self._entries[id(holder), name] = holder, name

    def _look_into(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and value.nbytes <= _TENSOR_BYTES_MAX:
                self._tensors[id(value)] = value
        elif type(value) in _CONTAINERS and len(value) <= _LENGTH_MAX and _is_tally(value):
            self._tallies[id(value)] = value
        elif _is_of_the_users(value):
            holder = vars(value) if isinstance(value, types.ModuleType) else value
            entries = _entries_of(holder)
            for name, entry in entries.items() if len(entries) <= _LENGTH_MAX else ():
                if isinstance(entry, _NUMBERS):
                    self._add(holder, name)


def _read(namespace: dict[str, Any], names: frozenset[str]) -> Iterator[Any]:
    """Yields the values of these names in a namespace, and in the user's modules that the names refer to."""
    for name in names & namespace.keys():
        value = namespace[name]
        yield value
        if isinstance(value, types.ModuleType) and _is_of_the_users(value):
            yield from (vars(value)[inner] for inner in names & vars(value).keys())


def _entries_of(holder: Any) -> Mapping[Any, Any]:
    if isinstance(holder, dict):
        return holder
    return vars(holder) if isinstance(holder, type) else attributes_of(holder)


def _put(holder: Any, name: Any, value: Any) -> None:
    if isinstance(holder, type):
        setattr(holder, name, value)
    elif not isinstance(holder, dict):
        object.__setattr__(holder, name, value)
    elif value is _MISSING:
        del holder[name]
    else:
        holder[name] = value


def _is_counted(value: Any) -> bool:
    return isinstance(value, (*_NUMBERS, Tensor))


def _is_tally(value: Any) -> bool:
    return all(map(_is_counted, value.values() if isinstance(value, dict) else value))


def _is_of_the_users(value: Any) -> bool:
    """Whether the value belongs to the user's code. A plain dict counts as the user's, a plain list does not.
    An nn.Module does not count, because a model's modules are saved elsewhere.
    """
    if type(value) in _CONTAINERS or isinstance(value, nn.Module):
        return isinstance(value, dict)
    if isinstance(value, (type, types.ModuleType)):
        name = value.__module__ if isinstance(value, type) else value.__name__
        return not is_name_of_a_library(name) and name.partition(".")[0] not in sys.stdlib_module_names
    return is_of_the_users(value)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the global names that the code sets, and all names that it may read."""
    sets: set[str] = set()
    if _SETS_GLOBAL in code.co_code[::2]:  # disassembling takes long, so only if needed
        sets = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            sets_inside, names_inside = _names_in(constant)
            sets |= sets_inside
            names |= names_inside
    return frozenset(sets), frozenset(names)
