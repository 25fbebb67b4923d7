"""MasterWeights keeps float32 copies (masters) of bfloat16 parameters for torch's optimizers.

With a usual learning rate a step changes a weight by less than 1/512 of its value. That is less than half
the distance to the next bfloat16 number, so rounding would lose the change. The native optimizers
(native_optimizer.py) need no MasterWeights: they keep masters themselves. Used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MASTER", "MasterWeights", "has_master", "load_wide_state", "loss_of", "master_dtype", "unwrapped"]

MASTER = "master"
"""The key of a parameter's master in an optimizer's state."""

_WIDER = {torch.bfloat16: torch.float32}


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which an optimizer computes steps of parameters of `dtype` and keeps their
    state.
    """
    return _WIDER.get(dtype, dtype)


def has_master(parameter: Tensor) -> bool:
    """Whether an optimizer keeps a master of the parameter."""
    return parameter.dtype in _WIDER


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Calls the closure of an optimizer's step. Returns the closure's loss; None if there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class MasterWeights(torch.optim.Optimizer):
    """Runs another optimizer on float32 copies (masters) of the bfloat16 parameters.

        # In a plain loop, and as `optimizer` of `run`:
        optimizer = pipedream.optim.MasterWeights(torch.optim.RMSprop, model.parameters(), lr=1e-3)
        optimizer = functools.partial(pipedream.optim.MasterWeights, torch.optim.RMSprop, lr=1e-3)

    make(params, **options) makes the other optimizer. A step converts the gradients to float32, lets the
    other optimizer update the masters, and rounds the masters into the parameters. Parameters of other dtypes
    are updated directly. The native optimizers (SGD, Adam, AdamW, NAdamW) keep masters without this class.

    The first step makes each master from its parameter. Later steps overwrite anything that is written into
    the parameter. So load a model's weights before the first step, and continue a training by
    load_state_dict().
    """

    def __init__(
        self, make: Callable[..., torch.optim.Optimizer], params: Iterable[Any], **options: Any
    ) -> None:
        pairs: list[tuple[Tensor, Tensor]] = []  # (stand-in, parameter)
        given = [_with_stand_ins(entry, pairs) for entry in params]
        self.inner = make(given, **options)
        """The other optimizer. Its parameters and its state are empty except during a step."""
        parameter_of = {id(stand_in): parameter for stand_in, parameter in pairs}
        groups = [
            {**group, "params": [parameter_of[id(stand_in)] for stand_in in group["params"]]}
            for group in self.inner.param_groups
        ]
        super().__init__(groups, self.inner.defaults)
        for stand_in, state in self.inner.state.items():  # Adagrad, for one, makes its state in its __init__
            self.state[parameter_of[id(stand_in)]] = state
        self._take_back()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"inner": self.inner}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters in place from their .grad."""
        loss = loss_of(closure)
        master_of = {
            parameter: self._master_of(parameter)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }
        try:
            self._hand_over(master_of)
            self.inner.step()
            rounded = [parameter for parameter in master_of if has_master(parameter)]
            if rounded:
                torch._foreach_copy_(rounded, [master_of[parameter] for parameter in rounded])
            for parameter, master in master_of.items():
                self.state[parameter] = dict(self.inner.state.get(master, {}))
                if has_master(parameter):
                    self.state[parameter][MASTER] = master
                    master.grad = None
        finally:
            self._take_back()
        return loss

    def _hand_over(self, master_of: Mapping[Tensor, Tensor]) -> None:
        """Gives the other optimizer these masters, each in its parameter's group and with its parameter's
        state.
        """
        for group in self.param_groups:  # read at every step, because schedulers change the groups
            masters = [master_of[parameter] for parameter in group["params"] if parameter in master_of]
            self.inner.param_groups.append({**group, "params": masters})
        for parameter, master in master_of.items():
            state = {key: value for key, value in self.state[parameter].items() if key != MASTER}
            if state:
                self.inner.state[master] = state

    def _take_back(self) -> None:
        self.inner.param_groups = []
        self.inner.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as torch does, but does not round it to the dtype of the parameters."""
        super().load_state_dict(state_dict)
        load_wide_state(self, state_dict)

    def _master_of(self, parameter: Tensor) -> Tensor:
        """Returns the parameter's master with the gradient in the master's dtype. A parameter that needs no
        master is returned itself.
        """
        if not has_master(parameter):
            return parameter
        assert parameter.grad is not None
        master: Tensor | None = self.state[parameter].get(MASTER)
        if master is None:
            master = parameter.detach().to(master_dtype(parameter.dtype))
        master.grad = parameter.grad.to(master.dtype)
        return master


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer that computes the steps: the one inside a MasterWeights, or `optimizer`
    itself.
    """
    return unwrapped(optimizer.inner) if isinstance(optimizer, MasterWeights) else optimizer


def load_wide_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Restores the state of parameters with masters in the master's dtype. Call it after torch's
    load_state_dict(), which rounds state to the parameter's dtype.
    """
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, parameter in zip(saved, parameters, strict=True):
        if not has_master(parameter):
            continue
        for name, value in state_dict["state"].get(key, {}).items():
            if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
                optimizer.state[parameter][name] = value.to(
                    parameter.device, master_dtype(parameter.dtype), copy=True
                )


def _with_stand_ins(entry: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """Replaces parameters that have masters by stand-ins, and adds (stand-in, parameter) to `pairs`. A
    stand-in has the master's dtype and the parameter's shape, but takes no memory. entry: a parameter, a pair
    of name and parameter, or a group.
    """
    if isinstance(entry, dict):
        listed = [entry["params"]] if isinstance(entry["params"], Tensor) else entry["params"]
        return {**entry, "params": [_with_stand_ins(of_group, pairs) for of_group in listed]}
    if isinstance(entry, tuple):
        name, parameter = entry
        return name, _with_stand_ins(parameter, pairs)
    stand_in = entry
    if has_master(entry):
        one = torch.zeros((), dtype=master_dtype(entry.dtype), device=entry.device)
        stand_in = nn.Parameter(one.expand(entry.shape))
    pairs.append((stand_in, entry))
    return stand_in
