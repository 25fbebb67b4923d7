"""Lets workers follow the learning rates of Lightning's schedulers. Before a run, the process that called
fit() computes the optimizer's options for each step of the run. In the workers the scheduler Rates sets them.
Any thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from pipedream.checkpoint.snapshot import StageSnapshot, decode
from pipedream.integrations.whole_optimizer import Options, options_of
from pipedream.update.piece_states import joined_states

__all__ = ["Rates", "changing_options", "planned_options", "state_by_name"]


class Rates:
    """A scheduler for run(lr_scheduler=). Before each step of a stage it sets the options of the stage's
    parameter groups.
    """

    def __init__(self, rows: Sequence[Options], optimizer: torch.optim.Optimizer) -> None:
        """rows: the options of all groups before each step of this run, and after the last step."""
        self._rows, self._optimizer, self._next = rows, optimizer, 0
        self.step()

    def step(self) -> None:
        row = self._rows[min(self._next, len(self._rows) - 1)]
        self._next += 1
        for group, options in zip(self._optimizer.param_groups, row, strict=True):
            group.update(options)

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty state, because the next run has its own rows."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = 0
        self.step()


def planned_options(
    optimizer: torch.optim.Optimizer, schedulers: Sequence[Any], num_steps: int, step: Callable[[int], None]
) -> list[Options]:
    """Returns the options before each of the next num_steps steps, and after the last one. Optimizer and
    schedulers keep their states. step: step(i) advances the schedulers to their state after step i.
    """
    kept, states = (
        copy.deepcopy(options_of(optimizer)),
        [copy.deepcopy(one.state_dict()) for one in schedulers],
    )
    rows = [changing_options(optimizer)]
    for index in range(num_steps if schedulers else 0):
        step(index)
        rows.append(changing_options(optimizer))
    for scheduler, state in zip(schedulers, states, strict=True):
        scheduler.load_state_dict(state)
    for group, options in zip(optimizer.param_groups, kept, strict=True):
        group.update(options)
    return rows


def changing_options(optimizer: torch.optim.Optimizer) -> Options:
    """Returns copies of the options that schedulers may change: rates, momentum and weight decay."""
    return [
        {
            name: copy.deepcopy(group[name])
            for name in ("lr", "momentum", "betas", "weight_decay")
            if name in group
        }
        for group in optimizer.param_groups
    ]


def state_by_name(snapshots: Iterable[StageSnapshot]) -> dict[str, dict[str, Any]]:
    """Returns the optimizer's state of each parameter, from the snapshots of all stages."""
    found = []
    for snapshot in snapshots:
        document = snapshot.optimizer_document.get("optimizer")
        tensors = {**snapshot.optimizer, **snapshot.document_tensors}
        for name, value in (document or {"state": {}})["state"].items():
            found.append((name, decode(value, tensors, torch.device("cpu"))))
    return joined_states(found)
