"""Tests loss_on() of loss_state.py: the tensors of a loss move to the device of the outputs, and the caller's
object stays unchanged. The device "meta" stands in for a GPU, because its tensors are not in host memory
either."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from pipedream.model.loss_state import call_loss, loss_on
from torch import Tensor, nn

_META = torch.device("meta")


class _Weighted(nn.Module):
    """A loss with a buffer, a frozen network and a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(3))
        self.features = nn.LSTM(3, 3).requires_grad_(False)
        self.calls: Any
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.features(outputs)[0], targets, weight=self.weight)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


@pytest.mark.parametrize("wrap", [lambda loss: loss, functools.partial, lambda loss: loss.forward])
def test_the_modules_of_a_loss_are_on_the_device_inside_and_as_they_were_afterwards(wrap: Any) -> None:
    loss = _Weighted()
    before = [(tensor, tensor.data_ptr(), tensor.clone()) for tensor in _tensors(loss)]
    outputs, targets = torch.zeros(2, 3, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")
    with loss_on(wrap(loss), _META):
        assert all(tensor.is_meta for tensor in _tensors(loss))
        assert loss(outputs, targets).is_meta
    for tensor, (own, address, content) in zip(_tensors(loss), before, strict=True):
        assert tensor is own
        assert tensor.data_ptr() == address
        assert torch.equal(tensor, content)
    assert torch.isfinite(loss(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)))


def test_a_loss_that_is_there_already_is_not_touched() -> None:
    loss = _Weighted()
    before = _tensors(loss)
    with loss_on(loss, torch.device("cpu")):
        assert all(a is b for a, b in zip(_tensors(loss), before, strict=True))
        loss.calls += 1
    assert loss.calls == 1


def test_what_the_loss_made_of_its_buffers_is_kept() -> None:
    loss = _Weighted().to("meta")
    own = loss.weight
    with loss_on(loss, torch.device("meta")):
        loss.calls = torch.ones((), device="meta")
    assert loss.weight is own
    assert loss.calls.is_meta


def _weighted(outputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    if weight.device != outputs.device:
        raise RuntimeError("Expected all tensors to be on the same device")
    return outputs.sum()


def test_an_error_of_a_loss_with_a_tensor_elsewhere_says_what_to_do() -> None:
    loss_fn = functools.partial(_weighted, weight=torch.ones(3))
    with pytest.raises(RuntimeError) as caught:
        call_loss(loss_fn, torch.zeros(2, 3, device="meta"), None)
    assert str(caught.value) == (
        "RuntimeError: Expected all tensors to be on the same device; loss_fn.weight is on cpu and the"
        " outputs are on meta: make it a buffer of an nn.Module (self.register_buffer), which is moved for"
        " you, or move it in the loss with .to(outputs.device)"
    )


def test_an_error_of_any_other_loss_is_its_own() -> None:
    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        call_loss(loss_fn, torch.zeros(2, 3), None)
