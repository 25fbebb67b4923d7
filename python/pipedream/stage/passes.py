"""Runs one stage's forward and backward in PyTorch: its layers, and at the last stage the loss.

A stage that recomputes runs the forward without a graph. Right before the backward it runs the same forward
again, now with a graph. Nothing here knows the schedule. Owned by the worker's compute thread.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipedream.budget.offload import SavedTensors, StageOffload, graph_root
from pipedream.common.regions import Region, entered
from pipedream.data.batch_reader import Microbatch
from pipedream.model.batch_norm import MinibatchStatistics
from pipedream.model.boundary import (
    Boundary,
    boundary_input,
    map_tensors,
    tensors_of,
    to_device,
)
from pipedream.model.ignored_labels import with_other_labels
from pipedream.model.recompute import BufferMemory, Buffers, buffers_replayed
from pipedream.model.seeding import TorchState
from pipedream.model.stage_calls import StageCalls, backward, backward_of_loss
from pipedream.model.stage_module import StageModule
from pipedream.model.untouched import untouched
from pipedream.stage.user_code import UserCode, origins_of_nan
from pipedream.update.weights import StageWeights

__all__ = ["OffloadedStash", "RecomputedPasses", "StagePasses", "Stashed", "begins_to_work_in_place"]

_LEAF_CHANGED = "a leaf Variable that requires grad"  # part of the text of torch's error


class StagePasses:
    """Runs the forward with a graph, and the backward through this graph."""

    def __init__(
        self,
        stage: StageModule,
        boundary_in: Boundary | None,
        boundary_out: Boundary | None,
        *,
        loss_fn: Callable[[Any, Any], Tensor],
        user: UserCode,
        device: torch.device,
        autocast: torch.dtype | None,
        statistics: MinibatchStatistics | None,
        torch_region: Region | None,
        around_backward: Region | None = None,
        clones_inputs: bool | None,
        offload: OffloadedStash | None,
    ) -> None:
        """statistics, torch_region, around_backward: contexts around the layers; None for one that is not
            needed.
        clones_inputs: whether the first stage works on copies of the inputs. None: the first forward decides,
            because it shows whether the first layer works in place.
        """
        self._stage = stage
        self._boundary_in = boundary_in
        self._boundary_out = boundary_out
        self._user = user
        self._device = device
        self._clones_inputs = clones_inputs
        self._works_in_place: bool | None = None  # known after the first forward
        self._offload = offload
        self._loss_fn = loss_fn
        self._calls = calls = StageCalls(stage, loss_fn, device, autocast)
        self._call_stage = functools.partial(_call_stage, calls, stage.stage_index)
        self._call_loss = functools.partial(_loss_of, calls, device)
        around: list[Region] = [] if torch_region is None else [torch_region]
        # Layers with activation checkpointing run their forward again in the backward, so the backward needs
        # these contexts, too.
        self._around_again = [*around, *([] if statistics is None else [statistics.recomputation])]
        self._around_backward = [*self._around_again, *([] if around_backward is None else [around_backward])]
        self._around_forward = [*around, *([] if statistics is None else [statistics.microbatch])]

    # Forward.

    def take_input(self, piece: Microbatch, received: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Returns (leaves, value): the received tensors as autograd leaves, and the stage's input, which is
        made of them. At the first stage the input comes from the data, and there are no leaves."""
        boundary = self._boundary_in
        if boundary is None:
            value, piece.inputs = piece.inputs, None
            clones = self._works_in_place is not False if self._clones_inputs is None else self._clones_inputs
            return [], to_device(value, self._device, copy=clones)
        leaves = boundary.received(received)
        for leaf, spec in zip(leaves, boundary.tensors, strict=True):
            if spec.requires_grad:
                leaf.requires_grad_()
        return leaves, boundary.unflatten(leaves)

    def forward(self, stashed: Stashed, *, is_next: bool) -> Any:
        """Returns the stage's output, or the loss at the last stage. is_next: whether the stage's next
        backward belongs to this microbatch."""
        if self._stage.draws is not None:
            self._stage.draws.begin(stashed.minibatch, stashed.microbatch, self._stage)
        if not self._around_forward:
            return self._forward(stashed, is_next=is_next)
        with entered(self._around_forward):
            return self._forward(stashed, is_next=is_next)

    def _forward(self, stashed: Stashed, *, is_next: bool) -> Any:
        given, stashed.value = stashed.value, None
        if self._works_in_place is not False:  # layers that may work in place must not get the leaves
            given = map_tensors(boundary_input, given)
        before = None if self._works_in_place is not None else _history_of(given)
        if self._offload is None:
            output = self._run_layers(stashed, given)
        else:
            with self._offload.saving(stashed, given, is_next=is_next):
                output = self._run_layers(stashed, given)
        if before is not None:
            self._works_in_place = _history_of(given) != before
        return output

    def _run_layers(self, stashed: Stashed, given: Any) -> Any:
        output = self._user.run("forward", self._call_stage, stashed, given)
        if self._boundary_out is not None:
            return output
        if self._stage.draws is not None:
            self._stage.draws.begin_loss()
        return self._user.run("loss_fn", self._call_loss, stashed, output)

    def origins_of_nan(self, stashed: Stashed, targets: Any) -> list[str]:
        """Describes the places where the NaN of a microbatch's loss began. Returns an empty list if none is
        found, or if the plan has one stage, whose input is not kept. Call it after the forward."""
        boundary = self._boundary_in
        if boundary is None:
            return []
        value = boundary.unflatten(stashed.leaves)

        def run() -> Tensor:
            output = self._calls.layers(value)
            return self._calls.loss(output, to_device(targets, self._device), stashed.minibatch)

        with contextlib.suppress(Exception), entered(self._around_again):
            return origins_of_nan(self._stage, stashed.leaves, run)
        return []

    def loss_with(self, stashed: Stashed, labels: Tensor, others: Tensor) -> float:
        """Returns the loss that the microbatch would have with `others` in place of its labels. Call it
        before the microbatch's forward. It changes no state of the model or the generators."""
        with untouched([self._stage], self._loss_fn), entered(self._around_again), torch.no_grad():
            output = self._calls.layers(with_other_labels(stashed.value, labels, others))
            targets = to_device(with_other_labels(stashed.piece.targets, labels, others), self._device)
            return float(self._calls.loss(output, targets, stashed.minibatch))

    def crossing(self, output: Any, minibatch: int) -> list[Tensor]:
        """Returns the tensors of an output that are sent downstream."""
        assert self._boundary_out is not None
        return self._boundary_out.checked(output, stage=self._stage.stage_index, minibatch=minibatch)

    # Backward.

    def backward(self, stashed: Stashed, received: Sequence[Tensor], following: Stashed | None) -> None:
        """Adds gradients to the stashed leaves and to the parameters. received: the gradients from
        downstream.
        following: the stash of the stage's next backward."""
        if self._stage.draws is not None:
            self._stage.draws.go_back_to(stashed.minibatch, stashed.microbatch)
        if not self._around_backward:
            self._backward(stashed, received, following)
            return
        with entered(self._around_backward):
            self._backward(stashed, received, following)

    def _backward(self, stashed: Stashed, received: Sequence[Tensor], following: Stashed | None) -> None:
        if self._offload is not None:
            self._offload.arrive(stashed, following)
        if not stashed.piece.is_empty:
            self._user.run("backward", self._run_backward, stashed, received)

    def _run_backward(self, stashed: Stashed, received: Sequence[Tensor]) -> None:
        if self._boundary_out is None:
            backward_of_loss(stashed.outputs.pop(), stashed.piece.weight * stashed.scale)
            return
        outputs, stashed.outputs = stashed.outputs, []
        specs = self._boundary_out.tensors
        crossing = [output for output, spec in zip(outputs, specs, strict=True) if spec.requires_grad]
        # Without crossing tensors, the received tensor only says that the backward downstream is done.
        if crossing:
            backward(crossing, self._boundary_out.received(received, gradients=True))


