"""Trace is the record of one forward of a model. It has the modules that were called, and the memory that
every operation read and wrote.

    ticks   0        1 ... 4          5      6 ... 9
            inputs   stem: conv, ...  relu   block: ...      one clock for calls and operations
            call 0   call 1           in no  call 2
                                      call

A tensor is identified by its storage and the number of writes to the storage so far. Views of one storage
count as the same tensor. The data flow is therefore exact, however Python passes a tensor on (attributes,
hooks, tuples). Operations outside all module calls, and the loss, belong to the call ROOT. The recording
keeps no tensor alive. The model is unchanged afterwards if the caller wraps the recording in `untouched`.
Owned by the thread that runs the model.

Data sizes are sizes of dimensions that depend on the contents of a tensor, as after `x[mask]`:

    mask = x > 0             (6, 5)      has no data size
    rows = x[mask]           (17,)       has the data size 17; so have results of nonzero, unique and the like
    relu(rows), rows[:, None] * w        have 17: the operations read the data size 17 and made a dimension of
                                         this length
    out.index_put_(mask, rows)           has none: out is as long as before

The trace compares lengths only, so a dimension that has the same length by chance counts as a data size as
well. The trace does not see a slice by a number that Python got from a tensor (`x[:n.item()]`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pipedream.model.boundary import tensors_of
from pipedream.model.calls import calls_seen, module_names, uncompiled, visible_modules
from pipedream.model.seeding import TorchState
from pipedream.model.structure import Structure, rebuilt, taken_apart

__all__ = [
    "AS_LONG_AS_FIRST",
    "INPUTS",
    "ROOT",
    "Call",
    "CallCounter",
    "CallKey",
    "Leaf",
    "Opaque",
    "Operation",
    "Sizes",
    "Trace",
    "Version",
    "data_sizes",
    "record",
]

# Operations that use a tensor's shape and dtype, but not its contents.
_BLIND = {
    "aten::empty_like",
    "aten::zeros_like",
    "aten::ones_like",
    "aten::full_like",
    "aten::rand_like",
    "aten::randn_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full",
}

# Operations that draw random numbers until one is accepted, so that their input decides how many they draw.
_DRAWS_BY_CONTENTS = {
    "aten::_sample_dirichlet",
    "aten::_standard_gamma",
    "aten::binomial",
    "aten::poisson",
}

ROOT = -1
"""The call that stands for the model itself and for the loss."""


class Version(NamedTuple):
    """Identifies the contents of a storage at one time. They last until the next write to the storage."""

    storage: int
    writes: int
    """Number of writes to the storage so far; 0: the forward has not written it."""


_NOTHING = Version(-1, 0)


class CallKey(NamedTuple):
    """Identifies a module's call, also in another forward."""

    module: str
    nth: int

    def __str__(self) -> str:
        return self.module if self.nth == 0 else f"{self.module} (call {self.nth + 1})"


class CallCounter:
    """Assigns keys to the calls of one forward, in the order of the calls."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """names: the result of calls.module_names()."""
        self._names = names
        self._times_called: Counter[str] = Counter()

    def key_of_next(self, module: nn.Module) -> CallKey:
        name = self._names[id(module)]
        key = CallKey(name, self._times_called[name])
        self._times_called[name] += 1
        return key

    def skip(self, times_called: Mapping[str, int]) -> None:
        """Counts calls that are not made. times_called: number of calls by module."""
        self._times_called.update(times_called)


class Opaque:
    """The class itself, not an instance, stands for an object that is no plain value, such as a cache. The
    stage after a cut gets None in place of the object.
    """


INPUTS = CallKey("the inputs", 0)
"""The call that stands for the inputs. It ends before anything runs, and the inputs are its output."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that a call returned."""

    version: Version
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    is_dense: bool
    has_data_size: bool
    """Whether a dimension's size depends on the contents of a tensor."""
    source: tuple[int, int] | None = None
    """Identifies the operation whose backward gets the tensor's gradient, and the output of it. None: the
    tensor has no such operation."""

    @property
    def num_bytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize

    @property
    def memory(self) -> tuple[Any, ...]:
        """A key that is equal for leaves that view the same memory in the same way, and whose gradients take
        the same way back. `h` and `h.detach()`, or `h` and its gradient reversal, have different keys.
        """
        return self.version, self.shape, self.stride, self.offset, self.dtype, self.requires_grad, self.source


@dataclass(slots=True)
class Call:
    """A module's call, with its output."""

    key: CallKey
    parent: int
    begin: int
    end: int
    is_plain: bool
    """Whether autograd records the call in the ordinary way: not under no_grad, and without the hooks on
    saved tensors that checkpointing uses.
    """
    structure: Structure
    """The structure of the output."""
    leaves: tuple[Any, ...]
    """The output's leaves: a Leaf for each tensor, a plain value itself, Opaque for any other object."""
    is_hooked: bool = False
    """Whether forward hooks saw the output. They may have stored it elsewhere."""


