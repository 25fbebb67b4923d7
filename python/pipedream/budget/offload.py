"""Offloads stashed weight versions and activations. They wait in pinned host memory, each in a place called
its home, and are copied back before they are needed.

    stage 0 of 4, by microbatch     activations on the device           activations on the host
    FORWARD 0                       0, whose backward is next
    FORWARD 1, then 2, then 3       0, and the one that runs            1 2 3
    BACKWARD 0                      0, and 1 is copied back             2 3
    FORWARD 4                       1, and 4 until it is copied out     2 3 4

The backwards of a stage come in the order of its forwards, so it is always known which tensors are needed
next. At most two microbatches and three weight versions are on the device (resident_versions.py has the
versions). Parameters tied across stages stay on the device.

Hooks for saved tensors (torch.autograd.graph.saved_tensors_hooks) keep autograd's graph from holding device
memory. For a view of a weight slot, the graph holds only the version's number and the view's place in it.

Device memory is freed only after the compute stream has been made to wait for the copy out of it
(copy_streams.py). The next user of the memory is later in that stream, so no allocator has to check whether
the copy is done.

Offloading does not work for layers that use torch.func inside, because torch.func allows no such hooks. Nor
does it work for a torch.autograd.Function that keeps views of a weight outside save_for_backward.

$PIPEDREAM_OFFLOAD ("activations", "versions" or both, with a comma) turns offloading on wherever it is
possible. Without it, run(memory=...) turns offloading on where a stage would not fit. The worker's compute
thread owns all objects; autograd's threads call the hooks that a graph holds.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipedream.budget.copy_streams import CopyStreams
from pipedream.budget.resident_versions import ResidentVersions, memory_of

__all__ = [
    "Offload",
    "SavedTensors",
    "StageOffload",
    "forced_offload",
    "graph_root",
    "measure_offloadable",
]

SMALL_BYTES = 64 << 10
"""Saved tensors with fewer bytes stay on the device, because a copy would cost more than it saves."""

_VARIABLE = "PIPEDREAM_OFFLOAD"
_ALIGNMENT = 64  # bytes; tensors in a microbatch's host memory begin at multiples of it, as in torch


@dataclass(frozen=True)
class Offload:
    """The parts of one stage that are offloaded to host memory."""

    versions: bool = False
    activations: bool = False

    def names(self) -> list[str]:
        return [name for name in ("versions", "activations") if getattr(self, name)]


def forced_offload() -> Offload:
    """Returns the parts that $PIPEDREAM_OFFLOAD asks for. Raises ValueError for an unknown word."""
    text = os.environ.get(_VARIABLE, "")
    words = {word.strip() for word in text.split(",")} - {""}
    if unknown := sorted(words - {"versions", "activations"}):
        raise ValueError(f"{_VARIABLE} has {unknown[0]!r}: use activations, versions or both with a comma")
    return Offload(versions="versions" in words, activations="activations" in words)


class _Geometry(NamedTuple):
    """The place of a tensor in its storage."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Geometry:
        offset = int(tensor.storage_offset())
        return cls(tensor.dtype, offset, tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg())

    def view(self, flat: Tensor) -> Tensor:
        """Returns the tensor as a view of `flat`, which contains the bytes of the tensor's storage."""
        whole = flat[: flat.numel() - flat.numel() % self.dtype.itemsize].view(self.dtype)
        tensor = whole.as_strided(self.size, self.stride, self.offset)
        tensor = tensor.conj() if self.is_conj else tensor
        return torch._neg_view(tensor) if self.is_neg else tensor


_Content = tuple[int, int, _Geometry]
"""A storage, a version of its content, and the place of the tensor that counts the versions."""


@dataclass(frozen=True)
class _Kept:
    """A saved tensor that stays on the device."""

    tensor: Tensor
    version: int
    """Torch's version counter of the tensor when autograd saved it. unpack() checks it, because autograd does
    not check tensors that hooks have saved."""

    @classmethod
    def of(cls, tensor: Tensor) -> _Kept:
        return cls(tensor.detach(), tensor._version)  # without detach() the graph would hold itself

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise _modified(self.tensor)
        return self.tensor


