"""Tests errors.afterwards: the fate of an error in a clean-up after another error."""

from __future__ import annotations

import pytest
from pipedream.common.errors import PipelineError, afterwards


def _fail() -> None:
    raise RuntimeError("CUDA error: device-side assert triggered")


def test_it_cleans_up_once_whatever_happens() -> None:
    cleaned: list[int] = []
    with afterwards(lambda: cleaned.append(1)):
        assert not cleaned
    assert cleaned == [1]
    with pytest.raises(KeyError), afterwards(lambda: cleaned.append(2)):
        raise KeyError("gone")
    assert cleaned == [1, 2]


def test_an_error_while_cleaning_up_does_not_replace_the_first() -> None:
    first = PipelineError("stage 1 at minibatch 3 (FORWARD): cuda:0: device-side assert triggered")
    with pytest.raises(PipelineError) as caught, afterwards(_fail):
        raise first
    assert caught.value is first
    if hasattr(first, "__notes__"):  # Python has notes from 3.11 on
        assert first.__notes__ == [
            "and then, while cleaning up: RuntimeError: CUDA error: device-side assert triggered"
        ]


def test_an_error_while_cleaning_up_is_told_where_it_is_the_only_one() -> None:
    with pytest.raises(RuntimeError, match="CUDA error"), afterwards(_fail):
        pass