@dataclass(slots=True)
class Operation:
    """One use of an operation of torch. An operation that makes only views is not recorded."""

    tick: int
    call: int
    """The innermost call around it."""
    name: str
    reads: tuple[Version, ...]
    writes: tuple[Version, ...]
    draws: bool
    """Whether the operation drew random numbers."""
    decides: bool
    """Whether the operation's result may decide which code runs later, as when .item() gives Python a value.
    Also True if a tensor's contents decide how many random numbers the operation drew, because later random
    numbers then differ.
    """
    is_copy: bool = False
    """Whether the recording added it: see _made_own()."""


@dataclass
class Trace:
    """The record of a forward. It holds no tensors."""

    calls: list[Call] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    """Full name -> storage."""
    buffers: dict[str, int] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    """Names of the modules that can be called, without containers, in the order of registration."""
    loss: Version = field(default=_NOTHING)


def record(
    model: nn.Module, inputs: Any, call_model: Callable[[Any], Any], make_loss: Callable[[Any], Tensor]
) -> Trace:
    """Records one evaluation of make_loss(call_model(inputs)). call_model must call the model.

    Raises any error that the model raises.
    """
    recorder = _Recorder(model)
    recorder.note_inputs(inputs)
    modules = [module for _, module in visible_modules(model)]
    with uncompiled([model]), calls_seen(modules, recorder.call), recorder:
        loss = make_loss(call_model(inputs))
    recorder.trace.loss = recorder.version_of(loss)
    return recorder.trace


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._tick = 0
        self._stack = [ROOT]
        self._hooks = _saved_tensors_hooks()
        self._counter = CallCounter(module_names(model))
        self._storages: dict[int, int] = {}
        self._kept: list[StorageWeakRef] = []  # a reference keeps the storage's address from being reused
        self._writes: list[int] = []  # per storage
        self._written_at: list[int] = []
        self._data_sizes: dict[int, Sizes] = {}  # by storage
        self.trace.modules = tuple(
            name for name, module in visible_modules(model) if not _is_container(module)
        )
        self.trace.parameters = {name: self.version_of(p).storage for name, p in model.named_parameters()}
        self.trace.buffers = {name: self.version_of(b).storage for name, b in model.named_buffers()}

    def version_of(self, tensor: Tensor) -> Version:
        address = tensor.untyped_storage()._cdata if _has_storage(tensor) else -1 - id(tensor)
        storage = self._storages.get(address)
        if storage is None:
            storage = self._storages[address] = len(self._writes)
            self._writes.append(0)
            self._written_at.append(0)
            if _has_storage(tensor):
                self._kept.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
        return Version(storage, self._writes[storage])

    # Calls.

    def note_inputs(self, inputs: Any) -> None:
        index = self._open(INPUTS)
        self._close(index, *taken_apart(inputs))

    def call(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        index = self._open(self._counter.key_of_next(module))
        self._stack.append(index)
        try:
            output = call()
            values, structure = taken_apart(output)
            own = self._made_own(values, self.trace.calls[index].begin)
        finally:
            self._stack.pop()
        self._close(index, own, structure)
        self.trace.calls[index].is_hooked = bool(module._forward_hooks)
        return output if own is values else rebuilt(structure, own)

    def _made_own(self, values: list[Any], begin: int) -> list[Any]:
        """Returns the output of a call, with a clone of each tensor that the call passed on unchanged
        (Identity, Flatten). The trace then shows which operations read the call's output and which read its
        input. begin: the call's first tick.
        """
        copies: dict[int, Tensor] = {}
        for value in values:
            if isinstance(value, Tensor) and _has_storage(value):
                storage = self.version_of(value).storage
                if self._written_at[storage] < begin and id(value) not in copies:
                    copies[id(value)] = value.clone()
                    self.trace.operations[-1].is_copy = True
        return [copies.get(id(value), value) for value in values] if copies else values

    def _open(self, key: CallKey) -> int:
        self._tick += 1
        self.trace.calls.append(Call(key, self._stack[-1], self._tick, -1, self._is_plain(), Structure(), ()))
        return len(self.trace.calls) - 1

    def _is_plain(self) -> bool:
        return torch.is_grad_enabled() and _saved_tensors_hooks() == self._hooks

    def _close(self, index: int, values: list[Any], structure: Structure) -> None:
        self._tick += 1
        call = self.trace.calls[index]
        call.end, call.structure = self._tick, structure
        call.leaves = tuple(
            self._leaf(value) if isinstance(value, Tensor) else _constant(value) for value in values
        )

    def _leaf(self, tensor: Tensor) -> Leaf:
        is_dense = _has_storage(tensor)
        version = self.version_of(tensor)
        return Leaf(
            version,
            tuple(tensor.shape) if is_dense else (),
            tuple(tensor.stride()) if is_dense else (),
            int(tensor.storage_offset()) if is_dense else 0,
            tensor.dtype,
            tensor.requires_grad,
            is_dense,
            self._has_data_size(tensor),
            _source_of(tensor),
        )

    def _has_data_size(self, tensor: Tensor) -> bool:
        sizes = self._data_sizes.get(self.version_of(tensor).storage, Sizes())
        return not sizes.isdisjoint(tensor.shape)

    # Operations.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        before = TorchState.capture() if seeded else None
        given = tuple({self.version_of(tensor): None for tensor in tensors_of((args, kwargs))})
        reads = () if func._schema.name in _BLIND else given
        output = func(*args, **kwargs)
        self._note_sizes(func, args, given, output)
        draws = before is not None and not before.equals(TorchState.capture())
        self._note(func, args, kwargs, reads, output, draws=draws)
        return output

    def _note_sizes(self, func: Any, args: tuple[Any, ...], given: tuple[Version, ...], output: Any) -> None:
        storages = {version.storage for version in given}
        sources = storages
        if func._schema.name in AS_LONG_AS_FIRST:
            sources = {self.version_of(args[0]).storage}
        known = Sizes().union(*(self._data_sizes.get(storage, Sizes()) for storage in sources))
        for tensor in tensors_of(output):
            storage = self.version_of(tensor).storage
            if storage not in storages and _has_storage(tensor):
                self._data_sizes[storage] = data_sizes(func, args, tensor, known)

    def _note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reads: tuple[Version, ...],
        output: Any,
        *,
        draws: bool,
    ) -> None:
        written = {self.version_of(tensor).storage for tensor in tensors_of(_written(func, args, kwargs))}
        made = tensors_of(output)
        read = {version.storage for version in reads}
        written |= {version.storage for version in map(self.version_of, made)} - read
        decides = not made and not written and bool(reads)
        decides |= draws and (func._schema.name in _DRAWS_BY_CONTENTS or any(map(self._has_data_size, made)))
        if not written and not decides:
            return  # it made only views
        self._tick += 1
        for storage in written:
            self._writes[storage] += 1
            self._written_at[storage] = self._tick
        writes = tuple(Version(storage, self._writes[storage]) for storage in sorted(written))
        name = func._schema.name.replace("::", ".")
        operation = Operation(self._tick, self._stack[-1], name, reads, writes, draws, decides)
        self.trace.operations.append(operation)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the arguments that the operation changes, according to its schema."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    changed = [
        given.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    # Batch norm's schemas do not declare that it changes its running statistics.
    if "batch_norm" in func._schema.name and (given.get("training") or given.get("train")):
        changed += [given.get("running_mean"), given.get("running_var")]
    return changed


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))


