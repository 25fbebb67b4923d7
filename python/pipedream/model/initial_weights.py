"""Gives a model on the meta device its initial values, tensor by tensor, so that no process must hold the
whole model.

    the modules' own   reset_parameters() of each module, then _init_weights(module) of the model around it
                       (Hugging Face), children before parents, in the order of a model's constructor
    a function         the user's; called with each module, after the module's own functions
    a checkpoint       a safetensors file or a folder of such files, which give values by name; buffers that
                       the checkpoint lacks come from the modules

Every draw of random numbers has a stream of its own, which depends on the seed, the module and the number of
the module's earlier draws. Tensors that stay on the meta device draw as well. So the values of a tensor do
not depend on which other tensors get values. A model in one process and the same model in many stages start
with equal values.

whole_for_a_check() holds the whole model in host memory while its cuts are checked, if the check fits. Owned
by the calling thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipedream.common.errors import describe_error
from pipedream.common.units import format_bytes
from pipedream.model.layers import Model, roots_of
from pipedream.model.seeding import base_seed, generators_kept
from pipedream.model.stand_ins import exchange, is_on_meta, zeroed

__all__ = [
    "COMPLEX_MARK",
    "NUM_COPIES",
    "WEIGHT_INDEX",
    "WeightSource",
    "check_weights",
    "free_host_bytes",
    "materialise",
    "materialise_some",
    "materialised",
    "traceable",
    "whole_for_a_check",
]

WeightSource = Callable[[nn.Module], Any] | str | os.PathLike[str] | None
"""The source of the values for a model on the meta device. None: the modules' own functions."""

WEIGHT_INDEX = "model.safetensors.index.json"
"""Name of the file that says which safetensors file of a folder has which tensor."""
COMPLEX_MARK = "complex:"
"""Prefix of the name of a complex128 tensor, which is saved as pairs of reals because safetensors lacks the
dtype.
"""

_UNSET = 0xFF  # this byte, repeated, is NaN in a float of any width


def materialise(model: Model, weights: WeightSource = None, *, seed: int | None = None) -> None:
    """Gives a model that was made on the meta device its values, in host memory. They are the values from
    which `run` starts with this seed, or the values of a checkpoint that `run(save=folder)` wrote.

    weights: None calls each module's own `reset_parameters()` and `_init_weights`. A function is called with
    each module after these two, and sets the tensors that they leave unset. A safetensors file, or a folder
    of such files, gives the values by name, also to tensors that are not on meta. The generators keep their
    state. Raises ValueError naming the tensors that nothing sets.
    """
    check_weights(weights)
    roots = roots_of(model)
    if not is_on_meta(module for _, module in roots):
        raise ValueError("the model is not on the meta device: its parameters have values already")
    materialise_some(roots, [name for name, _ in _tensors_of(roots)], weights, base_seed(seed))


def materialise_some(
    roots: Sequence[tuple[str, nn.Module]], names: Collection[str], weights: WeightSource, seed: int
) -> None:
    """Gives the named tensors on the meta device their values. Named tensors that have memory get the
    checkpoint's values, if `weights` is a checkpoint that has them. roots: the result of layers.roots_of().
    """
    there = {name: tensor for name, tensor in _tensors_of(roots) if name in names and not tensor.is_meta}
    _make_values(roots, names, weights, seed)
    if isinstance(weights, (str, os.PathLike)):
        checkpoint = _Checkpoint(Path(weights))
        for name, name_there in checkpoint.names_of(there, roots).items():
            checkpoint.load(name_there, name, there[name])


