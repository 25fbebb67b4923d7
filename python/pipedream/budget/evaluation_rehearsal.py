"""Rehearses an evaluation: each worker runs its own stages once, in eval mode, on the first validation
minibatch. The rehearsal shows which tensors cross the cuts in eval mode, and how much memory an evaluation
takes. It also shows whether the loss and the metrics accept the outputs.

Values go from stage to stage as in the rehearsal of the training (rehearsal.py). Afterwards modules, random
generators and the state of loss and metrics are as they were. Runs on the worker's compute thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipedream.budget.footprint import make_meter
from pipedream.budget.rehearsal import Handover
from pipedream.common.errors import PipelineError, describe_error
from pipedream.model.boundary import Boundary, to_device
from pipedream.model.calls import is_compiled
from pipedream.model.loss_state import spare_loss
from pipedream.model.stage_calls import StageCalls
from pipedream.model.stage_module import FrozenWrites, StageModule
from pipedream.model.untouched import untouched
from pipedream.model.validation import Metric
from pipedream.splitting.evaluation_cut import in_eval_mode

__all__ = ["RehearsedEvaluation", "rehearse_evaluation"]


@dataclass(frozen=True)
class RehearsedEvaluation:
    """The facts about evaluations that a worker learns before it trains."""

    boundaries: dict[int, Boundary] = field(default_factory=dict)
    """Boundaries at both sides of this worker's stages, by the stage upstream of the cut."""
    peak_bytes: int = 0
    """Peak bytes of torch's tensors in one forward, plus the bytes of the stage's buffers and small frozen
    parameters, which the forward copies.
    """


def rehearse_evaluation(
    handover: Handover,
    stages: Sequence[StageModule],
    inputs: Any,
    targets: Any,
    *,
    device: torch.device,
    loss_fn: Callable[[Any, Any], Tensor],
    metrics: Mapping[str, Metric],
    autocast: torch.dtype | None,
    describe: Callable[[int], str],
) -> RehearsedEvaluation:
    """Runs the worker's stages on the first validation minibatch.

    stages: the worker's stages as cut for eval mode, on the device. inputs, targets: the minibatch; None at a
    worker that has neither the first nor the last stage. describe: names a stage in errors."""
    boundaries: dict[int, Boundary] = {}
    peak_bytes = 0
    for stage in stages:
        index = stage.stage_index
        value = to_device(inputs, device, copy=True) if index == 0 else None
        if index > 0:
            boundary, tensors = handover.receive(index - 1)
            boundaries[index - 1] = boundary
            value = boundary.unflatten([tensor.to(device) for tensor in tensors])
        is_last = index == handover.num_stages - 1
        spared = spare_loss((loss_fn, dict(metrics)), [stage]) if is_last else None
        roots = [root for _, root in stage.roots()]
        try:
            with untouched([stage], spared), in_eval_mode(roots), torch.no_grad():
                output, num_bytes = _run(stage, value, targets, spared, device, autocast)
        except Exception as error:
            raise PipelineError(
                f"the first validation minibatch does not pass {describe(index)}: {describe_error(error)}"
            ) from error
        copied = (*stage.stage_buffers(), *FrozenWrites(stage).suspects())
        peak_bytes = max(peak_bytes, num_bytes + sum(tensor.nbytes for _, tensor in copied))
        if not is_last:
            boundary = Boundary.of(output, name=f"the output of stage {index} in eval mode")
            boundaries[index] = boundary
            handover.send(index, boundary, boundary.flatten(output))
    return RehearsedEvaluation(boundaries, peak_bytes)


def _run(
    stage: StageModule,
    value: Any,
    targets: Any,
    spared: Any,
    device: torch.device,
    autocast: torch.dtype | None,
) -> tuple[Any, int]:
    """Returns the stage's output, and the peak bytes of the tensors that the forward made."""
    loss_fn, metrics = (None, {}) if spared is None else spared
    calls = StageCalls(stage, loss_fn, device, autocast)
    meter = make_meter(device)
    # The meter's dispatch mode would make torch compile a compiled forward again. So such a forward runs
    # without the meter.
    is_metered = not any(map(is_compiled, stage.modules()))
    with meter if is_metered else contextlib.nullcontext():
        meter.reset_peak()
        before = meter.live_bytes
        output = calls.layers(value)
        if loss_fn is not None:
            targets = to_device(targets, device)
            calls.loss(output, targets)
            for metric in metrics.values():
                metric(output, targets)
    return output, meter.peak_bytes - before
