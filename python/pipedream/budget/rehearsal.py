"""Rehearsal: each worker runs its own stages once, on its own device, on the first microbatch of minibatch 0.
That tells what crosses the cuts (Boundary) and what memory the stages need beside the pool (Footprint).

    worker of stage 0   forward --value--.    backward
    worker of stage 1                     `-> forward --value--.    backward
    worker of stage 2                                           `-> forward, loss    backward

- A layer runs in no other process than the one that trains it, and as it will train: on that worker's device,
  under the autocast lists of that device, with rank 0's initial weights and buffers.
- Across a cut go the boundary, as a document, and then the values of its tensors, as the stage upstream made
  them, whatever their dtype. Nothing stands in for them: integers are indices and masks select, a loss may
  refuse what is no probability, and on a GPU one index out of range ends all use of the device. It is as much
  as the training's first microbatch sends. They go before the backward, for which nobody else waits.
- The first stage has the inputs and the last the targets, each of its own stream, which gives the minibatch
  to the training again.
- A worker learns the boundaries at both sides of its stages and the footprints of its stages. The channels
  and the memory of others are not its own, so nobody collects anything, however many workers there are.
- Several stages of one worker go in ascending order: each waits only for lower ones, so none waits for ever.
  Between two of them a value goes from hand to hand.
- Generators, buffers, gradients, flags and counters of layers are afterwards as they were. Of the loss it is
  a copy that runs.

A layer that fails raises PipelineError naming stage and rank, and a value that cannot cross ValueError naming
the stage and the place in it; a loss, a last stage or a backward that fails is left to minibatch 0, which
says where. Owned by the worker's compute thread.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
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
from pipedream.model.recompute import BufferMemory, GeneratorState, buffers_replayed
from pipedream.model.seeding import RngState
from pipedream.model.stage_calls import StageCalls, backward, backward_of_loss, leaves_of
from pipedream.model.stage_module import StageModule
from pipedream.model.untouched import untouched

__all__ = ["Handover", "Rehearsal", "foreign_draws", "gives_the_same_again"]

_NUM_TRIES = 4  # to find that draws matter, which need not show at once: of a layer that is dropped at times


class Handover:
    """The ways across the cuts, each named by the stage upstream of it. All replicas rehearse, each what one
    upstream has sent it."""

    def __init__(self, core: _core.Worker | None, placement: _core.Placement, replica: int = 0) -> None:
        """core: with the channels of channels.set_up_channels; None where one worker has all stages. replica:
        of the worker's stage."""
        self._core = core
        self._placement = placement
        self._replica = replica
        self._in_hand: dict[int, tuple[Boundary, list[Tensor]]] = {}

    @property
    def num_stages(self) -> int:
        return self._placement.num_stages

    def send(self, cut: int, boundary: Boundary, tensors: list[Tensor]) -> None:
        """Afterwards the tensors may change, and go: the rehearsal that made them measures what it holds."""
        if self._is_local(cut):
            self._in_hand[cut] = (boundary, [tensor.detach().clone() for tensor in tensors])
            return
        receivers = range(self._placement.num_replicas(cut + 1))
        for receiver in receivers[self._replica :: self._placement.num_replicas(cut)]:
            assert self._core is not None
            name = rehearsal_name(cut, receiver)
            send_document(self._core, name, boundary.to_json())
            # What is sent is held until it has left.
            copies = [tensor.detach().to("cpu", copy=True) for tensor in boundary.sent(tensors)]
            send_tensors(self._core, name, copies)

    def receive(self, cut: int) -> tuple[Boundary, list[Tensor]]:
        """The boundary and its tensors, in memory of the receiver's own."""
        if self._is_local(cut):
            return self._in_hand.pop(cut)
        assert self._core is not None
        name = rehearsal_name(cut, self._replica)
        boundary = Boundary.from_json(receive_document(self._core, name))
        tensors = [torch.empty(spec.shape, dtype=spec.dtype) for spec in boundary.tensors]
        tensors = [tensor.contiguous() for tensor in boundary.sent(tensors)]
        receive_tensors(self._core, name, tensors)
        return boundary, boundary.received(tensors)

    def _is_local(self, cut: int) -> bool:
        return self._placement.rank_of(cut) == self._placement.rank_of(cut + 1)


