"""run(memory=...): what fits, what makes recompute or offloading necessary, what is refused; and peaks beside predictions
where activations, not constants, are most of it."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pipedream
import pytest
import torch
import torch.nn.functional as F
from farm import Farm
from oracle import assert_memory_as_predicted
from pipedream import Plan, RunResult
from torch import nn

_SAMPLES = 768
_WIDTHS = (16, 64, 256, 64, 16, 64, 256, 64, 16)


def _model() -> nn.Sequential:
    """Activations of 48 to 768 KiB, weights of 4 or 64 KiB. Every second boundary is a wide one, so that some
    stages have large inputs and others large outputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        pairs = itertools.pairwise(_WIDTHS)
        return nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b), nn.Tanh())))


def _data(num_minibatches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    shape = (num_minibatches, _SAMPLES, _WIDTHS[0])
    return list(zip(*(torch.randn(shape, generator=generator) for _ in range(2)), strict=True))


_OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "native adamw": functools.partial(pipedream.optim.AdamW, lr=0.01),
}


def _train(num_stages: int, num_workers: int, **options: Any) -> RunResult:
    plan = Plan.straight(16, num_stages, num_workers=num_workers)
    defaults = {"optimizer": _OPTIMIZERS["sgd"], "data": _data(9), "loss_fn": F.mse_loss, "seed": 1}
    return pipedream.run(_model(), plan, progress=False, **(defaults | options))


@pytest.mark.parametrize("recompute", [None, True, (1,)], ids=["stashed", "recomputed", "stage 1 recomputed"])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    "schedule",
    ["pipedream", "vertical_sync", "naive", "2bw", "flush", "gpipe", "model_parallel", "interleaved"],
)
def test_large_activations_stay_within_their_prediction(
    farm: Farm, schedule: str, microbatches: int, recompute: Any
) -> None:
    if schedule == "2bw":
        microbatches = max(microbatches, 4)
    num_workers = 2 if schedule == "interleaved" else 4
    options = {"schedule": schedule, "microbatches": microbatches, "recompute": recompute}
    result = farm.results(_train, 4, num_workers, num_ranks=num_workers, **options)[0]
    assert_memory_as_predicted(result)
