"""Tests outgoing.py: a tensor must not change while it waits to be sent."""

from __future__ import annotations

import torch
from pipedream import Plan
from pipedream.model.boundary import Boundary
from pipedream.splitting.splitter import split
from pipedream.stage.outgoing import gradients_of, memory_of, nothing_like, settled, written_memory
from torch import nn

_HOST = torch.device("cpu")


def test_an_output_leaves_without_a_copy_unless_it_lies_in_a_buffer() -> None:
    output = torch.zeros(4)
    assert memory_of(settled(output, set())) == memory_of(output)
    assert memory_of(settled(output, {memory_of(output)})) != memory_of(output)


class _Keeps(nn.Module):
    """Keeps tensors in a buffer, an attribute, a list and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.zeros(1))
        self.workspace = torch.zeros(2)
        self.listed = [torch.zeros(3)]
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value


def test_a_stage_may_write_into_its_buffers_and_into_tensors_in_attributes() -> None:
    layer = _Keeps()
    (stage,) = split(nn.Sequential(layer), Plan.straight(1, 1))
    kept = [layer.buffer, layer.workspace, layer.listed[0]]
    assert written_memory(stage) == {memory_of(tensor) for tensor in kept}


def test_a_gradient_that_a_parameter_shares_is_copied() -> None:
    leaf = torch.zeros(4, requires_grad=True)
    leaf.grad = torch.ones(4)
    (alone,) = gradients_of([leaf], _HOST)
    assert memory_of(alone) == memory_of(leaf.grad)
    del alone
    others = leaf.grad.view(2, 2)
    (shared,) = gradients_of([leaf], _HOST)
    assert memory_of(shared) != memory_of(others)
    assert shared.tolist() == [1.0] * 4


def test_a_tensor_that_the_loss_does_not_depend_on_has_a_gradient_without_elements() -> None:
    (gradient,) = gradients_of([torch.ones(2, 3, requires_grad=True), torch.ones(1)], _HOST)
    assert gradient.shape == (0, 3)
    (of_a_number,) = gradients_of([torch.ones((), requires_grad=True)], _HOST)
    assert of_a_number.shape == (0,)
    (of_nothing,) = gradients_of([torch.ones(0, 3, requires_grad=True)], _HOST)
    assert of_nothing.shape == (0, 0, 3), "the shape is not that of a gradient"


def test_a_backward_without_gradients_says_so_with_one_byte() -> None:
    (word,) = gradients_of([torch.ones(3)], _HOST)
    assert (word.dtype, word.shape) == (torch.uint8, (1,))


def test_an_empty_microbatch_has_no_element_in_any_tensor() -> None:
    value = (torch.zeros(4, 3, requires_grad=True), torch.zeros(4, 2, dtype=torch.int64))
    boundary = Boundary.of(value)
    sent = nothing_like(boundary, _HOST, gradients=False)
    assert [(t.dtype, t.shape) for t in sent] == [(torch.float32, (0, 3)), (torch.int64, (0, 2))]
    assert [t.shape for t in nothing_like(boundary, _HOST, gradients=True)] == [(0, 3)]
