"""Offloading: stashed weight versions and activations wait in pinned host memory, and come back in time.

    stage 0 of 4, activations    on the device                       on the host
    FORWARD 0                    0: its backward is next
    FORWARD 1, then 2, then 3    0, and the one that is forwarded    1 2 3
    BACKWARD 0                   0, and 1 comes back                 2 3
    FORWARD 4                    1, and 4 goes as it is made         2 3 4

The backwards of a stage come in the order of its forwards, so what is used next is always known: two
microbatches are on the device at most, and three versions: the newest, the one that a backward reads, and the
one that comes back or is written. (A forward of vertical sync that reads another one waits for its copy.)
A graph holds no version: the hooks for saved tensors turn a view of a weight slot into a note of what it
viewed. Parameters tied across stages stay on the device.

CUDA copies on streams of its own, one per direction, ordered by events; the CPU waits for none. Device memory
is given back only after the compute stream was made to wait for the copy from it: then whatever gets it next
comes after in that stream, and no allocator has to look whether the copy is done. The host has nothing to
gain, and does the same at once, so that its tests are tests of this.

Not for layers that use torch.func inside, which takes no such hooks, nor for a torch.autograd.Function that
keeps views of a weight outside save_for_backward.

$PIPEDREAM_OFFLOAD ("activations", "versions" or both, with a comma) turns offloading on wherever it is
possible; without it run(memory=...) does, where a stage would not fit. Owned by the worker's compute thread;
autograd's threads call what a graph holds.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

__all__ = [
    "CopyStreams",
    "Offload",
    "ResidentVersions",
    "SavedTensors",
    "StageOffload",
    "forced_offload",
    "graph_root",
    "make_copy_streams",
    "measure_offloadable",
    "num_resident_versions",
]

SMALL_BYTES = 64 << 10
"""Smaller saved tensors stay where they are: a copy of so few bytes costs more than they do."""
NUM_RESIDENT_VERSIONS = 3

_VARIABLE = "PIPEDREAM_OFFLOAD"
_ALIGNMENT = 64  # of the tensors in a microbatch's memory: that of torch's own on the host
_POISON = 0xFF  # bytes that are NaN as a float of any width


@dataclass(frozen=True)
class Offload:
    """What of one stage lies in host memory."""

    versions: bool = False
    activations: bool = False

    def names(self) -> list[str]:
        return [name for name in ("versions", "activations") if getattr(self, name)]


def forced_offload() -> Offload:
    """What $PIPEDREAM_OFFLOAD asks for. Raises ValueError for an unknown word."""
    text = os.environ.get(_VARIABLE, "")
    words = {word.strip() for word in text.split(",")} - {""}
    if unknown := sorted(words - {"versions", "activations"}):
        raise ValueError(f"{_VARIABLE} has {unknown[0]!r}: use activations, versions or both with a comma")
    return Offload(versions="versions" in words, activations="activations" in words)


def num_resident_versions(num_versions: int) -> int:
    """How many of a stage's weight versions stay in device memory; all where offloading saves nothing."""
    return min(num_versions, NUM_RESIDENT_VERSIONS)


# Copies between device and host.


class CopyStreams(Protocol):
    """Copies beside the compute stream. What they return says when a copy is done; None: it is."""

    def out(self, source: Tensor, target: Tensor, *after: Any) -> Any:
        """Device to host, after what the compute stream has been given so far and after `after`."""

    def into(self, source: Tensor, target: Tensor, *after: Any) -> Any:
        """Host to device, likewise."""

    def wait(self, *copies: Any) -> None:
        """What the compute stream is given from now on waits for the copies; the CPU does not."""

    def finish(self) -> None:
        """The CPU waits for all copies."""


class _HostCopies:
    """One memory: a copy is done when the call returns."""

    def out(self, source: Tensor, target: Tensor, *after: Any) -> Any:
        with torch.no_grad():
            target.copy_(source)

    into = out

    def wait(self, *copies: Any) -> None:
        pass

    def finish(self) -> None:
        pass


