"""Compares the workers' loss of minibatch 0 with the caller's own loss. A difference shows that the workers
train another model than the caller's.

    workers   import, rehearse, train minibatch 0, write the loss to the status board
    caller    starts the workers, computes the loss, looks every 50 ms or less for the workers' loss, compares

Both use the initial weights. The losses are not compared if they may differ for a good reason: random numbers
are drawn, the workers read another minibatch, a codec changes activations, the workers use another kind of
device than the model's, the model is on the meta device, or the run continues an earlier one. They are not
compared either if a loss is not finite, if the caller's computation fails, or with PIPEDREAM_CHECK=0.

If a forward was run to cut the model, it has given the caller's loss. Otherwise the caller runs one forward
in microbatches, without storing activations. With PIPEDREAM_CHECK=1 the caller computes gradients too, and
compares their norms stage by stage, except with float16 or replicas. Runs on the caller's thread.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipedream.data.batch_reader import BatchReader, Microbatch
from pipedream.data.first_minibatch import KeptMinibatch
from pipedream.data.minibatch_source import MinibatchSource
from pipedream.data.stream import DataStream, fingerprint
from pipedream.model.batches import call_model
from pipedream.model.boundary import check_loss, device_of, map_tensors, to_device
from pipedream.model.calls import uncompiled
from pipedream.model.layers import Model, roots_of
from pipedream.model.loss_state import call_loss, loss_on, spare_loss
from pipedream.model.precision import autocast_region
from pipedream.model.seeding import RngState
from pipedream.model.stage_module import StageModule, find_ties
from pipedream.model.stand_ins import is_on_meta
from pipedream.model.untouched import untouched
from pipedream.planning.codec_choice import NO_CODEC, codec_between
from pipedream.report.first_figures import FirstFigures, compares_gradients, compares_losses
from pipedream.report.status import StatusBoard
from pipedream.splitting.cut_model import CutModel
from pipedream.stage.job import JobOptions, matmul_precision
from pipedream.update.gradients import figures_of
from pipedream.update.weights import split_tied
from pipedream.worker.devices import choose_device_type

__all__ = ["FirstLoss"]

# Two losses may differ by _TOLERANCE * max(both losses, _LEAST). Workers have other numbers of threads than
# the caller, so they add numbers in another order.
_TOLERANCE, _LEAST = 1e-3, 1e-2
_COARSE_TOLERANCE, _COARSE_LEAST = 5e-2, 1.0  # the same bounds if values may be rounded to 16 bits
Outcome = Literal["unknown", "incomparable", "equal", "different"]
_HALVES = (torch.float16, torch.bfloat16)


class FirstLoss:
    """Computes the caller's loss of minibatch 0, and compares it with the workers' loss."""

    def __init__(
        self,
        model: Model,
        stages: Sequence[StageModule],
        options: JobOptions,
        first: KeptMinibatch,
        read_first: Callable[[], tuple[Any, Any]],
    ) -> None:
        """stages: the stages of the model. first: has minibatch 0 if it was already read. read_first: reads
        minibatch 0 otherwise."""
        self._model = model
        self._stages = stages
        self._options = options
        self._first = first
        self._read_first = read_first
        self.outcome: Outcome = "unknown" if self._is_comparable() else "incomparable"
        # Gradients are not compared with float16, because they are scaled, nor with replicas, because these
        # push gradients to other workers while the backward runs.
        self._compares_gradients = (
            compares_gradients()
            and options.autocast is not torch.float16
            and all(stage.num_replicas == 1 for stage in options.plan.stages)
        )
        self._loss: float | None = None
        self._norms: list[float] = []
        """The norm of each stage's gradients; empty if they are not compared."""
        self._fingerprint = 0

    def compute(self) -> None:
        """Computes the caller's loss. If that fails, nothing is compared, because the workers will report the
        same error."""
        kept = self._first.take()
        if self.outcome != "unknown" or self._loss is not None:
            return
        with contextlib.suppress(Exception):
            first = kept or self._read_first()
            self._fingerprint = fingerprint(*first)
            traced = self._model.loss if isinstance(self._model, CutModel) else None
            if traced is not None and self._options.microbatches == 1 and not self._compares_gradients:
                self._loss = traced
            else:
                self._loss = self._compute(*first)
        if self._loss is None or not math.isfinite(self._loss):
            self.outcome = "incomparable"

    def differs(self, board: StatusBoard, folder: Path) -> str | None:
        """Describes how the workers' figures differ from the caller's. Returns "" if they agree or cannot be
        compared, and None if the workers have not reported them yet."""
        self.compute()
        if self.outcome != "unknown":
            return ""
        figures = FirstFigures(folder)
        losses = board.losses(self._options.plan.stages[-1].num_replicas, self._options.microbatches)
        if not losses or figures.fingerprint() is None:
            return None
        assert self._loss is not None
        if figures.fingerprint() != self._fingerprint or not math.isfinite(losses[0]):
            self.outcome = "incomparable"
            return ""
        if not self._is_close(losses[0], self._loss, _COARSE_LEAST if self._is_coarse() else _LEAST):
            self.outcome = "different"
            return f"the loss of minibatch 0 is {losses[0]:.6g} in the workers and {self._loss:.6g} here"
        norms = figures.gradient_norms(len(self._stages)) if self._norms else []
        if norms is None:
            return None
        least = _LEAST * max(self._norms, default=0.0)
        for stage, (theirs, mine) in enumerate(zip(norms, self._norms, strict=True)):
            if math.isfinite(theirs) and not self._is_close(theirs, mine, least):
                self.outcome = "different"
                return (
                    f"the norm of the gradients of minibatch 0 at stage {stage} is {theirs:.6g} in its worker"
                    f" and {mine:.6g} here"
                )
        self.outcome = "equal"
        return ""

    def _is_close(self, value: float, expected: float, least: float) -> bool:
        relative = _COARSE_TOLERANCE if self._is_coarse() else _TOLERANCE
        return abs(value - expected) <= relative * max(abs(value), abs(expected), least)

    def _is_coarse(self) -> bool:
        if self._options.autocast is not None or matmul_precision() != "highest":
            return True
        tensors = [t for root in self._roots() for t in (*root.parameters(), *root.buffers())]
        return any(tensor.dtype in _HALVES for tensor in tensors)

    def _roots(self) -> list[nn.Module]:
        return [root for _, root in roots_of(self._model)]

    def _is_comparable(self) -> bool:
        plan, codec = self._options.plan, self._options.links.codec
        return (
            compares_losses()
            # A run that continues reads older weight versions, too, which the caller does not have.
            and self._options.state is None
            and self._options.continues is None
            and all(codec_between(codec, s, s + 1) == NO_CODEC for s in range(plan.num_stages - 1))
            and not is_on_meta(self._roots())
            and device_of(self._roots()).type == choose_device_type()
            # The forward that cut the model had the same minibatch and generators. If it drew random numbers,
            # it gave no loss, and a forward here would draw them, too.
            and not (isinstance(self._model, CutModel) and self._model.loss is None)
        )

    def _compute(self, inputs: Any, targets: Any) -> float | None:
        """Returns the loss; None if random numbers were drawn. The model and the generators are unchanged."""
        options = self._options
        loss_fn = spare_loss(options.loss_fn, self._roots())
        device = device_of(self._roots())
        saving: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if not self._compares_gradients:
            saving = torch.autograd.graph.saved_tensors_hooks(_forget, _forget)
        with (
            untouched(self._roots(), loss_fn),
            loss_on(loss_fn, device),
            uncompiled(self._roots()),
            torch.enable_grad(),
            saving,
        ):
            before = RngState.capture()
            total = 0.0
            for piece in _microbatches(inputs, targets, options):
                loss = self._loss_of(piece, loss_fn, device) if piece.weight > 0.0 else None
                if not RngState.capture().equals(before):
                    return None
                if loss is not None:
                    total += loss.item() * piece.weight
                    if self._compares_gradients and loss.requires_grad:
                        (loss * piece.weight).backward()  # type: ignore[no-untyped-call]
            if self._compares_gradients:
                self._norms = self._gradient_norms()
            return total

    def _loss_of(self, piece: Microbatch, loss_fn: Any, device: torch.device) -> Tensor:
        given = map_tensors(lambda tensor: tensor.detach().clone(), to_device(piece.inputs, device))
        targets = map_tensors(lambda tensor: tensor.detach().clone(), to_device(piece.targets, device))
        with autocast_region(device.type, self._options.autocast):
            first, *others = self._roots()  # a list's layers in order, or one module that was cut
            output = functools.reduce(_call_layer, others, call_model(first, given))
        with autocast_region(device.type, self._options.autocast):
            return check_loss(call_loss(loss_fn, output, targets), 0)

    def _gradient_norms(self) -> list[float]:
        tied = [tie.parameter for tie in find_ties(self._stages)]
        own = [split_tied(stage, tied)[0] for stage in self._stages]
        return [math.sqrt(figures_of([p.grad for _, p in named]).squared_norm) for named in own]


def _microbatches(inputs: Any, targets: Any, options: JobOptions) -> list[Microbatch]:
    source = MinibatchSource(DataStream([(inputs, targets)], epochs=1))
    source.fetch(0)
    reader = BatchReader(
        source,
        options.microbatches,
        is_first=True,
        is_last=True,
        check_inputs=lambda *_: None,
        weight_fn=options.weight_fn,
    )
    pieces = [reader.read(0, index) for index in range(options.microbatches)]
    return [piece for piece in pieces if not piece.is_empty]


def _call_layer(value: Any, layer: nn.Module) -> Any:
    return layer(value)


def _forget(_: Any) -> Any:
    return None
