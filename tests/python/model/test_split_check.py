"""split_check.py: what counts as a difference, and what the check finds in models."""

from __future__ import annotations

import pytest
import torch
from pipedream.model.cut_model import cut_model
from pipedream.model.split_check import _difference, _Outcome, check_cuts
from torch import Tensor, nn
from twins import CLASSES, VOCABULARY, WIDTH, LongOnes, Rotary, Truncated, cross_entropy

_FLOAT32 = 1e-4


def _outcome(largest: float, other: float) -> _Outcome:
    return _Outcome([1.0], {"head": torch.tensor([largest]), "bias": torch.tensor([other, 0.0])}, {})


def test_a_gradient_that_is_nothing_but_rounding_is_no_difference() -> None:
    # Of a norm's bias in front of another one: of timm's levit_128s 25 of 141 cuts were left out for it.
    assert not _difference(_outcome(0.306, 1.27e-7), _outcome(0.306, 0.88e-7), _FLOAT32)


@pytest.mark.parametrize("other", [0.0, 0.99e-3, -1e-3, float("nan"), float("inf")])
def test_a_small_gradient_that_differs_is_found(other: float) -> None:
    assert _difference(_outcome(0.3, 1e-3), _outcome(0.3, other), _FLOAT32) == "the gradient of bias differs"
    assert not _difference(_outcome(0.3, 1e-3), _outcome(0.3, 1e-3), _FLOAT32)


def _texts(num_minibatches: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(VOCABULARY, (4, 3), generator=generator),
            torch.randint(VOCABULARY, (4, 3), generator=generator),
        )
        for _ in range(num_minibatches)
    ]


def test_a_little_state_that_the_outer_forward_carries_is_found_in_a_float32_model() -> None:
    """Losses were compared to 1e-4, and gradients while there was no state."""
    torch.manual_seed(5)
    model, data = Truncated(), _texts(2)
    cut = cut_model(model, *data[0], cross_entropy)
    assert "lower" in cut.layer_names
    bad = check_cuts(cut, data, cross_entropy)
    assert "lower" in [cut.offered[place].name for place in bad]
    without_state = cross_entropy(model(data[1][0]), data[1][1]).item()
    assert abs(cross_entropy(model(data[1][0]), data[1][1]).item() - without_state) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_of_float64_that_computes_in_float32_inside_may_be_cut(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    data = _texts(2)
    cut = cut_model(Rotary().to(dtype), *data[0], cross_entropy)
    assert len(cut.offered) > 4
    assert check_cuts(cut, data, cross_entropy) == {}


def test_a_cut_is_checked_on_another_minibatch_than_the_traced_one() -> None:
    data = [(torch.randn(3, length, WIDTH), torch.arange(3)) for length in (2, 3)]
    cut = cut_model(LongOnes(), *data[0], cross_entropy)
    assert check_cuts(cut, data[:1], cross_entropy) == {}
    assert {cut.offered[place].name for place in check_cuts(cut, data, cross_entropy)} == {"second"}


class _Float32Only(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        out: Tensor = self.second(self.first(x))
        return out


def test_a_model_that_does_not_compute_in_float64_is_checked_in_its_own() -> None:
    data = [(torch.randn(3, WIDTH), torch.arange(3))]
    model = _Float32Only()
    cut = cut_model(model, *data[0], cross_entropy)
    assert check_cuts(cut, data, cross_entropy) == {}
    assert model.first.weight.dtype == torch.get_default_dtype() == torch.float32
