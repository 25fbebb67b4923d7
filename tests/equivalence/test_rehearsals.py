"""Every worker rehearses its own stages: with rank 0's weights, on what the stage before made."""

from __future__ import annotations

import functools
import os
from collections import Counter
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from pipedream import Plan
from torch import Tensor, nn

_NUM_MINIBATCHES = 4
_FORWARDS: Counter[int] = Counter()
"""Of each layer, in this process; what a layer has itself is after a rehearsal as it was."""


class _AtHome(nn.Module):
    """Runs in the process of its worker alone, as a kernel that only one device has; passes on what it got,
    and the number of layers before it as an index."""

    def __init__(self, layer_index: int, worker: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self._layer_index = layer_index
        self._worker = worker

    def forward(self, given: Any) -> Any:
        assert os.environ["RANK"] == str(self._worker), f"layer {self._layer_index} at another worker"
        value, index = (given, torch.tensor([0])) if self._layer_index == 0 else given
        assert index.tolist() == [self._layer_index]
        if self._layer_index not in _FORWARDS:
            assert self.weight.item() == 1.0
        _FORWARDS[self._layer_index] += 1
        return value * self.weight, index + 1


def _mean(outputs: Any, targets: Tensor) -> Tensor:
    value: Tensor = outputs[0]
    return ((value - targets) ** 2).mean()


def _train(plan: Plan, width: int, **options: Any) -> tuple[list[float], list[int]]:
    """(losses, forwards of each layer in this process)."""
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
    return result.losses, [_FORWARDS[layer] for layer in range(plan.num_stages)]


_STRAIGHT = Plan.straight(3, 3)
_INTERLEAVED = Plan.straight(4, 4, num_workers=2)


@pytest.mark.parametrize(
    ("plan", "width", "options"),
    [
        (_STRAIGHT, 8, {}),
        (_INTERLEAVED, 8, {"schedule": "interleaved", "microbatches": 1}),
        # More than the links hold at once: 8 MiB per value.
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
