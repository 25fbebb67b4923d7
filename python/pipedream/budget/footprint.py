"""Measures the memory that a stage needs in addition to the pool, first in a rehearsal and again while
training.

On CUDA torch's allocator counts bytes. On the host torch does not count them. There a dispatch mode notes
every tensor that an operator makes, and when the tensor's memory is freed. It does not see memory that an
operator allocates and frees itself. It costs microseconds per operator, so it is on only in the first
minibatches.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipedream.common.compiling import unmarked_until_compiling
from pipedream.model.draws import SeenDraws

__all__ = [
    "SCALARS_BYTES",
    "Footprint",
    "MemoryMeter",
    "StepMeter",
    "WorkMeter",
    "make_meter",
    "storage_bytes",
]

# Room for scalars: the loss, its scale, and the gradient with which the loss's backward starts. A measurement
# may miss some of them, because they live for different times.
SCALARS_BYTES = 64


@dataclass(frozen=True)
class Footprint:
    """The memory that one stage needs from torch's own allocator, in bytes. A microbatch is as large as in
    the run."""

    input_bytes: int
    """Bytes of one microbatch's inputs (and targets at the last stage)."""
    stash_bytes: int
    """Bytes that the forward of a microbatch makes and that stay until its backward."""
    transient_bytes: int
    """Peak bytes while a forward or a backward runs, in addition to inputs, stash and gradients."""
    gradient_bytes: int
    """Bytes of the parameters' gradients."""
    is_measured: bool
    """Whether the stage was measured. It is not if it is compiled or its rehearsal failed."""
    output_bytes: int = 0
    """Bytes of one microbatch's outputs; 0 at the last stage."""
    target_bytes: int = 0
    """The part of input_bytes that targets take."""
    offloadable_bytes: int = 0
    """The part of stash_bytes that offloading would move to the host; 0 if this was not measured."""
    factor_rows: Mapping[str, int] = field(default_factory=dict)
    """Number of rows of a weight's factors in one microbatch, by the weight's name. It has the weights whose
    gradient is the product of two factors (model/factored.py). It is empty if the rows were not counted."""
    foreign_draws: tuple[str, ...] = ()
    """Names of random generators other than torch's from which the forward draws."""
    draws: SeenDraws = field(default_factory=SeenDraws)
    """The places at which the stage draws from torch's random generators."""
    is_repeatable: bool = True
    """Whether a recompute gives the same output as the forward; True if this was not tested."""

    def or_as(self, other: Footprint) -> Footprint:
        """Returns a footprint that is large enough for the minibatches of `self` and for those of
        `other`."""
        rows = (*self.factor_rows.items(), *other.factor_rows.items())
        offloadable_bytes = max(self.offloadable_bytes, other.offloadable_bytes)
        stays_bytes = max(kind.stash_bytes - kind.offloadable_bytes for kind in (self, other))
        return Footprint(
            input_bytes=max(self.input_bytes, other.input_bytes),
            stash_bytes=max(self.stash_bytes, other.stash_bytes, offloadable_bytes + stays_bytes),
            transient_bytes=max(self.transient_bytes, other.transient_bytes),
            gradient_bytes=max(self.gradient_bytes, other.gradient_bytes),
            is_measured=self.is_measured and other.is_measured,
            output_bytes=max(self.output_bytes, other.output_bytes),
            target_bytes=max(self.target_bytes, other.target_bytes),
            offloadable_bytes=offloadable_bytes,
            factor_rows={name: max(n for other, n in rows if other == name) for name, _ in rows},
            foreign_draws=tuple(dict.fromkeys((*self.foreign_draws, *other.foreign_draws))),
            draws=self.draws | other.draws,
            is_repeatable=self.is_repeatable and other.is_repeatable,
        )


