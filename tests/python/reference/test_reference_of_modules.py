"""Tests the reference of a module with a forward of its own. tests/equivalence compares its numbers with
runs.
"""

from __future__ import annotations

import functools

import pytest
import torch
from models import straight_plan
from pipedream import reference
from torch.utils.data import DataLoader
from twins import TWINS

_SGD = functools.partial(torch.optim.SGD, lr=0.1)


def test_a_module_is_cut_by_data_that_can_be_iterated_again() -> None:
    twin = TWINS["residual"]
    data = iter(twin.data(2))
    with pytest.raises(ValueError, match="data is an iterator, and the model is cut by a forward"):
        reference.run(twin.model(), straight_plan(2, (1,)), data=data, optimizer=_SGD)
    with pytest.raises(ValueError, match="data yields no minibatch"):
        reference.run(twin.model(), straight_plan(2, (1,)), data=[], optimizer=_SGD)


def test_the_trace_leaves_the_generator_of_a_shuffling_loader_alone() -> None:
    twin, plan, losses = TWINS["residual"], straight_plan(14, (3,)), []
    for is_read_before in (False, True):
        drawn = torch.Generator().manual_seed(3)
        loader = DataLoader(twin.data(4), batch_size=None, shuffle=True, generator=drawn)  # type: ignore[arg-type]
        data = list(loader) if is_read_before else loader
        options = {"loss_fn": twin.loss_fn, "optimizer": _SGD}
        losses.append(reference.run(twin.model(), plan, data=data, **options).losses)
    assert losses[0] == losses[1]
