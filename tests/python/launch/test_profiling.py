"""Tests profiling.py: when the fork server for a later run starts."""

from __future__ import annotations

import os
from typing import Any

import pipedream
import pytest
import torch
from pipedream.launch import profiling
from torch import nn

_DATA = [(torch.randn(2, 3), torch.randn(2, 3))]


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the list to which the steps of profile() are added, in order."""
    happened: list[str] = []

    def start(**how: Any) -> None:
        assert how == {"compiler": "if idle"}
        happened.append("server")

    monkeypatch.setattr(profiling, "start_server", start)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return happened


class _Noting(nn.Linear):
    def __init__(self, happened: list[str]) -> None:
        super().__init__(3, 3)
        self.note = happened.append  # a list of the module itself would be restored after a profile

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.note("forward")
        return super().forward(value)


def _profile(happened: list[str]) -> list[str]:
    model = nn.Sequential(_Noting(happened))
    pipedream.profile(model, _DATA, nn.functional.mse_loss, minibatches=1)
    return list(dict.fromkeys(happened))


@pytest.mark.parametrize(
    ("num_cores", "order"), [(3, ["server", "forward"]), (2, ["forward", "server"])], ids=["free", "none"]
)
def test_the_server_begins_before_the_profiler_where_a_core_is_free_for_it(
    happened: list[str], monkeypatch: pytest.MonkeyPatch, num_cores: int, order: list[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    assert _profile(happened) == order


def test_no_server_begins_under_torchrun(happened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert _profile(happened) == ["forward"]
