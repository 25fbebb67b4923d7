"""Rehearses the training: each worker runs its own stages, on its own device, on the first microbatch of
minibatch 0. The rehearsal shows which values cross the cuts (Boundary), and how much memory the stages need
in addition to the pool (Footprint).

    worker of stage 0   forward --value--.    backward
    worker of stage 1                     `-> forward --value--.    backward
    worker of stage 2                                           `-> forward, loss    backward

- A stage sends the boundary downstream as JSON, then the real values of its tensors. Made-up values could
  fail: integers may be indices, and a loss may refuse numbers that are no probabilities.
- A stage sends before its backward, so the next stage does not wait for the backward.
- A worker runs its stages in ascending order. Each stage waits only for lower stages, so there is no
  deadlock.
- Afterwards random generators, buffers, gradients, flags and counters of layers are as they were. The loss
  function is a copy. The training reads the same minibatch again.

A layer that fails raises PipelineError, which names stage and rank. A value that cannot cross a cut raises
ValueError, which names the stage and the place in the value. A failure of the last stage, the loss or a
backward raises nothing here, except an error of the device. Minibatch 0 will fail in the same way and name
the place. The worker's compute thread owns all objects.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipedream import _core
from pipedream.budget.footprint import SCALARS_BYTES, Footprint, WorkMeter, make_meter, storage_bytes
from pipedream.budget.offload import measure_offloadable
from pipedream.common.errors import PipelineError, describe_error
from pipedream.links.channels import rehearsal_name
from pipedream.links.state_transfer import receive_document, receive_tensors, send_document, send_tensors
from pipedream.model.batch_norm import MinibatchStatistics
from pipedream.model.boundary import (
    Boundary,
    boundary_input,
    map_tensors,
    tensors_of,
    to_device,
)
from pipedream.model.calls import calls_seen, is_compiled
from pipedream.model.draws import SeenDraws, drawing_alike
from pipedream.model.factored import FactoredLayers, factorable
from pipedream.model.loss_state import spare_loss
from pipedream.model.recompute import BufferMemory, buffers_replayed
from pipedream.model.seeding import RngState, TorchState
from pipedream.model.stage_calls import StageCalls, backward, backward_of_loss, leaves_of
from pipedream.model.stage_module import StageModule
from pipedream.model.untouched import untouched

__all__ = ["Handover", "Rehearsal", "foreign_draws", "gives_the_same_again"]

# Number of recomputes that are tried if the forward draws from random generators other than torch's. A single
# recompute may give the same output by chance, for example if layers are dropped at random.
_NUM_TRIES = 4


class Handover:
    """Sends values across the cuts and receives them. Cut 0 is between stages 0 and 1. All replicas rehearse;
    each one receives from one replica of the stage upstream."""

    def __init__(
        self,
        core: _core.Worker | None,
        placement: _core.Placement,
        replica: int = 0,
        *,
        in_microbatches: bool = False,
    ) -> None:
        """core: the core with the channels of channels.set_up_channels; None if one worker has all stages.
        replica: index of this worker among its stage's replicas. in_microbatches: whether the data yield
        Microbatches; only a worker that reads data knows it."""
        self._core = core
        self._placement = placement
        self._replica = replica
        self.in_microbatches = in_microbatches
        """Whether the data yield Microbatches. Workers that read no data learn it from the stage upstream."""
        self._in_hand: dict[int, tuple[Boundary, list[Tensor]]] = {}

    @property
    def num_stages(self) -> int:
        return self._placement.num_stages

    def send(self, cut: int, boundary: Boundary, tensors: list[Tensor]) -> None:
        """Sends copies of the tensors. So the rehearsal may free the tensors themselves, whose memory it
        measures."""
        if self._is_local(cut):
            self._in_hand[cut] = (boundary, [tensor.detach().clone() for tensor in tensors])
            return
        receivers = range(self._placement.num_replicas(cut + 1))
        for receiver in receivers[self._replica :: self._placement.num_replicas(cut)]:
            assert self._core is not None
            name = rehearsal_name(cut, receiver)
            send_document(self._core, name, [boundary.to_json(), self.in_microbatches])
            # send_tensors() holds its tensors until they have been sent, so it gets copies in host memory.
            copies = [tensor.detach().to("cpu", copy=True) for tensor in boundary.sent(tensors)]
            send_tensors(self._core, name, copies)

    def receive(self, cut: int) -> tuple[Boundary, list[Tensor]]:
        """Returns the boundary and its tensors, in memory that belongs to the receiver."""
        if self._is_local(cut):
            return self._in_hand.pop(cut)
        assert self._core is not None
        name = rehearsal_name(cut, self._replica)
        text, self.in_microbatches = receive_document(self._core, name)
        boundary = Boundary.from_json(text)
        tensors = [torch.empty(spec.shape, dtype=spec.dtype) for spec in boundary.tensors]
        tensors = [tensor.contiguous() for tensor in boundary.sent(tensors)]
        receive_tensors(self._core, name, tensors)
        return boundary, boundary.received(tensors)

    def _is_local(self, cut: int) -> bool:
        return self._placement.rank_of(cut) == self._placement.rank_of(cut + 1)


@dataclass(eq=False)
class Rehearsal:
    """The rehearsal of one worker, and its results."""

    handover: Handover
    device: torch.device
    _: KW_ONLY
    describe: Callable[[int], str] = "stage {}".format
    """Returns the name of a stage, and of this worker, for errors."""
    name: str = "the first minibatch"
    """The minibatch's name for errors."""
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    """The loss function; None rehearses forwards only."""
    autocast: torch.dtype | None = None
    repeats: bool = False
    """Whether forward and backward run twice, as for a minibatch of several microbatches. The second backward
    adds to existing gradients, which may take more memory."""
    for_offload: bool = False
    """Whether one more forward measures how much of the stash could be offloaded."""
    for_factors: Collection[int] = ()
    """Stages where one more forward and backward finds the weights whose gradients are products of
    factors."""
    for_recompute: Collection[int] = ()
    """Stages where more forwards find out whether the stage may recompute."""
    boundaries: dict[int, Boundary] = field(default_factory=dict, init=False)
    """Boundaries by the stage upstream of the cut."""
    footprints: dict[int, Footprint] = field(default_factory=dict, init=False)
    """Footprints by stage."""

    def __post_init__(self) -> None:
        self.loss_fn = spare_loss(self.loss_fn)

    def run(self, stages: Sequence[StageModule], inputs: Any, targets: Any) -> None:
        """Rehearses this worker's stages. stages: in ascending order, on the device. inputs, targets: one
        microbatch's; only workers with the first or the last stage need them."""
        for stage in stages:
            value = self._value_for(stage.stage_index, inputs)
            kept = untouched([stage], self.loss_fn if self._is_last(stage) else None)
            with kept, torch.enable_grad(), self._draws_of(stage):
                self._run_stage(stage, value, targets)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # gives memory back to the device, from which the pool is allocated

    def _draws_of(self, stage: StageModule) -> contextlib.AbstractContextManager[None]:
        """Makes stages on both sides of a cut draw the same random numbers. So code that branches on such a
        number takes the same branch in both stages.
        """
        is_cut = self.handover.num_stages > 1
        return drawing_alike(stage, self.device) if is_cut else contextlib.nullcontext()

    def _is_last(self, stage: StageModule) -> bool:
        return stage.stage_index == self.handover.num_stages - 1

    def _value_for(self, stage_index: int, inputs: Any) -> Any:
        """Returns the stage's input without the graph of earlier stages, as in training."""
        if stage_index == 0:
            # A copy is needed, because a first layer that works in place would change the caller's data.
            return map_tensors(lambda tensor: tensor.detach().to(self.device, copy=True), inputs)
        cut = stage_index - 1
        boundary, tensors = self.handover.receive(cut)
        self.boundaries[cut] = boundary
        leaves = [
            tensor.to(self.device).requires_grad_(spec.requires_grad)
            for tensor, spec in zip(tensors, boundary.tensors, strict=True)
        ]
        return boundary.unflatten(leaves)

    def _run_stage(self, stage: StageModule, value: Any, targets: Any) -> None:
        index = stage.stage_index
        is_last = self._is_last(stage)
        on_device = to_device(targets, self.device) if is_last else None
        stage_rehearsal = _StageRehearsal(self, stage, value, on_device, is_last=is_last)
        before = RngState.capture()
        if is_last:
            with contextlib.suppress(Exception):
                stage_rehearsal.forward()
        else:
            with self._located(index):
                stage_rehearsal.forward()
                _wait_for(self.device)
            boundary = Boundary.of(stage_rehearsal.output, name=f"the output of stage {index}")
            self.boundaries[index] = boundary
            self.handover.send(index, boundary, boundary.flatten(stage_rehearsal.output))
        draws = foreign_draws(before, RngState.capture())
        footprint = stage_rehearsal.footprint(with_backward=self.loss_fn is not None)
        offloadable_bytes = stage_rehearsal.offloadable_bytes() if self.for_offload else 0
        factor_rows = stage_rehearsal.factor_rows() if index in self.for_factors else {}
        is_repeatable = index not in self.for_recompute or all(
            stage_rehearsal.is_repeatable() for _ in range(_NUM_TRIES if draws else 1)
        )
        # Errors of the device are raised here, because after such an error minibatch 0 cannot run.
        with self._located(index):
            _wait_for(self.device)
        self.footprints[index] = replace(
            footprint,
            offloadable_bytes=offloadable_bytes,
            factor_rows=factor_rows,
            foreign_draws=draws,
            draws=stage_rehearsal.draws,
            is_repeatable=is_repeatable,
        )

    @contextlib.contextmanager
    def _located(self, stage_index: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise PipelineError(
                f"{self.name} does not pass {self.describe(stage_index)}: {describe_error(error)}"
            ) from error


class _StageRehearsal:
    """One stage's forward and backward under a meter."""

    def __init__(
        self, rehearsal: Rehearsal, stage: StageModule, value: Any, targets: Any, *, is_last: bool
    ) -> None:
        self._stage = stage
        self._repeats = rehearsal.repeats
        # A batch norm updates its running statistics once per minibatch, from all microbatches.
        joins_statistics = rehearsal.repeats and not rehearsal.handover.in_microbatches
        self._statistics = MinibatchStatistics(stage) if joins_statistics else None
        self._value = value
        self._leaves: list[Tensor] = []  # the microbatch's inputs
        self._targets = targets
        self._is_last = is_last
        self._loss_fn = rehearsal.loss_fn
        self._device = rehearsal.device
        self._calls = StageCalls(stage, self._loss_fn, self._device, rehearsal.autocast)
        # The meter's dispatch mode would make torch compile a compiled forward again, or make it fail.
        self._metered = not any(map(is_compiled, stage.modules()))
        parameters = self._parameters = [parameter for _, parameter in stage.trainable_parameters()]
        # The lambda must not hold self, because the cycle would keep gradients until the garbage collector
        # runs.
        self._meter = WorkMeter(make_meter(self._device), lambda: storage_bytes([p.grad for p in parameters]))
        self.draws = SeenDraws()
        self.output: Any = None
        self._roots: list[Tensor] = []
        self._output_bytes = 0

    def forward(self) -> None:
        leaves = leaves_of(self._value)  # each microbatch has its own leaves
        self._leaves = tensors_of(leaves)
        value = map_tensors(boundary_input, leaves)
        del leaves
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
        """Returns the stage's output, or the loss if this stage computes it."""
        if self._stage.draws is not None:
            self._stage.draws.begin(0, 0, self._stage)
        with self._layers_seen():
            output = self._calls.layers(value)
        if not self._is_last or self._loss_fn is None:
            return output
        before = TorchState.capture()
        loss = self._calls.loss(output, self._targets)
        self.draws |= SeenDraws(in_loss=not before.equals(TorchState.capture()))
        return loss

    def _layers_seen(self) -> contextlib.AbstractContextManager[None]:
        """Notes which layers draw random numbers, if the model is a list of layers. The trace of a traced
        model has shown this already."""
        if self._stage.traced_draws is not None:
            return contextlib.nullcontext()
        layer_indices = itertools.count(self._stage.first_layer)

        def call(_: nn.Module, call: Callable[[], Any]) -> Any:
            layer_index, before = next(layer_indices), TorchState.capture()
            output = call()
            if not before.equals(TorchState.capture()):
                self.draws |= SeenDraws(frozenset({layer_index}))
            return output

        return calls_seen(dict.fromkeys(self._stage.layers), call)

    def footprint(self, *, with_backward: bool) -> Footprint:
        measured = self._metered
        stash, of_forward = self._meter.stash_peak_bytes, self._meter.transient_peak_bytes
        left_bytes = 0
        if with_backward:
            try:
                self._backward()
                # Tensors that the model itself holds stay in memory until the next forward replaces them.
                left_bytes = self._meter.kept_bytes()
                if self._repeats:
                    self.forward()
                    self._backward()
            except Exception:
                measured = False
        for parameter in self._parameters:
            parameter.grad = None
        return Footprint(
            input_bytes=storage_bytes([*tensors_of(self._value), *tensors_of(self._targets)]),
            stash_bytes=stash,
            transient_bytes=max(self._meter.transient_peak_bytes, of_forward + left_bytes) + SCALARS_BYTES,
            gradient_bytes=storage_bytes(self._parameters),
            is_measured=measured,
            output_bytes=self._output_bytes,
            target_bytes=storage_bytes(tensors_of(self._targets)),
        )

    def offloadable_bytes(self) -> int:
        """Runs a forward, and returns how many bytes could be offloaded. Returns 0 if the forward fails under
        the hooks."""
        value = leaves_of(self._value, copies=True)
        given = map_tensors(boundary_input, value)
        kept = [*tensors_of(value), *tensors_of(self._targets), *self._stage.parameters()]
        kept += [buffer for _, buffer in self._stage.stage_buffers()]
        with contextlib.suppress(Exception), measure_offloadable(kept) as num_bytes:
            self._run(given)
            return num_bytes()
        return 0

    def is_repeatable(self) -> bool:
        """Whether two forwards give the same output. The meter is off."""

        def run() -> Any:
            return self._run(map_tensors(boundary_input, leaves_of(self._value, copies=True)))

        return gives_the_same_again(self._stage, self._device, run)

    def factor_rows(self) -> dict[str, int]:
        """Runs a forward and a backward without the meter. Returns Footprint.factor_rows; empty if the
        forward or the backward fails.
        """
        named = self._stage.trainable_parameters()
        rows: dict[str, int] = {}

        def count(name: str, _: Tensor, inputs: Tensor) -> None:
            rows[name] = rows.get(name, 0) + len(inputs)

        factored = FactoredLayers(factorable(self._stage, named), count)
        self._metered = False
        with contextlib.suppress(Exception), factored.installed():
            self.forward()
            with factored.backward():  # layers with activation checkpointing run again in the backward
                self._backward()
            # A weight that has another use, too, is left out, because part of its gradient is in `grad`. So
            # is a weight without rows, such as that of an expert that no token has chosen.
            return {
                name: rows[name] for name, parameter in named if rows.get(name) and parameter.grad is None
            }
        return {}

    def _backward(self) -> None:
        roots = [root for root in self._roots if root.requires_grad]
        # In training, received gradients lie in the pool. So their stand-ins are made before the meter is on.
        # The backward of a loss needs none.
        seeds = [] if self._is_last else [torch.ones_like(root) for root in roots]
        self._roots = []
        self.output = None
        region = self._meter.backward() if self._metered else contextlib.nullcontext()
        before = TorchState.capture()
        with region:
            if not self._is_last:
                backward(roots, seeds)
            elif roots:
                backward_of_loss(roots.pop())
            del roots, seeds
        self.draws |= SeenDraws(in_backward=not before.equals(TorchState.capture()))
        self._leaves = []  # also frees the leaves' gradients, unless the model holds them


def _wait_for(device: torch.device) -> None:
    """Waits for the device. Raises the error of a kernel that has failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def foreign_draws(before: RngState, after: RngState) -> tuple[str, ...]:
    """Returns the names of the random generators, other than torch's, that differ between the two states."""
    found = []
    if before.python != after.python:
        found.append("random")
    if before.of_numpy() != after.of_numpy():
        found.append("numpy.random")
    return tuple(found)


def gives_the_same_again(stage: StageModule, device: torch.device, run: Callable[[], Any]) -> bool:
    """Whether the stage's forward gives the same output when it is repeated, as in a recompute.

    It is False if the forward writes frozen parameters, because nobody keeps their earlier contents. It is
    True if the forward fails, because the failure is reported elsewhere. run: runs the forward and returns
    the output, which nobody may change in place afterwards.
    """
    generators = TorchState.capture()
    frozen = (
        [parameter for _, parameter in stage.frozen_parameters()] if isinstance(stage, StageModule) else []
    )
    before = [(parameter._version, parameter.data_ptr()) for parameter in frozen]
    with contextlib.suppress(Exception):
        with BufferMemory(stage).forward() as buffers:
            first = tensors_of(run())
        if before != [(parameter._version, parameter.data_ptr()) for parameter in frozen]:
            return False
        with generators.replayed(), buffers_replayed(stage, buffers):
            second = tensors_of(run())
        pairs = zip(first, second, strict=True)
        return all(_is_same(one, other, device) for one, other in pairs)
    return True


def _is_same(one: Tensor, other: Tensor, device: torch.device) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # A GPU may add the terms of a sum in another order the second time.
    tolerance = 0.0 if device.type == "cpu" else 1e-2
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
