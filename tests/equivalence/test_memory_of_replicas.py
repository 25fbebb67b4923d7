"""Tests that no worker exceeds its predicted memory, in random small models on replicated plans.

Gradients that share a chunk are sent from copies, which the prediction includes.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from oracle import assert_memory_as_predicted
from pipedream import Plan, RunResult
from pipedream.planning.plan import Stage
from torch import nn

_REPLICAS = ((2, 1), (3, 1), (1, 2), (2, 2), (3, 2), (4,), (2, 1, 2), (2,), (3,))
_NUM_MINIBATCHES = 13


class _OfWholeTensors(torch.optim.SGD):
    """A subclass of SGD. Its step() might read whole tensors, so its shards are whole tensors."""


class _Job:
    """A model, a plan and options, drawn from a seed. So all ranks draw the same job."""

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        replicas = draw.choice(_REPLICAS)
        self.width = draw.choice((1, 3, 16, 40))
        layers = self._layers(draw, draw.randint(max(len(replicas), 2), 7))
        self.model = nn.Sequential(*layers).to(draw.choice((torch.float32, torch.float64)))
        self.plan = _cut(draw, replicas, len(layers))
        self.options: dict[str, Any] = {"optimizer": draw.choice(_OPTIMIZERS)}
        schedules = ["pipedream", "flush", "gpipe", "vertical_sync"]
        schedules += ["2bw"] if replicas in ((2, 2), (1, 2)) else []
        self.options["schedule"] = "data_parallel" if len(replicas) == 1 else draw.choice(schedules)
        m = 4 if self.options["schedule"] == "2bw" else draw.choice((1, 1, 2))
        self.options["microbatches"] = m if len(replicas) > 1 else 1
        if draw.random() < 0.2:
            self.options["max_grad_norm"] = 1.0
        if draw.random() < 0.2 and self.options["schedule"] == "pipedream":
            self.options |= {"sync": "ssp", "staleness": draw.choice((1, 2))}
        elif draw.random() < 0.15 and len(replicas) > 1 and replicas[0] > 1 and replicas[-1] == 1:
            self.plan = self.plan.with_spare_shards([1] + [0] * (len(replicas) - 1))
        self.batch_size = draw.choice((4, 8, 64))

    def _layers(self, draw: random.Random, count: int) -> list[nn.Module]:
        """Returns layers of random kinds and sizes. All have parameters."""
        layers: list[nn.Module] = []
        for _ in range(count):
            inside = draw.choice((1, 7, 33, 200))
            bias = draw.random() < 0.5
            block = [nn.Linear(self.width, inside, bias=bias), nn.Tanh(), nn.Linear(inside, self.width)]
            layers.append(nn.Sequential(*block) if draw.random() < 0.7 else nn.Linear(self.width, self.width))
        return layers

    def data(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        dtype = next(self.model.parameters()).dtype
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch_size, self.width)
        pairs = (
            (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
            for _ in range(_NUM_MINIBATCHES)
        )
        return [(inputs, targets) for inputs, targets in pairs]


_OPTIMIZERS = (
    functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    functools.partial(torch.optim.Adam, lr=1e-3),
    functools.partial(pipedream.optim.Adam, lr=1e-3),
    functools.partial(_OfWholeTensors, lr=1e-3),
)


def _cut(draw: random.Random, replicas: tuple[int, ...], num_layers: int) -> Plan:
    ends = [*sorted(draw.sample(range(num_layers - 1), len(replicas) - 1)), num_layers - 1]
    firsts = [0, *(end + 1 for end in ends)]
    return Plan(
        tuple(Stage(first, last, count) for first, last, count in zip(firsts, ends, replicas, strict=False))
    )


def train_drawn(number: int) -> RunResult:
    """Trains a drawn job at one rank."""
    torch.manual_seed(number)
    job = _Job(number)
    return pipedream.run(
        job.model,
        job.plan,
        data=job.data(),
        loss_fn=nn.functional.mse_loss,
        seed=1,
        progress=False,
        **job.options,
    )


@pytest.mark.parametrize("number", range(12))
def test_no_worker_of_a_drawn_plan_has_more_than_was_predicted(farm: Farm, number: int) -> None:
    result = farm.results(train_drawn, number, num_ranks=_Job(number).plan.workers_used)[0]
    assert_memory_as_predicted(result)
