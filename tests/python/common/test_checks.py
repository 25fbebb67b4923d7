"""Tests checks.py: which values count as numbers, and the errors for values that do not."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from pipedream.common.checks import check_choice, check_count, check_output_file, is_number, is_whole


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


def test_a_file_that_can_be_made_or_overwritten_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_output_file("new.json")
    Path("old.json").touch()
    check_output_file("old.json", "trace")
    assert not Path("new.json").exists()
    check_output_file("/dev/null")


def test_a_file_that_cannot_be_written_is_named_with_its_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^trace is 'gone/t\.json': there is no folder /.*/gone$"):
        check_output_file("gone/t.json", "trace")
    with pytest.raises(ValueError, match=r"^gone/t\.json: there is no folder"):
        check_output_file("gone/t.json")
    with pytest.raises(ValueError, match=r"^\.: is a folder, give a file$"):
        check_output_file(".")
    forbidden = {str(tmp_path), str(tmp_path / "old.json")}
    Path("old.json").touch()
    # Makes files look as they do for an ordinary user. The tests may run as root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) not in forbidden)
    for name in ("new.json", "old.json"):
        with pytest.raises(ValueError, match=f"^trace is '{name}': may not be written"):
            check_output_file(name, "trace")