class _CudaCopies:
    """A stream per direction: both directions of the bus work at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._into = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def out(self, source: Tensor, target: Tensor, *after: Any) -> Any:
        return self._copy(self._out, source, target, after)

    def into(self, source: Tensor, target: Tensor, *after: Any) -> Any:
        return self._copy(self._into, source, target, after)

    def wait(self, *copies: Any) -> None:
        compute = torch.cuda.current_stream(self._device)
        for event in copies:
            if event is not None:
                compute.wait_event(event)

    def finish(self) -> None:
        self._out.synchronize()
        self._into.synchronize()

    def _copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor, after: Any) -> Any:
        # The source is made, or the target's former content read, by what compute has been given so far.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)
            return stream.record_event()


def make_copy_streams(device: torch.device) -> CopyStreams:
    return _CudaCopies(device) if device.type == "cuda" else _HostCopies()


# Weight versions.


class ResidentVersions:
    """Which of a stage's versions lie in device memory. Each has its home in host memory, written as soon as
    the version is; a device slot that is wanted for another is overwritten, as nothing is lost.

    A version goes by the slot that the core gives it, a device slot by its position.
    """

    def __init__(self, device_slots: Sequence[Tensor], homes: Sequence[Tensor], copies: CopyStreams) -> None:
        """homes: one per version kept. The slots are flat uint8 tensors of one size."""
        self._device_slots = device_slots
        self._homes = homes
        self._copies = copies
        self._held: list[int | None] = [None] * len(device_slots)
        self._position_of_memory = {_memory_of(slot): p for p, slot in enumerate(device_slots)}
        # By version: the copies after which its home is whole, and it is here.
        self._gone_out: dict[int, Any] = {}
        self._come_in: dict[int, Any] = {}
        self._newest: int | None = None
        self._reading: int | None = None
        self._next: int | None = None
        self.on_move: Callable[[int, int | None], None] = lambda version, position: None
        """Told (version, its position or None for nowhere) before a copy or a write begins."""

    @property
    def num_versions(self) -> int:
        return len(self._homes)

    def position_of(self, version: int) -> int | None:
        return self._held.index(version) if version in self._held else None

    def device_slot(self, version: int) -> Tensor:
        position = self.position_of(version)
        assert position is not None, f"version slot {version} is not in device memory, but {self._held} are"
        return self._device_slots[position]

    def version_at(self, memory: int) -> int | None:
        """The version in the device slot at an address; None for other memory."""
        position = self._position_of_memory.get(memory)
        return None if position is None else self._held[position]

    def read(self, version: int) -> None:
        """Before the compute stream is given what reads the version."""
        self._fetch(version)
        self._copies.wait(self._come_in.pop(version, None))
        self._reading = version
        if version == self._next:
            self._next = None

    def prefetch(self, version: int) -> None:
        """The version that a backward will read next, after the one that is read now."""
        self._next = version
        self._fetch(version)

    def write(self, version: int) -> None:
        """Before the version is written, from the newest one; `written` follows."""
        position = self.position_of(version)
        if position is None:
            position = self._victim()
        former = self._held[position]
        if former is not None:  # the copies of what lies there are done before it is overwritten
            self._copies.wait(self._gone_out.get(former), self._come_in.pop(former, None))
        self._place(version, position)

    def written(self, version: int) -> None:
        self._newest = version
        # A backward has read what the home held before, so the copy from there is done.
        self._gone_out[version] = self._copies.out(self.device_slot(version), self._homes[version])

    def poison(self, version: int) -> None:
        """Nobody may read the version any more: whoever does gets NaN, here and at home."""
        self._copies.finish()  # the CPU fills the home
        if self.position_of(version) is not None:
            self.device_slot(version).fill_(_POISON)
        self._homes[version].fill_(_POISON)

    def _fetch(self, version: int) -> None:
        if self.position_of(version) is not None:
            return
        position = self._victim()
        former = self._held[position]
        after = [self._gone_out.get(version), None if former is None else self._gone_out.get(former)]
        self._place(version, position)
        slot = self._device_slots[position]
        self._come_in[version] = self._copies.into(self._homes[version], slot, *after)

    def _victim(self) -> int:
        """A device slot whose content nobody needs soon. There is one: three are held at most by those who
        ask, and the one who asks now holds none."""
        if None in self._held:
            return self._held.index(None)
        wanted = {self._newest, self._reading, self._next}
        for position, version in enumerate(self._held):
            if version not in wanted:
                return position
        # What was read last is needed no longer by whoever reads or writes another one now.
        assert self._reading not in (None, self._newest, self._next), self._held
        return self._held.index(self._reading)

    def _place(self, version: int, position: int) -> None:
        former = self._held[position]
        if former is not None and former != version:
            self.on_move(former, None)
        self._held[position] = version
        self.on_move(version, position)


# Saved tensors.


class _Geometry(NamedTuple):
    """Where a tensor lies in its memory."""

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
        """The tensor, in memory that begins with its own."""
        whole = flat[: flat.numel() - flat.numel() % self.dtype.itemsize].view(self.dtype)
        tensor = whole.as_strided(self.size, self.stride, self.offset)
        tensor = tensor.conj() if self.is_conj else tensor
        return torch._neg_view(tensor) if self.is_neg else tensor


@dataclass(frozen=True)
class _Kept:
    """A saved tensor that stays where it is."""

    tensor: Tensor
    version: int
    """Of its content, as autograd counts; with hooks it does not look itself."""

    @classmethod
    def of(cls, tensor: Tensor) -> _Kept:
        return cls(tensor.detach(), tensor._version)  # detached, or the graph would hold itself

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise _modified(self.tensor)
        return self.tensor


@dataclass(frozen=True)
class _InVersion:
    """A saved view of a weight version, wherever that lies."""

    versions: ResidentVersions
    version: int
    geometry: _Geometry

    def unpack(self) -> Tensor:
        return self.geometry.view(self.versions.device_slot(self.version))


class _Memory:
    """One storage of a microbatch: on the device, at home, or both."""

    def __init__(self, source: Tensor, home: Tensor) -> None:
        self._source: Tensor | None = source
        self._version = source._version
        self._is_modified = False
        self.home = home
        self.gone_out: Any = None
        """The copy after which the home is whole."""
        self.flat: Tensor | None = _flat(source)
        """The bytes on the device; None while they are only at home."""

    def close(self) -> None:
        """The forward is done, and with it what may change the content by mistake."""
        assert self._source is not None
        self._is_modified = self._source._version != self._version
        self._source = None

    def content(self) -> Tensor:
        assert self.flat is not None, "saved tensors are used before their prefetch"
        source = self._source
        if self._is_modified or (source is not None and source._version != self._version):
            raise _modified(self.flat)
        return self.flat


@dataclass(frozen=True)
class _Away:
    """A saved view of a microbatch's storage."""

    memory: _Memory
    geometry: _Geometry

    def unpack(self) -> Tensor:
        return self.geometry.view(self.memory.content())


