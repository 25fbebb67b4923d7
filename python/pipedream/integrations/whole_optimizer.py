"""An optimizer and a scheduler of a whole model, as libraries make them, made again for each stage's
parameters. Stateless; any thread."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from pipedream import optim

__all__ = ["StageOptimizers", "StageSchedulers"]

_NATIVE: dict[type[torch.optim.Optimizer], Any] = {
    torch.optim.AdamW: optim.AdamW,
    torch.optim.Adam: optim.Adam,
    torch.optim.SGD: optim.SGD,
}
_OF_KERNELS = {"fused", "foreach", "capturable", "differentiable"}
"""Options by which torch chooses its own kernels."""


class StageOptimizers:
    """Makes the optimizer of a stage: of the class of the whole one, with its parameter groups, of which some
    are empty there. Torch's AdamW, Adam and SGD become those of pipedream.optim, which compute the same."""

    def __init__(self, whole: torch.optim.Optimizer, model: nn.Module) -> None:
        """Raises ValueError for an optimizer of other parameters than the model's."""
        names = {id(p): name for name, p in model.named_parameters()}
        self._groups: list[tuple[frozenset[str], dict[str, Any]]] = []
        for group in whole.param_groups:
            if any(id(p) not in names for p in group["params"]):
                raise ValueError("the optimizer has parameters that are not the model's: make it of these")
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            self._groups.append((frozenset(names[id(p)] for p in group["params"]), options))
        self._class: Any = type(whole)
        has_tensors = any(
            isinstance(v, torch.Tensor) for _, options in self._groups for v in options.values()
        )
        if type(whole) in _NATIVE and not has_tensors:
            self._class = _NATIVE[type(whole)]
            self._groups = [
                (named, {key: value for key, value in options.items() if key not in _OF_KERNELS})
                for named, options in self._groups
            ]

    def __call__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        own = dict(named_parameters)
        groups = [
            {"params": [p for name, p in own.items() if name in names], **options}
            for names, options in self._groups
        ]
        made: torch.optim.Optimizer = self._class(groups)
        return made


class StageSchedulers:
    """Makes the scheduler of a stage's optimizer: a copy of the whole one, which counts and multiplies by
    parameter groups alone."""

    def __init__(self, whole: torch.optim.lr_scheduler.LRScheduler) -> None:
        """Raises ValueError for a scheduler that has others inside."""
        state: Mapping[str, Any] = vars(whole)
        if "_schedulers" in state:
            raise ValueError(
                f"the scheduler is a {type(whole).__name__}, made of others: give a LambdaLR instead"
            )
        self._class = type(whole)
        self._state = {key: value for key, value in state.items() if key != "optimizer"}
        self._rates = [float(group["lr"]) for group in whole.optimizer.param_groups]

    def __call__(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        for group, rate, initial in zip(
            optimizer.param_groups, self._rates, self._state["base_lrs"], strict=True
        ):
            group["lr"], group["initial_lr"] = rate, initial
        made = self._class.__new__(self._class)
        # At count 1 torch warns of an optimizer that the scheduler has not seen being made.
        vars(made).update(copy.deepcopy(self._state), optimizer=optimizer, _step_count=2)
        return made
