"""Finds attributes of a LightningModule that its steps change. Such changes are lost, because the steps run
in the workers' copies of the module. Runs on the thread that called fit()."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.common.own_rank import is_rank_0

__all__ = ["no_attribute_changed"]

_OF_MODULES = vars(nn.Module()).keys()
"""Names of the attributes of every nn.Module, such as its tables of parameters and buffers. A run handles
these itself."""


@contextlib.contextmanager
def no_attribute_changed(attributes: Mapping[str, Any], *, is_training: bool) -> Iterator[None]:
    """Checks the step that runs in the with block. Raises ValueError if the step changes a number of the
    module, changes the length or a number of a list, set, deque or dict, or updates a metric. Prints a line
    about other attributes that the step sets. attributes: the module's attributes.
    """
    before = dict(attributes)
    amounts = {name: _amount(value) for name, value in before.items() if name not in _OF_MODULES}
    yield
    step = "training_step" if is_training else "validation_step"
    for name, amount in amounts.items():
        if amount is not None and _differs(_amount(attributes.get(name)), amount):
            raise ValueError(
                f"{step} changes self.{name}, which stays in the workers: use self.log(..., on_epoch=True)"
            )
    is_set = {name for name, value in attributes.items() if value is not before.get(name)}
    others = sorted(name for name in is_set if not isinstance(attributes[name], nn.Module))
    if others and is_rank_0():
        print(f"{step} sets self.{', self.'.join(others)}, which stays in the workers", flush=True)


def _amount(value: Any) -> Any:
    """Returns a figure that changes if a step adds to the value; None if the value is not of a kind to add
    to."""
    if isinstance(value, (bool, int, float, complex)):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() == 1 else None
    if hasattr(value, "_update_count"):  # a metric of torchmetrics that is no child of the module
        return value._update_count
    if isinstance(value, dict):
        value = [*value.values()]
    if not isinstance(value, (list, set, deque)):
        return None
    return [len(value), *map(_amount, value)]


def _differs(now: Any, before: Any) -> bool:
    if isinstance(now, list) and isinstance(before, list):
        return len(now) != len(before) or any(map(_differs, now, before))
    if isinstance(now, Tensor) and isinstance(before, Tensor):
        return now.shape != before.shape or not torch.equal(now, before)
    return type(now) is not type(before) or bool(now != before and now == now)
