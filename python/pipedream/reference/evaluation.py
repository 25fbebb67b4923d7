"""Evaluations: plain loops over validation data with the newest weights, between two minibatches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.model.batches import parts_of
from pipedream.model.boundary import to_device
from pipedream.model.microbatch import samples_of
from pipedream.model.seeding import generators_kept
from pipedream.model.validation import Validation

__all__ = ["evaluate", "evaluated_boundaries", "is_due"]


def is_due(every: str | int, epochs: Sequence[int], begin: int, end: int, *, is_end: bool = False) -> bool:
    """Whether an evaluation's place lies after the boundary `begin` and not after the next one. epochs: of
    the minibatches up to that. is_end: of the run."""
    if every == "epoch":
        return is_end or any(epochs[i - 1] != epochs[i] for i in range(begin + 1, end + 1))
    return begin // int(every) != end // int(every)


def evaluated_boundaries(every: str | int, epochs: Sequence[int], group: int) -> set[int]:
    """Returns the boundaries at which a run of these minibatches is evaluated. group: minibatches from one
    boundary to the next. A last group that is not whole has its evaluation at the end."""
    num_minibatches = len(epochs)
    last = (num_minibatches - 1) // group * group
    found = {begin for begin in range(group, last + 1, group) if is_due(every, epochs, begin - group, begin)}
    is_at_end = is_due(every, epochs, last, num_minibatches, is_end=True)
    if num_minibatches < last + group:
        is_at_end |= last in found
        found.discard(last)
    return found | ({num_minibatches} if is_at_end else set())


def evaluate(
    roots: Iterable[nn.Module],
    run: Callable[[Any], Any],
    validation: Validation,
    loss_fn: Callable[[Any, Any], Tensor],
    weight_fn: Callable[[Any], Any] | None,
    device: torch.device,
) -> dict[str, float]:
    """roots: of all stages. run: the whole model."""
    modules = [module for root in roots for module in root.modules()]
    losses: list[tuple[float, float]] = []
    sums: dict[str, list[tuple[float, float]]] = {name: [] for name in validation.metrics}
    with generators_kept(), torch.no_grad(), contextlib.ExitStack() as after:
        for module in modules:
            after.callback(setattr, module, "training", module.training)
            module.training = False
        buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers(recurse=False)]
        for index, batch in enumerate(validation.data):
            inputs, targets = (to_device(part, device, copy=True) for part in parts_of(batch, index))
            output = run(inputs)
            count = samples_of(inputs, targets) or 1
            weight = float(count if weight_fn is None else weight_fn(targets))
            if weight:
                losses.append((loss_fn(output, targets).item(), weight))
            for name, metric in validation.metrics.items():
                value, number = metric(output, targets)
                sums[name].append((float(value), float(number)))
        for buffer, content in buffers:
            buffer.copy_(content)
    figures = {"loss": sum(loss * weight for loss, weight in losses) / sum(weight for _, weight in losses)}
    for name, pairs in sums.items():
        figures[name] = sum(value for value, _ in pairs) / sum(number for _, number in pairs)
    return figures
