"""Tests stand_ins.py: parameters give up their memory in every place that holds them."""

from __future__ import annotations

import pytest
import torch
from pipedream.model.stand_ins import exchange, poisoned, zeroed
from torch import nn


def test_an_exchange_is_seen_in_every_place_and_undone_by_another() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    module, held = nn.Linear(3, 2), [weight]
    module.weight = weight
    former = exchange(weight, torch.zeros(2, 3))
    assert module.weight is weight is held[0] and torch.equal(held[0], torch.zeros(2, 3))
    assert isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf
    exchange(weight, former)
    assert torch.equal(module.weight, torch.ones(2, 3))


def test_what_reads_a_poisoned_parameter_reads_nan_and_one_element_is_all_its_memory() -> None:
    frozen = nn.Parameter(torch.ones(100, 100), requires_grad=False)
    whole = nn.Parameter(torch.ones(4, dtype=torch.long), requires_grad=False)
    with poisoned([frozen, whole], torch.device("cpu")):
        assert frozen.shape == (100, 100) and frozen.sum().isnan() and not frozen.requires_grad
        assert frozen.untyped_storage().nbytes() == 4
        assert int(whole.sum()) == 0
    assert torch.equal(frozen, torch.ones(100, 100)) and int(whole.sum()) == 4


def test_a_poisoned_parameter_that_is_read_can_be_viewed_in_another_shape_as_before() -> None:
    read, other = (nn.Parameter(torch.ones(3, 4).t()) for _ in range(2))
    with poisoned([read, other], torch.device("cpu"), [read]):
        assert read.stride() == (1, 4) and read.is_leaf and read.requires_grad
        assert read.t().view(12).isnan().all()
        assert other.untyped_storage().nbytes() == 4
    assert torch.equal(read, torch.ones(4, 3))


def test_parameters_come_back_after_an_error_whose_graph_still_holds_them() -> None:
    weight = nn.Parameter(torch.empty(2, device="meta"))
    kept = []
    with pytest.raises(RuntimeError, match="on the way"), zeroed([weight]):
        kept.append((weight * 2).sum())
        raise RuntimeError("on the way")
    assert weight.is_meta
