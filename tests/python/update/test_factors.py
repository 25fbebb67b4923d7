"""Tests factors.py: when factors are pushed, in what form they are sent, and which gradient is computed from
them."""

from __future__ import annotations

import pytest
import torch
from pipedream.model.factored import Factors
from pipedream.planning.factor_rule import are_smaller
from pipedream.update.factors import FactorLayer, RoundFactors, factors_of, item_of, mean_product


def _layer(num_rows: int = 4, outputs: int = 3, inputs: int = 5) -> FactorLayer:
    return FactorLayer("fc.weight", 0, num_rows, outputs, inputs, torch.float64)


def _factors(num_rows: int, seed: int = 0) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    return Factors(
        *(torch.randn(num_rows, width, generator=generator, dtype=torch.float64) for width in (3, 5))
    )


@pytest.mark.parametrize("num_replicas", [2, 3, 8])
def test_factors_are_smaller_below_two_m_n_over_r_m_plus_n_rows(num_replicas: int) -> None:
    rows = 2 * 4096 * 1024 // (num_replicas * (4096 + 1024))
    fewer, more = _layer(rows, 4096, 1024), _layer(rows + 1, 4096, 1024)
    assert are_smaller(fewer.factor_bytes, fewer.weight_bytes, num_replicas)
    assert not are_smaller(more.factor_bytes, more.weight_bytes, num_replicas)


def test_all_uses_of_a_round_are_one_below_the_other_in_memory_of_their_own() -> None:
    round_factors, uses = RoundFactors([_layer(7)]), [_factors(4, 1), _factors(3, 2)]
    for use in uses:
        round_factors.add("fc.weight", *use)
    assert round_factors.num_bytes == 7 * 8 * 8
    expected = uses[0].gradients.t() @ uses[0].inputs + uses[1].gradients.t() @ uses[1].inputs
    for use in uses:
        use.gradients.zero_()
    (taken,) = round_factors.take()
    assert taken is not None
    torch.testing.assert_close(taken.gradients.t() @ taken.inputs, expected, rtol=1e-12, atol=0.0)
    assert round_factors.take() == [None]


def test_more_rows_than_planned_are_refused() -> None:
    round_factors = RoundFactors([_layer(4)])
    round_factors.add("fc.weight", *_factors(5))
    with pytest.raises(ValueError, match=r"'fc\.weight' 5 rows at one replica, .* planned for 4"):
        round_factors.take()


def test_an_item_says_which_layers_have_none() -> None:
    layers, factors = [_layer(), _layer(), _layer()], [_factors(4), None, _factors(0)]
    item = item_of(layers, factors, torch.device("cpu"))
    assert [tuple(tensor.shape) for tensor in item] == [(3,), (4, 3), (4, 5), (0, 3), (0, 5), (0, 3), (0, 5)]
    found = factors_of(item)
    assert found[1] is None
    assert all(
        one is not None and other is not None and all(map(torch.equal, one, other))
        for one, other in zip(found[::2], factors[::2], strict=True)
    )


def test_the_mean_is_over_all_members_also_those_without_a_gradient() -> None:
    factors = {2: _factors(2, 2), 0: _factors(4, 0)}
    expected = sum(of_member.gradients.t() @ of_member.inputs for of_member in factors.values()) / 3
    before = factors[0].gradients.clone()
    mean = mean_product(factors, 3)
    torch.testing.assert_close(mean, expected, rtol=1e-12, atol=0.0)
    assert torch.equal(mean, mean_product(dict(sorted(factors.items())), 3))
    assert torch.equal(factors[0].gradients, before)


def test_no_rows_make_a_gradient_of_zeros() -> None:
    assert torch.equal(mean_product({0: _factors(0)}, 1), torch.zeros(3, 5, dtype=torch.float64))
