"""The state of stages, to a file and back."""

from __future__ import annotations

from pathlib import Path

import torch
from pipedream import Plan
from pipedream.checkpoint.state import load_state, save_state
from pipedream.model.splitter import split
from torch import nn


class _Odd(nn.Module):
    """A parameter that is not contiguous, a complex buffer, and a buffer of no elements."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.full((3, 5), fill).t())
        self.register_buffer("phase", torch.full((2,), complex(fill, 1), dtype=torch.complex128))
        self.register_buffer("empty", torch.empty(0, 4))


def _make_model(fill: float) -> nn.Sequential:
    return nn.Sequential(_Odd(fill), nn.BatchNorm1d(3), _Odd(fill + 1))


def test_what_was_saved_is_loaded_in_place(tmp_path: Path) -> None:
    trained, fresh = _make_model(7.0), _make_model(0.0)
    trained[1].running_mean.fill_(5)
    plan = Plan.straight(3, 2)
    weight, mean = fresh[0].transposed, fresh[1].running_mean
    save_state(split(trained, plan), tmp_path / "state.safetensors")
    load_state(split(fresh, plan), tmp_path / "state.safetensors")
    assert fresh[0].transposed is weight
    assert fresh[1].running_mean is mean
    assert weight.stride() == trained[0].transposed.stride()
    for name, value in trained.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name


def test_a_buffer_that_is_new_or_has_another_shape_is_taken_over(tmp_path: Path) -> None:
    trained, fresh = _make_model(7.0), _make_model(0.0)
    trained[2].register_buffer("cache", torch.arange(6.0))
    trained[0].empty = torch.ones(2, 4)
    plan = Plan.straight(3, 2)
    save_state(split(trained, plan), tmp_path / "state.safetensors")
    load_state(split(fresh, plan), tmp_path / "state.safetensors")
    assert torch.equal(fresh[2].cache, torch.arange(6.0))
    assert torch.equal(fresh[0].empty, torch.ones(2, 4))


def test_a_buffer_that_is_taken_over_goes_where_its_model_is(tmp_path: Path) -> None:
    trained, fresh = _make_model(7.0), _make_model(0.0)
    trained[2].register_buffer("cache", torch.arange(6.0))
    trained[0].empty = torch.ones(2, 4)
    plan = Plan.straight(3, 2)
    save_state(split(trained, plan), tmp_path / "state.safetensors")
    stages = split(fresh, plan)
    fresh.to("meta")
    load_state(stages, tmp_path / "state.safetensors")
    assert fresh[2].cache.is_meta
    assert fresh[0].empty.is_meta and fresh[0].empty.shape == (2, 4)
