"""What a stage's own work needs of memory beside the pool: measured in a dry run, and again while training.

On CUDA the allocator counts. On the host torch keeps no count, so a dispatch mode sees every tensor that an
operator makes and when its memory goes; that costs some us per operator, so it watches only the first
minibatches. What an operator allocates and frees inside itself is not seen on the host.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .batch_norm import MinibatchStatistics
from .boundary import Boundary, boundary_input, check_loss, device_of, map_tensors, tensors_of, untouched
from .offload import measure_offloadable
from .precision import autocast_region
from .splitter import StageModule

__all__ = [
    "SCALARS_BYTES",
    "DryRun",
    "Footprint",
    "MemoryMeter",
    "StepMeter",
    "WorkMeter",
    "dry_run",
    "make_meter",
    "storage_bytes",
]

# Scalars, as the loss, its scale and what its backward starts with: how long each lives differs.
SCALARS_BYTES = 64


@dataclass(frozen=True)
class Footprint:
    """Bytes of torch's own memory that one stage needs, the minibatch being cut as the run will."""

    input_bytes: int
    """Of one microbatch's inputs (and targets at the last stage)."""
    stash_bytes: int
    """Made by the forward of a microbatch and kept until its backward."""
    transient_bytes: int
    """The most beyond the other terms, while a forward or a backward runs."""
    gradient_bytes: int
    """Of the parameters' gradients."""
    is_measured: bool
    """False: the stage could not be measured (it is compiled, or its dry run failed)."""
    output_bytes: int = 0
    """Of one microbatch's outputs; 0 at the last stage."""
    offloadable_bytes: int = 0
    """Of stash_bytes, what offloading moves to the host; 0 also where nobody asked."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class DryRun:
    boundaries: list[Boundary]
    """After each stage but the last."""
    footprints: list[Footprint]
    """Of each stage."""


class MemoryMeter(Protocol):
    """Counts the live bytes of torch's tensors on one device while it is entered."""

    @property
    def live_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    def reset_peak(self) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *error: Any) -> None: ...


def make_meter(device: torch.device) -> MemoryMeter:
    """Of a device that has memory, or of "meta", whose tensors only say how much they would take."""
    return _CudaMeter(device) if device.type == "cuda" else _HostMeter(device.type)


class _CudaMeter:
    """The caching allocator's own figures."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._baseline = int(torch.cuda.memory_allocated(device))  # what was there before: the model

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
    """Every storage that an operator returns and that was not there before."""

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self.live_bytes = 0
        self.peak_bytes = 0
        # Storages by the address of their C++ object, with a weak reference that keeps the entry true.
        self._known: dict[int, Any] = {}

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                self._note(value, counts=False)
        result = func(*args, **kwargs)
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._note(value, counts=True)
        return result

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


class WorkMeter:
    """Reads a meter around work items and keeps the peaks per term."""

    def __init__(self, meter: MemoryMeter, gradient_bytes: Callable[[], int]) -> None:
        """gradient_bytes: of the parameters' gradients that there are."""
        self._meter = meter
        self._gradient_bytes = gradient_bytes
        self.stash_peak_bytes = 0
        self.transient_peak_bytes = 0
        self.gradient_peak_bytes = 0

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        with self._measured():
            yield
            self._note_kept()

    @contextlib.contextmanager
    def recompute(self) -> Iterator[None]:
        """What it makes lives until the backward that follows, so it counts as transient."""
        with self._measured():
            yield

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        with self._measured():
            yield
            self.gradient_peak_bytes = max(self.gradient_peak_bytes, self._gradient_bytes())
            self._note_kept()  # also gradients on their way upstream

    def _note_kept(self) -> None:
        kept = self._meter.live_bytes - self._gradient_bytes()
        self.stash_peak_bytes = max(self.stash_peak_bytes, kept)

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        with self._meter as meter:
            meter.reset_peak()
            yield
            # Beyond the most that was kept, not beyond what is kept now: a microbatch of fewer samples keeps
            # less and has the same temporary gradients, and the sum of the terms is what counts.
            beyond = meter.peak_bytes - self._gradient_bytes() - self.stash_peak_bytes
            self.transient_peak_bytes = max(self.transient_peak_bytes, beyond)


class StepMeter:
    """Reads a meter around an optimizer's steps: what they make and drop. What they keep, the optimizer's
    state, has a term of its own, so this meter is no other's."""

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self.peak_bytes = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        with self._meter as meter:
            before = meter.live_bytes
            meter.reset_peak()
            yield
            # Gradients may go meanwhile, so that there is less than before.
            kept = max(before, meter.live_bytes)
            self.peak_bytes = max(self.peak_bytes, meter.peak_bytes - kept)