def _make_values(
    roots: Sequence[tuple[str, nn.Module]], names: Collection[str], weights: WeightSource, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """Makes values for tensors on meta. Returns pairs of tensors with which stand_ins.exchange() puts the
    tensors back on meta.
    """
    wanted = {name: tensor for name, tensor in _tensors_of(roots) if name in names and tensor.is_meta}
    checkpoint = _Checkpoint(Path(weights)) if isinstance(weights, (str, os.PathLike)) else None
    saved: dict[str, str] = {} if checkpoint is None else checkpoint.names_of(wanted, roots)
    made = {name: tensor for name, tensor in wanted.items() if name not in saved}
    former = [(tensor, exchange(tensor, _empty(tensor))) for tensor in wanted.values()]
    if checkpoint is not None:
        checkpoint.check_has_parameters(made)
    if made:
        blank = {name: _Blank(tensor) for name, tensor in made.items()}
        _initialise(roots, made.values(), weights if callable(weights) else None, seed)
        _check_set(roots, blank, weights)
    if checkpoint is not None:
        for name, name_there in saved.items():
            checkpoint.load(name_there, name, wanted[name])
    return former


@contextlib.contextmanager
def materialised(
    roots: Sequence[tuple[str, nn.Module]], names: Collection[str], weights: WeightSource, seed: int
) -> Iterator[None]:
    """In the with block, the named tensors that were on meta have values. Afterwards they are on meta
    again.
    """
    tables = [(module, dict(module._buffers)) for _, root in roots for module in root.modules()]
    former = _make_values(roots, names, weights, seed)
    try:
        yield
    finally:
        for tensor, content in former:
            exchange(tensor, content)
        for module, buffers in tables:
            module._buffers.clear()
            module._buffers.update(buffers)


@contextlib.contextmanager
def traceable(model: nn.Module, weights: WeightSource) -> Iterator[None]:
    """In the with block, a model on meta can run on the host: its buffers have their values, its parameters
    are stand-ins. Tensors that autograd saves are dropped at once, so there can be no backward.
    """
    if not is_on_meta([model]):
        yield
        return
    roots = [("", model)]
    parameters = [p for p in model.parameters() if p.is_meta]
    with (
        materialised(roots, [name for name, _ in model.named_buffers()], weights, seed=0),
        zeroed(parameters),
        torch.autograd.graph.saved_tensors_hooks(_forget, _forget),
    ):
        yield


def check_weights(weights: Any) -> None:
    """Raises ValueError or TypeError if this is no source of weights."""
    if isinstance(weights, (str, os.PathLike)):
        _Checkpoint(Path(weights))
    elif isinstance(weights, type) or not (weights is None or callable(weights)):
        raise TypeError(
            f"weights is {weights!r}: give a function of a module, or the path of a safetensors file or of a"
            " folder with some"
        )


def _forget(_: Any) -> Any:
    return None


# Tensors by name.


def _tensors_of(roots: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor once, with its first name."""
    seen: set[int] = set()
    for name, tensor in _all_names(roots):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _all_names(roots: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in roots:
        named = (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        )
        yield from ((prefix + name, tensor) for name, tensor in named)


def _empty(tensor: Tensor) -> Tensor:
    content = torch.empty_like(tensor, device="cpu", requires_grad=False)
    if content.numel() > 0:
        _bytes_of(content).fill_(_UNSET)
    return content


def _bytes_of(content: Tensor) -> Tensor:
    """Returns a dense tensor's whole memory as bytes, in the order of the memory."""
    return torch.empty(0, dtype=torch.uint8).set_(content.untyped_storage())


class _Blank:
    """A tensor that has no values yet."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def is_set(self, now: Tensor | None) -> bool:
        """Whether the tensor has its values now. now: the tensor that the model now has under the tensor's
        name.
        """
        if now is not self._tensor:
            return now is not None and not now.is_meta
        if now.numel() == 0:
            return True
        if now.is_floating_point() or now.is_complex():
            return not bool(now.detach().isnan().any())
        return now._version != self._version or not bool((_bytes_of(now.detach()) == _UNSET).all())


def _check_set(
    roots: Sequence[tuple[str, nn.Module]], blank: dict[str, _Blank], weights: WeightSource
) -> None:
    now = dict(_all_names(roots))
    unset = [name for name, tensor in blank.items() if not tensor.is_set(now.get(name))]
    if not unset:
        return
    some = ", ".join(map(repr, unset[:3])) + (f" and {len(unset) - 3} more" if len(unset) > 3 else "")
    tried = "the function `weights`" if callable(weights) else "reset_parameters() or _init_weights()"
    raise ValueError(
        f"{some} is on the meta device, and {tried} of its module does not set all of it: give weights=, a"
        " function of a module that does, or a checkpoint that has it; where it is a buffer that __init__"
        " computes, make the model under pipedream.parameters_on_meta(), which leaves buffers as they are"
    )


# The modules' own functions.


def _initialise(
    roots: Sequence[tuple[str, nn.Module]],
    made: Iterable[Tensor],
    function: Callable[[nn.Module], Any] | None,
    seed: int,
) -> None:
    ids = {id(tensor) for tensor in made}
    done: set[int] = set()
    with generators_kept(), torch.no_grad():
        for prefix, root in roots:
            for place in _children_first(root, prefix.removesuffix("."), None):
                if id(place.module) in done or not place.holds(ids):
                    continue
                done.add(id(place.module))
                with _OwnDraws(seed, place.name):
                    place.initialise(ids, function)


@dataclass(frozen=True)
class _ModulePlace:
    module: nn.Module
    name: str
    of_model: Callable[[nn.Module], Any] | None
    """The _init_weights method of this module, or else of the innermost module around it that has one."""

    def holds(self, ids: set[int]) -> bool:
        """Whether the module, or a module inside it, has any of these tensors."""
        return any(id(tensor) in ids for tensor in (*self.module.parameters(), *self.module.buffers()))

    def initialise(self, ids: set[int], function: Callable[[nn.Module], Any] | None) -> None:
        own = (*self.module.parameters(recurse=False), *self.module.buffers(recurse=False))
        kind = type(self.module).__name__
        for name in ("reset_parameters", "_reset_parameters"):
            reset = getattr(self.module, name, None)
            if callable(reset) and any(id(tensor) in ids for tensor in own):
                self._call(reset, f"{name}() of {self.name or 'the model'} ({kind})")
                break
        if self.of_model is not None:
            self._call(self.of_model, f"_init_weights({self.name or 'the model'})", self.module)
        if function is not None:
            self._call(function, f"weights({self.name or 'the model'})", self.module)

    def _call(self, function: Callable[..., Any], what: str, *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            raise ValueError(
                f"{what} raised {describe_error(error)}; it is called while parameters of other stages are on"
                " the meta device: give weights=, a function of a module or a checkpoint"
            ) from error


def _children_first(
    module: nn.Module, name: str, of_model: Callable[[nn.Module], Any] | None
) -> Iterator[_ModulePlace]:
    of_model = _initialiser_of(module) or of_model
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}" if name else child_name, of_model)
    yield _ModulePlace(module, name, of_model)


def _initialiser_of(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """Returns the module's _init_weights method; None if it has none that takes one module, as in Hugging
    Face's models.
    """
    function = getattr(module, "_init_weights", None)
    if not callable(function):
        return None
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    needed = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return function if len(needed) == 1 else None


class _OwnDraws(TorchDispatchMode):
    """In the with block, each draw of random numbers on the host starts from a seed of its own."""

    def __init__(self, seed: int, module: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._key = f"{seed} {module}"
        self._num_draws = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            digest = hashlib.sha256(f"{self._key} {self._num_draws}".encode()).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            self._num_draws += 1
        return func(*args, **(kwargs or {}))


# Checkpoints.


class _Checkpoint:
    """A checkpoint in safetensors, which is read tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file_of: dict[str, tuple[str, Path]] = {}
        if not path.exists():
            raise ValueError(f"weights is {os.fspath(path)!r}: there is no such file or folder")
        try:
            for file in self._files():
                with safe_open(file, framework="pt") as opened:
                    names = list(opened.keys())
                self._file_of |= {name.removeprefix(COMPLEX_MARK): (name, file) for name in names}
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"weights is {os.fspath(path)!r}, which is not readable as safetensors:"
                f" {describe_error(error)}"
            ) from None
        if not self._file_of:
            raise ValueError(
                f"weights is {os.fspath(path)!r}, which has no safetensors file with a tensor in it"
            )

    def names_of(self, wanted: Collection[str], roots: Sequence[tuple[str, nn.Module]]) -> dict[str, str]:
        """Returns {wanted name: name in the checkpoint} for the tensors that the checkpoint has. The
        checkpoint may have a tensor with several names under any of these names.
        """
        first_name = {id(tensor): name for name, tensor in _tensors_of(roots)}
        found: dict[str, str] = {}
        for name, tensor in _all_names(roots):
            first = first_name[id(tensor)]
            if first in wanted and name in self._file_of:
                found.setdefault(first, name)
        return found

    def check_has_parameters(self, missing: dict[str, Tensor]) -> None:
        names = [name for name, tensor in missing.items() if isinstance(tensor, nn.Parameter)]
        if names:
            some = ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
            raise ValueError(
                f"the checkpoint {os.fspath(self._path)!r} has no {some}, which the model has: it is of"
                f" another model (it has {next(iter(self._file_of))!r})"
            )

    def load(self, name: str, name_in_model: str, tensor: Tensor) -> None:
        name_there, file = self._file_of[name]
        with safe_open(file, framework="pt") as opened:
            value: Tensor = opened.get_tensor(name_there)
        if name_there != name:
            value = torch.view_as_complex(value)
        if value.shape != tensor.shape:
            raise ValueError(
                f"the checkpoint {os.fspath(self._path)!r} has {name!r} of shape {tuple(value.shape)}, and"
                f" the model has {name_in_model!r} of {tuple(tensor.shape)}: it is of another model"
            )
        with torch.no_grad():
            tensor.copy_(value)

    def _files(self) -> list[Path]:
        if self._path.is_file():
            return [self._path]
        index = self._path / WEIGHT_INDEX
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return sorted({self._path / name for name in names})
        return sorted(self._path.glob("*.safetensors"))


_log = logging.getLogger("pipedream")

NUM_COPIES = 8
"""A check of cuts needs the memory of this many copies of the parameters and buffers. They are the values,
the gradients of the whole model and of the cut model, tensors for their comparison, and about as much for
activations.
"""
_SEED = 0


@contextlib.contextmanager
def whole_for_a_check(model: nn.Module, weights: WeightSource) -> Iterator[bool]:
    """In the with block, the model has values if host memory has room for NUM_COPIES copies of them, as a
    check of cuts needs. Yields whether it has values. If not, the log says why.
    """
    roots = roots_of(model)
    tensors = dict(_tensors_of(roots))
    needed_bytes = NUM_COPIES * sum(tensor.nbytes for tensor in tensors.values())
    free_bytes = free_host_bytes()
    if needed_bytes > free_bytes:
        _log.warning(
            "the cuts of the model are not checked: it is on the meta device, and whole it would take some"
            " %s, of which %s are free; check a smaller one of the same kind",
            format_bytes(needed_bytes),
            format_bytes(free_bytes),
        )
        yield False
        return
    with generators_kept(), materialised(roots, list(tensors), weights, _SEED):
        yield True


def free_host_bytes() -> int:
    """Returns the free bytes of host memory. The system's file cache counts as free if the system
    reports it.
    """
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
