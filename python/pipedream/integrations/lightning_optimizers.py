"""The optimizer and the rates of a Lightning module at the stages of a pipeline.

    OptimizerOfStages   makes each stage's optimizer as configure_optimizers made the whole one
    Rates               a scheduler that sets what Lightning's schedulers will have set before each step

Any thread.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.checkpoint.snapshot import StageSnapshot, decode
from pipedream.update.stage_optimizer import joined_states

__all__ = ["OptimizerOfStages", "Options", "Rates", "options_of", "planned_options", "state_by_name"]

Options = list[dict[str, Any]]
"""The options of each parameter group, without its parameters."""

_GROUP = "group_of_the_module"  # an option of a stage's group: its index in the module's optimizer


def options_of(optimizer: torch.optim.Optimizer) -> Options:
    return [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]


class OptimizerOfStages:
    """A factory for run(optimizer=): the same class, with those parameters of each group that a stage has."""

    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        self._class = type(optimizer)
        known = inspect.signature(self._class.__init__).parameters
        self._arguments = {name: value for name, value in optimizer.defaults.items() if name in known}
        self._options = [
            {name: value for name, value in options.items() if name != "initial_lr"}
            for options in copy.deepcopy(options_of(optimizer))
        ]
        group_of = {
            id(parameter): index
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._group_of: dict[str, int] = {}
        self.state: dict[str, dict[str, Any]] = {}
        """By parameter, the state to begin with; empty: none."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in group_of:
                self._group_of[name] = group_of[id(parameter)]
            if parameter in optimizer.state:
                self.state[name] = dict(optimizer.state[parameter])

    def __call__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        named = [(name, parameter) for name, parameter in named_parameters if name in self._group_of]
        groups = []
        for index, options in enumerate(self._options):
            parameters = [parameter for name, parameter in named if self._group_of[name] == index]
            if parameters:
                groups.append({"params": parameters, **options, _GROUP: index})
        optimizer = self._class(groups, **self._arguments)
        for name, parameter in named:
            if name in self.state:
                optimizer.state[parameter] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in self.state[name].items()
                }
        return optimizer


class Rates:
    """A scheduler for run(lr_scheduler=): sets the options of a stage's groups before each of its steps."""

    def __init__(self, rows: Sequence[Options], optimizer: torch.optim.Optimizer) -> None:
        """rows: for each step of this run, and after the last one."""
        self._rows, self._optimizer, self._next = rows, optimizer, 0
        self.step()

    def step(self) -> None:
        row = self._rows[min(self._next, len(self._rows) - 1)]
        self._next += 1
        for group in self._optimizer.param_groups:
            group.update(row[group[_GROUP]])

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the next run brings rows of its own."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = 0
        self.step()


def planned_options(
    optimizer: torch.optim.Optimizer, schedulers: Sequence[Any], num_steps: int, step: Callable[[int], None]
) -> list[Options]:
    """The options before each of the next steps, and after the last. step(i): steps the schedulers as they
    will be after step i. Optimizer and schedulers are afterwards as they were."""
    kept, states = (
        copy.deepcopy(options_of(optimizer)),
        [copy.deepcopy(one.state_dict()) for one in schedulers],
    )
    rows = [_changing(kept)]
    for index in range(num_steps if schedulers else 0):
        step(index)
        rows.append(_changing(options_of(optimizer)))
    for scheduler, state in zip(schedulers, states, strict=True):
        scheduler.load_state_dict(state)
    for group, options in zip(optimizer.param_groups, kept, strict=True):
        group.update(options)
    return rows


def _changing(options: Options) -> Options:
    """The options that schedulers may change: rates, and a cycle's momentum."""
    return [
        {
            name: copy.deepcopy(group[name])
            for name in ("lr", "momentum", "betas", "weight_decay")
            if name in group
        }
        for group in options
    ]


def state_by_name(snapshots: Iterable[StageSnapshot]) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter, from the states of all stages."""
    found = []
    for snapshot in snapshots:
        document = snapshot.optimizer_document.get("optimizer")
        tensors = {**snapshot.optimizer, **snapshot.document_tensors}
        for name, value in (document or {"state": {}})["state"].items():
            found.append((name, decode(value, tensors, torch.device("cpu"))))
    return joined_states(itertools.chain(found))
