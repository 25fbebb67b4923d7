"""Tests a stage's snapshot, which is written to files and read again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from pipedream import Plan
from pipedream.checkpoint.checkpoint_folder import folder_of
from pipedream.checkpoint.manifest import write_manifest
from pipedream.checkpoint.snapshot import StageSnapshot, encode
from pipedream.checkpoint.stage_files import contents_of, read_snapshot, state_of, write_stage
from torch import Tensor
from written_checkpoints import header_of


def _snapshot() -> StageSnapshot:
    tensors: dict[str, Tensor] = {}
    document = {"generators": encode({"torch": torch.arange(5, dtype=torch.uint8)}, "generators", tensors)}
    return StageSnapshot(
        stage_index=0,
        replica_index=0,
        minibatch=6,
        versions={v: {"0.weight": torch.full((2, 3), float(v)).t()} for v in (4, 5, 6)},
        tied={0: {5: {"1.weight": torch.ones(2)}}, 1: {3: {"1.bias": torch.zeros(2, dtype=torch.complex64)}}},
        buffers={"1.mean": torch.tensor(7)},
        optimizer={"0.weight / exp_avg": torch.rand(2, 3).t(), "0.weight[0:4] / step": torch.tensor(3.0)},
        optimizer_document={"groups": [{"lr": 0.1 + 0.2}]},
        residuals={"a channel / 0 / 1": torch.rand(3).bfloat16()},
        document=document,
        document_tensors=tensors,
    )


def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path) -> None:
    snapshot, folder = _snapshot(), folder_of(tmp_path, 6)
    folder.mkdir()
    header = header_of(Plan.straight(2, 1), 6)
    write_stage(folder, header, (0, 0), contents_of(snapshot), state_of(snapshot))
    manifest = write_manifest(folder)
    assert manifest is not None
    names = {file.name for file in manifest.files}
    assert {"stage-0-version-4.safetensors", "stage-0-tied-1-version-3.safetensors"} <= names
    back = read_snapshot(folder, manifest.parts[0])
    for field in dataclasses.fields(StageSnapshot):
        _check_equal(getattr(back, field.name), getattr(snapshot, field.name), field.name)


def test_a_stage_that_trains_nothing_has_its_versions_all_the_same(tmp_path: Path) -> None:
    snapshot = StageSnapshot(0, 0, 6, versions={6: {}})
    write_stage(
        tmp_path, header_of(Plan.straight(1, 1), 6), (0, 0), contents_of(snapshot), state_of(snapshot)
    )
    manifest = write_manifest(tmp_path)
    assert manifest is not None
    assert read_snapshot(tmp_path, manifest.parts[0]) == snapshot


def _check_equal(there: object, here: object, where: str) -> None:
    if isinstance(here, Tensor):
        assert isinstance(there, Tensor) and there.dtype == here.dtype and torch.equal(there, here), where
        assert there.stride() == here.stride(), where
    elif isinstance(here, dict):
        assert isinstance(there, dict) and list(there) == list(here), where
        for name in here:
            _check_equal(there[name], here[name], f"{where} {name}")
    else:
        assert there == here, where
