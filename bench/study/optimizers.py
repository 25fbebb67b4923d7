"""Defines optimizers that update many runs at once. Each run is a row of parameters and has its own learning
rate.

An optimizer here (STACKED) computes what the optimizer of the same name in REAL computes. Before the study
trains, it checks that the two agree.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pipedream
import torch
from torch import Tensor

MUON_MOMENTUM = 0.8
NADAMW_BETAS = (0.99, 0.999)

REAL: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD, momentum 0.9": functools.partial(torch.optim.SGD, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "NAdamW (0.99)": functools.partial(pipedream.optim.NAdamW, betas=NADAMW_BETAS),
    "Muon": functools.partial(pipedream.optim.Muon, momentum=MUON_MOMENTUM),
}

Span = tuple[str, int, torch.Size]
"""A parameter: (name, the index of its first column in the rows, shape)."""


class Optimizer(abc.ABC):
    def __init__(self, rates: Tensor, spans: list[Span]) -> None:
        """rates: the runs' learning rates, of shape (runs, 1). spans: all parameters."""
        self._rates = rates
        self._spans = spans
        self._num_steps = 0

    def step(self, weights: Tensor, gradients: Tensor) -> Tensor:
        """Returns the weights after one update. `weights` and `gradients` have the shape (runs,
        parameters).
        """
        self._num_steps += 1
        return self._next(weights, gradients)

    @abc.abstractmethod
    def _next(self, weights: Tensor, gradients: Tensor) -> Tensor: ...


class _Momentum(Optimizer):
    def __init__(self, rates: Tensor, spans: list[Span], momentum: float = 0.9) -> None:
        super().__init__(rates, spans)
        self._momentum = momentum
        self._velocity: Tensor | None = None

    def _next(self, weights: Tensor, gradients: Tensor) -> Tensor:
        if self._velocity is None:
            self._velocity = gradients.clone()
        else:
            self._velocity.mul_(self._momentum).add_(gradients)
        return weights - self._rates * self._velocity


class _AdamW(Optimizer):
    def __init__(
        self,
        rates: Tensor,
        spans: list[Span],
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(rates, spans)
        self._betas, self._eps = betas, 1e-8
        self._kept = 1 - rates * weight_decay
        self._moments: tuple[Tensor, Tensor] | None = None

    def _next(self, weights: Tensor, gradients: Tensor) -> Tensor:
        if self._moments is None:
            self._moments = torch.zeros_like(weights), torch.zeros_like(weights)
        first, second = self._moments
        beta1, beta2 = self._betas
        first.lerp_(gradients, 1 - beta1)
        second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        root = second.sqrt().div_(math.sqrt(1 - beta2**self._num_steps)).add_(self._eps)
        return (weights * self._kept).sub_(self._direction(first, gradients).div_(root).mul_(self._rates))

    def _direction(self, first: Tensor, gradients: Tensor) -> Tensor:
        return first / (1 - self._betas[0] ** self._num_steps)


class _NAdamW(_AdamW):
    _MOMENTUM_DECAY = 0.004

    def __init__(self, rates: Tensor, spans: list[Span], **options: Any) -> None:
        super().__init__(rates, spans, **options)
        self._product = 1.0

    def _direction(self, first: Tensor, gradients: Tensor) -> Tensor:
        now, following = self._momentum(self._num_steps), self._momentum(self._num_steps + 1)
        self._product *= now
        looked_ahead = first * (following / (1 - self._product * following))
        return looked_ahead.add_(gradients, alpha=(1 - now) / (1 - self._product))

    def _momentum(self, step: int) -> float:
        return float(self._betas[0] * (1 - 0.5 * 0.96 ** (step * self._MOMENTUM_DECAY)))


class _Muon(Optimizer):
    """Uses Muon, as torch.optim.Muon defines it, for hidden matrices, and NAdamW for all other parameters."""

    _WEIGHT_DECAY = 0.1
    _COEFFICIENTS = 3.4445, -4.7750, 2.0315
    _NUM_ITERATIONS = 5
    _EPS = 1e-7

    def __init__(self, rates: Tensor, spans: list[Span]) -> None:
        super().__init__(rates, spans)
        self._rest = _NAdamW(rates, spans, weight_decay=self._WEIGHT_DECAY)
        self._average: Tensor | None = None
        hidden = set(_hidden_matrices(spans))
        self._by_shape: dict[torch.Size, list[int]] = {}
        for name, first, shape in spans:
            if name in hidden:
                self._by_shape.setdefault(shape, []).append(first)

    def _next(self, weights: Tensor, gradients: Tensor) -> Tensor:
        if self._average is None:
            self._average = torch.zeros_like(weights)
        self._average.lerp_(gradients, 1 - MUON_MOMENTUM)
        wanted = gradients.lerp(self._average, MUON_MOMENTUM)
        following = self._rest.step(weights, gradients)
        decayed = weights * (1 - self._rates * self._WEIGHT_DECAY)
        for shape, firsts in self._by_shape.items():
            count = shape.numel()
            rows = torch.stack([wanted[:, first : first + count] for first in firsts])
            updates = self._orthogonal(rows.unflatten(-1, shape)).flatten(-2).to(weights.dtype)
            rates = self._rates * (0.2 * math.sqrt(max(shape)))
            for first, update in zip(firsts, updates, strict=True):
                following[:, first : first + count] = decayed[:, first : first + count] - rates * update
        return following

    def _orthogonal(self, matrices: Tensor) -> Tensor:
        """Orthogonalises matrices (..., rows, columns) by Newton-Schulz iterations, in bfloat16 as torch
        does."""
        a, b, c = self._COEFFICIENTS
        x = matrices.bfloat16().flatten(0, -3)
        is_tall = x.shape[-2] > x.shape[-1]
        x = x.mT if is_tall else x
        x = x / x.flatten(1).norm(dim=1).clamp(min=self._EPS)[:, None, None]
        for _ in range(self._NUM_ITERATIONS):
            gram = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return (x.mT if is_tall else x).reshape(matrices.shape)


def _hidden_matrices(spans: list[Span]) -> list[str]:
    """Returns the names of the parameters that pipedream.optim.Muon updates by Muon."""
    named = [(name, torch.nn.Parameter(torch.empty(shape))) for name, _, shape in spans]
    name_of = {id(parameter): name for name, parameter in named}
    groups = pipedream.optim.Muon(named).param_groups
    return [name_of[id(p)] for group in groups if group["part"] == "muon" for p in group["params"]]


STACKED: Mapping[str, Callable[[Tensor, list[Span]], Optimizer]] = {
    "SGD, momentum 0.9": _Momentum,
    "AdamW": _AdamW,
    "NAdamW (0.99)": functools.partial(_NAdamW, betas=NADAMW_BETAS),
    "Muon": _Muon,
}
