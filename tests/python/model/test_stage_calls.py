"""Tests stage_calls.py: a training, a rehearsal and the sweep that times layers compute the same as the
stage's layers.
"""

from __future__ import annotations

import pytest
import torch
from pipedream.model.stage_calls import StageCalls, backward, backward_of_loss, leaves_of
from pipedream.model.stage_module import StageModule
from torch import Tensor, nn

_HOST = torch.device("cpu")


def _calls(layer: nn.Module, autocast: torch.dtype | None = None) -> StageCalls:
    return StageCalls(StageModule(0, 0, [("0", "0.", layer)]), nn.functional.mse_loss, _HOST, autocast)


def test_output_and_loss_are_those_of_layers_and_loss_function() -> None:
    layer, value, targets = nn.Linear(3, 3), torch.randn(4, 3), torch.randn(4, 3)
    calls = _calls(layer)
    output = calls.layers(value)
    assert torch.equal(output, layer(value))
    assert torch.equal(calls.loss(output, targets), nn.functional.mse_loss(layer(value), targets))


def test_layers_and_loss_run_under_the_precision_of_the_run() -> None:
    class Product(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value @ value

    calls = _calls(Product(), torch.bfloat16)
    assert calls.layers(torch.randn(3, 3)).dtype == torch.bfloat16
    assert _calls(Product()).layers(torch.randn(3, 3)).dtype == torch.float32


def test_a_loss_that_no_backward_can_start_from_is_refused_with_its_minibatch() -> None:
    calls = StageCalls(StageModule(0, 0, [("0", "0.", nn.Identity())]), lambda output, _: output, _HOST)
    with pytest.raises(ValueError, match="of shape \\(2,\\) for minibatch 5"):
        calls.loss(torch.zeros(2), None, 5)


@pytest.mark.parametrize("copies", [False, True])
def test_leaves_have_the_values_and_not_the_graph(copies: bool) -> None:
    made, index = torch.randn(3, requires_grad=True) * 2, torch.arange(3)
    leaf, kept = leaves_of((made, index), copies=copies)
    assert leaf.is_leaf and leaf.requires_grad and not kept.requires_grad
    assert torch.equal(leaf, made) and torch.equal(kept, index)
    assert (leaf.data_ptr() != made.data_ptr()) == copies


def test_a_backward_takes_the_gradients_of_the_outputs_that_need_one() -> None:
    leaf = torch.ones(3, requires_grad=True)
    backward([leaf * 2, torch.ones(2)], [torch.full((3,), 5.0), torch.ones(2)])
    assert torch.equal(leaf.grad, torch.full((3,), 10.0))  # type: ignore[arg-type]
    backward([torch.ones(2)], [torch.ones(2)])


def test_the_backward_of_a_loss_is_of_its_multiple() -> None:
    leaf = torch.ones(3, requires_grad=True)
    backward_of_loss(leaf.sum(), 0.5)
    assert torch.equal(leaf.grad, torch.full((3,), 0.5))  # type: ignore[arg-type]
    backward_of_loss(torch.zeros(()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_backward_of_a_multiple_has_the_bits_of_that_of_the_product(dtype: torch.dtype) -> None:
    weight, factor = torch.randn(5, dtype=dtype), 1 / 3
    ours, theirs = (torch.ones(5, dtype=dtype, requires_grad=True) for _ in range(2))
    loss = (ours * weight).sum()
    backward_of_loss(loss, factor)
    ((theirs * weight).sum() * factor).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


class _OwnBackward(Tensor):
    was_asked = False

    def backward(self, *arguments: object, **options: object) -> None:
        _OwnBackward.was_asked = True
        super().backward(*arguments, **options)  # type: ignore[arg-type,no-untyped-call]


def test_a_loss_of_a_class_with_a_backward_of_its_own_is_asked_for_it() -> None:
    leaf = torch.ones(3, requires_grad=True)
    backward_of_loss(leaf.sum().as_subclass(_OwnBackward), 0.5)  # type: ignore[no-untyped-call]
    assert _OwnBackward.was_asked
