"""Makes each stage's optimizer and scheduler. They are like the optimizer and scheduler that a library made
for the whole model. Any thread.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipedream import optim

__all__ = ["Options", "StageOptimizers", "StageSchedulers", "options_of"]

_NATIVE: dict[type[torch.optim.Optimizer], Any] = {
    torch.optim.AdamW: optim.AdamW,
    torch.optim.Adam: optim.Adam,
    torch.optim.SGD: optim.SGD,
}
_OF_KERNELS = {"fused", "foreach", "capturable", "differentiable"}
"""Options that choose between torch's own kernels."""
_NOT_OPTIONS = {"param_names", "initial_lr"}
"""Entries of a parameter group that are no arguments of an optimizer: torch adds them."""

Options = list[dict[str, Any]]
"""The options of each parameter group, without its parameters."""


def options_of(optimizer: torch.optim.Optimizer) -> Options:
    return [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]


class StageOptimizers:
    """Makes the optimizer of a stage when it is called. The optimizer has the class and the parameter groups
    of the whole model's optimizer; some groups may be empty. But torch's AdamW, Adam and SGD are replaced by
    those of pipedream.optim, which give the same results. They are kept with keeps_class, with tensors as
    options, and with bfloat16 parameters.
    """

    def __init__(self, whole: torch.optim.Optimizer, model: nn.Module, *, keeps_class: bool = False) -> None:
        """keeps_class: whether torch's classes are kept, and stages start with the state of the whole
        optimizer.

        Raises ValueError for an optimizer with parameters that do not belong to the model.
        """
        named = [*model.named_parameters(remove_duplicate=False)]
        group_of = {id(p): index for index, group in enumerate(whole.param_groups) for p in group["params"]}
        if group_of.keys() - {id(p) for _, p in named}:
            raise ValueError("the optimizer has parameters that are not the model's: make it of these")
        self._group_of = {name: group_of[id(p)] for name, p in named if id(p) in group_of}
        self._options = [
            {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
            for group in copy.deepcopy(options_of(whole))
        ]
        self.state = {name: dict(whole.state[p]) for name, p in named if keeps_class and p in whole.state}
        """The state with which stages start, by the parameter's name."""
        self._class: Any = type(whole)
        has_tensors = any(isinstance(v, Tensor) for options in self._options for v in options.values())
        # pipedream.optim would keep float32 masters of bfloat16 parameters, which torch's optimizers do not.
        has_masters = any(p.dtype == torch.bfloat16 for group in whole.param_groups for p in group["params"])
        if self._class in _NATIVE and not keeps_class and not has_tensors and not has_masters:
            self._class = _NATIVE[self._class]
            self._options = [
                {key: value for key, value in options.items() if key not in _OF_KERNELS}
                for options in self._options
            ]

    def __call__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        own = {name: p for name, p in named_parameters if name in self._group_of}
        made: torch.optim.Optimizer = self._class(
            [
                {"params": [p for name, p in own.items() if self._group_of[name] == index], **options}
                for index, options in enumerate(self._options)
            ]
        )
        for name in own.keys() & self.state.keys():
            made.state[own[name]] = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in self.state[name].items()
            }
        return made


class StageSchedulers:
    """Makes the scheduler of a stage's optimizer when it is called. It is a copy of the whole model's
    scheduler. A copy is enough, because a scheduler only counts steps and multiplies the rates of parameter
    groups.
    """

    def __init__(self, whole: torch.optim.lr_scheduler.LRScheduler) -> None:
        """Raises ValueError for a scheduler that contains other schedulers."""
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
        # At a step count of 1 torch would warn about the order of steps, because the copy's __init__ never
        # ran.
        vars(made).update(copy.deepcopy(self._state), optimizer=optimizer, _step_count=2)
        return made
