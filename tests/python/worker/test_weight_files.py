"""Tests weight_files.py: the error before a training whose weights could not be saved, and the files after a
training."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pipedream import PipelineError, Plan, Stage
from pipedream.checkpoint.state import save_state
from pipedream.splitting.splitter import split
from pipedream.worker import weight_files
from pipedream.worker.weight_files import check_room, load_weights, reserve_room
from safetensors.torch import load_file
from torch import nn

_PLAN = Plan((Stage(0, 0, num_replicas=2), Stage(1, 1)), in_flight=(2, 1))


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(100, 100), nn.BatchNorm1d(100))


def test_the_room_for_the_callers_weights_is_taken_before_the_run(tmp_path: Path) -> None:
    reserve_room(split(_model(), _PLAN), _PLAN, tmp_path)
    sizes = {path.name: path.stat().st_blocks * 512 for path in tmp_path.iterdir()}
    assert sizes["model-00001-of-00002.safetensors.part"] >= 100 * 101 * 4
    assert sorted(sizes) == [
        "model-00001-of-00002-replica-1.safetensors.part",
        "model-00001-of-00002.safetensors.part",
        "model-00002-of-00002.safetensors.part",
    ]


def test_a_temporary_folder_without_that_room_ends_the_run_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without this check the trained weights would be lost at the end.
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    (tmp_path / "run").mkdir()
    with pytest.raises(PipelineError, match=f"of stage 0 .* come back through {tmp_path}, .* TMPDIR"):
        reserve_room(split(_model(), _PLAN), _PLAN, tmp_path / "run")


def test_a_temporary_folder_in_host_memory_is_asked_for_room_and_none_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check must not take memory. The trained weights would otherwise take their memory twice for the
    whole run.
    """
    try:
        made = tempfile.TemporaryDirectory(dir="/dev/shm")
    except OSError:
        pytest.skip("no /dev/shm")
    with made as name:
        reserve_room(split(_model(), _PLAN), _PLAN, Path(name))
        assert sum(path.stat().st_blocks for path in Path(name).iterdir()) == 0
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=45_000))
        with pytest.raises(PipelineError, match=r"of stage 1 .* come back through /dev/shm, .* TMPDIR"):
            reserve_room(split(_model(), _PLAN), _PLAN, Path(name))


def test_a_folder_to_save_in_that_has_no_room_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_room(_model(), str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5000))
    with pytest.raises(ValueError, match=r"save is .* are free, and the trained weights take .*"):
        check_room(_model(), str(tmp_path / "not" / "yet"))


def test_weights_that_the_model_cannot_take_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    plan, model, folder = Plan.straight(2, 1), _model(), tmp_path / "run"
    folder.mkdir()
    save_state(split(model, plan)[0], folder / "model-00001-of-00001.safetensors")
    monkeypatch.setattr(weight_files, "set_state", fail)
    with pytest.raises(PipelineError, match=r"\(no memory\): they are in ") as failed:
        load_weights(split(model, plan), plan, folder)
    kept = Path(re.sub(".*they are in ", "", str(failed.value)))
    assert kept.parent == tmp_path and not list(folder.iterdir())
    assert torch.equal(load_file(kept / "model-00001-of-00001.safetensors")["0.weight"], model[0].weight)
    assert tempfile.gettempdir() != str(tmp_path)