class Rehearsal:
    """One worker's, and what it has learned."""

    def __init__(
        self,
        handover: Handover,
        device: torch.device,
        *,
        describe: Callable[[int], str] = "stage {}".format,
        name: str = "the first minibatch",
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        autocast: torch.dtype | None = None,
        repeats: bool = False,
        for_offload: bool = False,
        for_factors: Collection[int] = (),
        for_recompute: Collection[int] = (),
    ) -> None:
        """describe: names this worker in errors, by the stage. name: of what is rehearsed with. loss_fn: None
        rehearses forwards alone.
        repeats: the backward comes twice, as under microbatches gradients are added to those that are there.
        for_offload: also find out what of the stash could be offloaded, with one more forward.
        for_factors: of these stages also find out which weights' gradients are products of factors, with one
        more forward and backward.
        for_recompute: of these stages also find out whether they may recompute, with two more forwards."""
        self.boundaries: dict[int, Boundary] = {}
        """By the stage upstream of the cut."""
        self.footprints: dict[int, Footprint] = {}
        """By stage."""
        self._handover = handover
        self._device = device
        self._describe = describe
        self._name = name
        self._loss_fn = spare_loss(loss_fn)
        self._autocast = autocast
        self._repeats = repeats
        self._for_offload = for_offload
        self._for_factors = for_factors
        self._for_recompute = for_recompute

    def run(self, stages: Sequence[StageModule], inputs: Any, targets: Any) -> None:
        """stages: the worker's, ascending, on the device. inputs, targets: of one microbatch; read where the
        first and the last stage are."""
        for stage in stages:
            value = self._value_for(stage.stage_index, inputs)
            kept = untouched([stage], self._loss_fn if self._is_last(stage) else None)
            with kept, torch.enable_grad(), self._draws_of(stage):
                self._run_stage(stage, value, targets)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the pool comes from the device, not from torch's cache

    def _draws_of(self, stage: StageModule) -> contextlib.AbstractContextManager[None]:
        """Makes stages on both sides of a cut go the same way."""
        is_cut = self._handover.num_stages > 1
        return drawing_alike(stage, self._device) if is_cut else contextlib.nullcontext()

    def _is_last(self, stage: StageModule) -> bool:
        return stage.stage_index == self._handover.num_stages - 1

    def _value_for(self, stage_index: int, inputs: Any) -> Any:
        """Returns the input without the graph of the stages before, as a stage sees it in training."""
        if stage_index == 0:
            # A copy, as a first layer that works in place would change the caller's data.
            return map_tensors(lambda tensor: tensor.detach().to(self._device, copy=True), inputs)
        cut = stage_index - 1
        boundary, tensors = self._handover.receive(cut)
        self.boundaries[cut] = boundary
        leaves = [
            tensor.to(self._device).requires_grad_(spec.requires_grad)
            for tensor, spec in zip(tensors, boundary.tensors, strict=True)
        ]
        return boundary.unflatten(leaves)

    def _run_stage(self, stage: StageModule, value: Any, targets: Any) -> None:
        index = stage.stage_index
        is_last = self._is_last(stage)
        stage_rehearsal = _StageRehearsal(
            stage,
            value,
            to_device(targets, self._device) if is_last else None,
            is_last=is_last,
            device=self._device,
            loss_fn=self._loss_fn,
            autocast=self._autocast,
            repeats=self._repeats,
        )
        before = RngState.capture()
        if is_last:
            with contextlib.suppress(Exception):
                stage_rehearsal.forward()
        else:
            with self._located(index):
                stage_rehearsal.forward()
                _wait_for(self._device)
            boundary = Boundary.of(stage_rehearsal.output, name=f"the output of stage {index}")
            self.boundaries[index] = boundary
            self._handover.send(index, boundary, boundary.flatten(stage_rehearsal.output))
        draws = foreign_draws(before, RngState.capture())
        footprint = stage_rehearsal.footprint(with_backward=self._loss_fn is not None)
        offloadable_bytes = stage_rehearsal.offloadable_bytes() if self._for_offload else 0
        factor_rows = stage_rehearsal.factor_rows() if index in self._for_factors else {}
        is_repeatable = index not in self._for_recompute or all(
            stage_rehearsal.is_repeatable() for _ in range(_NUM_TRIES if draws else 1)
        )
        with self._located(index):  # after an error of the device there is no minibatch 0 to leave it to
            _wait_for(self._device)
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
                f"{self._name} does not pass {self._describe(stage_index)}: {describe_error(error)}"
            ) from error