def _history_of(given: Any) -> list[tuple[int, Any]]:
    """Returns a value that differs after an operation has written to one of the tensors in place."""
    return [(tensor._version, tensor.grad_fn) for tensor in tensors_of(given)]


def begins_to_work_in_place(stage_index: int, minibatch: int) -> ValueError:
    return ValueError(
        f"stage {stage_index} changed its input in place at minibatch {minibatch} and not at the first: its"
        " first layer must always or never work in place, so clone there"
    )


def _call_stage(calls: StageCalls, stage_index: int, stashed: Stashed, given: Any) -> Any:
    try:
        return calls.layers(given)
    except RuntimeError as error:
        leaves = {id(leaf) for leaf in stashed.leaves if leaf.requires_grad}
        if _LEAF_CHANGED in str(error) and not leaves.isdisjoint(map(id, tensors_of(given))):
            raise begins_to_work_in_place(stage_index, stashed.minibatch) from error
        raise


def _loss_of(calls: StageCalls, device: torch.device, stashed: Stashed, output: Any) -> Tensor:
    if stashed.piece.weight == 0.0:  # the loss is a mean of nothing, so it and its gradients would be NaN
        return torch.zeros((), device=device, requires_grad=True)
    targets = to_device(stashed.piece.targets, device)
    if stashed.saved is not None:
        stashed.saved.keep(tensors_of(targets))
    return calls.loss(output, targets, stashed.minibatch)


