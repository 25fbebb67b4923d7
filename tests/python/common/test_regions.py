"""Tests regions.py: which code runs inside which regions, and in which order they are entered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pipedream.common.regions import entered, within


def test_the_first_region_is_outermost_and_each_is_made_anew() -> None:
    seen: list[str] = []

    def region(name: str) -> contextlib.AbstractContextManager[None]:
        @contextlib.contextmanager
        def around() -> Iterator[None]:
            seen.append(f"{name} in")
            yield
            seen.append(f"{name} out")

        return around()

    for _ in range(2):
        with entered([lambda: region("outer"), lambda: region("inner")]):
            seen.append("work")
    assert seen == 2 * ["outer in", "inner in", "work", "inner out", "outer out"]


def test_without_a_region_a_function_is_itself() -> None:
    assert within(None, max) is max


def test_a_function_within_a_region_runs_inside_it_each_time() -> None:
    inside: list[bool] = [False]

    @contextlib.contextmanager
    def region() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    look = within(region, lambda value: (value, inside[0]))
    assert [look(1), look(2)] == [(1, True), (2, True)]
    assert not inside[0]
