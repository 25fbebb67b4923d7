"""Tests that trace.py finds tensors whose length depends on the contents of other tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipedream.model.trace import Call, record
from pipedream.splitting.cut_model import cut_model
from torch import Tensor, nn
from twins import CLASSES, WIDTH, cross_entropy

_NUM_ROWS = 6
_NUM_CHOSEN = 4  # no other dimension has this length


def _mask() -> Tensor:
    return torch.arange(_NUM_ROWS) < _NUM_CHOSEN


class _Returning(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Any:
        return self._function(x)


def _call_of(function: Callable[[Tensor], Any]) -> Call:
    model = nn.Sequential(_Returning(function))
    x = torch.ones(_NUM_ROWS, WIDTH, requires_grad=True)
    trace = record(model, x, model, lambda _: torch.ones(()))
    return next(call for call in trace.calls if call.key.module == "0")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[_mask()],
        lambda x: x.t()[:, _mask()],
        lambda x: x[_mask().nonzero()[:, 0]],
        lambda x: torch.relu(x[_mask()] @ x.new_ones(WIDTH, 3)),
        lambda x: torch.cat([x[_mask()], x[_mask()]]),
        lambda x: torch.cat([x[_mask()].t(), x[_mask()].t()], dim=1),
        lambda x: torch.zeros_like(x[_mask()]),
        lambda x: x.masked_select(_mask()[:, None]),
        lambda x: torch.unique(torch.arange(_NUM_CHOSEN).repeat(2)),
        lambda x: x[0].repeat_interleave(torch.tensor([2] + [0] * (WIDTH - 1))),
        lambda x: (
            nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([_NUM_CHOSEN]), batch_first=True).data
        ),
    ],
)
def test_what_is_as_long_as_contents_say_is_known(function: Callable[[Tensor], Tensor]) -> None:
    (leaf,) = _call_of(function).leaves
    assert leaf.has_data_size


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2,
        lambda x: x[torch.tensor([1, 0])],
        lambda x: x[_mask()].sum(0),
        lambda x: x[_mask()].sum(),
        lambda x: torch.zeros_like(x).index_put_((_mask(),), x[_mask()]),
        lambda x: torch.zeros_like(x).index_add(0, _mask().nonzero()[:, 0], x[_mask()]),
        # One expert gets as many tokens as the mask chooses.
        lambda x: torch.zeros(_NUM_CHOSEN, WIDTH).index_add(0, _mask().nonzero()[:, 0], x[_mask()]),
        lambda x: x.masked_fill(_mask()[:, None], 0.0),
        lambda x: torch.cat([x, x]),
    ],
)
def test_what_has_the_same_size_whatever_the_contents_is_not(function: Callable[[Tensor], Tensor]) -> None:
    (leaf,) = _call_of(function).leaves
    assert not leaf.has_data_size


class _Experts(nn.Module):
    """Each expert gets the rows that the gate gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        chosen = self.gate(x).argmax(-1)
        parts = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            parts[chosen == index] = expert(x[chosen == index])
        out: Tensor = self.last(x + parts)
        return out


def test_it_is_not_cut_where_that_would_cross() -> None:
    torch.manual_seed(0)
    cut = cut_model(_Experts(), torch.randn(9, WIDTH), torch.zeros(9, dtype=torch.long), cross_entropy)
    assert [place.name for place in cut.offered] == ["stem", "gate"]
    refused = {place.name: place.why_not for place in cut.cuts.refused}
    assert refused["experts.0"] == "a tensor would cross that is as long as the contents of another say"
