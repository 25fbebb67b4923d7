"""Native optimizers: one pass over memory, from one version's slot into another's.

They are torch optimizers, so they also work in a plain loop (in place); a pipeline calls
`step_out_of_place`, which reads version v and writes version v + 1 without a copy. SGD is built;
Adam and AdamW are not yet: use torch.optim's, which work through one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _core

__all__ = ["SGD"]

_NATIVE_DTYPES = {torch.float32: "float32", torch.float64: "float64"}


class SGD(torch.optim.Optimizer):
    """Stochastic gradient descent with momentum, Nesterov momentum and weight decay.

    The arithmetic and the arguments are those of torch.optim.SGD. Parameters are contiguous float32 or
    float64 tensors in host memory. Raises ValueError for an argument out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} is {value}: it must not be negative")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("nesterov needs momentum > 0 and dampening 0")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters in place from their .grad, as torch.optim.SGD does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(group, parameter, parameter, parameter, parameter.grad)
        return loss

    @torch.no_grad()
    def step_out_of_place(
        self, read: Sequence[Tensor], write: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> None:
        """Reads version v of the parameters and writes version v + 1.

        The sequences are in the order in which the optimizer got its parameters. A parameter without
        a gradient is copied. `read` and `write` may be the same memory.
        """
        position = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                source, target, gradient = read[position], write[position], gradients[position]
                position += 1
                if gradient is not None:
                    self._step_one(group, parameter, source, target, gradient)
                elif source.data_ptr() != target.data_ptr():
                    target.copy_(source)

    def _step_one(
        self, group: dict[str, Any], key: Tensor, source: Tensor, target: Tensor, gradient: Tensor
    ) -> None:
        dtype = _NATIVE_DTYPES.get(source.dtype)
        if dtype is None or source.device.type != "cpu":
            raise TypeError(
                f"pipedream.optim.SGD got a {source.dtype} parameter on {source.device}: it handles float32"
                " and float64 in host memory; use torch.optim.SGD"
            )
        dense = _laid_out_like(source, gradient.to_dense() if gradient.is_sparse else gradient)
        state = self.state[key]
        first_step = group["momentum"] != 0 and "momentum_buffer" not in state
        if first_step:
            state["momentum_buffer"] = torch.empty_like(source)
        buffer = state.get("momentum_buffer")
        _core.sgd_step(
            dtype=dtype,
            num_elements=source.numel(),
            weight_in=source.data_ptr(),
            weight_out=target.data_ptr(),
            gradient=dense.data_ptr(),
            momentum_buffer=0 if buffer is None else buffer.data_ptr(),
            first_step=first_step,
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )


def _laid_out_like(weight: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with its elements in the order in memory that the weight's have (channels_last, say)."""
    if gradient.dtype == weight.dtype and gradient.stride() == weight.stride():
        return gradient
    return torch.empty_like(weight).copy_(gradient)