class _Memory:
    """A storage that a microbatch's graph saves. Its bytes are on the device, at home in host memory, or
    both."""

    def __init__(self, source: Tensor, home: Tensor) -> None:
        self._source: Tensor | None = source
        self._version = source._version
        self._is_modified = False
        self.home = home
        self.gone_out: Any = None
        """The copy to the home."""
        self.flat: Tensor | None = _flat(source)
        """The bytes on the device; None while they are only at home."""

    def close(self) -> None:
        """Notes whether a layer has changed the content after it was saved. Call it at the end of the
        forward."""
        assert self._source is not None
        self._is_modified = self._source._version != self._version
        self._source = None

    def content(self) -> Tensor:
        assert self.flat is not None, "saved tensors are used before their prefetch"
        source = self._source
        if self._is_modified or (source is not None and source._version != self._version):
            raise _modified(self.flat)
        return self.flat


@dataclass
class _HomeSlot:
    """Host memory for the tensors that one microbatch saves."""

    content: Tensor
    last_read: Any = None
    """The last copy back to the device. It must be done before this memory is written again."""


class SavedTensors:
    """The tensors that the graph of one microbatch saves. Run the microbatch's forward inside `with`.

    Call prefetch() when the previous microbatch's backward is about to begin, and arrive() when this
    microbatch's backward is.
    """

    def __init__(self, stage: StageOffload, slot: _HomeSlot | None, kept: Iterable[Tensor]) -> None:
        self._stage = stage
        self._slot = slot
        self._kept_memory = {memory_of(tensor) for tensor in kept}
        self._used_bytes = 0
        self._memories: dict[_Content, _Memory] = {}
        # The references are weak, so that memory which the graph drops is freed and not copied back.
        self._away: list[weakref.ref[_Memory]] = []
        self._come_in: list[Any] = []
        self._hooks: Any = None

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Leaves these tensors on the device. Call it for tensors that are also used outside the graph."""
        self._kept_memory |= {memory_of(tensor) for tensor in tensors}

    @property
    def leaves_device(self) -> bool:
        return self._slot is not None

    def __enter__(self) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed())
        self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._hooks = None  # breaks a cycle, because the hooks hold this object
        memories = list(self._memories.values())
        self._memories = {}
        for memory in memories:
            memory.close()
        self._away = [weakref.ref(memory) for memory in memories]
        self._stage.leaving = memories

    def prefetch(self) -> None:
        self._stage.settle()
        slot, self._slot = self._slot, None
        if slot is None:
            return
        copies = self._stage.copies
        for reference in self._away:
            memory = reference()
            if memory is not None:
                flat = torch.empty(memory.home.numel(), dtype=torch.uint8, device=self._stage.device)
                slot.last_read = copies.into(memory.home, flat, memory.gone_out)
                self._come_in.append(slot.last_read)
                memory.flat = flat
        self._away = []
        self._stage.give_back(slot)

    def arrive(self) -> None:
        self.prefetch()
        self._stage.copies.wait(*self._come_in[-1:])  # one stream has all copies, so the last one ends last
        self._come_in = []

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Saves the tensor for the backward. Returns a function that returns the tensor."""
        if not _is_plain(tensor, self._stage.device):
            return _Kept.of(tensor).unpack
        place, versions = _Geometry.of(tensor), self._stage.versions
        version = None if versions is None else versions.version_at(memory_of(tensor))
        if versions is not None and version is not None:
            # At the backward the version may lie in another device slot than now.
            return lambda: place.view(versions.device_slot(version))
        memory = self._memory_for(tensor)
        return _Kept.of(tensor).unpack if memory is None else lambda: place.view(memory.content())

    def _memory_for(self, tensor: Tensor) -> _Memory | None:
        """Returns the tensor's storage, whose copy to the host has begun; None if the storage stays on the
        device.
        """
        if self._slot is None or not _is_movable(tensor, self._kept_memory | self._stage.kept_memory):
            return None
        key = _content_of(tensor)
        memory = self._memories.get(key)
        if memory is None:
            num_bytes = tensor.untyped_storage().nbytes()
            begin, end = self._used_bytes, self._used_bytes + num_bytes
            if end > self._slot.content.numel():  # the forward saves more bytes than the rehearsal measured
                return None
            self._used_bytes = _aligned(end)
            memory = _Memory(tensor.detach(), self._slot.content[begin:end])
            assert memory.flat is not None
            copies = self._stage.copies
            memory.gone_out = copies.out(memory.flat, memory.home, self._slot.last_read)
            self._memories[key] = memory
        return memory


