"""Implements native Adam, AdamW and NAdamW, which keep two moments per parameter. Used by one thread at a
time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pipedream import _core
from pipedream.optim.native_optimizer import (
    Group,
    NativeOptimizer,
    Past,
    Row,
    check_numbers,
    scalar_tensor,
)

__all__ = ["Adam", "AdamW", "NAdamW"]


class _MomentOptimizer(NativeOptimizer):
    """The base of optimizers with a first and a second moment per parameter, such as Adam."""

    _SCALAR_NAMES: tuple[str, ...] = ("step",)

    def _check_group(self, group: Group) -> None:
        check_numbers(group, "lr", "eps", "weight_decay")
        for beta in group["betas"]:
            if not 0 <= beta < 1:
                raise ValueError(f"betas are {group['betas']}: each must be at least 0 and below 1")

    def _begin_step(self, group: Group, parameters: list[Tensor]) -> list[Past]:
        """Adds 1 to each parameter's step count in the state, as torch does. Returns the new counts."""
        if not parameters:
            return []
        counts = self._scalars("step", 0.0, parameters)
        torch._foreach_add_(counts, 1)
        return [(count,) for count in torch.stack(counts).tolist()]

    def _scalars(self, name: str, initial: float, parameters: list[Tensor]) -> list[Tensor]:
        """Returns the number `name` in each parameter's state. Where it is missing, it is set to
        `initial`.
        """
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = scalar_tensor(initial)
        return [self.state[parameter][name] for parameter in parameters]

    @abstractmethod
    def _variant(self, group: Group, past: Past) -> dict[str, Any]:
        """Returns the options by which the core's step computes this optimizer's variant of Adam."""

    def _run(self, group: Group, past: Past, rows: list[Row], common: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        _core.adam_step(
            rows,
            step=int(past[0]),
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            **self._variant(group, past),
            **common,
        )


class Adam(_MomentOptimizer):
    """Adam (Kingma and Ba, ICLR'15), with amsgrad and with L2 or decoupled weight decay.

    Arithmetic and arguments are the same as in torch.optim.Adam, but foreach, fused, capturable and
    differentiable are left out. Raises ValueError for an argument out of range.
    """

    _STATE_NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    _TORCH_NAME = "torch.optim.Adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": (float(betas[0]), float(betas[1])),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("decoupled_weight_decay", False)  # torch 2.6 has no such option

    def _num_state_tensors(self, group: Group) -> int:
        return 3 if group["amsgrad"] else 2

    def _variant(self, group: Group, past: Past) -> dict[str, Any]:
        return {name: group[name] for name in ("decoupled_weight_decay", "amsgrad")}


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, ICLR'19).

    Arithmetic and arguments are the same as in torch.optim.AdamW, but foreach, fused, capturable and
    differentiable are left out. Raises ValueError for an argument out of range.
    """

    _TORCH_NAME = "torch.optim.AdamW"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled_weight_decay=True
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True


class NAdamW(_MomentOptimizer):
    """Adam with Nesterov momentum (Dozat, ICLR'16 workshop) and decoupled weight decay.

    Arithmetic and arguments are the same as in torch.optim.NAdam(decoupled_weight_decay=True), except that
    weight_decay is 0.01 by default, as in AdamW, and that foreach, capturable and differentiable are left
    out. Raises ValueError for an argument out of range.
    """

    _STATE_NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    _SCALAR_NAMES = ("step", "mu_product")
    _TORCH_NAME = "torch.optim.NAdam with decoupled_weight_decay=True"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 2e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        momentum_decay: float = 4e-3,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": (float(betas[0]), float(betas[1])),
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum_decay": momentum_decay,
            "maximize": maximize,
            "decoupled_weight_decay": True,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        check_numbers(group, "momentum_decay")

    def _num_state_tensors(self, group: Group) -> int:
        return 2

    def _begin_step(self, group: Group, parameters: list[Tensor]) -> list[Past]:
        """Counts the step. Returns for each parameter its step count, and the product of the momenta of all
        its steps including this one.
        """
        counts = super()._begin_step(group, parameters)
        if not counts:
            return []
        products = self._scalars("mu_product", 1.0, parameters)
        beta1 = float(group["betas"][0])
        momenta = [beta1 * (1 - 0.5 * 0.96 ** (step * group["momentum_decay"])) for (step,) in counts]
        torch._foreach_mul_(products, momenta)
        return [
            (step, product) for (step,), product in zip(counts, torch.stack(products).tolist(), strict=True)
        ]

    def _variant(self, group: Group, past: Past) -> dict[str, Any]:
        return {
            "decoupled_weight_decay": True,
            "amsgrad": False,
            "nesterov": True,
            "momentum_decay": group["momentum_decay"],
            "momentum_product": past[1],
        }