def storage_bytes(tensors: Sequence[Tensor | None]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def dry_run(
    stages: Sequence[StageModule],
    inputs: Any,
    targets: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    *,
    autocast: torch.dtype | None = None,
    repeats: bool = False,
    for_offload: bool = False,
) -> DryRun:
    """Passes one microbatch through the stages, forward and, given a loss_fn, backward.

    repeats: the backward comes twice, as under microbatches gradients are added to those that are there.
    for_offload: also find out what of the stash could be offloaded, with one more forward.
    Random number generators, buffers, gradients and training flags are afterwards as they were. Raises
    ValueError naming the stage for what cannot cross; a last stage, loss or backward that fails is left to
    the first minibatch, which says where.
    """
    boundaries: list[Boundary] = []
    footprints: list[Footprint] = []
    # A copy, as a first layer that works in place would change the caller's data.
    device = device_of(stages)
    value = map_tensors(lambda tensor: tensor.detach().to(device, copy=True), inputs)
    targets = map_tensors(lambda tensor: tensor.to(device), targets)
    with untouched(stages), torch.enable_grad():
        for stage in stages:
            is_last = stage is stages[-1]
            rehearsal = _Rehearsal(stage, value, targets if is_last else None, loss_fn, autocast, repeats)
            if is_last:
                with contextlib.suppress(Exception):
                    rehearsal.forward()
            else:
                rehearsal.forward()
            if not is_last:
                boundary = Boundary.of(rehearsal.output, name=f"the output of stage {stage.stage_index}")
                boundaries.append(boundary)
                value = _detached(boundary, rehearsal.output)
            footprint = rehearsal.footprint(with_backward=loss_fn is not None)
            offloadable_bytes = rehearsal.offloadable_bytes() if for_offload else 0
            footprints.append(replace(footprint, offloadable_bytes=offloadable_bytes))
            del rehearsal
    return DryRun(boundaries, footprints)


def _detached(boundary: Boundary, output: Any) -> Any:
    """As in training, a stage sees its input without the graph of the stages before."""
    leaves = [
        tensor.detach().clone().requires_grad_(spec.requires_grad)
        for tensor, spec in zip(boundary.flatten(output), boundary.tensors, strict=True)
    ]
    return boundary.unflatten(leaves)


class _Rehearsal:
    """One stage's forward and backward under a meter."""

    def __init__(
        self,
        stage: StageModule,
        value: Any,
        targets: Any,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        autocast: torch.dtype | None,
        repeats: bool,
    ) -> None:
        self._stage = stage
        self._repeats = repeats
        self._statistics = MinibatchStatistics(stage) if repeats else None
        self._leaves = value
        self._targets = targets
        self._is_last = targets is not None
        self._loss_fn = loss_fn
        self._autocast = autocast
        self._device = device_of([stage])
        self._metered = not _is_compiled(stage)
        self._parameters = [parameter for _, parameter in stage.trainable_parameters()]
        self._meter = WorkMeter(
            make_meter(self._device), lambda: storage_bytes([p.grad for p in self._parameters])
        )
        self.output: Any = None
        self._roots: list[Tensor] = []
        self._output_bytes = 0

    def forward(self) -> None:
        value = map_tensors(boundary_input, self._leaves)
        region = self._meter.forward() if self._metered else contextlib.nullcontext()
        with region:
            statistics = self._statistics.microbatch() if self._statistics else contextlib.nullcontext()
            with statistics:
                output = self._run(value)
            if self._is_last and self._loss_fn is not None:
                self._roots = [output]
            else:
                self.output = output
                self._roots = tensors_of(output)
                self._output_bytes = 0 if self._is_last else storage_bytes(self._roots)
            del output, value

    def _run(self, value: Any) -> Any:
        """The stage's output, or the loss where there is one."""
        with autocast_region(self._device.type, self._autocast):
            output = self._stage(value)
        if not self._is_last or self._loss_fn is None:
            return output
        with autocast_region(self._device.type, self._autocast):
            return check_loss(self._loss_fn(output, self._targets), 0)

    def footprint(self, *, with_backward: bool) -> Footprint:
        measured = self._metered
        stash = self._meter.stash_peak_bytes
        if with_backward:
            try:
                self._backward()
                if self._repeats:
                    self.forward()
                    self._backward()
            except Exception:
                measured = False
        for parameter in self._parameters:
            parameter.grad = None
        return Footprint(
            input_bytes=storage_bytes([*tensors_of(self._leaves), *tensors_of(self._targets)]),
            stash_bytes=stash,
            transient_bytes=self._meter.transient_peak_bytes + SCALARS_BYTES,
            gradient_bytes=storage_bytes(self._parameters),
            is_measured=measured,
            output_bytes=self._output_bytes,
        )

    def offloadable_bytes(self) -> int:
        """By a forward of its own: some layers do not run under the hooks, and are not offloaded then."""
        value = map_tensors(
            lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), self._leaves
        )
        given = map_tensors(boundary_input, value)
        kept = [*tensors_of(value), *tensors_of(self._targets), *self._stage.parameters()]
        kept += [buffer for _, buffer in self._stage.stage_buffers()]
        with contextlib.suppress(Exception), measure_offloadable(kept) as num_bytes:
            self._run(given)
            return num_bytes()
        return 0

    def _backward(self) -> None:
        roots = [root for root in self._roots if root.requires_grad]
        # Gradients come in the pool's memory; a loss starts with one that torch makes.
        seeds = [None if self._is_last else torch.ones_like(root) for root in roots]
        self._roots = []
        self.output = None
        region = self._meter.backward() if self._metered else contextlib.nullcontext()
        with region:
            if self._is_last and (self._repeats or self._autocast is torch.float16):
                roots = [root * 0.5 for root in roots]  # a share of the minibatch, or a scale
            if roots:
                torch.autograd.backward(roots, seeds)
            del roots, seeds
        for leaf in tensors_of(self._leaves):
            leaf.grad = None  # each microbatch has leaves of its own


def _is_compiled(stage: nn.Module) -> bool:
    # A compiled forward would see the dispatch mode, and compile again or not at all.
    return any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        for module in stage.modules()
    )
