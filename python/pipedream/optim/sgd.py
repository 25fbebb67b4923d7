"""Implements native stochastic gradient descent. Used by one thread at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from pipedream import _core
from pipedream.optim.native_optimizer import Group, NativeOptimizer, Past, Row, check_numbers

__all__ = ["SGD"]


class SGD(NativeOptimizer):
    """Stochastic gradient descent with momentum, Nesterov momentum and weight decay.

    Arithmetic and arguments are the same as in torch.optim.SGD, but sparse gradients are made dense, and
    foreach, fused and differentiable are left out. Raises ValueError for an argument out of range.
    """

    _STATE_NAMES = ("momentum_buffer",)
    _TAKES_SPARSE = True
    _TORCH_NAME = "torch.optim.SGD"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: Group) -> None:
        check_numbers(group, "lr", "momentum", "weight_decay")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("nesterov needs momentum > 0 and dampening 0")

    def _num_state_tensors(self, group: Group) -> int:
        return 1 if group["momentum"] != 0 else 0

    def _begin_step(self, group: Group, parameters: list[Tensor]) -> list[Past]:
        """Returns the past (1,) for a parameter whose momentum starts with this step, and (0,) for others."""
        if group["momentum"] == 0:
            return [(0,)] * len(parameters)
        return [(int(self.state[parameter].get("momentum_buffer") is None),) for parameter in parameters]

    def _run(self, group: Group, past: Past, rows: list[Row], common: dict[str, Any]) -> None:
        _core.sgd_step(
            rows,
            first_step=past == (1,),
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            **common,
        )
