"""Tests shapes: the largest sizes of a minibatch's entries, by name. Each kind of minibatch has shapes of its
own, for which memory is planned."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream import FileFormatError, LayerProfile, Plan, Profile, partition
from pipedream.planning.shapes import (
    NUM_KINDS_MAX,
    cover,
    cover_sizes,
    larger_of,
    next_kind,
    shapes_of,
    with_apart,
)


def _tensor(*shape: int) -> Any:
    return SimpleNamespace(shape=shape)


@dataclass
class _Batch:
    tokens: Any
    name: str = ""


def test_entries_are_named_as_the_data_name_them() -> None:
    pair = (_tensor(2, 3), [_tensor(2), {"mask": _tensor(2, 4)}])
    assert shapes_of(pair) == {"inputs": (2, 3), "targets[0]": (2,), "targets[1].mask": (2, 4)}
    assert shapes_of({"input_ids": _tensor(2, 9), "epoch": 3}) == {"input_ids": (2, 9)}
    assert shapes_of(_Batch(_tensor(5))) == {"tokens": (5,)}


def test_the_larger_size_counts_in_every_dimension() -> None:
    assert larger_of({"x": (2, 9)}, {"x": (4, 3), "y": (1,)}) == {"x": (4, 9), "y": (1,)}
    assert larger_of({"x": (2, 9)}, {"x": (4,)}) == {"x": (2, 9)}


def test_a_plan_has_the_shapes_of_its_profile_and_of_what_it_is_to_fit() -> None:
    profile = Profile(
        (LayerProfile("a", 1.0, 1.0, 8, 8), LayerProfile("b", 1, 1, 0, 8)), max_shapes={"x": (2, 9)}
    )
    assert Profile.from_dict(profile.to_dict()).max_shapes == {"x": (2, 9)}
    plan = partition(profile, 2, "1Gbit/s").fitting({"x": _tensor(4, 3)}, {"x": _tensor(1, 1)})
    assert plan.max_shapes == {"x": (4, 9)}
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.hash() == partition(profile, 2, "1Gbit/s").hash()
    assert "max_shapes" not in Plan.straight(2, 2).to_dict()


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        ([{"x": _tensor(1)}, {"x": _tensor(2)}, {"x": _tensor(3)}], "list of 3"),
        (_tensor(2, 3), "SimpleNamespace"),
        ({"x": 3}, "dict"),
        (None, "NoneType"),
    ],
)
def test_what_is_no_minibatch_is_not_taken_for_one_to_fit(batch: Any, what: str) -> None:
    """Such a value must raise an error. Otherwise it would leave the plan unchanged, and the user would not
    notice.
    """
    with pytest.raises(TypeError, match=f"a {what} is no minibatch with tensors"):
        Plan.straight(2, 2).fitting(batch)


@pytest.mark.parametrize("shapes", [{"x": 3}, {"x": [-1]}, [4], {"x": ["4"]}])
def test_a_file_with_other_than_shapes_is_refused(shapes: Any) -> None:
    with pytest.raises(FileFormatError, match="max_shapes"):
        Plan.from_dict(Plan.straight(2, 2).to_dict() | {"max_shapes": shapes})


def test_shapes_that_are_apart_are_those_that_no_other_covers() -> None:
    long, wide = {"x": _tensor(2, 9)}, {"x": _tensor(6, 3)}
    assert with_apart([], [long, wide, {"x": _tensor(2, 3)}]) == ({"x": (2, 9)}, {"x": (6, 3)})
    assert with_apart([{"x": (2, 9)}], [{"x": _tensor(2, 10)}]) == ({"x": (2, 10)},)
    assert not cover([{"x": (2, 9)}], {"x": (2, 9), "y": (1,)})


def test_what_lies_between_two_kinds_is_covered() -> None:
    kinds = [{"x": (2, 128), "y": (2,)}, {"x": (16, 16), "y": (16,)}]
    for size, length in ((4, 64), (8, 32), (5, 51), (2, 128), (16, 2), (1, 1)):
        assert cover(kinds, {"x": (size, length), "y": (size,)})
    for size, length in ((4, 65), (5, 52), (17, 1), (1, 129)):
        assert not cover(kinds, {"x": (size, length), "y": (size,)})
    assert with_apart(kinds, [{"x": _tensor(8, 32), "y": _tensor(8)}]) == tuple(kinds)


@settings(max_examples=200)
@given(st.lists(st.tuples(*[st.integers(1, 40)] * 3), min_size=3, max_size=4))
def test_no_product_of_sizes_is_more_than_for_one_of_the_kinds_that_cover_it(
    sizes: list[tuple[int, ...]],
) -> None:
    *kinds, one = sizes
    if cover_sizes(kinds, one):
        for powers in itertools.product(range(3), repeat=3):
            takes = [math.prod(size**power for size, power in zip(k, powers, strict=True)) for k in sizes]
            assert takes[-1] <= max(takes[:-1]) * (1 + 1e-6)


# The test makes batches of sizes (length, 100 - length). None of these sizes covers another one or lies
# between two others, so each length is a kind of its own.
_LENGTHS = st.lists(st.integers(1, 99), min_size=NUM_KINDS_MAX + 1, max_size=60, unique=True)


@settings(max_examples=100)
@given(_LENGTHS, st.integers(1, 9))
def test_more_kinds_than_are_rehearsed_become_larger_ones_that_cover_each(
    lengths: list[int], every: int
) -> None:
    batches = [{"x": _tensor(length, 100 - length), "y": _tensor(length)} for length in lengths]
    for batch in batches[::every]:
        batch["z"] = _tensor(1)  # an entry that other batches do not have
    kinds = with_apart([], batches)
    assert len(kinds) == NUM_KINDS_MAX
    assert all(cover(kinds, shapes_of(batch)) for batch in batches)


def test_those_two_become_one_that_are_smallest_together() -> None:
    kinds = tuple({"x": (size, 40 - 2 * size)} for size in range(1, NUM_KINDS_MAX + 1))
    assert with_apart(kinds, []) == kinds
    # (1, 38) and (2, 36) become (2, 38), which is smaller than what any other pair would become.
    assert with_apart(kinds, [{"x": _tensor(17, 6)}]) == (*kinds[2:], {"x": (17, 6)}, {"x": (2, 38)})
    assert next_kind(kinds, {"x": (17, 6)}, are_apart=True) == {"x": (17, 8)}
    assert next_kind(kinds[1:], {"x": (17, 6)}, are_apart=True) == {"x": (17, 6)}
    assert next_kind(kinds, {"x": (17, 6)}, are_apart=False) == {"x": (17, 38)}


def test_kinds_that_no_minibatch_can_be_as_large_as_stay_apart() -> None:
    kinds = tuple({"x": (1,) * num_dims} for num_dims in range(1, NUM_KINDS_MAX + 1))
    batch = {"x": _tensor(*[1] * (NUM_KINDS_MAX + 1))}
    assert with_apart(kinds, [batch]) == (*kinds, shapes_of(batch))
    assert next_kind(kinds, shapes_of(batch), are_apart=True) == shapes_of(batch)


def test_a_plan_with_both_kinds_of_shapes_is_refused() -> None:
    """With both, memory would be planned for a mixture of the two."""
    with pytest.raises(ValueError, match="max_shapes and shapes_apart are both given") as refused:
        Plan(Plan.straight(2, 2).stages, max_shapes={"x": (4, 4)}, shapes_apart=({"x": (2, 9)},))
    assert "\n" not in str(refused.value)
    fields = Plan.straight(2, 2).fitting({"x": _tensor(4, 4)}).to_dict()
    with pytest.raises(FileFormatError, match="both given"):
        Plan.from_dict(fields | {"shapes_apart": [{"x": [2, 9]}]})


def test_a_plan_keeps_them_and_drops_the_largest_of_each_dimension() -> None:
    plan = Plan.straight(2, 2).fitting({"x": _tensor(4, 4)})
    apart = plan.fitting({"x": _tensor(2, 9)}, {"x": _tensor(6, 3)}, apart=True)
    assert apart.max_shapes == {}
    assert apart.shapes_apart == ({"x": (2, 9)}, {"x": (6, 3)})
    assert Plan.from_dict(apart.to_dict()) == apart
    with pytest.raises(ValueError, match="apart=True for these, too"):
        apart.fitting({"x": _tensor(9, 9)})
    with pytest.raises(FileFormatError, match=r"shapes_apart\[0\]"):
        Plan.from_dict(plan.to_dict() | {"shapes_apart": [4]})
