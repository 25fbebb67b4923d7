"""Tests that run(schedule="flush") of networks of transformers and torchvision equals a plain loop. The tests
are skipped if the libraries are not installed. test_any_module.py tests small models with the same special
parts.
"""

from __future__ import annotations

import functools
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from networks import NETWORKS, needed
from pipedream import Plan
from pipedream.model.batches import call_model, own_loss, parts_of
from pipedream.splitting.cut_model import cut_model
from training import assert_close_losses

_SGD = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
_NUM_MINIBATCHES = 3
_RELATIVE = 1e-4  # allows for float32 sums in another order


def _train(name: str, plan: Plan) -> list[float]:
    made = NETWORKS[name].seeded(draws=False)
    result = pipedream.run(
        made.model.train(),
        plan,
        data=[made.batch] * _NUM_MINIBATCHES,
        loss_fn=None if made.loss_fn is own_loss else made.loss_fn,
        optimizer=_SGD,
        schedule="flush",
        progress=False,
    )
    return result.losses


def _train_plainly(name: str) -> list[float]:
    made = NETWORKS[name].seeded(draws=False)
    inputs, targets = parts_of(made.batch, 0)
    optimizer = _SGD(made.model.train().parameters())
    losses = []
    for _ in range(_NUM_MINIBATCHES):
        loss = made.loss_fn(call_model(made.model, inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _num_layers(name: str) -> int:
    made = NETWORKS[name].seeded(draws=False)
    cut: Any = cut_model(made.model.train(), *parts_of(made.batch, 0), made.loss_fn)
    return len(cut.layer_names)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_stages_of_a_network_train_as_a_plain_loop_does(farm: Farm, name: str, num_stages: int) -> None:
    needed(name)
    plan = Plan.straight(_num_layers(name), num_stages)
    losses = farm.results(_train, name, plan, num_ranks=num_stages)[0]
    assert_close_losses(losses, _train_plainly(name), _RELATIVE)
