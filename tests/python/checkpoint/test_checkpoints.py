"""Tests Checkpoints: its arguments, and the checkpoint from which a run continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pipedream
import pytest
import torch
from pipedream import Plan
from pipedream.checkpoint.checkpoints import Checkpoints, checkpoints_of
from torch import nn
from written_checkpoints import write_checkpoint


def _write(path: Path, *minibatches: int) -> list[Path]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return [write_checkpoint(path, model, Plan.straight(2, 2), minibatch) for minibatch in minibatches]


def test_a_plain_path_stands_for_checkpoints(tmp_path: Path) -> None:
    assert checkpoints_of(str(tmp_path)) == pipedream.Checkpoints(str(tmp_path))
    assert checkpoints_of(None) is None
    with pytest.raises(TypeError, match="checkpoints is a int: give the path of a folder"):
        checkpoints_of(3)


@pytest.mark.parametrize(
    ("every", "minibatches", "seconds"),
    [("epoch", None, None), (50, 50, None), ("10min", None, 600.0), ("1.5 h", None, 5400.0)],
)
def test_every_is_an_epoch_a_number_or_a_time(every: Any, minibatches: Any, seconds: Any) -> None:
    checkpoints = Checkpoints("C", every=every)
    assert (checkpoints.minibatches, checkpoints.seconds) == (minibatches, seconds)


@pytest.mark.parametrize(
    "arguments",
    [
        {"every": 0},
        {"every": True},
        {"every": "10"},
        {"every": "0s"},
        {"keep": 0},
        {"grace": -1},
        {"resume": 3},
        {"path": ""},
    ],
    ids=str,
)
def test_what_is_mistaken_is_refused_by_name(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises((TypeError, ValueError), match=f"^checkpoints: {name} is "):
        Checkpoints(**{"path": "C", **arguments})


def test_a_run_continues_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).find() is None
    first, second = _write(tmp_path, 6, 12)
    (second / "stage-0.json").unlink()
    found = Checkpoints(tmp_path).find()
    assert found is not None and found.checkpoint == first and found.manifest.header.minibatch == 6
    assert "stage-0.json is missing" in found.unused[0]


def test_a_folder_in_which_nothing_is_whole_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (only,) = _write(tmp_path, 6)
    (only / "stage-0.json").unlink()
    with pytest.raises(ValueError, match=r"no checkpoint of .* is whole .*stage-0\.json is missing"):
        Checkpoints(tmp_path).find()
    (only / "checkpoint.json").unlink()  # A run that ends before its first checkpoint leaves such a folder.
    assert Checkpoints(tmp_path).find() is None


def test_without_resume_a_folder_that_has_any_is_refused(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, resume=False).find() is None
    _write(tmp_path, 6)
    with pytest.raises(ValueError, match=r"resume is False, and .* has checkpoint-000000006: give another"):
        Checkpoints(tmp_path, resume=False).find()


def test_a_checkpoint_is_named_to_continue_from(tmp_path: Path) -> None:
    first, second = _write(tmp_path, 6, 12)
    found = Checkpoints(tmp_path, resume=second).find()
    assert found is not None and found.checkpoint == second
    found = Checkpoints(tmp_path / "new", resume=first).find()
    assert found is not None and found.checkpoint == first
    with pytest.raises(ValueError, match=r"has newer ones, as checkpoint-000000012, which this run would"):
        Checkpoints(tmp_path, resume=first).find()
    with pytest.raises(ValueError, match="is no checkpoint and no folder"):
        Checkpoints(tmp_path, resume=tmp_path / "none").find()