def _has_storage(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # as under vmap


def _source_of(tensor: Tensor) -> tuple[int, int] | None:
    node = tensor.grad_fn
    return None if node is None else (node._sequence_nr(), tensor.output_nr)


def _constant(value: Any) -> Any:
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain else Opaque


def _saved_tensors_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


AS_LONG_AS_FIRST = {
    "aten::index_add",
    "aten::index_copy",
    "aten::index_fill",
    "aten::index_put",
    "aten::masked_scatter",
    "aten::scatter",
    "aten::scatter_add",
}
"""Operations whose result is as long as their first argument, whatever the other arguments are."""

_JOINING = {"aten::cat", "aten::concat", "aten::_cat"}
_PACKING = {"aten::_pack_padded_sequence"}
_MASKS = (torch.bool, torch.uint8)

Sizes = frozenset[int]


def data_sizes(func: Any, args: Sequence[Any], output: Tensor, known: Sizes) -> Sizes:
    """Returns the sizes of an operation's output that depend on tensors' contents. known: the sizes of the
    operation's arguments that depend on tensors' contents.
    """
    name = func._schema.name
    shape = output.shape
    found = known.intersection(shape)
    if not shape:
        return Sizes()
    if known and name in _JOINING:
        dim = args[1] if len(args) > 1 else 0
        return found | {shape[dim]}
    if name == "aten::index":
        kept = list(itertools.takewhile(lambda index: index is None, args[1]))
        is_masked = any(index is not None and index.dtype in _MASKS for index in args[1])
        return found | {shape[len(kept)]} if is_masked else found
    if name in _PACKING or torch.Tag.dynamic_output_shape in func.tags:
        return found | {shape[0]}
    return found
