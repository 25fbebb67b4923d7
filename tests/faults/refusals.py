"""Assertions that tests of refusals share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["assert_says", "refused"]


def refused(call: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    """Asserts that the call raises exactly this kind of error, in one line with these words."""
    with pytest.raises(kind) as caught:
        call()
    assert_says(caught.value, kind, *words)


def assert_says(error: BaseException | None, kind: type[Exception], *words: str) -> None:
    assert type(error) is kind, repr(error)
    assert "\n" not in str(error)
    for word in words:
        assert word in str(error)
