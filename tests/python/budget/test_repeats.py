"""Tests how rehearsal.py finds out whether a forward can be repeated, and from which generators it draws."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from pipedream import Plan
from pipedream.budget.rehearsal import foreign_draws, gives_the_same_again
from pipedream.model.seeding import RngState
from pipedream.splitting.splitter import split
from torch import nn


class _Remembering(nn.Module):
    """Adds the mean of its previous output to its output."""

    def __init__(self, in_buffer: bool) -> None:
        super().__init__()
        self.in_buffer = in_buffer
        if in_buffer:
            self.register_buffer("hidden", torch.zeros(3))
        else:
            self.hidden = torch.zeros(3)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output = value + self.hidden
        if self.in_buffer:
            with torch.no_grad():
                self.hidden.copy_(output.mean(0))
        else:
            self.hidden = output.detach().mean(0)
        return output


class _Drawing(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.draw()


class _Counting(nn.Module):
    """Counts its forwards, but its output does not depend on the count."""

    count = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return value


class _Averaging(nn.Module):
    """Keeps the average of its weight in a frozen parameter, which begins as the weight."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.average = nn.Parameter(torch.ones(3), requires_grad=False)
        self._in_place = in_place

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self._in_place:
                self.average.mul_(0.5).add_(self.weight, alpha=0.5)
            else:
                self.average.data = self.average.data * 0.5 + self.weight.data * 0.5
        return value * self.weight + self.average


class _Failing(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not in a rehearsal")


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Linear(3, 3), True),
        (nn.Dropout(0.5), True),
        (nn.BatchNorm1d(3), True),
        (_Counting(), True),
        (_Remembering(in_buffer=True), True),
        (_Failing(), True),
        (_Remembering(in_buffer=False), False),
        (_Averaging(in_place=True), False),
        (_Averaging(in_place=False), False),
        (_Drawing(random.random), False),
        (_Drawing(numpy.random.rand), False),
    ],
    ids=lambda value: value if isinstance(value, bool) else type(value).__name__,
)
def test_what_a_recompute_would_do_again_is_done_again(layer: nn.Module, expected: bool) -> None:
    (stage,) = split(nn.Sequential(layer), Plan.straight(1, 1))
    value = torch.rand(4, 3)
    assert gives_the_same_again(stage, torch.device("cpu"), lambda: stage(value)) is expected


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda: torch.rand(3), ()),
        (random.random, ("random",)),
        (numpy.random.rand, ("numpy.random",)),
        (lambda: random.gauss(0, numpy.random.rand()), ("random", "numpy.random")),
    ],
    ids=["torch", "random", "numpy", "both"],
)
def test_draws_from_others_than_torch_are_found(draw: Callable[[], Any], expected: tuple[str, ...]) -> None:
    before = RngState.capture()
    draw()
    assert foreign_draws(before, RngState.capture()) == expected
