"""Tests the folder of checkpoints: which are complete, torn or corrupted, and which are kept."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from pipedream import FileFormatError, Plan
from pipedream.checkpoint.checkpoint_folder import (
    checkpoints_in,
    find_checkpoint,
    folder_of,
    go_on_after,
    is_complete,
    newest_whole,
    pin,
    remove_incomplete,
    remove_old,
)
from pipedream.checkpoint.manifest import read_manifest, read_part, write_manifest, write_whole
from torch import nn
from written_checkpoints import header_of, write_checkpoint

PLAN = Plan.replicated(3, [1, 2])


def _make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _write(path: Path, *minibatches: int) -> list[Path]:
    return [write_checkpoint(path, _make_model(), PLAN, minibatch) for minibatch in minibatches]


def test_a_manifest_says_what_was_written(tmp_path: Path) -> None:
    (folder,) = _write(tmp_path, 6)
    manifest = read_manifest(folder)
    assert manifest.header == header_of(PLAN, 6)
    assert [(part.stage, part.replica) for part in manifest.parts] == [(0, 0), (1, 0), (1, 1)]
    assert {file.name for file in manifest.files} | {"checkpoint.json"} == {
        path.name for path in folder.iterdir()
    }
    assert [file.version for file in manifest.parts[0].of_kind("version")] == [5, 6]
    assert [file.name for file in manifest.parts[0].newest_weights] == ["stage-0-version-6.safetensors"]
    fields = json.loads((folder / "checkpoint.json").read_text())
    assert fields["format"] == "pipedream.checkpoint/1"
    _, _, state = read_part(folder / "stage-0.json")
    assert state["best"] == float("inf")


def test_a_checkpoint_is_complete_with_the_last_of_its_parts(tmp_path: Path) -> None:
    model = _make_model()
    folder = write_checkpoint(tmp_path, model, PLAN, stages=[1])
    assert not is_complete(folder) and newest_whole(tmp_path)[0] is None
    write_checkpoint(tmp_path, model, PLAN, stages=[0])
    assert is_complete(folder) and newest_whole(tmp_path) == ((folder, read_manifest(folder)), [])


def test_parts_of_two_runs_make_no_checkpoint(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, _make_model(), PLAN, stages=[1], run="before")
    with pytest.raises(FileFormatError, match="of another run"):
        write_checkpoint(tmp_path, _make_model(), PLAN, stages=[0], run="after")
    assert not is_complete(folder)


def test_a_file_whose_writing_fails_is_not_left(tmp_path: Path) -> None:
    def write(file: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "stage-0.json", "state", write)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut off", "longer", "changed", "missing", "manifest"])
def test_the_newest_whole_checkpoint_is_used_and_what_is_damaged_is_named(
    tmp_path: Path, damage: str
) -> None:
    whole, newest = _write(tmp_path, 6, 12)
    victim = newest / ("checkpoint.json" if damage == "manifest" else "stage-1-version-6.safetensors")
    content = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    elif damage == "longer":
        victim.write_bytes(content + b"x")
    elif damage == "changed":
        victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        victim.write_bytes(content[:-9])
    found, unused = newest_whole(tmp_path)
    assert found is not None and found[0] == whole
    assert len(unused) == 1 and str(victim) in unused[0]
    with pytest.raises(ValueError, match=victim.name):
        find_checkpoint(newest)


@pytest.mark.parametrize("num_files", range(10))
def test_a_checkpoint_that_was_torn_after_any_of_its_files_is_not_used(
    tmp_path: Path, num_files: int
) -> None:
    whole, newest = _write(tmp_path, 6, 12)
    in_order = sorted(newest.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert in_order[-1].name == "checkpoint.json"
    for path in in_order[num_files:]:
        path.unlink()
    found, unused = newest_whole(tmp_path)
    assert found is not None and found[0] == whole
    assert "is not complete" in unused[0]
    remove_incomplete(tmp_path)
    assert checkpoints_in(tmp_path) == [whole]


def test_the_newest_are_kept_and_pinned_ones(tmp_path: Path) -> None:
    folders = _write(tmp_path, 6, 12, 18, 24)
    pin(folders[0])
    torn = write_checkpoint(tmp_path, _make_model(), PLAN, 15, stages=[0])
    being_written = write_checkpoint(tmp_path, _make_model(), PLAN, 30, stages=[0])
    remove_old(tmp_path, 2)
    assert not torn.exists()
    assert checkpoints_in(tmp_path) == [folders[0], *folders[2:], being_written]
    remove_old(tmp_path, 1)
    assert checkpoints_in(tmp_path) == [folders[0], folders[3], being_written]
    with pytest.raises(ValueError, match="give a larger keep to pin it in time"):
        pin(folders[1])


def test_a_manifest_in_which_any_bit_has_changed_is_not_used_but_where_it_says_the_same(
    tmp_path: Path,
) -> None:
    _, newest = _write(tmp_path, 6, 12)
    path, manifest = newest / "checkpoint.json", read_manifest(newest)
    content = path.read_bytes()
    for position in range(0, len(content), 13):
        changed = bytes([content[position] ^ 1 << position % 8])
        path.write_bytes(content[:position] + changed + content[position + 1 :])
        found, unused = newest_whole(tmp_path)
        assert found is not None
        if found[0] == newest:
            assert found[1].to_dict() == manifest.to_dict(), position
        else:
            assert str(newest) in unused[0] and "\n" not in unused[0]


def test_a_removal_that_was_cut_short_is_made_whole_by_the_next_run(tmp_path: Path) -> None:
    (folder,) = _write(tmp_path, 6)
    with mock.patch("shutil.rmtree"):  # plays a process that is killed before the removal
        remove_old(tmp_path, 1)
        write_checkpoint(tmp_path, _make_model(), PLAN, 12)
        remove_old(tmp_path, 1)
    assert checkpoints_in(tmp_path) == [folder_of(tmp_path, 12)]
    assert not folder.exists() and len(list(tmp_path.iterdir())) == 2
    remove_incomplete(tmp_path)
    assert list(tmp_path.iterdir()) == [folder_of(tmp_path, 12)]


def test_a_manifest_that_names_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    (folder,) = _write(tmp_path, 6)
    path = folder / "checkpoint.json"
    path.write_text(path.read_text().replace('"stage-0.json"', '"../stage-0.json"'))
    with pytest.raises(FileFormatError, match=r"files\[\d\]\.name is '\.\./stage-0\.json'"):
        read_manifest(folder)


def test_a_run_that_continues_writes_over_no_checkpoint(tmp_path: Path) -> None:
    """A folder with files of two runs would be no valid checkpoint."""
    _, second, third, fourth = _write(tmp_path, 6, 12, 13, 18)
    assert go_on_after(third, 13, tmp_path) == third
    names = {path.name.rpartition("-")[2] for path in tmp_path.glob("damaged-*")}
    assert names == {"000000018"} and not fourth.exists()
    renamed = go_on_after(third, 12, tmp_path)
    assert renamed == second and read_manifest(renamed).header.minibatch == 13
    assert [path.name[-2:] for path in checkpoints_in(tmp_path)] == ["06", "12"]
    assert go_on_after(renamed, 12, tmp_path) == renamed
    assert go_on_after(renamed, 6, tmp_path / "other") == renamed


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    assert newest_whole(tmp_path / "none") == (None, [])
    with pytest.raises(ValueError, match="has no complete checkpoint"):
        find_checkpoint(tmp_path)
    assert write_manifest(tmp_path) is None
    assert folder_of(tmp_path, 1234567890).name == "checkpoint-1234567890"