class _CudaMeter:
    """Reads the byte counts of torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._baseline = int(torch.cuda.memory_allocated(device))  # bytes of the model, which exists already

    @property
    def live_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self._device)) - self._baseline

    @property
    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device)) - self._baseline

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def __enter__(self) -> _CudaMeter:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


class _HostMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every new storage that an operator returns."""

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self.live_bytes = 0
        self.peak_bytes = 0
        # A weak reference to each known storage, by the address of the storage's C++ object. When a storage
        # is freed, its weak reference removes the entry.
        self._known: dict[int, Any] = {}

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._note_all((*args, *kwargs.values()), counts=False)
        result = func(*args, **kwargs)
        self._note_all((result,), counts=True)
        return result

    def _note_all(self, values: Sequence[Any], *, counts: bool) -> None:
        """Notes the tensors among the values, and the tensors in lists and tuples among them."""
        for value in values:
            if isinstance(value, Tensor):
                self._note(value, counts=counts)
            elif isinstance(value, (list, tuple)):
                self._note_all(value, counts=counts)

    def _note(self, tensor: Tensor, *, counts: bool) -> None:
        if tensor.layout != torch.strided or tensor.device.type != self._device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        num_bytes = storage.nbytes() if counts else 0

        def gone(_: Any) -> None:
            self._known.pop(key, None)
            self.live_bytes -= num_bytes

        self._known[key] = weakref.ref(storage, gone)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


# TorchDispatchMode marks this method as not to be compiled, and the mark would import torch's compiler
# (common/compiling.py).
_HostMeter.__torch_dispatch__ = unmarked_until_compiling(_HostMeter.__torch_dispatch__)  # type: ignore[method-assign]


MemoryMeter = _CudaMeter | _HostMeter
"""Counts the live bytes of torch's tensors on one device while it is entered."""


def make_meter(device: torch.device) -> MemoryMeter:
    """Makes the meter of a device. The device may be "meta": its tensors have no memory, and the meter counts
    the bytes that they would take."""
    return _CudaMeter(device) if device.type == "cuda" else _HostMeter(device.type)


class WorkMeter:
    """Reads a meter around forwards, recomputes and backwards, and keeps the peaks of stash, gradients and
    transient tensors."""

    def __init__(self, meter: MemoryMeter, gradient_bytes: Callable[[], int]) -> None:
        """gradient_bytes: returns the bytes of the parameters' gradients that exist at the moment."""
        self._meter = meter
        self._gradient_bytes = gradient_bytes
        self.stash_peak_bytes = 0
        self._peak_bytes = 0  # without gradients
        self.gradient_peak_bytes = 0

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        with self._measured():
            yield
            self._note_kept()

    @contextlib.contextmanager
    def recompute(self) -> Iterator[None]:
        """Measures a recompute. Its tensors count as transient, because they live only until the backward
        that follows."""
        with self._measured():
            yield

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        # The peak of the gradients counts, because gradients of earlier rounds may be sent and freed during
        # the backward.
        with self._measured(lambda: self.gradient_peak_bytes):
            yield
            self._note_gradients()
            self._note_kept()  # the inputs' gradients, which are sent upstream, count as kept

    @property
    def transient_peak_bytes(self) -> int:
        """Peak bytes minus the peak of the stash. When the bytes peaked, the stash may have been smaller than
        at its own peak. But only the sum of stash and transient bytes matters."""
        return max(self._peak_bytes - self.stash_peak_bytes, 0)

    def kept_bytes(self) -> int:
        """Returns the bytes of all live tensors except the parameters' gradients."""
        return self._meter.live_bytes - self._gradient_bytes()

    def _note_gradients(self) -> None:
        self.gradient_peak_bytes = max(self.gradient_peak_bytes, self._gradient_bytes())

    def _note_kept(self) -> None:
        self.stash_peak_bytes = max(self.stash_peak_bytes, self.kept_bytes())

    @contextlib.contextmanager
    def _measured(self, gradient_bytes: Callable[[], int] | None = None) -> Iterator[None]:
        gradient_bytes = gradient_bytes or self._gradient_bytes
        with self._meter as meter:
            meter.reset_peak()
            yield
            self._peak_bytes = max(self._peak_bytes, meter.peak_bytes - gradient_bytes())


class StepMeter:
    """Measures the tensors that an optimizer's steps allocate and free. The state that a step keeps does not
    count, because it has its own term."""

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self.peak_bytes = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        with self._meter as meter:
            before = meter.live_bytes
            meter.reset_peak()
            yield
            # The step may free gradients, so fewer bytes may be live after the step than before it.
            kept = max(before, meter.live_bytes)
            self.peak_bytes = max(self.peak_bytes, meter.peak_bytes - kept)


def storage_bytes(tensors: Sequence[Tensor | None]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