class RecomputedPasses(StagePasses):
    """The passes of a stage that recomputes. No graph is kept from the forward to the backward."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._buffers = BufferMemory(self._stage)

    def _forward(self, stashed: Stashed, *, is_next: bool) -> Any:
        """Runs the forward without a graph, and stores the values that the recompute needs."""
        # The recompute needs the input unchanged. So the first layer gets a copy of the input if it works in
        # place.
        in_place = self._works_in_place is not False
        given = map_tensors(
            lambda tensor: tensor.detach().clone() if in_place else tensor.detach(), stashed.value
        )
        counts = [tensor._version for tensor in tensors_of(given)]
        with torch.no_grad(), self._buffers.forward() as stashed.buffers:
            if self._stage.draws is None:  # with draws, each forward is seeded and needs no generators
                stashed.generators = TorchState.capture()
            output = self._run_layers(stashed, given)
            self._learn_works_in_place(stashed.minibatch, given, counts)
            return output

    def recompute(self, stashed: Stashed) -> Any:
        """Runs the forward again, now with its graph, and returns the output or the loss."""
        replayed: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._stage.draws is not None:
            self._stage.draws.begin(stashed.minibatch, stashed.microbatch, self._stage)
        elif stashed.generators is not None:
            replayed = stashed.generators.replayed()
        with entered(self._around_again), buffers_replayed(self._stage, stashed.buffers), replayed:
            return super()._forward(stashed, is_next=True)

    def _learn_works_in_place(self, minibatch: int, given: Any, counts: list[int]) -> None:
        changed = [tensor._version for tensor in tensors_of(given)] != counts
        if self._works_in_place is None:
            self._works_in_place = changed
        elif changed and not self._works_in_place:
            raise begins_to_work_in_place(self._stage.stage_index, minibatch)


@dataclass(slots=True)
class Stashed:
    """Everything that the backward of a microbatch needs."""

    minibatch: int
    leaves: list[Tensor]
    """The received tensors. Their gradients are sent upstream."""
    value: Any
    """The stage's input. None after the forward. A stage that recomputes keeps it until the recompute."""
    piece: Microbatch
    read_slot: int
    """The slot of the version that the forward read."""
    scale: float
    """The factor by which the loss is multiplied in float16; 1 otherwise."""
    outputs: list[Tensor] = field(default_factory=list)
    """The outputs at which the backward begins; at the last stage the loss. Empty before a recompute."""
    generators: TorchState | None = None
    buffers: Buffers = field(default_factory=list)
    """With recompute: the buffers that the forward read and changed."""
    saved: SavedTensors | None = None
    """With offloading: the tensors that the graph saved."""
    microbatch: int = 0


class OffloadedStash:
    """Moves one stage's stashed tensors to the host and back."""

    def __init__(self, offload: StageOffload, stage: StageModule, weights: StageWeights) -> None:
        self._offload = offload
        self._stage = stage
        self._weights = weights

    def saving(
        self, stashed: Stashed, given: Any, *, is_next: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which the microbatch's graph is made. is_next: whether the stage's next
        backward belongs to this microbatch."""
        kept = [*stashed.leaves, *tensors_of(given)]
        kept += [buffer for _, buffer in self._stage.stage_buffers()]
        stashed.saved = self._offload.forward(kept, is_next=is_next)
        return contextlib.nullcontext() if stashed.saved is None else stashed.saved

    def roots(self, stashed: Stashed, outputs: list[Tensor]) -> list[Tensor]:
        """Returns the tensors at which the backward begins. A stash that is moved to the host keeps the roots
        of the outputs' graph instead of the outputs, which would hold device memory."""
        if stashed.saved is None or not stashed.saved.leaves_device:
            return outputs
        return [graph_root(output) for output in outputs]

    def arrive(self, stashed: Stashed, following: Stashed | None) -> None:
        """Waits until the stash is back on the device. Call it before the backward. following: the stash of
        the next backward. It is then fetched in the background."""
        if stashed.saved is not None:
            stashed.saved.arrive()
        if following is None:
            return
        self._weights.own.prefetch(following.read_slot)
        if following.saved is not None:
            following.saved.prefetch()