class StageOffload:
    """The offloading of one stage."""

    def __init__(
        self,
        device: torch.device,
        copies: CopyStreams,
        homes: Sequence[Tensor],
        versions: ResidentVersions | None,
        kept: Iterable[Tensor],
    ) -> None:
        """homes: flat host memory, one tensor per microbatch that may be offloaded at once; empty leaves
        activations on the device. kept: tensors that stay on the device, because they live as long as the
        stage."""
        self.device = device
        self.copies = copies
        self.versions = versions
        self.kept_memory = {memory_of(tensor) for tensor in kept}
        self._num_homes = len(homes)
        self._free = [_HomeSlot(home) for home in homes]
        self.leaving: list[_Memory] = []
        """The memory of the microbatch whose forward ran last. Its copies to the host may still run."""

    def names(self) -> list[str]:
        return Offload(self.versions is not None, self._num_homes > 0).names()

    def forward(self, kept: Iterable[Tensor], *, is_next: bool) -> SavedTensors | None:
        """Returns the object inside which a microbatch's forward runs, or None if its graph may hold all
        tensors directly.

        is_next: whether this microbatch's backward is the stage's next one, so that its tensors stay on the
        device. kept: tensors that stay on the device, because they are also used outside the graph."""
        self.settle()
        slot = None if is_next or not self._free else self._free.pop()
        return None if slot is None and self.versions is None else SavedTensors(self, slot, kept)

    def settle(self) -> None:
        """Makes the compute stream wait until the previous microbatch's tensors are in host memory. Then it
        frees their device memory. Call it before the next work on the device."""
        leaving, self.leaving = self.leaving, []
        # All copies are in one stream, so the last one ends last.
        self.copies.wait(*(memory.gone_out for memory in leaving[-1:]))
        for memory in leaving:
            memory.flat = None

    def finish(self) -> None:
        """Makes the CPU wait for all copies. Their memory may be freed afterwards."""
        self.copies.finish()

    def give_back(self, slot: _HomeSlot) -> None:
        self._free.append(slot)


def graph_root(output: Tensor) -> Tensor:
    """Returns a tensor that stands for the output in the backward. So the output's memory can be freed once
    the output has been sent."""
    if not output.requires_grad:
        return torch.empty(0, dtype=output.dtype, device=output.device)
    root: Tensor = _Root.apply(output)  # type: ignore[no-untyped-call]
    return root


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.new_zeros(()).expand(output.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


@contextlib.contextmanager
def measure_offloadable(kept: Iterable[Tensor]) -> Iterator[Callable[[], int]]:
    """Measures the forward that runs in the with block. Yields a function that returns how many bytes
    offloading would have moved. kept: tensors that would stay on the device."""
    kept_memory = {memory_of(tensor) for tensor in kept}
    # The tensors must stay alive, because memory that is freed and used again would have the same key.
    held: dict[_Content, Tensor] = {}

    def pack(tensor: Tensor) -> _Kept:
        packed = _Kept.of(tensor)
        if _is_plain(tensor, tensor.device) and _is_movable(tensor, kept_memory):
            held.setdefault(_content_of(tensor), packed.tensor)
        return packed

    def num_bytes() -> int:
        return sum(_aligned(tensor.untyped_storage().nbytes()) for tensor in held.values())

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.unpack()):
        yield num_bytes


def _is_plain(tensor: Tensor, device: torch.device) -> bool:
    """Whether the tensor is an ordinary strided tensor on the device, not one of a subclass."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device == device
        and not tensor.is_quantized
    )


def _is_movable(tensor: Tensor, kept_memory: set[int]) -> bool:
    num_bytes = tensor.untyped_storage().nbytes()
    return num_bytes >= max(SMALL_BYTES, 1) and memory_of(tensor) not in kept_memory


def _content_of(tensor: Tensor) -> _Content:
    """Returns a key that is equal for two live tensors only if they have the same storage with the same
    content. Tensors of one storage may have different version counters, as the gates of a GRUCell have. A
    view shares its base's counter, so the key has the base's place."""
    base = tensor if tensor._base is None else tensor._base
    return tensor.untyped_storage()._cdata, tensor._version, _Geometry.of(base)


def _flat(tensor: Tensor) -> Tensor:
    """Returns all bytes of the tensor's storage."""
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _modified(tensor: Tensor) -> RuntimeError:
    return RuntimeError(
        f"a tensor of shape {list(tensor.shape)} that the gradient needs has been modified by an inplace"
        " operation after its use"
    )
