"""Tests StagePasses: a stage's forward and backward are those of its layers, with and without recompute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pipedream.common.errors import PipelineError
from pipedream.data.batch_reader import Microbatch
from pipedream.model.boundary import Boundary
from pipedream.model.stage_module import StageModule
from pipedream.stage.passes import RecomputedPasses, StagePasses, Stashed
from pipedream.stage.user_code import UserCode
from torch import Tensor, nn

_HOST = torch.device("cpu")
_GIVEN = Boundary.of(torch.zeros(4, 3, requires_grad=True))


def _passes(kind: type[StagePasses], layers: list[nn.Module], boundary_out: Boundary | None) -> Any:
    named = [(f"{index}", f"{index}.", layer) for index, layer in enumerate(layers)]
    return kind(
        StageModule(1, 1, named),
        _GIVEN,
        boundary_out,
        loss_fn=nn.functional.mse_loss,
        user=UserCode(str),
        device=_HOST,
        autocast=None,
        statistics=None,
        torch_region=None,
        clones_inputs=False,
        offload=None,
    )


def _stashed(passes: StagePasses, value: Tensor, targets: Tensor | None = None) -> Stashed:
    piece = Microbatch(targets=targets)
    leaves, given = passes.take_input(piece, [value.clone()])
    return Stashed(0, leaves, given, piece, read_slot=0, scale=1.0)


def _layers() -> list[nn.Module]:
    return [nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(3, 3)]


@pytest.mark.parametrize("kind", [StagePasses, RecomputedPasses])
def test_gradients_of_a_middle_stage_are_those_of_its_layers(kind: type[StagePasses]) -> None:
    layers, value, gradient = _layers(), torch.randn(4, 3), torch.randn(4, 3)
    plain = copy.deepcopy(nn.Sequential(*layers))
    leaf = value.clone().requires_grad_()
    torch.manual_seed(3)
    plain(leaf * 1.0).backward(gradient)

    passes = _passes(kind, layers, _GIVEN)
    stashed = _stashed(passes, value)
    torch.manual_seed(3)
    output = passes.forward(stashed, is_next=True)
    if isinstance(passes, RecomputedPasses):
        assert not output.requires_grad
        output = passes.recompute(stashed)
    stashed.outputs = passes.crossing(output, 0)
    passes.backward(stashed, [gradient], None)
    assert torch.equal(stashed.leaves[0].grad, leaf.grad)  # type: ignore[arg-type]
    assert torch.equal(layers[2].weight.grad, plain[2].weight.grad)  # type: ignore[arg-type, union-attr]
    assert stashed.outputs == []


def test_the_loss_of_the_last_stage_counts_by_its_samples_and_its_scale() -> None:
    value, targets = torch.randn(4, 3), torch.randn(4, 3)
    passes = _passes(StagePasses, [nn.Identity()], None)
    stashed = _stashed(passes, value, targets)
    stashed.piece.weight, stashed.scale = 0.5, 8.0
    loss = passes.forward(stashed, is_next=True)
    assert loss.item() == nn.functional.mse_loss(value, targets).item()
    stashed.outputs = [loss]
    passes.backward(stashed, [], None)
    torch.testing.assert_close(stashed.leaves[0].grad, 4.0 * 2 / 12 * (value - targets))


@pytest.mark.parametrize("works_in_place", [True, False])
def test_layers_that_leave_their_input_alone_have_the_leaves_themselves(works_in_place: bool) -> None:
    seen: list[Tensor] = []

    class Seeing(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            seen.append(value)
            return value.relu_() if works_in_place else value.relu()

    passes = _passes(StagePasses, [Seeing()], _GIVEN)
    for _ in range(3):
        value, gradient = torch.randn(4, 3), torch.randn(4, 3)
        stashed = _stashed(passes, value)
        stashed.outputs = passes.crossing(passes.forward(stashed, is_next=True), 0)
        passes.backward(stashed, [gradient], None)
        assert torch.equal(stashed.leaves[0].grad, gradient * (value > 0))  # type: ignore[arg-type]
    assert [tensor.is_leaf for tensor in seen] == [False] + 2 * [not works_in_place]


def test_a_first_layer_that_detaches_its_input_is_not_given_a_leaf() -> None:
    class Detaching(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            return super().forward(value.detach_())

    passes = _passes(StagePasses, [Detaching(3, 3)], _GIVEN)
    for _ in range(2):
        stashed = _stashed(passes, torch.randn(4, 3))
        stashed.outputs = passes.crossing(passes.forward(stashed, is_next=True), 0)
        passes.backward(stashed, [torch.randn(4, 3)], None)
        assert stashed.leaves[0].requires_grad and stashed.leaves[0].grad is None


@pytest.mark.parametrize("kind", [StagePasses, RecomputedPasses])
def test_a_first_layer_that_begins_to_work_in_place_is_refused(kind: type[StagePasses]) -> None:
    class Sometimes(nn.Module):
        calls = 0

        def forward(self, value: Tensor) -> Tensor:
            self.calls += 1
            return value.mul_(2) if self.calls > 1 else value * 2

    passes = _passes(kind, [Sometimes()], _GIVEN)
    passes.forward(_stashed(passes, torch.ones(4, 3)), is_next=True)
    refusal = "stage 1 changed its input in place at minibatch 0 and not at the first"
    with pytest.raises((ValueError, PipelineError), match=refusal):
        passes.forward(_stashed(passes, torch.ones(4, 3)), is_next=True)
