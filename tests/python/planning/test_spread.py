"""Tests how the spread of items' times is measured, and how a simulation draws from it. A spread has a deck
of 20 factors for each kind of item. A factor is an item's time divided by the mean of its neighbours in time.
"""

from __future__ import annotations

import pytest
from pipedream.common.document import read_value, write_value
from pipedream.planning.item_cost import EVEN, Spread, measured_spread, shuffler


def test_even_items_have_factors_of_one_and_a_slow_change_is_no_spread() -> None:
    times = [[2.0] * 50, [1.0 + index / 1000 for index in range(50)]]
    (factors,) = measured_spread({"FORWARD": times}).values()
    assert factors == pytest.approx([1.0] * 20, abs=0.011)


def test_stalls_are_kept_and_the_mean_is_one() -> None:
    (factors,) = measured_spread({"UPDATE": [([1.0] * 9 + [11.0]) * 20]}).values()
    assert sum(factors) == pytest.approx(20)
    assert factors[:18] == pytest.approx([0.5] * 18, rel=0.3)  # 0.5 is 1 ms divided by the mean of 2 ms
    assert min(factors[18:]) > 4.5


def test_too_few_items_say_nothing() -> None:
    assert measured_spread({"FORWARD": [[1.0, 2.0]], "UPDATE": []}) == EVEN


def test_every_deck_has_all_factors_and_workers_draw_in_an_order_of_their_own() -> None:
    factors = tuple(index / 10 for index in range(20))
    drawn = []
    for worker in range(2):
        shuffled = shuffler({"FORWARD": factors})
        decks = [shuffled(worker, "FORWARD") for _ in range(2)]
        assert all(sorted(deck) == list(factors) for deck in decks)
        drawn += decks
    assert len(set(map(tuple, drawn))) == 4


def test_a_spread_is_the_same_from_its_fields() -> None:
    spread = {"BACKWARD": (0.5, 1.5)}
    assert read_value("spread", write_value(spread), Spread) == spread
    with pytest.raises(ValueError, match=r"spread.BACKWARD\[0\] is 'x'"):
        read_value("spread", {"BACKWARD": ["x"]}, Spread)
