"""Calls one stage's forward and backward. Three parts use these calls and add their own work around them:
training (stage/passes.py), a rehearsal, which measures memory (budget/rehearsal.py), and the layer sweep,
which measures time (layer_sweep.py).

    leaves_of(value)          the stage's input, detached from the graph of earlier stages
    layers(given), loss(...)  the forward and the loss, each in the run's precision
    backward(...)             leaves gradients at the leaves and at the parameters

StageCalls has no state besides the stage. Used on the thread that runs the stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from pipedream.common.regions import Region, within
from pipedream.model.boundary import check_loss, map_tensors
from pipedream.model.loss_state import call_loss
from pipedream.model.precision import autocast_region
from pipedream.model.stage_module import StageModule

__all__ = ["StageCalls", "backward", "backward_of_loss", "leaves_of", "run_backward"]


class StageCalls:
    """The forward of one stage, and at the last stage the loss."""

    def __init__(
        self,
        stage: StageModule,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        device: torch.device,
        autocast: torch.dtype | None = None,
    ) -> None:
        """loss_fn: None at a stage that calls no loss."""
        region: Region | None = None
        if autocast is not None:
            region = functools.partial(autocast_region, device.type, autocast)
        self.layers: Callable[[Any], Any] = within(region, stage)
        """(input) -> output."""
        self._call_loss: Callable[[Any, Any], Tensor] | None = None
        if loss_fn is not None:
            self._call_loss = within(region, functools.partial(call_loss, loss_fn))

    def loss(self, output: Any, targets: Any, minibatch: int = 0) -> Tensor:
        """Returns the loss of the last stage's output. Raises TypeError or ValueError if no backward can
        start from it.
        """
        assert self._call_loss is not None
        return check_loss(self._call_loss(output, targets), minibatch)


def leaves_of(value: Any, *, copies: bool = False) -> Any:
    """Returns the value with a leaf in place of each tensor, in the same memory or in copies."""

    def leaf_of(tensor: Tensor) -> Tensor:
        plain = tensor.detach()
        return (plain.clone() if copies else plain).requires_grad_(tensor.requires_grad)

    return map_tensors(leaf_of, value)


def backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Runs the backward from the outputs' gradients. Two kinds of outputs are left out: those that need no
    gradient, and those whose gradient has no elements, because nothing downstream depended on them.
    """
    roots = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad and output.shape == gradient.shape
    ]
    if roots:
        run_backward([output for output, _ in roots], [gradient for _, gradient in roots])


def run_backward(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Does the work of torch.autograd.backward(roots, gradients) without torch's comparison of shapes. The
    engine compares them anyway, and torch's comparison imports the compiler's symbolic shapes, which takes
    0.4 s.
    """
    _engine_run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def backward_of_loss(loss: Tensor, factor: float = 1.0) -> None:
    """Runs the backward of factor * loss, or nothing if the loss needs no gradient.

    The backward starts with `factor` as the gradient of the loss. A multiplication, with torch's checks in
    Python, would take as long as a small layer's backward.
    """
    if not loss.requires_grad:
        return
    if type(loss) is Tensor:
        run_backward((loss,), (torch.full_like(loss, factor, requires_grad=False),))
    else:  # a subclass may have a backward of its own
        (loss if factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]
