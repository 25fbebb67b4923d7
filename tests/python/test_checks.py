"""checks.py: what counts as a number, and the lines that name what does not."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pipedream.checks import check_choice, check_count, is_number, is_whole


@pytest.mark.parametrize("value", [0, -3, 10**400])
def test_an_int_is_whole(value: Any) -> None:
    assert is_whole(value)


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_bools_floats_and_texts_are_not_whole(value: Any) -> None:
    assert not is_whole(value)


@pytest.mark.parametrize("value", [0, -1.5, 1e300])
def test_finite_ints_and_floats_are_numbers(value: Any) -> None:
    assert is_number(value)


@pytest.mark.parametrize("value", [True, math.inf, -math.inf, math.nan, 10**400, "1", None])
def test_what_is_no_finite_float_is_no_number(value: Any) -> None:
    assert not is_number(value)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_a_count_below_one_or_of_another_kind_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=f"epochs is {value!r}: give a whole number of at least 1"):
        check_count("epochs", value)


def test_an_unknown_choice_is_named_with_all_that_there_are() -> None:
    with pytest.raises(ValueError, match="gather is 'rank1': use one of 'rank0', 'all'"):
        check_choice("gather", "rank1", ("rank0", "all"))
