"""split_check.py: what counts as a difference. What the check finds in models is tested with the profiler."""

from __future__ import annotations

import pytest
import torch
from pipedream.model.split_check import _difference, _Outcome


def _outcome(largest: float, other: float) -> _Outcome:
    return _Outcome([1.0], {"head": torch.tensor([largest]), "bias": torch.tensor([other, 0.0])}, {})


def test_a_gradient_that_is_nothing_but_rounding_is_no_difference() -> None:
    # Of a norm's bias in front of another one: of timm's levit_128s 25 of 141 cuts were left out for it.
    assert not _difference(_outcome(0.306, 1.27e-7), _outcome(0.306, 0.88e-7))


@pytest.mark.parametrize("other", [0.0, 0.99e-3, -1e-3, float("nan"), float("inf")])
def test_a_small_gradient_that_differs_is_found(other: float) -> None:
    assert _difference(_outcome(0.3, 1e-3), _outcome(0.3, other)) == "the gradient of bias differs"
    assert not _difference(_outcome(0.3, 1e-3), _outcome(0.3, 1e-3))
