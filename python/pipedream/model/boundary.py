"""Boundary describes the value that crosses the cut between two stages. A rehearsal before the run finds out
what crosses. Each minibatch's value must then fit the boundary.

A value is a tensor, or nested tuples, lists and dicts (str keys) of tensors and JSON constants. Only its
tensors are sent, each once, in the order of the structure. Both sides know the structure. This module also
has small checks and helpers for code that runs layers. Stateless; any thread.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C import _from_dlpack  # torch.from_dlpack would take several microseconds longer
from torch.utils.dlpack import to_dlpack

from pipedream import _core
from pipedream.common.microbatches import Microbatches
from pipedream.model.batches import Keywords
from pipedream.model.layers import dtype_name
from pipedream.model.tensor_spec import DimOrder, TensorSpec, as_sent, as_used, whole

__all__ = [
    "TENSORS",
    "Boundary",
    "boundary_input",
    "check_loss",
    "device_of",
    "exportable",
    "map_tensors",
    "replaced",
    "tensors_of",
    "to_device",
]

_KEEP = "keep the structure of the first minibatch"
_NOTHING = object()  # marks a tensor that the value has not given yet

# The types of nodes whose entries have keys, then the types of nodes whose entries have positions. Each type
# stands under its name in a structure.
_KEYED: dict[str, type[dict[str, Any]]] = {"dict": dict, "keywords": Keywords}
_INDEXED: dict[str, type[Any]] = {"tuple": tuple, "list": list, "microbatches": Microbatches}


@dataclass(frozen=True)
class Boundary:
    """The structure of a value and the tensors in it.

    `structure` is ready for JSON. It is one node, which is one of {"tensor": index}, {"tuple": [nodes]},
    {"list": [nodes]}, {"microbatches": [nodes]}, {"dict": {key: node}}, {"keywords": {key: node}},
    {"constant": value}. A tensor object that occurs twice has one index and crosses once. A tensor of the
    first minibatch may be None in a later minibatch, if at least one other tensor crosses in that minibatch.
    """

    structure: dict[str, Any]
    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(
        cls, value: Any, *, name: str = "the value", needs_tensor: bool = True, num_beside: int = 0
    ) -> Boundary:
        """Returns the boundary of a value. Raises ValueError, naming the place, for a value that cannot
        cross.

        needs_tensor: whether a value without any tensor is refused. num_beside: number of additional tensors
        that will cross.
        """
        index_of: dict[int, int] = {}
        specs: list[TensorSpec] = []
        structure = _describe(value, name, index_of, specs)
        if not specs and needs_tensor:
            raise ValueError(f"{name} has no tensor in it: a stage must pass on at least one")
        most = _core.NUM_TENSORS_MAX - num_beside
        if len(specs) > most:
            raise ValueError(
                f"{name} has {len(specs)} tensors: at most {most} can cross a cut, so join some or cut"
                " elsewhere"
            )
        return cls(structure, tuple(specs))

    def or_as(self, other: Boundary) -> Boundary:
        """Returns a boundary with room for the values of both boundaries, `self` and `other`. Raises
        ValueError if the two differ in structure, or in a tensor's dtype or number of dimensions.
        """
        kinds = [[(spec.dtype, len(spec.shape)) for spec in b.tensors] for b in (self, other)]
        if self.structure != other.structure or kinds[0] != kinds[1]:
            raise ValueError("minibatches of these shapes differ in more than their sizes")
        pairs = zip(self.tensors, other.tensors, strict=True)
        return Boundary(self.structure, tuple(one.or_as(another) for one, another in pairs))

    @property
    def num_bytes(self) -> int:
        """Bytes that cross per minibatch in one direction, as planned."""
        return sum(spec.num_bytes for spec in self.tensors)

    @functools.cached_property
    def _lone(self) -> TensorSpec | None:
        """The spec of the only tensor, if the value is a single tensor, as it is at most cuts. None for any
        other value.
        """
        return self.tensors[0] if "tensor" in self.structure else None

    def checked(
        self, value: Any, *, stage: int | None = None, minibatch: int | None = None
    ) -> list[torch.Tensor]:
        """Returns a value's tensors in the order in which they cross. Raises ValueError naming stage and
        minibatch unless the value fits the plan, as flatten() and check() do.
        """
        lone = self._lone
        if (  # the planned shape, as in every minibatch but a short last one
            lone is not None
            and isinstance(value, torch.Tensor)
            and value.shape == lone.shape
            and value.dtype == lone.dtype
            and (lone.requires_grad or not value.requires_grad)
        ):
            return [value]
        try:
            tensors = self.flatten(value)
            self.check(tensors)
        except ValueError as error:
            raise ValueError(f"{_where(stage, minibatch)}{error}") from None
        return tensors

    def flatten(self, value: Any) -> list[torch.Tensor]:
        """Returns a value's tensors in the order in which they cross.

        Raises ValueError naming the place if the structure or a constant differs from the plan, or if a
        tensor needs a gradient that was not planned.
        """
        given: list[Any] = [_NOTHING] * len(self.tensors)
        _collect(self.structure, value, "the value", given)
        found: list[torch.Tensor] = []
        for tensor_index, (one, spec) in enumerate(zip(given, self.tensors, strict=True)):
            tensor = self._for_none(tensor_index, given) if one is None else one
            if one is not None and spec.is_for_none(one):
                raise ValueError(
                    f"{self._name_of(tensor_index)} has no extent in any dimension, which stands for None:"
                    " pass on None, or at least one entry"
                )
            if tensor.requires_grad and not spec.requires_grad:
                raise ValueError(
                    f"tensor {tensor_index} needs a gradient, but in the first minibatch it needed none: do"
                    " not switch requires_grad or no_grad between minibatches"
                )
            found.append(tensor)
        return found

    def _for_none(self, tensor_index: int, given: Sequence[Any]) -> torch.Tensor:
        device = next((tensor.device for tensor in given if tensor is not None), None)
        sent = None if device is None else self.tensors[tensor_index].for_none(device)
        if sent is None:
            raise ValueError(
                f"{self._name_of(tensor_index)} is None, and a tensor in the first minibatch: pass on a"
                " tensor in every minibatch, as one of zeros"
            )
        return sent

    def _name_of(self, tensor_index: int) -> str:
        return f"tensor {tensor_index}{_key_of(self.structure, tensor_index)}"

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Returns the value that holds these tensors; the inverse of flatten()."""
        if self._lone is not None:
            return tensors[0]
        pairs = zip(tensors, self.tensors, strict=True)
        given = [None if spec.is_for_none(tensor) else tensor for tensor, spec in pairs]
        return _build(self.structure, given)

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raises ValueError unless the tensors fit the plan.

        The number of tensors, their dtypes and their numbers of dimensions must be as planned. No tensor may
        have a larger first dimension or more bytes than planned. Tensors may be smaller, because the last
        batch may be short.
        """
        if len(tensors) != len(self.tensors):
            raise ValueError(
                f"{len(tensors)} tensors, planned {len(self.tensors)}: pass on the same tensors in every"
                " minibatch"
            )
        for tensor_index, (tensor, spec) in enumerate(zip(tensors, self.tensors, strict=True)):
            if tensor.shape == spec.shape and tensor.dtype == spec.dtype:
                continue
            fault = spec.misfit(tensor)
            if fault is not None:
                raise ValueError(f"{self._name_of(tensor_index)} {fault}")

    # Tensors are sent row-major. A stage uses each in the layout that it had in the first minibatch, such as
    # channels_last. sent() and received() change between the two. gradients: whether the tensors are
    # gradients.

    def sent(self, tensors: Sequence[torch.Tensor], *, gradients: bool = False) -> list[torch.Tensor]:
        return _each(as_sent, tensors, self._gradient_orders if gradients else self._orders)

    def received(self, tensors: Sequence[torch.Tensor], *, gradients: bool = False) -> list[torch.Tensor]:
        """Returns received tensors in the stage's layout, without a copy. The inverse of sent()."""
        return _each(as_used, tensors, self._gradient_orders if gradients else self._orders)

    @functools.cached_property
    def _orders(self) -> list[DimOrder]:
        """The order of each tensor's dimensions; empty if all are row-major, as in most models."""
        orders = [spec.order for spec in self.tensors]
        return orders if any(orders) else []

    @functools.cached_property
    def _gradient_orders(self) -> list[DimOrder]:
        orders = [spec.order for spec in self.tensors if spec.requires_grad]
        return orders if any(orders) else []

    def to_json(self) -> str:
        tensors = [spec.to_fields() for spec in self.tensors]
        return json.dumps({"structure": self.structure, "tensors": tensors}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Boundary:
        """Reads the text of to_json(). Raises ValueError for any other text."""
        try:
            fields = json.loads(text)
            specs = tuple(map(TensorSpec.from_fields, fields["tensors"]))
            indices = set(_indices(fields["structure"]))
            if indices != set(range(len(specs))):
                raise ValueError(f"tensor indices {sorted(indices)} for {len(specs)} tensors")
            return cls(fields["structure"], specs)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a boundary: {error}") from None


class _Alias(torch.autograd.Function):
    """Returns a tensor in the same memory. For autograd it is neither a leaf nor a view.

    It is made by `.data` and not by detach(). detach() makes a view, and autograd forbids changing a view in
    place that a custom function returns.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


# _Alias.apply would first look for transforms of torch.func. The search takes longer than the rest of the
# call, and a stage has no such transforms.
_alias = super(torch.autograd.Function, _Alias).apply


def boundary_input(leaf: torch.Tensor) -> torch.Tensor:
    """Returns a non-leaf, non-view alias of a received leaf's memory, as the input of a stage's first layer.

    The first layer may then work in place (nn.ReLU(inplace=True)), as in the unsplit model. It overwrites the
    leaf's memory, and the gradient still arrives in leaf.grad. A tensor that needs no gradient is returned
    unchanged.
    """
    if not leaf.requires_grad:
        return leaf
    alias: torch.Tensor = _alias(leaf)  # type: ignore[no-untyped-call]
    return alias


def check_loss(loss: Any, minibatch: int) -> torch.Tensor:
    """Returns the loss if it is a scalar tensor from which a backward can start. Raises TypeError or
    ValueError.
    """
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"loss_fn returned a {type(loss).__name__} for minibatch {minibatch}: return a scalar tensor"
        )
    if loss.ndim != 0:
        raise ValueError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)} for minibatch {minibatch}: return a "
            f"scalar, for example its mean()"
        )
    if not loss.is_floating_point():
        raise ValueError(
            f"loss_fn returned a {dtype_name(loss.dtype)} tensor for minibatch {minibatch}: return a "
            f"floating-point scalar"
        )
    return loss


def exportable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's values as plain contiguous memory, for code that reads it by its address.

    No copy is made if the tensor's memory is plain already. Lazy conjugate and negative bits are resolved,
    because DLPack and raw pointers do not carry such bits.
    """
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain if plain.is_contiguous() else plain.contiguous()


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Returns the value with function(tensor) in place of each tensor in its tuples, lists and dicts.

    A tensor object that occurs twice is mapped once.
    """
    return function(value) if isinstance(value, torch.Tensor) else _map(function, value, {})


def replaced(value: Any, others: Mapping[int, Any]) -> Any:
    """Returns the value with others[id] in place of each tensor, tuple, list or dict whose id() is a key of
    others.
    """
    return _map(lambda tensor: tensor, value, {**others})


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a value's tuples, lists and dicts, each object once."""
    if type(value) is tuple and len(value) == 2:  # (inputs, targets), as most data have them
        first, second = value
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and first is not second:
            return [first, second]
    found: dict[int, torch.Tensor] = {}
    _find(value, found)
    return list(found.values())


def device_of(modules: Iterable[nn.Module]) -> torch.device:
    """Returns the device of the first parameter or buffer; the CPU if there is none."""
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            return tensor.device
    return torch.device("cpu")


def to_device(value: Any, device: torch.device, *, copy: bool = False) -> Any:
    """Returns the value with its tensors on the device. A tensor that is on the device already stays the same
    object, unless `copy` is True.
    """
    if isinstance(value, torch.Tensor):
        return value if value.device == device and not copy else value.to(device, copy=copy)
    return _map(lambda tensor: tensor.to(device, copy=copy), value, {})


def _each(
    change: Callable[[torch.Tensor, DimOrder], torch.Tensor],
    tensors: Sequence[torch.Tensor],
    orders: Sequence[DimOrder],
) -> list[torch.Tensor]:
    if not orders:
        return [*tensors]
    return [change(tensor, order) for tensor, order in zip(tensors, orders, strict=True)]


def _describe(value: Any, place: str, index_of: dict[int, int], specs: list[TensorSpec]) -> dict[str, Any]:
    # Only these exact types may cross, because a named tuple or an ordered dict would arrive as another type.
    if isinstance(value, torch.Tensor):
        if id(value) not in index_of:
            index_of[id(value)] = len(specs)
            specs.append(TensorSpec.of(value, place))
        return {"tensor": index_of[id(value)]}
    if type(value) in (tuple, list, Microbatches):
        return {
            _kind_of(value): [
                _describe(item, f"{place}[{i}]", index_of, specs) for i, item in enumerate(value)
            ]
        }
    if type(value) in (dict, Keywords):
        for key in value:
            if type(key) is not str:
                raise ValueError(f"{place} has the dict key {key!r}: only str keys can cross a cut")
        return {
            _kind_of(value): {
                key: _describe(item, f"{place}[{key!r}]", index_of, specs) for key, item in value.items()
            }
        }
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return {"constant": value}
    what = repr(value) if isinstance(value, float) else f"a {type(value).__name__}"
    raise ValueError(
        f"{place} is {what}: only tensors, JSON constants, and tuples, lists and dicts of them can "
        f"cross a cut"
    )


def _kind_of(value: Any) -> str:
    return type(value).__name__.lower()


def _collect(node: dict[str, Any], value: Any, place: str, given: list[Any]) -> None:
    # Puts the tensors of `value` into `given`, by their indices. A tensor may be None. Raises ValueError if
    # the value differs from the plan.
    ((kind, content),) = node.items()
    if kind == "tensor":
        if value is not None and not isinstance(value, torch.Tensor):
            raise ValueError(f"{place} is a {type(value).__name__}, planned a tensor: {_KEEP}")
        known = given[content]
        given[content] = value
        if known is not _NOTHING and known is not value:
            raise ValueError(f"{place} was the same tensor as another, now it is not: {_KEEP}")
        return
    if kind == "constant":
        if type(value) is type(content) and value == content:
            return
        if content is None:
            remedy = "put one first that has it"
            raise ValueError(f"{place} is {_brief(value)}, and None in the first minibatch: {remedy}")
        raise ValueError(f"{place} is {_brief(value)}, planned the constant {content!r}: {_KEEP}")
    if _kind_of(value) != kind:
        raise ValueError(f"{place} is a {type(value).__name__}, planned a {kind}: {_KEEP}")
    if kind in _KEYED:
        if value.keys() != content.keys():
            raise ValueError(f"{place} has the keys {list(value)}, planned {list(content)}: {_KEEP}")
        for key, child in content.items():
            _collect(child, value[key], f"{place}[{key!r}]", given)
    else:
        if len(value) != len(content):
            raise ValueError(f"{place} has {len(value)} items, planned {len(content)}: {_KEEP}")
        for i, (child, item) in enumerate(zip(content, value, strict=True)):
            _collect(child, item, f"{place}[{i}]", given)


def _build(node: dict[str, Any], tensors: Sequence[torch.Tensor | None]) -> Any:
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "constant":
        return content
    if kind in _KEYED:
        return _KEYED[kind]({key: _build(child, tensors) for key, child in content.items()})
    return _INDEXED[kind](_build(child, tensors) for child in content)


def _indices(node: Any) -> Iterator[int]:
    ((kind, content),) = node.items()
    if kind == "tensor":
        yield whole(content)
    elif kind in _KEYED:
        for child in content.values():
            yield from _indices(child)
    elif kind in _INDEXED:
        for child in content:
            yield from _indices(child)
    elif kind != "constant":
        raise ValueError(f"unknown node {kind!r}")


def _key_of(structure: dict[str, Any], tensor_index: int) -> str:
    """Returns " (input_ids)" for an input that the model takes by the name input_ids; "" for any other."""
    keys = structure.get("keywords", {})
    return "".join(f" ({key})" for key, node in keys.items() if node == {"tensor": tensor_index})


def _map(function: Callable[[torch.Tensor], torch.Tensor], value: Any, done: dict[int, Any]) -> Any:
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, torch.Tensor):
        done[id(value)] = function(value)
        return done[id(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(_map(function, item, done) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_map(function, item, done) for item in value)
    if isinstance(value, dict):
        mapped = copy.copy(value)  # keeps a default factory and the like
        for key, item in value.items():
            mapped[key] = _map(function, item, done)
        return mapped
    return value


def _find(value: Any, found: dict[int, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[id(value)] = value
    elif isinstance(value, (tuple, list)):
        for item in value:
            _find(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _find(item, found)


def _where(stage: int | None, minibatch: int | None) -> str:
    parts = [
        f"{word} {number}"
        for word, number in (("stage", stage), ("minibatch", minibatch))
        if number is not None
    ]
    return ", ".join(parts) + ": " if parts else ""


def _brief(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)


TENSORS = _core.TensorExchange(torch.Tensor, to_dlpack, _from_dlpack, exportable)
