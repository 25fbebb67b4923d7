"""The work items of one stage: what PyTorch does between the core's next_work and complete.

Owned by the worker's compute thread.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _from_dlpack as from_dlpack  # the public one takes several us to get there
from torch.utils.dlpack import to_dlpack

from . import _core
from .boundary import (
    Boundary,
    boundary_input,
    check_loss,
    exportable,
    map_tensors,
    tensors_of,
    to_device,
)
from .channels import activations_name, gradients_name
from .data import MinibatchStream, mark_of, num_samples
from .errors import DataMismatch, NonFiniteLoss, PipelineError, describe_error
from .job import JobOptions, WorkerPlace
from .progress import RunProgress
from .seeding import RngStream, stage_seed
from .splitter import StageModule
from .weights import StageOptimizer, StageWeights

__all__ = ["StageLoop"]


class _UserCode:
    """Errors of the user's own code, told with stage and minibatch. Times what it encloses."""

    def __init__(self, where: Callable[[str], str]) -> None:
        self._where = where
        self._what = ""
        self._began_ns = 0
        self.elapsed_ns = 0
        """Since it was last reset to 0."""

    def __call__(self, what: str) -> _UserCode:
        self._what = what
        return self

    def __enter__(self) -> None:
        self._began_ns = time.perf_counter_ns()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.elapsed_ns += time.perf_counter_ns() - self._began_ns
        # Forwarded data come from the core: its failures are the world's.
        if isinstance(error, Exception) and not isinstance(error, (PipelineError, _core.RunFailure)):
            raise PipelineError(f"{self._where(self._what)}: {describe_error(error)}") from error