@dataclass
class _HomeSlot:
    """Host memory for what one microbatch saves."""

    content: Tensor
    last_read: Any = None
    """The copy after which it may be written again."""


class SavedTensors:
    """What the graph of one microbatch saves, while its forward is done inside `with`.

    Then: prefetch() while the work before its backward is under way, arrive() before the backward.
    """

    def __init__(self, stage: StageOffload, slot: _HomeSlot | None, kept: Iterable[Tensor]) -> None:
        self._stage = stage
        self._slot = slot
        self._kept_memory = {_memory_of(tensor) for tensor in kept}
        self._used_bytes = 0
        self._memories: dict[tuple[int, int], _Memory] = {}
        # Weak: what the graph has dropped need not come back, and what it drops shall be free.
        self._away: list[weakref.ref[_Memory]] = []
        self._come_in: list[Any] = []
        self._hooks: Any = None

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Their memory stays where it is: it is not the graph's alone."""
        self._kept_memory |= {_memory_of(tensor) for tensor in tensors}

    @property
    def leaves_device(self) -> bool:
        return self._slot is not None

    def __enter__(self) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed.unpack())
        self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._hooks = None  # they hold this
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
        self._stage.copies.wait(*self._come_in[-1:])  # they come in one stream, one after the other
        self._come_in = []

    def _pack(self, tensor: Tensor) -> _Kept | _InVersion | _Away:
        if not _is_plain(tensor, self._stage.device):
            return _Kept.of(tensor)
        versions = self._stage.versions
        version = None if versions is None else versions.version_at(_memory_of(tensor))
        if versions is not None and version is not None:
            return _InVersion(versions, version, _Geometry.of(tensor))
        memory = self._memory_for(tensor)
        return _Kept.of(tensor) if memory is None else _Away(memory, _Geometry.of(tensor))

    def _memory_for(self, tensor: Tensor) -> _Memory | None:
        """The tensor's storage on its way home; None when it stays."""
        if self._slot is None or not _is_movable(tensor, self._kept_memory | self._stage.kept_memory):
            return None
        key = _content_of(tensor)
        memory = self._memories.get(key)
        if memory is None:
            num_bytes = tensor.untyped_storage().nbytes()
            begin, end = self._used_bytes, self._used_bytes + num_bytes
            if end > self._slot.content.numel():  # more than the rehearsal saw
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
        """homes: flat host memory for the microbatches that are away, none to keep activations where they
        are. kept: tensors that live as long as the stage."""
        self.device = device
        self.copies = copies
        self.versions = versions
        self.kept_memory = {_memory_of(tensor) for tensor in kept}
        self._num_homes = len(homes)
        self._free = [_HomeSlot(home) for home in homes]
        self.leaving: list[_Memory] = []
        """Of the latest microbatch that was forwarded, perhaps still being copied."""

    def names(self) -> list[str]:
        return Offload(self.versions is not None, self._num_homes > 0).names()

    def forward(self, kept: Iterable[Tensor], *, is_next: bool) -> SavedTensors | None:
        """For the forward of a microbatch; None when its graph may hold all as it is. is_next: its backward
        is the stage's next, so it stays. kept: tensors that are not the graph's alone."""
        self.settle()
        slot = None if is_next or not self._free else self._free.pop()
        return None if slot is None and self.versions is None else SavedTensors(self, slot, kept)

    def settle(self) -> None:
        """Before the next work on the device: what was made for the microbatch before is at home by then, and
        its memory is free."""
        leaving, self.leaving = self.leaving, []
        self.copies.wait(*(memory.gone_out for memory in leaving[-1:]))  # one stream: the last comes last
        for memory in leaving:
            memory.flat = None

    def finish(self) -> None:
        """The CPU waits for all copies: memory may go."""
        self.copies.finish()

    def give_back(self, slot: _HomeSlot) -> None:
        self._free.append(slot)


def graph_root(output: Tensor) -> Tensor:
    """Stands for the output in a backward, so that its memory can go once it has been sent."""
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
    """Around a forward; what it gives says how many bytes offloading would have moved."""
    kept_memory = {_memory_of(tensor) for tensor in kept}
    held: dict[tuple[int, int], Tensor] = {}  # alive, so that no two have one address

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
    """Whether a tensor is nothing but a view of a storage on the device."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device == device
        and not tensor.is_quantized
    )


def _is_movable(tensor: Tensor, kept_memory: set[int]) -> bool:
    num_bytes = tensor.untyped_storage().nbytes()
    return num_bytes >= max(SMALL_BYTES, 1) and _memory_of(tensor) not in kept_memory


def _content_of(tensor: Tensor) -> tuple[int, int]:
    """Equal for tensors whose memory has the same content, while both are alive."""
    return tensor.untyped_storage()._cdata, tensor._version


def _flat(tensor: Tensor) -> Tensor:
    """All bytes of the tensor's storage."""
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _modified(tensor: Tensor) -> RuntimeError:
    return RuntimeError(
        f"a tensor of shape {list(tensor.shape)} that the gradient needs has been modified by an inplace"
        " operation after its use"
    )
