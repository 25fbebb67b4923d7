"""Tests the writer of checkpoints: what it copies and writes, and what it does on a full disk."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path

import pytest
import torch
from pipedream import Plan
from pipedream.checkpoint import manifest
from pipedream.checkpoint import writer as writer_module
from pipedream.checkpoint.checkpoint_folder import checkpoints_in, folder_of, is_complete, newest_whole
from pipedream.checkpoint.stage_files import Content, read_kind
from pipedream.checkpoint.writer import CheckpointWriter, CopyMemory
from written_checkpoints import header_of

PLAN = Plan.straight(2, 2)


def _writer(path: Path, keep: int = 3, num_bytes: int = 4096) -> CheckpointWriter:
    return CheckpointWriter(
        path, keep, {stage: torch.empty(num_bytes, dtype=torch.uint8) for stage in range(2)}
    )


def _contents(weight: torch.Tensor) -> list[Content]:
    return [Content("version", {"weight": weight}, 6), Content("buffers", {"mean": weight.double() + 1})]


def test_what_is_written_is_what_the_tensors_were_when_they_were_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write_stage = writer_module.write_stage

    def late(*arguments: object) -> object:
        may_write.wait()
        return write_stage(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(writer_module, "write_stage", late)
    writer = _writer(tmp_path)
    weight = torch.arange(6.0).view(2, 3)
    for stage in range(2):
        writer.save(header_of(PLAN, 6), (stage, 0), _contents(weight), {"step": 1})
    weight.zero_()
    may_write.set()
    writer.close()
    found, unused = newest_whole(tmp_path)
    assert found is not None and unused == []
    checkpoint, known = found
    for part in known.parts:
        assert torch.equal(read_kind(checkpoint, part.newest_weights)["weight"], torch.arange(6.0).view(2, 3))
        mean = read_kind(checkpoint, part.of_kind("buffers"))["mean"]
        assert mean.dtype == torch.float64 and mean[1, 2] == 6
    assert writer.figures.num_copied == writer.figures.num_written == 2


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    writer = _writer(tmp_path, keep=2)
    for minibatch in (6, 12, 18):
        for stage in range(2):
            writer.save(header_of(PLAN, minibatch), (stage, 0), _contents(torch.ones(3)), {})
    writer.close()
    assert [path.name[-2:] for path in checkpoints_in(tmp_path)] == ["12", "18"]


def test_a_checkpoint_that_cannot_be_written_is_told_and_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_stage = writer_module.write_stage

    def full(folder: Path, header: object, place: tuple[int, int], *rest: object) -> object:
        written = write_stage(folder, header, place, *rest)  # type: ignore[arg-type]
        if place == (1, 0) and folder.name.endswith("12"):
            (folder / "stage-1.json").unlink()
            raise OSError(28, "No space left on device")
        return written

    monkeypatch.setattr(writer_module, "write_stage", full)
    writer = _writer(tmp_path)
    with caplog.at_level(logging.WARNING, logger="pipedream"):
        for minibatch in (6, 12, 18):
            for stage in range(2):
                writer.save(header_of(PLAN, minibatch), (stage, 0), _contents(torch.ones(3)), {})
        writer.close()
    assert [is_complete(path) for path in checkpoints_in(tmp_path)] == [True, False, True]
    assert not list(folder_of(tmp_path, 12).glob("stage-1*"))
    (told,) = caplog.messages
    assert "minibatch 12 could not be written at stage 1" in told and "No space left" in told


def test_a_worker_that_cannot_write_the_manifest_takes_nothing_from_a_checkpoint_that_another_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With keep=1 no whole checkpoint would be left if the previous one were removed now.
    write_manifest = writer_module.write_manifest

    def complete_and_fail(folder: Path) -> object:
        if write_manifest(folder) is not None:
            raise OSError(28, "No space left on device")
        return None

    monkeypatch.setattr(writer_module, "write_manifest", complete_and_fail)
    writer = _writer(tmp_path)
    for stage in range(2):
        writer.save(header_of(PLAN, 6), (stage, 0), _contents(torch.ones(3)), {})
    writer.close()
    found, unused = newest_whole(tmp_path)
    assert found is not None and not unused


def test_an_old_checkpoint_that_another_worker_removes_meanwhile_costs_no_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A worker checks whether the old checkpoint is complete while another worker removes it. The check finds
    # a file missing. This must not cost the new checkpoint.
    read_part = manifest.read_part

    def read_late(path: Path) -> object:
        if path.parent == folder_of(tmp_path, 6) and path.parent.exists():
            shutil.rmtree(path.parent)
        return read_part(path)

    for minibatch, stages in ((6, [0]), (12, [0, 1])):
        writer = _writer(tmp_path)
        for stage in stages:
            writer.save(header_of(PLAN, minibatch), (stage, 0), _contents(torch.ones(3)), {})
        writer.close()
        monkeypatch.setattr(manifest, "read_part", read_late)
    assert not caplog.messages
    assert checkpoints_in(tmp_path) == [folder_of(tmp_path, 12)] and is_complete(folder_of(tmp_path, 12))


def test_what_has_no_room_is_copied_beside_it_and_counted() -> None:
    memory = CopyMemory(torch.empty(64, dtype=torch.uint8))
    small, large = torch.arange(4.0), torch.arange(64.0)
    assert torch.equal(memory.copy(small), small) and torch.equal(memory.copy(large), large)
    assert memory.peak_bytes == 16 + 256
    memory.clear()
    assert torch.equal(memory.copy(large[:16]), large[:16])
    assert CopyMemory.bytes_beside(2) == 128


def test_tensors_of_any_kind_are_copied_as_they_are() -> None:
    memory = CopyMemory(torch.empty(4096, dtype=torch.uint8))
    kinds = [
        torch.ones((), dtype=torch.int64),
        torch.ones(3, dtype=torch.bool),
        torch.ones(2, 3).t(),
        torch.ones(2, dtype=torch.complex128),
        torch.empty(0, 4),
        torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16)),
    ]
    for tensor in kinds:
        copied = memory.copy(tensor)
        assert copied.dtype == tensor.dtype and torch.equal(copied, tensor) and not copied.requires_grad
