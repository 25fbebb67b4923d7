"""Tests pipedream checkpoint show | export, by main() in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pipedream import Plan
from pipedream.checkpoint.checkpoint_folder import folder_of, pin
from pipedream.cli import main
from safetensors.torch import load_file
from torch import nn
from written_checkpoints import write_checkpoint

PLAN = Plan.straight(2, 2)


def _make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with a whole checkpoint, a damaged one, and one that is not complete."""
    path = tmp_path / "C"
    write_checkpoint(path, _make_model(), PLAN, 6)
    damaged = write_checkpoint(path, _make_model(), PLAN, 12)
    (damaged / "stage-0-version-6.safetensors").write_bytes(b"")
    write_checkpoint(path, _make_model(), PLAN, 18, stages=[0])
    return path


def _call(capture: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code, *capture.readouterr()


def test_show_lists_the_checkpoints_of_a_folder(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = _call(capfd, "checkpoint", "show", folder)
    assert status == 0
    rows = [line.split() for line in shown.splitlines()[1:4]]
    assert [(row[0][-2:], row[-1]) for row in rows] == [("06", "whole"), ("12", "damaged"), ("18", "usable")]
    assert "stage-0-version-6.safetensors has 0 bytes" in shown
    assert "000000018 is not complete" in shown


def test_show_says_what_is_in_a_checkpoint(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = _call(capfd, "checkpoint", "show", folder_of(folder, 6))
    assert status == 0
    assert "minibatch 6, epoch 0" in shown and "all files are whole" in shown
    assert [line.split()[:5] for line in shown.splitlines() if line.startswith("1 ")] == [
        ["1", "0", "1-1", "5,", "6"]
    ]
    status, printed, _ = _call(capfd, "checkpoint", "show", folder_of(folder, 6), "--json")
    fields = json.loads(printed)
    assert status == 0 and fields["minibatch"] == 6 and fields["problems"] == [] and not fields["pinned"]


def test_show_marks_what_is_pinned(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pin(folder_of(folder, 6))
    _, shown, _ = _call(capfd, "checkpoint", "show", folder)
    assert [line.split()[-1] for line in shown.splitlines()[1:3]] == ["pinned", "damaged"]
    assert "`keep` never removes it" in _call(capfd, "checkpoint", "show", folder_of(folder, 6))[1]


def test_show_imports_no_torch(folder: Path) -> None:
    code = (
        "import sys\nfrom pipedream.cli import _run_command\n"
        f"status = _run_command(['checkpoint', 'show', {str(folder)!r}])\n"
        "print(status, 'torch' in sys.modules)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines()[-1] == "0 False"


def test_export_writes_the_newest_whole_checkpoint(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = folder.parent / "model.safetensors"
    status, shown, _ = _call(capfd, "checkpoint", "export", folder, output)
    assert status == 0
    assert "checkpoint-000000006 written to" in shown and "not used:" in shown
    state = load_file(output)
    assert all(torch.equal(state[name], value) for name, value in _make_model().state_dict().items())


def test_averages_that_a_checkpoint_has_not_got_are_told(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, _, error = _call(capfd, "checkpoint", "export", folder, tmp_path / "ema.safetensors", "--ema")
    assert status == 2 and "has no averages: its run had no pipedream.callbacks.EMA" in error


def test_a_path_without_a_checkpoint_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, shown, told = _call(capfd, "checkpoint", "show", tmp_path)
    assert (status, shown) == (2, "") and told.count("\n") == 1 and "no checkpoint" in told
