"""Tests that each worker rehearses only its own stages, with rank 0's weights and the outputs of the stage
upstream.
"""

from __future__ import annotations

import functools
import os
import random
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from pipedream import Plan
from torch import Tensor, nn

_NUM_MINIBATCHES = 4
_FORWARDS: list[str] = []
"""Layers in the order of their forwards in this process. A rehearsal restores the state of layers and global
numbers, but not this list.
"""


class _AtHome(nn.Module):
    """Runs only in the process of its own worker, like a kernel that only one device has.

    Returns its input, and an index that counts the layers.
    """

    def __init__(self, layer_index: int, worker: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self._layer_index = layer_index
        self._worker = worker

    def forward(self, given: Any) -> Any:
        assert os.environ["RANK"] == str(self._worker), f"layer {self._layer_index} at another worker"
        value, index = (given, torch.tensor([0])) if self._layer_index == 0 else given
        assert index.tolist() == [self._layer_index]
        name = f"layer {self._layer_index}"
        if name not in _FORWARDS:
            assert self.weight.item() == 1.0
        _FORWARDS.append(name)
        return value * self.weight, index + 1


def _mean(outputs: Any, targets: Tensor) -> Tensor:
    value: Tensor = outputs[0]
    return ((value - targets) ** 2).mean()


def _train(plan: Plan, width: int, **options: Any) -> tuple[list[float], list[int]]:
    """Returns the losses, and the number of forwards of each layer in this process."""
    _FORWARDS.clear()
    model = nn.Sequential(
        *(_AtHome(i, worker) for i, worker in enumerate(map(plan.placement.rank_of, range(plan.num_stages))))
    )
    if os.environ["RANK"] != "0":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
    result = pipedream.run(
        model,
        plan,
        data=[(torch.full((2, width), 1.0), torch.zeros(2, width))] * _NUM_MINIBATCHES,
        loss_fn=_mean,
        optimizer=functools.partial(torch.optim.SGD, lr=0.0),
        progress=False,
        **options,
    )
    return result.losses, [_FORWARDS.count(f"layer {layer}") for layer in range(plan.num_stages)]


_STRAIGHT = Plan.straight(3, 3)
_INTERLEAVED = Plan.straight(4, 4, num_workers=2)


@pytest.mark.parametrize(
    ("plan", "width", "options"),
    [
        (_STRAIGHT, 8, {}),
        (_INTERLEAVED, 8, {"schedule": "interleaved", "microbatches": 1}),
        # A value of 8 MiB is more than the links can hold.
        (_INTERLEAVED, 1 << 20, {"schedule": "interleaved", "microbatches": 1}),
    ],
    ids=["straight", "interleaved", "interleaved and wide"],
)
def test_a_worker_rehearses_its_own_layers_and_no_others(
    farm: Farm, plan: Plan, width: int, options: dict[str, Any]
) -> None:
    outcomes = farm.results(_train, plan, width, num_ranks=plan.workers_used, **options)
    for rank, (losses, forwards) in enumerate(outcomes):
        own = plan.stages_of(rank)
        once_more = 1 + _NUM_MINIBATCHES
        assert forwards == [once_more if stage in own else 0 for stage in range(plan.num_stages)]
        assert losses == [1.0] * _NUM_MINIBATCHES


class _Remembering(nn.Module):
    """Adds the mean of its previous output, which it keeps in an attribute that a recompute does not
    restore.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.hidden = torch.zeros(1)

    def forward(self, value: Tensor) -> Tensor:
        output = value * self.weight + self.hidden
        self.hidden = output.detach().mean(0, keepdim=True)
        return output


class _Drawing(nn.Module):
    """Draws a number from a generator that belongs to the data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.weight * random.random()


def _train_with(layer: nn.Module, num_stages: int = 2, **options: Any) -> Any:
    torch.manual_seed(1)
    # Wide inside the stage, so that a recompute saves memory.
    wide = [nn.Linear(16, 512), layer, nn.Linear(512, 16)]
    model = nn.Sequential(*wide, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    return pipedream.run(
        model,
        Plan.straight(6, num_stages),
        data=[(torch.rand(256, 16), torch.rand(256, 16)) for _ in range(4)],
        loss_fn=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        progress=False,
        **options,
    )


@pytest.mark.parametrize("layer", [_Remembering(), _Drawing()], ids=["remembers", "draws from random"])
def test_a_stage_whose_forward_cannot_be_done_again_is_not_recomputed(farm: Farm, layer: nn.Module) -> None:
    for outcome in farm.run(_train_with, layer, num_ranks=2, recompute=True):
        assert isinstance(outcome.error, ValueError), outcome
        said = str(outcome.error)
        assert said.startswith("recompute names stage 0 (rank 0), whose forward gives something else when")
        assert "\n" not in said
    # The stage may be left out of `recompute`.
    result = farm.results(_train_with, layer, num_ranks=2, recompute=[1])[0]
    assert result.recompute == [False, True]


def test_memory_does_not_choose_a_recompute_that_would_be_wrong(farm: Farm) -> None:
    free = farm.results(_train_with, nn.Tanh(), num_ranks=2)[0]
    limit = sum(figures["predicted"] or 0 for figures in free.memory[0].values()) - 1
    assert farm.results(_train_with, nn.Tanh(), num_ranks=2, memory=limit)[0].recompute == [True, False]
    for outcome in farm.run(_train_with, _Remembering(), num_ranks=2, memory=limit):
        assert isinstance(outcome.error, ValueError), outcome
        assert "but stage 0 (rank 0) needs" in str(outcome.error)


def test_who_draws_from_generators_of_the_data_is_told_of_once(capfd: pytest.CaptureFixture[str]) -> None:
    _train_with(_Drawing())
    told = [line for line in capfd.readouterr().err.splitlines() if "belongs to the data" in line]
    assert len(told) == 1
    assert told[0].startswith("stage 0 (rank 0) draws from random in its forward, which belongs to the data")
    _train_with(_Remembering())
    _train_with(_Drawing(), 1)  # on one worker all draw from the same generators, as in a plain loop
    assert "belongs to the data" not in capfd.readouterr().err
