"""The work items of one stage: forward, recompute, backward and update in PyTorch.

Owned by the worker's compute thread, as all that it is given.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _from_dlpack as from_dlpack  # the public one takes several us to get there
from torch.utils.dlpack import to_dlpack

from pipedream import _core
from pipedream.budget.footprint import StepMeter, WorkMeter
from pipedream.budget.offload import SavedTensors, StageOffload, graph_root
from pipedream.common.errors import DataMismatch
from pipedream.data.batch_reader import BatchReader, Microbatch
from pipedream.model.batch_norm import MinibatchStatistics
from pipedream.model.boundary import (
    Boundary,
    boundary_input,
    check_loss,
    exportable,
    map_tensors,
    tensors_of,
    to_device,
)
from pipedream.model.loss_placement import call_loss
from pipedream.model.precision import LossScaler, autocast_region
from pipedream.model.recompute import BufferMemory, Buffers, GeneratorState, buffers_replayed
from pipedream.model.seeding import RngStream
from pipedream.model.splitter import StageModule
from pipedream.report.losses import LossRecord
from pipedream.stage.gradients import StageGradients
from pipedream.stage.job import JobOptions
from pipedream.stage.tied import TiedParameters
from pipedream.stage.user_code import UserCode
from pipedream.stage.weights import StageWeights

__all__ = ["StageParts", "StageRunner"]


_Result = TypeVar("_Result")

_USES_OF_AN_UNSHARED_STORAGE = 2  # the tensor, and the Python object that asks


def _within(
    region: Callable[[], contextlib.AbstractContextManager[Any]] | None, function: Callable[..., _Result]
) -> Callable[..., _Result]:
    """The function inside a region, made anew for each call; the function itself where there is none."""
    if region is None:
        return function
    make_region = region

    def inside(*arguments: Any) -> _Result:
        with make_region():
            return function(*arguments)

    return inside


@dataclass(slots=True)
class _Stashed:
    """What the backward of a microbatch needs."""

    leaves: list[Tensor]
    """Received tensors: their gradients go upstream."""
    value: Any
    """The stage's input, until the forward has it; under recompute until the second one has."""
    piece: Microbatch
    read_slot: int
    """Of the version that the forward read."""
    scale: float
    """Of the loss in float16, where it is taken."""
    outputs: list[Tensor] = field(default_factory=list)
    """Of the forward that the backward goes through, or the loss; empty before a recompute."""
    generators: GeneratorState | None = None
    buffers: Buffers = field(default_factory=list)
    """Recompute: what the forward read and changed."""
    saved: SavedTensors | None = None
    """Offloading: what the graph holds."""


@dataclass(frozen=True)
class StageParts:
    """What a runner works with."""

    stage: StageModule
    weights: StageWeights
    tied: TiedParameters
    gradients: StageGradients
    boundary_in: Boundary | None
    """Towards upstream; None at the first stage."""
    boundary_out: Boundary | None
    """Towards downstream; None at the last stage."""
    reader: BatchReader | None
    """At the first and the last stage."""
    losses: LossRecord | None
    """At the last stage."""
    rng: RngStream | None
    """Around what draws random numbers for the model; None where nobody else draws."""
    clones_inputs: bool | None
    """Whether the first stage works on copies of the inputs; None leaves it to the first forward."""
    copies_targets: bool
    """Whether the last stage works on copies of the targets."""
    offload: StageOffload | None = None
    torch_region: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    """Around what torch computes: where its tensors lie. None leaves it to torch."""