class _StageRehearsal:
    """One stage's forward and backward under a meter."""

    def __init__(
        self,
        stage: StageModule,
        value: Any,
        targets: Any,
        *,
        is_last: bool,
        device: torch.device,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        autocast: torch.dtype | None,
        repeats: bool,
    ) -> None:
        self._stage = stage
        self._repeats = repeats
        self._statistics = MinibatchStatistics(stage) if repeats else None
        self._value = value
        self._leaves: list[Tensor] = []  # of the microbatch
        self._targets = targets
        self._is_last = is_last
        self._loss_fn = loss_fn
        self._calls = StageCalls(stage, loss_fn, device, autocast)
        self._device = device
        # A compiled forward would see the dispatch mode, and compile again or not at all.
        self._metered = not any(map(is_compiled, stage.modules()))
        parameters = self._parameters = [parameter for _, parameter in stage.trainable_parameters()]
        # Not of self: the gradients would wait for the garbage collector.
        self._meter = WorkMeter(make_meter(self._device), lambda: storage_bytes([p.grad for p in parameters]))
        self.draws = SeenDraws()
        self.output: Any = None
        self._roots: list[Tensor] = []
        self._output_bytes = 0

    def forward(self) -> None:
        leaves = leaves_of(self._value)  # of each microbatch its own
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
        """The stage's output, or the loss where there is one."""
        if self._stage.draws is not None:
            self._stage.draws.begin(0, 0, self._stage)
        with self._layers_seen():
            output = self._calls.layers(value)
        if not self._is_last or self._loss_fn is None:
            return output
        before = GeneratorState.capture(self._device)
        loss = self._calls.loss(output, self._targets)
        self.draws |= SeenDraws(in_loss=before.has_moved_on(self._device))
        return loss

    def _layers_seen(self) -> contextlib.AbstractContextManager[None]:
        """Notes which layers of a list draw; what is cut was traced."""
        if self._stage.traced_draws is not None:
            return contextlib.nullcontext()
        layer_indices = itertools.count(self._stage.first_layer)

        def call(_: nn.Module, call: Callable[..., Any], arguments: Any, keywords: Any) -> Any:
            layer_index, before = next(layer_indices), GeneratorState.capture(self._device)
            output = call(*arguments, **keywords)
            if before.has_moved_on(self._device):
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
                # What the model itself still holds is there until the next forward replaces it.
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
        """Bytes that may be offloaded, measured by a forward of its own. It offloads nothing for layers that
        do not run under the hooks."""
        value = leaves_of(self._value, copies=True)
        given = map_tensors(boundary_input, value)
        kept = [*tensors_of(value), *tensors_of(self._targets), *self._stage.parameters()]
        kept += [buffer for _, buffer in self._stage.stage_buffers()]
        with contextlib.suppress(Exception), measure_offloadable(kept) as num_bytes:
            self._run(given)
            return num_bytes()
        return 0

    def is_repeatable(self) -> bool:
        """Whether two forwards give the same, tried by forwards of its own without a meter."""

        def run() -> Any:
            return self._run(map_tensors(boundary_input, leaves_of(self._value, copies=True)))

        return gives_the_same_again(self._stage, self._device, run)

    def factor_rows(self) -> dict[str, int]:
        """The rows of each factorable weight, counted in a forward and a backward of its own without a meter.
        Empty where these fail."""
        named = self._stage.trainable_parameters()
        rows: dict[str, int] = {}

        def count(name: str, _: Tensor, inputs: Tensor) -> None:
            rows[name] = rows.get(name, 0) + len(inputs)

        factored = FactoredLayers(factorable(self._stage, named), count)
        self._metered = False
        with contextlib.suppress(Exception), factored.installed():
            self.forward()
            with factored.backward():  # in which layers that checkpoint themselves run again
                self._backward()
            # Of a weight with another use besides the rest of the gradient is there; one that has been given
            # no rows, as an expert that is not chosen, will be given some.
            return {
                name: rows[name] for name, parameter in named if rows.get(name) and parameter.grad is None
            }
        return {}

    def _backward(self) -> None:
        roots = [root for root in self._roots if root.requires_grad]
        # Gradients come in the pool's memory; a loss starts with one that torch makes.
        seeds = [] if self._is_last else [torch.ones_like(root) for root in roots]
        self._roots = []
        self.output = None
        region = self._meter.backward() if self._metered else contextlib.nullcontext()
        before = GeneratorState.capture(self._device)
        with region:
            if not self._is_last:
                backward(roots, seeds)
            elif roots:
                backward_of_loss(roots.pop())
            del roots, seeds
        self.draws |= SeenDraws(in_backward=before.has_moved_on(self._device))
        self._leaves = []  # with their gradients, but for what the model holds


def _wait_for(device: torch.device) -> None:
    """Waits for the device; the error of a kernel comes out here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def foreign_draws(before: RngState, after: RngState) -> tuple[str, ...]:
    """Returns the generators, torch's apart, that were drawn from between the two."""
    found = []
    if before.python != after.python:
        found.append("random")
    if before.of_numpy() != after.of_numpy():
        found.append("numpy.random")
    return tuple(found)


def gives_the_same_again(stage: StageModule, device: torch.device, run: Callable[[], Any]) -> bool:
    """Whether the stage's forward, done again as a recompute does it, gives what it gave. True too where it
    fails, which is told otherwise. run: does it; its output has no in-place work to come."""
    generators = GeneratorState.capture(device)
    with contextlib.suppress(Exception):
        with BufferMemory(stage).forward() as buffers:
            first = tensors_of(run())
        with generators.replayed(device), buffers_replayed(stage, buffers):
            second = tensors_of(run())
        pairs = zip(first, second, strict=True)
        return all(_is_same(one, other, device) for one, other in pairs)
    return True


def _is_same(one: Tensor, other: Tensor, device: torch.device) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # On a device two sums may be added up in different orders.
    tolerance = 0.0 if device.type == "cpu" else 1e-2
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