class StageLoop:
    """The work items of one stage."""

    def __init__(
        self,
        core: _core.Worker,
        options: JobOptions,
        place: WorkerPlace,
        *,
        stage: StageModule,
        weights: StageWeights,
        stream: MinibatchStream,
        device: torch.device,
        base_seed: int,
        input_boundary: Boundary | None,
        boundary_in: Boundary | None,
        boundary_out: Boundary | None,
    ) -> None:
        """boundary_in, boundary_out: towards the neighbours, None where there is none. input_boundary: what
        the first stage's inputs must look like, None to check nothing."""
        self._core = core
        self._options = options
        self._board = place.board
        self._rank = self._stage_index = place.rank
        self._is_first = boundary_in is None
        self._is_last = boundary_out is None
        self._stage = stage
        self._weights = weights
        self._optimizer = StageOptimizer(options.optimizer, weights)
        self._stream = stream
        self._device = device
        self._boundary_in = boundary_in
        self._boundary_out = boundary_out
        self._input_boundary = input_boundary
        self._rng = self._own_stream(base_seed)
        # Inputs are copied when their memory may change while they are in flight, and when the first layer
        # works in place: that would change the data of the next epoch, here and not at the last stage.
        # None: not known before the first forward.
        self._clone_inputs: bool | None = False
        if self._is_first and not self._is_last:
            self._clone_inputs = True if stream.may_reuse_memory else None
        self._buffer_memory: set[int] = set()  # known after the first forward, which may make buffers
        # Minibatch -> what its backward needs: received leaves, and the outputs or the loss.
        self._in_flight: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._gradient_slot = 0
        self._minibatch = -1
        self._user = _UserCode(self._where)
        self._losses: list[float] = []
        self._samples: list[int] = []
        self._epochs: list[int] = []

    def _own_stream(self, base: int) -> contextlib.AbstractContextManager[Any]:
        """Around what draws random numbers for the model; seeding.py has the rule."""
        if self._is_first and self._is_last:
            return contextlib.nullcontext()
        seed = stage_seed(base, self._stage_index)
        if (self._is_first or self._is_last) and self._stream.draws:
            return RngStream(seed)
        torch.manual_seed(seed)  # nobody else draws here, so nothing needs swapping
        return contextlib.nullcontext()

    def train(self) -> dict[str, Any]:
        plan, core = self._options.plan, self._core
        core.start(
            schedule=self._options.schedule,
            stage=self._stage_index,
            num_stages=plan.num_stages,
            in_flight=plan.in_flight[self._stage_index],
            activations_in="" if self._is_first else activations_name(self._stage_index - 1),
            activations_out="" if self._is_last else activations_name(self._stage_index),
            gradients_in="" if self._is_last else gradients_name(self._stage_index),
            gradients_out="" if self._is_first else gradients_name(self._stage_index - 1),
        )
        do = {"FORWARD": self._forward, "BACKWARD": self._backward, "UPDATE": self._update}
        newest_slot = 0
        self._progress = RunProgress(
            enabled=self._options.progress and self._is_last,
            num_minibatches=self._stream.num_minibatches,
            in_flight=plan.in_flight,
        )
        with self._progress, contextlib.ExitStack() as cleanup:
            # Also after a failure: the user's modules get their own parameters back.
            cleanup.callback(lambda: self._weights.restore(newest_slot))
            while (work := core.next_work()).kind != "DONE":
                self._user.elapsed_ns = 0
                self._minibatch = work.minibatch
                if self._board is not None:
                    self._board.write(self._rank, work.minibatch)
                do[work.kind](work)
                if work.kind == "UPDATE":
                    newest_slot = work.write_slot
        if self._is_last and not self._is_first:
            self._check_end(work.num_minibatches)
        return self._report()

    def _forward(self, work: _core.WorkItem) -> None:
        minibatch = work.minibatch
        inputs: Any = None
        targets: Any = None
        leaves: list[Tensor] = []
        mark = work_mark = work.tag
        if self._is_first or self._is_last:
            with self._user("reading data"):
                batch = self._stream.next()
            if batch is None and self._is_first:
                self._core.end_of_data()
                return
            if batch is None:
                raise self._data_mismatch(minibatch)
            if not (self._is_first and self._is_last):  # else nobody reads it too
                mark = mark_of(batch)
            if not self._is_first and mark != work_mark:
                raise self._data_mismatch(minibatch)
            inputs, targets = batch.inputs, batch.targets
            if self._is_last:
                self._samples.append(num_samples(targets))
                self._epochs.append(batch.epoch)
        if self._is_first:
            if self._input_boundary is not None:
                flat = self._input_boundary.flatten(inputs, stage=0, minibatch=minibatch)
                self._input_boundary.check(flat, stage=0, minibatch=minibatch)
            value = to_device(inputs, self._device)
            if self._clone_inputs is not False:
                value = map_tensors(torch.Tensor.clone, value)
        else:
            assert self._boundary_in is not None
            leaves = [from_dlpack(capsule) for capsule in work.take_tensors()]
            for leaf, spec in zip(leaves, self._boundary_in.tensors, strict=True):
                leaf.requires_grad_(spec.requires_grad)
            value = self._boundary_in.unflatten([boundary_input(leaf) for leaf in leaves])
        self._weights.bind(work.read_slot)
        with self._rng, self._user("forward"):
            output = self._stage(value)
        if self._clone_inputs is None:
            self._clone_inputs = any(tensor._version > 0 for tensor in tensors_of(value))
        if self._is_last:
            self._loss(minibatch, output, targets, leaves)
        else:
            self._send_activations(minibatch, output, leaves, mark)

    def _loss(self, minibatch: int, output: Any, targets: Any, leaves: list[Tensor]) -> None:
        with self._rng, self._user("loss_fn"):
            loss = self._options.loss_fn(output, to_device(targets, self._device))
            value = float(check_loss(loss, minibatch).detach())
        if not math.isfinite(value) and self._options.on_nonfinite == "stop":
            raise NonFiniteLoss(
                f"the loss of minibatch {minibatch} is {value}: lower the learning rate or check the data, or"
                ' go on with on_nonfinite="continue"'
            )
        if not loss.requires_grad and self._is_trained(leaves):
            raise ValueError(
                f"the loss of minibatch {minibatch} needs no gradient, so nothing would be trained: loss_fn"
                " must not detach, and run() must not be called under torch.no_grad()"
            )
        self._losses.append(value)
        self._progress.advance(minibatch, value, self._samples[-1])
        self._in_flight[minibatch] = (leaves, [loss])
        self._core.complete_forward([], 0, self._user.elapsed_ns)

    def _is_trained(self, leaves: list[Tensor]) -> bool:
        return bool(self._weights.names) or any(leaf.requires_grad for leaf in leaves)

    def _send_activations(self, minibatch: int, output: Any, leaves: list[Tensor], mark: int) -> None:
        assert self._boundary_out is not None
        if minibatch == 0:
            self._buffer_memory = {_memory_of(buffer) for _, buffer in self._stage.stage_buffers()}
        tensors = self._boundary_out.flatten(output, stage=self._stage_index, minibatch=minibatch)
        self._boundary_out.check(tensors, stage=self._stage_index, minibatch=minibatch)
        self._in_flight[minibatch] = (leaves, tensors)
        capsules = [to_dlpack(self._settled(tensor)) for tensor in tensors]
        self._core.complete_forward(capsules, mark, self._user.elapsed_ns)

    def _settled(self, tensor: Tensor) -> Tensor:
        """Memory that stays as it is until it has been sent."""
        settled = exportable(tensor)
        # The next forward may write into a buffer, and the send reads without a copy.
        return settled.clone() if _memory_of(settled) in self._buffer_memory else settled

    def _backward(self, work: _core.WorkItem) -> None:
        leaves, outputs = self._in_flight.pop(work.minibatch)
        gradients: list[Tensor] = []
        if self._boundary_out is not None:
            received = [from_dlpack(capsule) for capsule in work.take_tensors()]
            specs = self._boundary_out.tensors
            outputs = [o for o, spec in zip(outputs, specs, strict=True) if spec.requires_grad]
            gradients = received if outputs else []
        with self._user("backward"):
            if self._is_last:
                if outputs[0].requires_grad:  # else nothing is to be trained: see _loss
                    outputs[0].backward()  # type: ignore[no-untyped-call]
            else:
                roots = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
                if roots:
                    torch.autograd.backward([o for o, _ in roots], [g for _, g in roots])
        self._gradient_slot = work.read_slot
        capsules = []
        if self._boundary_in is not None:
            sent = [_gradient_of(leaf) for leaf in leaves if leaf.requires_grad]
            capsules = [to_dlpack(gradient) for gradient in sent or [torch.zeros(1, dtype=torch.uint8)]]
        self._core.complete_backward(capsules, 0, self._user.elapsed_ns)

    def _update(self, work: _core.WorkItem) -> None:
        with self._user("optimizer"):
            self._optimizer.step(self._gradient_slot, work.read_slot, work.write_slot)
        self._core.complete_update(self._user.elapsed_ns)

    def _where(self, what: str) -> str:
        return (
            f"stage {self._stage_index} (rank {self._rank}) failed at minibatch {self._minibatch} in {what}"
        )

    def _data_mismatch(self, minibatch: int) -> DataMismatch:
        return DataMismatch(
            f"minibatch {minibatch} is not the same data at stage 0 (rank 0) and stage {self._stage_index}"
            f" (rank {self._rank}): every worker iterates `data` itself, so its order must follow from the"
            " seeded generators of torch, random and numpy, or be fixed"
        )

    def _check_end(self, num_minibatches: int) -> None:
        with self._user("reading data"):
            beyond = self._stream.next()
        if beyond is not None:
            raise self._data_mismatch(num_minibatches)

    def _report(self) -> dict[str, Any]:
        counters = self._core.counters()
        between_stages = (activations_name(self._stage_index), gradients_name(self._stage_index - 1))
        return {
            "pid": os.getpid(),
            "versions": self._core.versions(),
            "totals": self._core.totals(),
            "spans": self._core.spans(),
            "memory": {
                name: {"predicted": planned, "peak": peak} for name, planned, peak in self._core.memory()
            },
            "bytes_sent": sum(counters[name][0] for name in between_stages if name in counters),
            "losses": self._losses,
            "samples": self._samples,
            "epochs": self._epochs,
        }


def _gradient_of(leaf: Tensor) -> Tensor:
    # The loss may not depend on every tensor that could have had a gradient.
    return torch.zeros_like(leaf) if leaf.grad is None else exportable(leaf.grad)


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