class StageRunner:
    """One stage's forward, recompute, backward and update."""

    def __init__(
        self,
        core: _core.Worker,
        options: JobOptions,
        schedule: _core.ScheduleOptions,
        parts: StageParts,
        device: torch.device,
        user: UserCode,
        describe: str,
    ) -> None:
        """describe: the worker, for errors."""
        self.stage_index = parts.stage.stage_index
        self.is_first = parts.boundary_in is None
        self.is_last = parts.boundary_out is None
        self.parts = parts
        self.gradient_slot = 0
        """Of the version whose leaves hold the gradients."""
        self.meter: WorkMeter | None = None
        """Measures forwards, recomputes and backwards while there is one."""
        self.step_meter: StepMeter | None = None
        """Measures updates while there is one."""
        self._core = core
        self._options = options
        self._device = device
        self._user = user
        self._describe = describe
        self._num_microbatches = schedule.num_microbatches
        self._recomputes = bool(schedule.recompute) and schedule.recompute[self.stage_index]
        self._statistics: MinibatchStatistics | None = None
        if schedule.num_microbatches > 1:
            self._statistics = MinibatchStatistics(parts.stage) or None
        self._clone_inputs = parts.clones_inputs
        self._works_in_place: bool | None = None  # the first layer, on its input; known after a forward
        self._buffers = BufferMemory(parts.stage)
        self._buffer_memory: set[int] = set()  # known after the first forward, which may make buffers
        self._in_flight: dict[tuple[int, int], _Stashed] = {}
        self._reads_losses_late = parts.losses is not None and parts.losses.reads_late
        self._is_tied = bool(parts.tied)
        self._poisons = _core.poisons_released_slots()
        self._scales_loss = options.autocast is torch.float16
        self._scaler: LossScaler | None = None
        if self._scales_loss and parts.losses is not None:
            drains = _core.drains_every_minibatch(schedule)
            self._scaler = LossScaler(1 if drains else schedule.in_flight[0])
        self._scale = 1.0  # of the minibatch that is being forwarded
        self._overflow_upstream = False
        self.loss_scale = 1.0
        """Of the gradients that the latest backward left."""
        self._surround()

    def _surround(self) -> None:
        """Puts the regions that this run has around the parts of its work, once: around functions that are
        given the runner. With its methods in it, it would hold itself, and the pool, in a circle."""
        rng, statistics, torch_region = self.parts.rng, self._statistics, self.parts.torch_region
        autocast: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
        if self._options.autocast is not None:
            autocast = functools.partial(autocast_region, self._device.type, self._options.autocast)
        self._call_stage = _within(autocast, self.parts.stage)
        self._call_loss = _within(autocast, StageRunner._loss_of)

        kind = StageRunner
        forward = kind._forward_without_graph if self._recomputes else kind._forward_with_graph
        forward = _within(None if rng is None else lambda: rng, forward)
        forward = _within(None if statistics is None else statistics.microbatch, forward)
        self._run_forward = _within(torch_region, forward)
        # Layers that checkpoint themselves run their forward again in the backward.
        again = None if statistics is None else statistics.recomputation
        self._run_recompute = _within(torch_region, _within(again, kind._rerun))
        self._run_backward = _within(torch_region, _within(again, kind._propagate))

    # Forward.

    def forward(self, work: _core.WorkItem) -> None:
        minibatch, microbatch, received = work.minibatch, work.microbatch, work.fields
        piece = self._read(minibatch, microbatch, received)
        if piece is None:
            self._user.drop_elapsed()
            self._core.end_of_data()
            return
        if microbatch == 0:
            self._begin_minibatch(minibatch, overflowed_upstream=received.gradients_overflowed)
        if piece.is_empty:
            self._forward_nothing(work, piece)
            return
        stashed = self._take_input(work, piece)
        self._bind(stashed.read_slot, minibatch)
        run = _within(self.meter.forward if self.meter else None, self._run_forward)
        output = run(self, minibatch, stashed)
        if minibatch == 0 and microbatch == 0:
            self._look_at_what_was_made()
        self._in_flight[minibatch, microbatch] = stashed
        closes = microbatch + 1 == self._num_microbatches
        if self.is_last:
            self._complete_loss(minibatch, stashed, output, closes=closes)
        else:
            self._send_activations(minibatch, stashed, output, closes=closes)

    def _look_at_what_was_made(self) -> None:
        """The first forward may make buffers, and keep parameters of the version that it read."""
        self._buffer_memory = {_memory_of(buffer) for _, buffer in self.parts.stage.stage_buffers()}
        self.parts.weights.follow_new_references()

    def _read(self, minibatch: int, microbatch: int, received: _core.ItemFields) -> Microbatch | None:
        reader = self.parts.reader
        if reader is None:
            return Microbatch(fingerprint=received.data_fingerprint, is_empty=received.is_empty)
        is_over = microbatch == 0 and not self._user.run("reading data", reader.fetch)
        piece = None if is_over else reader.read(minibatch, microbatch)
        if not self.is_first and (piece is None or not _is_same_data(piece, received)):
            raise self.data_mismatch(minibatch)
        if piece is not None and self.parts.copies_targets:
            piece.targets = to_device(piece.targets, self._device, copy=True)
        return piece

    def _begin_minibatch(self, minibatch: int, *, overflowed_upstream: bool) -> None:
        self.parts.tied.pull_for(minibatch)
        if not self._scales_loss:
            return
        overflowed = self.parts.gradients.take_overflow() or overflowed_upstream
        if self._scaler is not None:
            self._scale = self._scaler.next_scale(overflowed)
        self._overflow_upstream = overflowed

    def _take_input(self, work: _core.WorkItem, piece: Microbatch) -> _Stashed:
        boundary = self.parts.boundary_in
        if boundary is None:
            copy = self._clone_inputs is not False
            value, piece.inputs = to_device(piece.inputs, self._device, copy=copy), None
            return _Stashed([], value, piece, work.read_slot, self._scale)
        leaves = [from_dlpack(capsule) for capsule in work.take_tensors()]
        for leaf, spec in zip(leaves, boundary.tensors, strict=True):
            leaf.requires_grad_(spec.requires_grad)
        return _Stashed(leaves, boundary.unflatten(leaves), piece, work.read_slot, self._scale)

    def _bind(self, read_slot: int, minibatch: int) -> None:
        """The layers read the weights of the minibatch from now on."""
        tied = self.parts.tied
        self.parts.weights.bind(read_slot, tied.slot_read_by(minibatch) if self._is_tied else 0)

    def _forward_with_graph(self, minibatch: int, stashed: _Stashed) -> Any:
        """The stage's output, or the loss at the last stage."""
        given, stashed.value = map_tensors(boundary_input, stashed.value), None
        if self.parts.offload is None:
            return self._run_layers(minibatch, stashed, given)
        with self._saving(self.parts.offload, stashed, given, is_next=not self._in_flight):
            return self._run_layers(minibatch, stashed, given)

    def _run_layers(self, minibatch: int, stashed: _Stashed, given: Any) -> Any:
        output = self._user.run("forward", self._call_stage, given)
        if self._clone_inputs is None:
            self._clone_inputs = any(tensor._version > 0 for tensor in tensors_of(given))
        return self._run_loss(minibatch, stashed, output) if self.is_last else output

    def _forward_without_graph(self, minibatch: int, stashed: _Stashed) -> Any:
        """As _forward_with_graph; keeps what the recompute needs."""
        # The first layer may work in place, and the recompute needs its input as it was.
        in_place = self._works_in_place is not False
        given = map_tensors(
            lambda tensor: tensor.detach().clone() if in_place else tensor.detach(), stashed.value
        )
        counts = [tensor._version for tensor in tensors_of(given)]
        with torch.no_grad(), self._buffers.forward() as stashed.buffers:
            stashed.generators = GeneratorState.capture(self._device)
            output = self._run_layers(minibatch, stashed, given)
            self._learn_works_in_place(minibatch, given, counts)
            return output

    def _saving(
        self, offload: StageOffload, stashed: _Stashed, given: Any, *, is_next: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """Around what makes the microbatch's graph. is_next: its backward is the stage's next."""
        kept = [*stashed.leaves, *tensors_of(given)]
        kept += [buffer for _, buffer in self.parts.stage.stage_buffers()]
        stashed.saved = offload.forward(kept, is_next=is_next)
        return contextlib.nullcontext() if stashed.saved is None else stashed.saved

    def _learn_works_in_place(self, minibatch: int, given: Any, counts: list[int]) -> None:
        changed = [tensor._version for tensor in tensors_of(given)] != counts
        if self._works_in_place is None:
            self._works_in_place = changed
        elif changed and not self._works_in_place:
            raise ValueError(
                f"stage {self.stage_index} changed its input in place at minibatch {minibatch} and not at the"
                " first: under recompute its first layer must always or never work in place, so clone there"
            )

    def _run_loss(self, minibatch: int, stashed: _Stashed, output: Any) -> Tensor:
        return self._user.run("loss_fn", self._call_loss, self, minibatch, stashed, output)

    def _loss_of(self, minibatch: int, stashed: _Stashed, output: Any) -> Tensor:
        targets = to_device(stashed.piece.targets, self._device)
        if stashed.saved is not None:
            stashed.saved.keep(tensors_of(targets))
        return check_loss(call_loss(self._options.loss_fn, output, targets), minibatch)

    def _complete_loss(self, minibatch: int, stashed: _Stashed, loss: Tensor, *, closes: bool) -> None:
        losses = self.parts.losses
        assert losses is not None
        if not self._recomputes:
            self._keep_loss(minibatch, stashed, loss)
        if self._reads_losses_late:
            self._read_losses()
        losses.add(minibatch, loss, stashed.piece.weight)
        if closes:
            self._close_minibatch(minibatch)
        self._core.complete_forward([], _core.ItemFields(), self._user.take_elapsed_ns())

    def _keep_loss(self, minibatch: int, stashed: _Stashed, loss: Tensor) -> None:
        """For the backward."""
        if not loss.requires_grad:
            self._check_trains_nothing(minibatch, stashed)
        stashed.outputs = [loss]
        stashed.piece.targets = None

    def _check_trains_nothing(self, minibatch: int, stashed: _Stashed) -> None:
        if self.parts.weights.has_parameters or any(leaf.requires_grad for leaf in stashed.leaves):
            raise ValueError(
                f"the loss of minibatch {minibatch} needs no gradient, so nothing would be trained: loss_fn"
                " must not detach, and run() must not be called under torch.no_grad()"
            )

    def _send_activations(self, minibatch: int, stashed: _Stashed, output: Any, *, closes: bool) -> None:
        tensors = self._crossing(output, minibatch)
        if not self._recomputes:
            stashed.outputs = tensors
        if closes:
            self._close_minibatch(minibatch)
        if stashed.saved is not None and stashed.saved.leaves_device:
            stashed.outputs = [graph_root(tensor) for tensor in tensors]
        capsules = [to_dlpack(self._settled(tensor)) for tensor in tensors]
        self._core.complete_forward(capsules, self._fields_of(stashed.piece), self._user.take_elapsed_ns())

    def _crossing(self, output: Any, minibatch: int) -> list[Tensor]:
        boundary = self.parts.boundary_out
        assert boundary is not None
        return boundary.checked(output, stage=self.stage_index, minibatch=minibatch)

    def _settled(self, tensor: Tensor) -> Tensor:
        """Memory that stays as it is until it has been sent."""
        settled = exportable(tensor)
        # The next forward may write into a buffer, and the send reads without a copy.
        if self._buffer_memory and _memory_of(settled) in self._buffer_memory:
            return settled.clone()
        return settled

    def _fields_of(self, piece: Microbatch) -> _core.ItemFields:
        return _core.ItemFields(
            data_fingerprint=piece.fingerprint,
            gradients_overflowed=self._overflow_upstream,
            is_empty=piece.is_empty,
        )

    def _close_minibatch(self, minibatch: int) -> None:
        """The forward of its last microbatch is done."""
        if self._statistics is not None:
            self._statistics.update()
        if self.parts.losses is not None:
            self.parts.losses.close(minibatch)

    def _forward_nothing(self, work: _core.WorkItem, piece: Microbatch) -> None:
        work.take_tensors()
        stashed = _Stashed([], None, piece, work.read_slot, self._scale)
        self._in_flight[work.minibatch, work.microbatch] = stashed
        if work.microbatch + 1 == self._num_microbatches:
            self._close_minibatch(work.minibatch)
        capsules = [] if self.is_last else self._nothing_like(self.parts.boundary_out, gradients=False)
        self._core.complete_forward(capsules, self._fields_of(piece), self._user.take_elapsed_ns())

    # Recompute.

    def recompute(self, work: _core.WorkItem) -> None:
        """The forward again, now with its graph."""
        minibatch = work.minibatch
        stashed = self._in_flight[minibatch, work.microbatch]
        if not stashed.piece.is_empty:
            self._bind(work.read_slot, minibatch)
            run = _within(self.meter.recompute if self.meter else None, self._run_recompute)
            run(self, minibatch, stashed)
        self._core.complete_recompute(self._user.take_elapsed_ns())

    def _rerun(self, minibatch: int, stashed: _Stashed) -> None:
        assert stashed.generators is not None
        given, stashed.value = map_tensors(boundary_input, stashed.value), None
        replayed = stashed.generators.replayed(self._device)
        saving: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.parts.offload is not None:
            saving = self._saving(self.parts.offload, stashed, given, is_next=True)
        with buffers_replayed(self.parts.stage, stashed.buffers), replayed, saving:
            output = self._run_layers(minibatch, stashed, given)
        if self.is_last:
            self._keep_loss(minibatch, stashed, output)
        else:
            stashed.outputs = self._crossing(output, minibatch)

    # Backward.

    def backward(self, work: _core.WorkItem) -> None:
        minibatch, microbatch, read_slot = work.minibatch, work.microbatch, work.read_slot
        stashed = self._in_flight.pop((minibatch, microbatch))
        self.gradient_slot = read_slot
        if self._scales_loss:
            self.loss_scale = stashed.scale if self.is_last else work.fields.loss_scale
        # Layers that checkpoint themselves run again in the backward, on what is bound then.
        self._bind(read_slot, minibatch)
        run = _within(self.meter.backward if self.meter else None, self._run_backward)
        run(self, stashed, [from_dlpack(capsule) for capsule in work.take_tensors()])
        if self._reads_losses_late:  # before anything of this backward leaves the stage
            self._read_losses()
        if microbatch + 1 == self._num_microbatches:
            self.parts.tied.push(minibatch)
        fields = _core.ItemFields(loss_scale=self.loss_scale if self._scales_loss else 0.0)
        gradients = self._outgoing_gradients(stashed)
        freed = self._core.complete_backward(gradients, fields, self._user.take_elapsed_ns())
        if self._poisons:
            self._poison(work, freed)

    def _propagate(self, stashed: _Stashed, received: list[Tensor]) -> None:
        if self.parts.offload is not None:
            self._prefetch(stashed)
        if not stashed.piece.is_empty:
            self._user.run("backward", self._call_autograd, stashed, received)

    def _read_losses(self) -> None:
        """What the device could not do comes out here too, so it is the user's code that is named."""
        assert self.parts.losses is not None
        self._user.run("forward or loss_fn", self.parts.losses.read_pending)

    def _prefetch(self, current: _Stashed) -> None:
        """What the next backward needs comes back while this one runs."""
        if current.saved is not None:
            current.saved.arrive()
        following = next(iter(self._in_flight.values()), None)  # backwards come in the order of forwards
        if following is None:
            return
        self.parts.weights.own.prefetch(following.read_slot)
        if following.saved is not None:
            following.saved.prefetch()

    def _poison(self, work: _core.WorkItem, freed: int) -> None:
        """Whoever reads a version after its last backward gets NaN."""
        if freed >= 0:
            self.parts.weights.own.poison(freed)
        if work.microbatch + 1 == self._num_microbatches:
            freed_tied = self.parts.tied.slot_freed_by(work.minibatch)
            if freed_tied is not None:
                self.parts.weights.tied.poison(freed_tied)

    def _call_autograd(self, stashed: _Stashed, received: list[Tensor]) -> None:
        if self.is_last:
            root = stashed.outputs.pop()
            if root.requires_grad:  # else nothing is to be trained: see _check_trains_nothing
                factor = stashed.piece.weight * stashed.scale
                root = root if factor == 1.0 else root * factor
                root.backward()  # type: ignore[no-untyped-call]
            return
        boundary = self.parts.boundary_out
        assert boundary is not None
        crossing = [
            output
            for output, spec in zip(stashed.outputs, boundary.tensors, strict=True)
            if spec.requires_grad
        ]
        stashed.outputs = []
        if not crossing:
            return
        roots = [(o, g) for o, g in zip(crossing, received, strict=True) if o.requires_grad]
        if roots:
            torch.autograd.backward([output for output, _ in roots], [gradient for _, gradient in roots])

    def _outgoing_gradients(self, stashed: _Stashed) -> list[Any]:
        if self.parts.boundary_in is None:
            return []
        if stashed.piece.is_empty:
            return self._nothing_like(self.parts.boundary_in, gradients=True)
        sent = [_gradient_of(leaf) for leaf in stashed.leaves if leaf.requires_grad]
        return [to_dlpack(gradient) for gradient in sent or [self._no_gradient()]]

    # Update.

    def update(self, work: _core.WorkItem, gradient_scale: float | None) -> None:
        """gradient_scale: None skips the update."""
        read_slot, write_slot = work.read_slot, work.write_slot
        if self.parts.offload is None:
            self._user.run("optimizer", self._make_version, read_slot, write_slot, gradient_scale)
        else:
            with self.parts.weights.own.updating(read_slot, write_slot):
                self._user.run("optimizer", self._make_version, read_slot, write_slot, gradient_scale)
        self._core.complete_update(self._user.take_elapsed_ns())

    def _make_version(self, read_slot: int, write_slot: int, gradient_scale: float | None) -> None:
        if gradient_scale is None:
            self.parts.gradients.skip(read_slot, write_slot)
        else:
            step_region = self.step_meter.step if self.step_meter else None
            apply = _within(step_region, self.parts.gradients.apply)
            apply(read_slot, write_slot, gradient_scale)

    def data_mismatch(self, minibatch: int) -> DataMismatch:
        return DataMismatch(
            f"minibatch {minibatch} is not the same data at stage 0 (rank 0) and {self._describe}:"
            " every worker iterates `data` itself, so its order must follow from the seeded generators of"
            " torch, random and numpy, or be fixed"
        )

    def _no_gradient(self) -> Tensor:
        """The word that a backward is done, where no tensor of the boundary needs a gradient."""
        return torch.zeros(1, dtype=torch.uint8, device=self._device)

    def _nothing_like(self, boundary: Boundary | None, *, gradients: bool) -> list[Any]:
        """Tensors without elements in the place of a boundary's: an empty microbatch."""
        assert boundary is not None
        specs = [spec for spec in boundary.tensors if spec.requires_grad or not gradients]
        if not specs:
            return [to_dlpack(self._no_gradient())]
        shapes = [(0, *spec.shape[1:]) if spec.shape else () for spec in specs]
        return [
            to_dlpack(torch.zeros(shape, dtype=spec.dtype, device=self._device))
            for shape, spec in zip(shapes, specs, strict=True)
        ]


def _gradient_of(leaf: Tensor) -> Tensor:
    gradient = leaf.grad
    if gradient is None:  # the loss may not depend on every tensor that could have had a gradient
        return torch.zeros_like(leaf)
    # Autograd may have given a parameter the same memory (x + p.unsqueeze(0) with one sample), and the next
    # backward adds to that while this is still being sent.
    storage = gradient.untyped_storage()
    is_shared = torch._C._storage_Use_Count(storage._cdata) > _USES_OF_AN_UNSHARED_STORAGE
    return exportable(gradient).clone() if is_shared else exportable(gradient)


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_same_data(piece: Microbatch, received: _core.ItemFields) -> bool:
    return (piece.fingerprint, piece.is_empty) == (received.data_fingerprint, received.is_empty)
