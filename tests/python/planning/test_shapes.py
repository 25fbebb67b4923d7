"""The largest shapes of a minibatch's entries, by name."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from pipedream import FileFormatError, LayerProfile, Plan, Profile, partition
from pipedream.planning.shapes import larger_of, shapes_of


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
    """It was taken, and the plan stayed as it was."""
    with pytest.raises(TypeError, match=f"a {what} is no minibatch with tensors"):
        Plan.straight(2, 2).fitting(batch)


@pytest.mark.parametrize("shapes", [{"x": 3}, {"x": [-1]}, [4], {"x": ["4"]}])
def test_a_file_with_other_than_shapes_is_refused(shapes: Any) -> None:
    with pytest.raises(FileFormatError, match="max_shapes"):
        Plan.from_dict(Plan.straight(2, 2).to_dict() | {"max_shapes": shapes})
