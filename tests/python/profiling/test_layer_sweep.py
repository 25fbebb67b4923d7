"""Tests layer_sweep.py: a model on the meta device is profiled with one layer in memory at a time."""

from __future__ import annotations

from typing import ClassVar

import pipedream
import pytest
import torch
from pipedream import Profile
from pipedream.model import initial_weights
from pipedream.model.batches import own_loss
from torch import nn
from twins import CLASSES, TWINS, WIDTH, RandomlyDropped, cross_entropy

_WIDTH = 64


class _Watched(nn.Linear):
    """Records how many layers of the model have values while it runs."""

    others: list[nn.Linear]
    seen: ClassVar[set[int]] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add(sum(not layer.weight.is_meta for layer in self.others))
        return super().forward(x)


@pytest.mark.parametrize("name", ["residual", "transformer", "tuples"])
def test_a_model_on_meta_has_the_sizes_of_the_one_with_values(name: str) -> None:
    twin = TWINS[name]
    loss_fn = None if twin.loss_fn is own_loss else twin.loss_fn
    with pipedream.parameters_on_meta():
        model = twin.model()
    on_meta = pipedream.profile(model, twin.data(2), loss_fn, minibatches=1)
    assert all(parameter.is_meta for parameter in model.parameters())
    usual = pipedream.profile(twin.model(), twin.data(2), loss_fn, minibatches=1)
    sizes = [
        [(layer.name, layer.activation_bytes, layer.parameter_bytes) for layer in found.layers]
        for found in (on_meta, usual)
    ]
    assert sizes[0] == sizes[1]
    saved = [sum(layer.saved_bytes or 0 for layer in found.layers) for found in (on_meta, usual)]
    assert saved[0] >= saved[1]  # a tensor that two layers save counts for both
    assert on_meta.batch_size == usual.batch_size
    assert all(layer.forward_ms > 0 for layer in on_meta.layers)


def test_one_layer_of_a_list_has_values_at_a_time() -> None:
    with torch.device("meta"):
        layers = [_Watched(_WIDTH, _WIDTH) for _ in range(4)]
    for layer in layers:
        layer.others = layers  # type: ignore[assignment]
    _Watched.seen.clear()
    data = [(torch.randn(4, _WIDTH), torch.randn(4, _WIDTH))]
    found = pipedream.profile(layers, data, nn.functional.mse_loss, minibatches=3)
    assert _Watched.seen == {1}
    assert [layer.parameter_bytes for layer in found.layers] == [4 * (_WIDTH + 1) * _WIDTH] * 4
    assert all(layer.weight.is_meta for layer in layers)
    assert found.minibatches == 3


def test_buffers_are_on_meta_again() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    buffers = list(model.buffers())
    data = [(torch.randn(4, 2), torch.randn(4, 3))]
    pipedream.profile(model, data, nn.functional.mse_loss, minibatches=2)
    assert all(now is before and now.is_meta for now, before in zip(model.buffers(), buffers, strict=True))


class _Aside(nn.Module):
    """Stores a number in an attribute, which code behind a cut reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        scale = float(x.detach().numpy().mean())
        return self.last(self.second(x) * scale)


def _profile_aside(caplog: pytest.LogCaptureFixture) -> tuple[Profile, str]:
    with torch.device("meta"):
        model = _Aside()
    data = [(torch.randn(4, 8), torch.randn(4, 8))]
    found = pipedream.profile(model, data, nn.functional.mse_loss, minibatches=1)
    assert all(parameter.is_meta for parameter in model.parameters())
    return found, caplog.text


def test_the_cuts_of_a_model_on_meta_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    found, said = _profile_aside(caplog)
    assert len(found.layers) < 3
    assert "does not compute what the whole model does" in said


def test_where_it_does_not_fit_whole_that_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial_weights, "free_host_bytes", lambda: 1000)
    found, said = _profile_aside(caplog)
    assert len(found.layers) == 3
    assert "the cuts of the model are not checked: it is on the meta device" in said
    assert "are free; check a smaller one of the same kind" in said


@pytest.mark.parametrize("seed", range(3))
def test_layers_of_a_model_on_meta_drop_the_same_ones_at_random(seed: int) -> None:
    """All layers must draw the same numbers. Otherwise one layer would need the output of a layer that has
    been dropped.
    """
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = RandomlyDropped()
    data = [(torch.randn(4, WIDTH), torch.arange(4) % CLASSES)] * 2
    norms = [f"steps.{step}.norm" for step in range(4)]
    found = pipedream.profile(model, data, cross_entropy, minibatches=3, cuts=norms)
    assert [layer.name for layer in found.layers] == [*norms, "head"]
