"""Tests the reference of a module with a forward of its own. tests/equivalence compares its numbers."""

from __future__ import annotations

import functools

import pytest
import torch
from models import straight_plan
from pipedream import reference
from twins import TWINS

_SGD = functools.partial(torch.optim.SGD, lr=0.1)


def test_a_module_is_cut_by_data_that_can_be_iterated_again() -> None:
    twin = TWINS["residual"]
    data = iter(twin.data(2))
    with pytest.raises(ValueError, match="data is an iterator, and the model is cut by a forward"):
        reference.run(twin.model(), straight_plan(2, (1,)), data=data, optimizer=_SGD)
    with pytest.raises(ValueError, match="data yields no minibatch"):
        reference.run(twin.model(), straight_plan(2, (1,)), data=[], optimizer=_SGD)
