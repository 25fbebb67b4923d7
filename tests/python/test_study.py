"""Tests that the study's simulator (bench/study) gives the numbers of the reference."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench" / "study"))

from optimizers import REAL
from simulator import Setting, Stack, difference_from_reference

_STAGES = 4
_CASES = [
    ("flush", 4, "NAdamW (0.99)"),
    ("pipedream", 1, "SGD, momentum 0.9"),
    ("pipedream", 2, "AdamW"),
    ("pipedream", 4, "NAdamW (0.99)"),
    ("pipedream", 8, "Muon"),
    ("unstashed", 2, "Muon"),
    ("unstashed", 4, "AdamW"),
    ("unstashed", 8, "SGD, momentum 0.9"),
    ("2bw", 4, "AdamW"),
]


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = x + self.mlp(self.norm(x)).tanh()
        return changed


def _perceptron(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Sequential(nn.Linear(6, 8)), _Residual(8), _Residual(8), nn.Linear(8, 3))


def _convolutions(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Conv2d(c, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for c in (1, 4, 4)]
    return nn.Sequential(*blocks, nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))


def _batches(*shape: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(16, *shape, generator=generator), torch.randint(3, (16,), generator=generator))
        for _ in range(6)
    ]


def _tolerance(optimizer: str) -> float:
    # Muon computes matrix products in bfloat16, whose rounding depends on the order of the additions.
    return 1e-4 if optimizer == "Muon" else 1e-8


@pytest.mark.parametrize(("schedule", "microbatches", "optimizer"), _CASES)
def test_simulated_training_equals_the_reference(schedule: str, microbatches: int, optimizer: str) -> None:
    setting, loss_fn = Setting(schedule, _STAGES, microbatches), nn.functional.cross_entropy
    difference = difference_from_reference(_perceptron(1), _batches(6), loss_fn, setting, optimizer)
    assert difference < _tolerance(optimizer)


@pytest.mark.parametrize("schedule", ["flush", "pipedream", "unstashed"])
def test_batch_norm_is_simulated_by_microbatches(schedule: str) -> None:
    setting, loss_fn = Setting(schedule, _STAGES, 4), nn.functional.cross_entropy
    optimizer = "SGD, momentum 0.9"
    difference = difference_from_reference(_convolutions(1), _batches(1, 4, 4), loss_fn, setting, optimizer)
    assert difference < _tolerance(optimizer)


@pytest.mark.parametrize("optimizer", REAL)
def test_runs_of_a_stack_do_not_touch_each_other(optimizer: str) -> None:
    setting, loss_fn = Setting("pipedream", _STAGES, 4), nn.functional.cross_entropy
    rates, seeds, batches = [0.01, 0.3], [1, 2], _batches(6)
    together = Stack([_perceptron(seed) for seed in seeds], rates, setting, optimizer, loss_fn)
    alone = [
        Stack([_perceptron(s)], [r], setting, optimizer, loss_fn) for s, r in zip(seeds, rates, strict=True)
    ]
    for inputs, targets in batches:
        losses = together.train(inputs.expand(2, *inputs.shape), targets.expand(2, *targets.shape))
        expected = [each.train(inputs[None], targets[None]) for each in alone]
        assert torch.allclose(losses, torch.cat(expected), rtol=1e-3)
