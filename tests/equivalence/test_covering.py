"""Tests covering_rows(): its rows contain every pair of values and obey the given rule."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from covering import covering_rows, pairs_of, parametrize_pairs
from hypothesis import given
from hypothesis import strategies as st


def _anything(row: dict[str, Any]) -> bool:
    return True


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_every_pair_that_an_allowed_row_holds_is_held_by_an_allowed_row(
    sizes: list[int], random: Any
) -> None:
    factors = {f"factor {i}": list(range(size)) for i, size in enumerate(sizes)}
    everything = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    refused = random.sample(everything, len(everything) // 4)

    def allowed(row: dict[str, Any]) -> bool:
        # A partial row is refused if every whole row that completes it is refused.
        return any(row.items() <= other.items() for other in everything if other not in refused)

    rows = covering_rows(factors, allowed)
    possible = set().union(*(pairs_of(factors, row) for row in everything if row not in refused))
    assert set().union(set(), *(pairs_of(factors, row) for row in rows)) == possible
    assert not [row for row in rows if row in refused]


def test_rows_are_few_and_the_same_at_every_call() -> None:
    factors = {str(i): range(4) for i in range(8)}
    rows = covering_rows(factors, _anything)
    assert rows == covering_rows(factors, _anything)
    # 16 rows are the least for the pairs of two factors; all combinations are 65,536.
    assert 16 <= len(rows) <= 36


def test_a_test_is_parametrized_by_fewer_rows_with_every_pair() -> None:
    names, rows = parametrize_pairs(a="xyz", b=(1, 2), c=(None, True)).args
    assert names == ("a", "b", "c")
    assert len(rows) < 3 * 2 * 2
    for places in itertools.combinations(range(3), 2):
        values = {tuple(row[place] for place in places) for row in rows}
        assert len(values) == (4 if 0 not in places else 6)


def test_given_rows_are_completed_and_their_values_kept() -> None:
    factors = {"a": "xyz", "b": (1, 2), "c": (True, False)}
    given_rows = [{"a": "x", "b": 1}, {"a": "x", "b": 1}]
    rows = covering_rows(factors, _anything, given_rows)
    assert [{"a": row["a"], "b": row["b"]} for row in rows[:2]] == given_rows
    assert all(row.keys() == factors.keys() for row in rows)


def test_a_given_row_that_nothing_can_complete_is_an_error() -> None:
    with pytest.raises(LookupError, match="'a': 1"):
        covering_rows({"a": (1, 2), "b": (1, 2)}, lambda row: row.get("a") != 1 or "b" not in row, [{"a": 1}])
