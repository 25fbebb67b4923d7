"""Stores a stage's parameters: the newest version, which an optimizer updates, and older versions that may
still be read.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipedream import _core
from pipedream.model.seeding import seed_torch

__all__ = ["History", "OptimizerFactory", "SchedulerFactory", "Updater", "make_updaters"]

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], Any]


class History:
    """Copies of the versions of one parameter that may still be read. The parameter itself has the newest
    version."""

    def __init__(self, parameter: nn.Parameter, versions_back: int = 0) -> None:
        """versions_back: how far reads may go back. With 1, version 4 can still be read after version 5 has
        been read."""
        self.parameter = parameter
        self._versions_back = versions_back
        self._newest = 0
        self._copies = {0: parameter.detach().clone()}

    def leaf(self, version: int) -> Tensor:
        """Returns a new leaf with the contents of a version. Drops versions that can no longer be read."""
        for old in [held for held in self._copies if held < version - self._versions_back]:
            del self._copies[old]
        return self._copies[version].clone().requires_grad_()

    def add(self) -> None:
        """Records the parameter's contents as the next version. Call it after an update."""
        self._newest += 1
        self._copies[self._newest] = self.parameter.detach().clone()


class Updater:
    """The optimizer and the scheduler of one stage. The optimizer updates the newest version of the weights,
    which is in the parameters themselves."""

    def __init__(
        self,
        owned: Sequence[tuple[str, nn.Parameter]],
        optimizer: OptimizerFactory,
        lr_scheduler: SchedulerFactory | None,
        draws: int | None = None,
    ) -> None:
        """draws: the seed of random numbers in steps. None draws them from the process's generators."""
        self._draws = draws
        self._num_steps = 0
        self.parameters = [parameter for _, parameter in owned]
        self.minibatches: set[int] = set()
        """The minibatches of the present round whose gradients were added."""
        self.share = 0.0
        """The sum of the shares of the microbatches whose gradients were added in the present round."""
        # A stage without parameters to train has no optimizer, because torch refuses an empty list.
        self._optimizer = _make_optimizer(optimizer, owned) if owned else None
        self._scheduler = None
        if self._optimizer is not None and lr_scheduler is not None:
            self._scheduler = lr_scheduler(self._optimizer)

    def step(self) -> None:
        self.optimize()
        self.schedule()

    def optimize(self) -> None:
        if self._optimizer is None:
            return
        if self._draws is not None:
            seed_torch(_core.derived_seed(self._draws, self._num_steps))
            self._num_steps += 1
        self._optimizer.step()

    def schedule(self) -> None:
        if self._scheduler is not None:
            self._scheduler.step()


def make_updaters(
    owned: Sequence[tuple[str, nn.Parameter]],
    optimizer: OptimizerFactory,
    lr_scheduler: SchedulerFactory | None,
    count: int,
    draws: int | None = None,
) -> list[Updater]:
    """Makes `count` updaters. The first one has the stage's own parameters, the others have copies."""
    copies = [[(name, copy.deepcopy(parameter)) for name, parameter in owned] for _ in range(count - 1)]
    return [Updater(named, optimizer, lr_scheduler, draws) for named in (owned, *copies)]


def _make_optimizer(
    optimizer: OptimizerFactory, named_parameters: Sequence[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """Makes the optimizer of one stage. optimizer: a function that gets a list of parameters, or a list of
    (name, parameter) if its first argument is called `named_parameters`.

    Raises TypeError unless the function returns a torch.optim.Optimizer.
    """
    if not callable(optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}: give a function of the parameters, for example "
            f"functools.partial(torch.optim.SGD, lr=0.05)"
        )
    wants_names = _first_argument(optimizer) == "named_parameters"
    made = optimizer(
        list(named_parameters) if wants_names else [parameter for _, parameter in named_parameters]
    )
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"optimizer returned a {type(made).__name__}: return a torch.optim.Optimizer")
    return made


def _first_argument(function: Callable[..., Any]) -> str | None:
    try:
        return next(iter(inspect.signature(function).parameters), None)
    except (TypeError, ValueError):  # builtin functions may have no signature
        return None
