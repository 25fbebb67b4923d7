"""Tests that the gradient of a fully connected layer's weight equals the product of the two factors that
replace it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipedream.model.factored import FactoredLayers, factorable
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class _Taken:
    """Adds up the products of factors, by the name of the weight."""

    def __init__(self) -> None:
        self.products: dict[str, Tensor] = {}
        self.num_rows: dict[str, list[int]] = {}

    def __call__(self, name: str, gradients: Tensor, inputs: Tensor) -> None:
        product = gradients.t() @ inputs
        self.products[name] = self.products[name] + product if name in self.products else product
        self.num_rows.setdefault(name, []).append(len(inputs))


def _run(model: nn.Module, inputs: Tensor, factored: FactoredLayers | None) -> tuple[Tensor, Tensor | None]:
    """Returns the output and the gradient of the inputs."""
    torch.manual_seed(1)
    given = inputs.clone().requires_grad_(inputs.is_floating_point())
    output = model(given)
    loss = (output * torch.randn_like(output)).sum()
    if factored is None:
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        with factored.backward():
            loss.backward()  # type: ignore[no-untyped-call]
    return output.detach(), given.grad


class _Twice(nn.Module):
    """Uses a layer twice, once in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(self.layer, self.layer(x).tanh(), use_reentrant=False)
        return again


class _Shared(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.other(self.one(x).tanh())
        return output


class _Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(input=x)
        return output


class _Implicit(nn.Module):
    """Computes the fixed point of a layer. Its hook in the backward differentiates with respect to the
    layer's inputs only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        point = (x + self.layer(x)).tanh()
        at = point.detach().requires_grad_()
        again = (x.detach() + self.layer(at)).tanh()

        def solve(gradient: Tensor) -> Tensor:
            return gradient + torch.autograd.grad(again, at, gradient)[0]

        point.register_hook(solve)  # type: ignore[no-untyped-call]
        return point


@pytest.mark.parametrize(
    ("model", "shape", "num_rows"),
    [
        (nn.Linear(6, 4), (5, 6), [5]),
        (nn.Linear(6, 4, bias=False), (5, 6), [5]),
        (nn.Linear(6, 4), (2, 3, 6), [6]),
        (nn.Linear(6, 4), (6,), [1]),
        (nn.Linear(6, 4), (0, 6), [0]),
        (_Twice(), (5, 6), [5, 5]),
        (_Shared(), (5, 6), [5, 5]),
        (nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True)), (2, 3, 6), [6]),
        (_Keyword(), (5, 6), [5]),
        (_Implicit(), (5, 6), [5]),
    ],
    ids=[
        *("rows", "no bias", "tokens", "one vector", "no rows", "twice", "shared"),
        *("then in place", "by keyword", "differentiated in a hook"),
    ],
)
def test_the_factors_product_is_the_gradient_and_all_else_is_as_without(
    model: nn.Module, shape: tuple[int, ...], num_rows: list[int]
) -> None:
    model = model.double()
    stage = nn.Sequential(model)
    inputs = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = _run(stage, inputs, None)
    dense = {name: parameter.grad for name, parameter in stage.named_parameters()}
    stage.zero_grad()
    layers, taken = factorable(stage, list(stage.named_parameters())), _Taken()
    factored = FactoredLayers(layers, taken)
    (weight,) = layers
    with factored.installed():
        found = _run(stage, inputs, factored)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(taken.products[weight], dense[weight], rtol=1e-12, atol=0.0)
    assert taken.num_rows == {weight: num_rows}
    for name, parameter in stage.named_parameters():
        if name == weight:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, dense[name], rtol=1e-12, atol=0.0)
    assert not any("forward" in vars(module) for module in stage.modules())


def test_what_a_forward_differentiates_for_itself_is_not_taken() -> None:
    stage, taken = nn.Sequential(nn.Linear(3, 2)), _Taken()
    factored = FactoredLayers(factorable(stage, list(stage.named_parameters())), taken)
    inputs = torch.ones(4, 3, requires_grad=True)
    with factored.installed():
        torch.autograd.grad(stage(inputs).sum(), inputs)
        assert not taken.products
        with pytest.raises(RuntimeError, match="gradient of a gradient"):
            torch.autograd.grad(stage(inputs).sum(), inputs, create_graph=True)


def test_a_layer_that_is_frozen_for_a_while_leaves_none_then() -> None:
    stage, taken = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), _Taken()
    factored = FactoredLayers(factorable(stage, list(stage.named_parameters())), taken)
    with factored.installed(), factored.backward():
        stage[1].requires_grad_(False)
        stage(torch.ones(4, 3)).sum().backward()
    assert list(taken.products) == ["0.weight"]


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = {"weight": self.layer.weight * torch.eye(2, 3)}
        output: Tensor = torch.func.functional_call(self.layer, weights, x)
        return output


class _Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            output: Tensor = self.layer(x)
        return output


@pytest.mark.parametrize("make", [_Masked, _Rounded])
def test_a_gradient_that_is_no_product_of_factors_shows_at_the_weight(make: Any) -> None:
    stage, taken = nn.Sequential(make()), _Taken()
    factored = FactoredLayers(factorable(stage, list(stage.named_parameters())), taken)
    stage(torch.ones(4, 3)).sum().backward()
    expected = stage[0].layer.weight.grad
    stage.zero_grad()
    with factored.installed(), factored.backward():
        stage(torch.ones(4, 3)).sum().backward()
    assert torch.equal(stage[0].layer.weight.grad, expected)
    assert taken.products == {}


def test_a_hook_that_changes_what_a_layer_is_given_changes_its_factors() -> None:
    stage, taken = nn.Sequential(nn.Linear(3, 2)), _Taken()
    stage[0].register_forward_pre_hook(lambda _, given: (2 * given[0],))
    factored = FactoredLayers(factorable(stage, list(stage.named_parameters())), taken)
    with factored.installed(), factored.backward():
        stage(torch.ones(1, 3)).sum().backward()
    assert taken.products["0.weight"].tolist() == [[2.0] * 3] * 2


class _OfTheUser(nn.Linear):
    pass


class _ByFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.kept = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.kept[0])


def _tied_with_embedding() -> nn.Module:
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, head)


def _transposed() -> nn.Module:
    layer = nn.Linear(3, 4)
    layer.weight = nn.Parameter(torch.randn(3, 4).t())
    return layer


def _with_forward_of_its_own() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


def _parametrized() -> nn.Module:
    layer: nn.Module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: _OfTheUser(3, 3),
        _ByFunction,
        _tied_with_embedding,
        _transposed,
        _with_forward_of_its_own,
        _parametrized,
        lambda: nn.Conv2d(1, 1, 1),
        lambda: torch.compile(nn.Sequential(nn.Linear(3, 3))),
    ],
    ids=["subclass", "function", "embedding", "transposed", "forward", "parametrized", "conv", "compiled"],
)
def test_weights_that_other_code_may_use_are_not_factored(make: Any) -> None:
    stage = nn.Sequential(make())
    assert factorable(stage, list(stage.named_parameters())) == {}
