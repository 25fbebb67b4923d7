"""Finds all places where a model or a loss holds tensors, besides the modules' tables of parameters.

Before a forward, a stage puts its weight version into every place that holds a parameter: the modules'
tables, and the lists, dicts, tuples, attributes, partials and closures that a layer keeps. A place that
cannot be written is refused by name. If this search misses a place, a gradient arrives at the model's own
parameter, which gets no gradient otherwise during a run. gradients_noticed() reports that. Stateless; any
thread.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = [
    "ByteSpan",
    "Place",
    "check_loss_fn",
    "frozen_meanwhile",
    "gradients_noticed",
    "is_name_of_a_library",
    "modules_carried_by",
    "objects_carried_by",
    "places_of",
    "tensors_carried_by",
]

# Objects of these libraries hold none of the user's weights, except modules.
_LIBRARIES = ("torch", "numpy", "logging", "pipedream")
# Values of these types hold no tensors. They are by far the most numerous (a vocabulary has a million), so
# they are skipped before anything is allocated for them.
_ATOMS = {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device}
# Empty containers of these types are skipped. Most modules' tables of hooks are empty.
_CONTAINERS = {dict, OrderedDict, set, frozenset, list, tuple, deque}
_TABLES = {"_parameters", "_buffers", "_modules"}


class Place(NamedTuple):
    """A place that holds an object, such as a tensor."""

    value: Any
    path: str
    container: Any = None
    """The object for which container[key] is the value, or a tuple or partial that contains the value. None:
    the place cannot be written.
    """
    key: Any = None
    held: Any = None
    """The present value of container[key]."""
    is_outside: bool = False
    """Whether the place is inside a module that no root has registered."""

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = self.value
        return tensor

    @property
    def where(self) -> tuple[int, Any]:
        """A key that is equal for the same container and key."""
        holder = self.container.target if isinstance(self.container, _Attributes) else self.container
        return id(holder), self.key

    def filled(self, replace: Callable[[Tensor], Tensor]) -> Any:
        """Returns the value of container[key] with each of its tensors replaced by replace(tensor)."""
        return _replaced(self.held, replace)

    def entry(self, path: str, container: Any, key: Any, value: Any) -> Place:
        return Place(value, path, container, key, value, self.is_outside)

    def part(self, path: str, value: Any) -> Place:
        """Returns the place of a part of an immutable value. To change the part, the whole value must be
        replaced by a new value.
        """
        return Place(value, path, self.container, self.key, self.held, self.is_outside)

    def fixed(self, path: str, value: Any) -> Place:
        return Place(value, path, is_outside=self.is_outside)


class ByteSpan(NamedTuple):
    """The memory of a tensor: the bytes b of a storage with begin <= b < end."""

    device: torch.device
    storage: int
    begin: int
    end: int

    def overlaps(self, other: ByteSpan) -> bool:
        return self[:2] == other[:2] and self.begin < other.end and other.begin < self.end

    @classmethod
    def of(cls, tensor: Tensor) -> ByteSpan | None:
        """Returns the tensor's span; None for a tensor without memory of its own."""
        if tensor.layout != torch.strided or tensor.is_meta or tensor.numel() == 0:
            return None
        extent = sum(
            (int(size) - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        begin = int(tensor.storage_offset()) * tensor.element_size()
        storage = tensor.untyped_storage().data_ptr()
        return cls(tensor.device, storage, begin, begin + (extent + 1) * tensor.element_size())


def places_of(roots: Iterable[tuple[str, nn.Module]]) -> Iterator[Place]:
    """Yields the places inside the modules of `roots`, which are pairs (path, module). Each object is
    searched once.
    """
    roots = list(roots)
    registered = {id(module) for _, root in roots for module in root.modules()}
    places = _walk([Place(root, path) for path, root in roots], registered, with_globals=False)
    return (place for place in places if isinstance(place.value, Tensor))


def tensors_carried_by(name: str, function: Any) -> list[tuple[str, Tensor]]:
    """Returns (path, tensor) for each tensor that a function or object can reach: through attributes,
    arguments, closures, and the global names that its code reads.
    """
    places = _walk([Place(function, name)], set(), with_globals=True)
    tensors = (place for place in places if isinstance(place.value, Tensor))
    return list({id(place.tensor): (place.path, place.tensor) for place in tensors}.values())


def modules_carried_by(function: Any) -> list[nn.Module]:
    """Returns the modules that a function or object can reach."""
    found = _walk([Place(function, "")], set(), with_globals=True)
    return [entry.value for entry in found if isinstance(entry.value, nn.Module)]


def objects_carried_by(name: str, function: Any) -> list[tuple[str, Any]]:
    """Returns (path, object) for modules and other objects that a function or object holds, but not through
    global names. Tensors and containers are left out.
    """
    found = _walk([Place(function, name)], set(), with_globals=False)
    others = (Tensor, dict, list, tuple, set, frozenset, deque, type, types.ModuleType)
    return [(entry.path, entry.value) for entry in found if not isinstance(entry.value, others)]


def check_loss_fn(loss_fn: Any) -> None:
    """Raises TypeError if the loss is a class. Raises ValueError if it has trainable tensors, because a stage
    trains parameters of the model only.
    """
    if isinstance(loss_fn, type):
        name = loss_fn.__name__
        raise TypeError(f"loss_fn is the class {name}: make a loss of it, as {name}() does")
    for path, tensor in tensors_carried_by("loss_fn", loss_fn):
        if tensor.requires_grad:
            raise ValueError(
                f"loss_fn carries the trainable tensor {path} of shape {tuple(tensor.shape)}, whose gradient"
                " would be lost: for a penalty on weights use the optimizer's weight_decay, which every stage"
                " applies to its own; make what a loss trains part of the model's last layer; freeze what it"
                " only reads with requires_grad_(False)"
            )


@contextlib.contextmanager
def gradients_noticed(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """A context that raises ValueError if a gradient arrives at one of these parameters. The error has the
    parameter's name.
    """
    handles = [
        _told_of_gradients(parameter, _notice if parameter.requires_grad else _notice_thawed, name)
        for name, parameter in parameters.items()
        if parameter.is_floating_point() or parameter.is_complex()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _told_of_gradients(parameter: nn.Parameter, tell: Callable[[str, Tensor], None], name: str) -> Any:
    needs_gradient = parameter.requires_grad
    parameter.requires_grad_(True)  # torch accepts the hook only on such a parameter, and keeps it afterwards
    handle = parameter.register_post_accumulate_grad_hook(functools.partial(tell, name))  # type: ignore[no-untyped-call]
    parameter.requires_grad_(needs_gradient)
    return handle


def _notice(name: str, _: Tensor) -> None:
    raise ValueError(
        f"parameter {name!r} was used in a way that the stage does not know of (a global name, or a layer of"
        " another stage), so it would not be trained: register it, or the module that has it, in the layer"
        " that uses it (self.x = ...)"
    )


def _notice_thawed(name: str, _: Tensor) -> None:
    raise ValueError(
        f"parameter {name!r} was frozen when the run began, and has a gradient now, with which nobody would"
        " train it: requires_grad_(True) counts at the beginning of a run, so end this one where it is to"
        " thaw, and begin another"
    )


def frozen_meanwhile(name: str) -> ValueError:
    return ValueError(
        f"parameter {name!r} was frozen during the run, where each minibatch may read another version of it:"
        " requires_grad_(False) counts at the beginning of a run, so freeze it before, or end this run there"
        " and begin another"
    )


# The walk.


class _Attributes:
    """Gives an object's attributes the interface of a container."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getitem__(self, name: str) -> Any:
        return getattr(self.target, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.target, name, value)


def _walk(roots: list[Place], registered: set[int], *, with_globals: bool) -> Iterator[Place]:
    """Yields every object once. Tensors, tuples and partials are yielded at each of their places."""
    seen: dict[int, Any] = {}  # keeps the objects alive, so that ids stay unique
    pending = roots[::-1]
    while pending:
        found = pending.pop()
        value = found.value
        if isinstance(value, Tensor):
            yield found
        elif type(value) not in _ATOMS:
            # A tuple or partial that occurs at several places must be replaced at each of them.
            if id(value) in seen and not _is_made_anew(value):
                continue
            seen[id(value)] = value
            if isinstance(value, nn.Module) and id(value) not in registered:
                found = Place(value, found.path, is_outside=True)
            yield found
            pending += list(_inside(found, with_globals=with_globals))[::-1]


def _inside(found: Place, *, with_globals: bool) -> Iterator[Place]:
    value, path = found.value, found.path
    if isinstance(value, nn.Module):
        yield from _inside_module(found)
    elif isinstance(value, dict):
        # The base class reads the stored entries. A subclass may compute or load the values that it returns.
        stored = dict.items(value)
        yield from (found.fixed(f"a key of {path}", key) for key, _ in stored if type(key) not in _ATOMS)
        yield from (
            found.entry(f"{path}[{key!r}]", value, key, item)
            for key, item in stored
            if type(item) not in _ATOMS
        )
    elif isinstance(value, (list, deque)):
        items = list.__iter__(value) if isinstance(value, list) else deque.__iter__(value)
        yield from (
            found.entry(f"{path}[{i}]", value, i, item)
            for i, item in enumerate(items)
            if type(item) not in _ATOMS
        )
    elif isinstance(value, (tuple, set, frozenset)):
        inside = found.part if _is_made_anew(value) else found.fixed
        yield from (inside(f"{path}[{i}]", item) for i, item in enumerate(value) if type(item) not in _ATOMS)
    elif isinstance(value, functools.partial):
        inside = found.part if _is_made_anew(value) else found.fixed
        yield inside(path, value.func)
        yield from (inside(f"{path}.args[{i}]", item) for i, item in enumerate(value.args))
        yield from (inside(f"{path}.{name}", item) for name, item in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield found.fixed(path, value.__self__)
        yield found.fixed(path, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _inside_function(found, with_globals=with_globals)
    elif not isinstance(value, (type, types.ModuleType)) and not _is_of_a_library(value):
        yield from _inside_object(found)


def _inside_module(found: Place) -> Iterator[Place]:
    module, path = found.value, found.path
    own = vars(module)
    for table in (module._parameters, module._buffers):
        yield from (
            found.entry(f"{path}.{key}", table, key, tensor)
            for key, tensor in table.items()
            if tensor is not None
        )
    yield from (found.fixed(f"{path}.{name}", child) for name, child in module._modules.items())
    # Hooks of weight_norm, spectral_norm and prune make these attributes again before each forward.
    hooks = module._forward_pre_hooks.values()
    made_by_hooks = {getattr(hook, name, None) for hook in hooks for name in ("name", "_tensor_name")}
    for key, value in own.items():
        if not _holds_nothing(value) and key not in made_by_hooks and key not in _TABLES:
            yield found.entry(f"{path}.{key}", own, key, value)


def _holds_nothing(value: Any) -> bool:
    return type(value) in _ATOMS or (type(value) in _CONTAINERS and not value)


def _inside_function(found: Place, *, with_globals: bool) -> Iterator[Place]:
    function, path = found.value, found.path
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield found.entry(f"{path}.{name}", _Attributes(cell), "cell_contents", cell.cell_contents)
    defaults = _Attributes(function)
    yield found.entry(f"{path}.__defaults__", defaults, "__defaults__", function.__defaults__)
    yield found.fixed(path, function.__kwdefaults__)
    yield found.fixed(path, vars(function))
    if with_globals:
        for name in sorted(_globals_read(function.__code__)):
            value = function.__globals__.get(name)
            # Functions of the user's own module are followed. Imported functions are not.
            if not isinstance(value, types.FunctionType) or value.__module__ == function.__module__:
                yield found.fixed(f"{path} (the global {name})", value)


def _inside_object(found: Place) -> Iterator[Place]:
    # The object's own look-up is not used, because it may run code, or raise for a missing attribute.
    target, path = found.value, found.path
    with contextlib.suppress(AttributeError):
        attributes = object.__getattribute__(target, "__dict__")
        yield from (found.entry(f"{path}.{key}", attributes, key, attributes[key]) for key in attributes)
    for kind in type(target).__mro__:
        for name, slot in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # an empty slot
                    value = slot.__get__(target)
                    yield found.entry(f"{path}.{name}", _Attributes(target), name, value)


def _globals_read(code: types.CodeType) -> set[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_read(constant)
    return names


def _is_of_a_library(value: Any) -> bool:
    return is_name_of_a_library(type(value).__module__)


def is_name_of_a_library(module_name: str | None) -> bool:
    """Whether a module belongs to a library whose objects hold none of the user's weights."""
    return (module_name or "").partition(".")[0] in _LIBRARIES


def _is_made_anew(value: Any) -> bool:
    """Whether _replaced() can make a new value of the same type with other tensors."""
    kind = type(value)
    return kind in (functools.partial, tuple) or (isinstance(value, tuple) and hasattr(kind, "_make"))


def _replaced(value: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return replace(value)
    if not _is_made_anew(value):
        return value
    if isinstance(value, functools.partial):
        arguments = [_replaced(item, replace) for item in value.args]
        keywords = {name: _replaced(item, replace) for name, item in value.keywords.items()}
        return functools.partial(_replaced(value.func, replace), *arguments, **keywords)
    items = [_replaced(item, replace) for item in value]
    return tuple(items) if type(value) is tuple else type(value)._make(items)
