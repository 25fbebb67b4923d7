"""Tests precision.py: which values autocast may have, and when the loss scale of float16 changes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipedream.model.precision import LossScaler, autocast_dtype, autocast_region

_INITIAL = LossScaler.INITIAL_SCALE


@pytest.mark.parametrize(
    ("autocast", "dtype"),
    [
        (None, None),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
)
def test_autocast_is_a_name_or_a_dtype(autocast: Any, dtype: torch.dtype | None) -> None:
    assert autocast_dtype(autocast) is dtype


@pytest.mark.parametrize("autocast", ["float32", "fp16", True, torch.float64, [], 16])
def test_another_autocast_is_refused_in_one_line(autocast: Any) -> None:
    with pytest.raises(ValueError, match="use 'bfloat16', 'float16' or None") as caught:
        autocast_dtype(autocast)
    assert str(caught.value).startswith(f"autocast is {autocast!r}")


def test_a_region_casts_inside_only_and_none_never() -> None:
    layer, values = torch.nn.Linear(2, 2), torch.ones(1, 2)
    with autocast_region("cpu", torch.bfloat16):
        assert layer(values).dtype == torch.bfloat16
    with autocast_region("cpu", None):
        assert layer(values).dtype == torch.float32


def test_each_region_casts_the_parameters_that_are_bound_in_it() -> None:
    # In a single region torch would use its first cast of the parameter again.
    layer, values = torch.nn.Linear(1, 1, bias=False), torch.ones(1, 1)
    outputs = []
    for value in (1.0, 2.0):
        layer._parameters["weight"] = torch.nn.Parameter(torch.full((1, 1), value))
        with autocast_region("cpu", torch.bfloat16):
            outputs.append(layer(values).item())
    assert outputs == [1.0, 2.0]


def _scales(distance: int, overflows: list[bool]) -> list[float]:
    """Returns the scales in units of the initial scale."""
    scaler = LossScaler(distance)
    return [scaler.next_scale(overflowed) / _INITIAL for overflowed in overflows]


def test_every_overflow_halves_the_scale_where_one_minibatch_lies_between() -> None:
    assert _scales(1, [False, True, True, False, True]) == [1, 0.5, 0.25, 0.25, 0.125]


def test_overflows_of_minibatches_that_were_under_way_say_nothing_new() -> None:
    # 3 minibatches are in flight, so two more of them used the scale that was too large.
    assert _scales(3, [False, True, True, True, True, False]) == [1, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_the_first_overflow_always_counts() -> None:
    assert _scales(5, [True]) == [0.5]


def test_the_scale_grows_after_as_long_as_torchs_without_an_overflow() -> None:
    interval = LossScaler.GROWTH_INTERVAL
    assert torch.amp.GradScaler("cpu", enabled=True).get_growth_interval() == interval
    assert torch.amp.GradScaler("cpu", enabled=True).get_scale() == _INITIAL
    scales = _scales(1, [False] * (2 * interval + 1))
    # Minibatch `interval` is the first one that comes after `interval` minibatches without an overflow.
    assert (scales[0], scales[interval - 1], scales[interval], scales[2 * interval]) == (1, 1, 2, 4)
    after_overflow = _scales(1, [False] * 10 + [True] + [False] * interval)
    assert (after_overflow[10], after_overflow[-2], after_overflow[-1]) == (0.5, 0.5, 1)


@given(st.integers(1, 6), st.lists(st.booleans(), max_size=200))
def test_the_scale_stays_a_positive_power_of_two_and_halves_at_most_once_in_a_distance(
    distance: int, overflows: list[bool]
) -> None:
    scales = [1.0, *_scales(distance, overflows)]
    halved = [i for i in range(1, len(scales)) if scales[i] == scales[i - 1] / 2]
    assert all(scales[i] in (scales[i - 1], scales[i - 1] / 2) for i in range(1, len(scales)))
    assert all(later - earlier >= distance for earlier, later in itertools.pairwise(halved))


def test_the_scale_has_a_smallest_value() -> None:
    scaler = LossScaler(1)
    scales = [scaler.next_scale(True) for _ in range(100)]
    assert scales[-1] == scales[-2] > 0
