"""Tests ItemCost: the cost measured for a number of microbatches, and the interpolation between measured
numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipedream.common.document import read_value, write_value
from pipedream.planning.item_cost import ItemCost

_MS = st.floats(0.0, 100.0)
_PIECES = st.dictionaries(st.integers(2, 16), st.tuples(_MS, _MS), max_size=3)


@given(_MS, _PIECES)
def test_what_was_measured_is_said_again(whole_ms: float, pieces_ms: dict[int, tuple[float, float]]) -> None:
    cost = ItemCost.of_pieces(whole_ms, pieces_ms)
    assert cost.first(1) == pytest.approx(whole_ms)
    for m, (first_ms, later_ms) in pieces_ms.items():
        assert cost.first(m) == pytest.approx(first_ms, abs=1e-9)
        assert cost.later(m) == pytest.approx(later_ms, abs=1e-9)


@given(_MS, _PIECES, _MS, _PIECES, st.integers(1, 32))
def test_sums_and_products_are_those_of_the_items(
    one_ms: float,
    one: dict[int, tuple[float, float]],
    other_ms: float,
    other: dict[int, tuple[float, float]],
    m: int,
) -> None:
    first, second = ItemCost.of_pieces(one_ms, one), ItemCost.of_pieces(other_ms, other)
    for of in (ItemCost.first, ItemCost.later):
        if m > 1 or of is ItemCost.first:
            measured = sorted({1, *one, *other})
            if m in measured:  # costs add up only where one of them was measured, and not in between
                assert of(first.plus(second), m) == pytest.approx(of(first, m) + of(second, m), abs=1e-9)
            assert of(first.scaled(0.25), m) == pytest.approx(of(first, m) / 4, abs=1e-9)


def test_between_what_was_measured_the_distance_from_the_line_changes_with_the_samples() -> None:
    # A whole minibatch takes 1.2 ms, a half also 1.2 ms, and a quarter 0.6 ms. The line goes through the
    # whole minibatch and the quarter.
    cost = ItemCost.of_pieces(1.2, {2: (1.2, 1.2), 4: (0.6, 0.5)})
    assert (cost.first_ms, cost.minibatch_ms) == (pytest.approx(0.4), pytest.approx(0.8))
    assert cost.first(3) == pytest.approx(0.4 + 0.8 / 3 + 0.4 * (1 / 3 - 1 / 4) / (1 / 2 - 1 / 4))
    # For more microbatches than were measured the cost follows the line.
    assert cost.first(8) == pytest.approx(0.4 + 0.8 / 8)
    assert cost.later(8) == pytest.approx(0.3 + 0.8 / 8)


def test_what_grows_with_the_samples_grows_where_it_was_measured_too() -> None:
    cost = ItemCost.of_pieces(1.0, {2: (0.75, 0.5), 4: (0.625, 0.375)})
    twice = cost.growing(2.0)
    for m in (1, 2, 4):
        assert twice.first(m) - cost.first(m) == pytest.approx(cost.minibatch_ms / m)
    assert twice.later(2) - cost.later(2) == pytest.approx(cost.minibatch_ms / 2)


def test_it_is_the_same_from_its_file() -> None:
    for cost in (ItemCost(1.0, 0.5, 2.0), ItemCost.of_pieces(1.0, {4: (0.5, 0.25), 2: (0.75, 0.5)})):
        assert read_value("item", write_value(cost), ItemCost) == cost
    assert "measured" not in write_value(ItemCost(1.0))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(1, 1.0, 1.0)], r"item.measured has num_microbatches \[1\]: give ascending numbers, from 2 on"),
        ([(2, -1.0, 1.0)], r"item.measured\[0\].first_ms is -1.0"),
        ([(2, 1.0, "x")], r"item.measured\[0\].later_ms is 'x'"),
        ([(2, 1.0, 1.0), (2, 2.0, 2.0)], r"item.measured has num_microbatches \[2, 2\]"),
    ],
)
def test_a_file_that_says_what_cannot_be_is_refused(rows: list[tuple[Any, ...]], message: str) -> None:
    names = ("num_microbatches", "first_ms", "later_ms")
    measured = [dict(zip(names, row, strict=True)) for row in rows]
    with pytest.raises(ValueError, match=message):
        read_value("item", write_value(ItemCost(1.0, 1.0, 1.0)) | {"measured": measured}, ItemCost)
