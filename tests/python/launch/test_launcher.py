"""Tests task_files.py and launcher.py: the folder of a run and the files in it for workers, the messages that
workers get by other means, and the removal of folders that killed callers have left.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pipedream
import pytest
import torch
from pipedream import Plan
from pipedream.launch import launcher
from pipedream.launch.launcher import run_folder
from pipedream.links.keys import CurveKeys
from pipedream.worker.task_files import GraphReader, GraphWriter, read_part, write_data, write_part
from torch import nn
from torch.nn.utils import parametrizations

_SECRET = "s" * 40


class _TiedPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.arange(4))


class _Device:
    """Stands in for a GPU. Every storage seems to be on it, except copies in host memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: list[torch.UntypedStorage] = []
        monkeypatch.setattr(torch.UntypedStorage, "device", property(self._device_of))
        monkeypatch.setattr(torch.UntypedStorage, "cpu", self._cpu_of())

    def _device_of(self, storage: torch.UntypedStorage) -> torch.device:
        is_copy = storage._cdata in [copy._cdata for copy in self.copies]
        return torch.device("cpu") if is_copy else torch.device("cuda", 0)

    def _cpu_of(self) -> Callable[[torch.UntypedStorage], torch.UntypedStorage]:
        def cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
            self.copies.append(torch.UntypedStorage(list(storage)))
            return self.copies[-1]

        return cpu


def test_what_lies_on_a_device_is_written_as_it_is_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a copy in host memory the pickled tensor would name the caller's device. Every worker would then
    # make the tensor there.
    model = _TiedPair()
    with monkeypatch.context() as patch:
        device = _Device(patch)
        write_part(tmp_path, "model", model, "")
    assert len(device.copies) == 4  # the tied weight is copied once
    rebuilt = pickle.loads((tmp_path / "model.pickle").read_bytes())
    assert rebuilt.second.weight is rebuilt.first.weight
    assert isinstance(rebuilt.first.weight, nn.Parameter)
    for name, value in model.state_dict().items():
        assert torch.equal(rebuilt.state_dict()[name], value), name


def test_data_and_functions_are_written_from_host_memory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [(torch.ones(2), torch.zeros(2))]
    with monkeypatch.context() as patch:
        device = _Device(patch)
        write_part(tmp_path, "loss_fn", nn.CrossEntropyLoss(weight=torch.ones(3)), "")
        assert len(device.copies) == 1
        with GraphWriter(tmp_path) as graph:
            assert write_data(graph, tmp_path, data, None) is None  # type: ignore[arg-type]
    assert len(device.copies) == 3
    assert torch.equal(pickle.loads((tmp_path / "task.pickle").read_bytes())[0][0], torch.ones(2))


class _StoppedError(Exception):
    pass


@pytest.mark.parametrize("forwards", [False, True])
def test_no_secret_key_is_in_a_file(monkeypatch: pytest.MonkeyPatch, forwards: bool) -> None:
    # If the caller is killed, the folder of the run stays. It must not have the secret key.
    files: dict[str, bytes] = {}
    tasks: list[Any] = []
    links: list[Any] = []

    def launch(task: Any, *_: object) -> None:
        tasks.append(task)
        folder = Path(task.folder)
        files.update({path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()})
        with GraphReader(folder) as graph:
            links.append(graph.read("options").links)
        raise _StoppedError

    monkeypatch.setattr(launcher, "_launch", launch)
    batches = [(torch.ones(1, 1), torch.ones(1, 1))]
    with pytest.raises(_StoppedError):
        pipedream.run(
            nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)),
            Plan.straight(2, 2),
            data=iter(batches) if forwards else batches,
            loss_fn=nn.functional.mse_loss,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            keys=CurveKeys("p" * 40, _SECRET, ("p" * 40,)),
            progress=False,
        )
    assert {"task.pickle", "owner"} <= files.keys()
    assert not any(_SECRET.encode() in content for content in files.values())
    (task,) = tasks
    assert task.keys.secret == _SECRET  # the keys go through the pipe by which a process gets its arguments
    assert _SECRET not in repr(task)
    assert links[0].bind_host == "127.0.0.1" and links[0].keys is None
    assert not os.path.exists(task.folder)


def test_parametrized_modules_reach_the_workers(tmp_path: Path) -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 2))
    parametrizations.orthogonal(model[1])
    write_part(tmp_path, "model", model, "")
    read = read_part(tmp_path, "model")
    value = torch.randn(4, 3)
    assert torch.equal(read(value), model(value))
    assert [name for name, _ in read.named_parameters()] == [name for name, _ in model.named_parameters()]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder that stands in for the folder of temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


_KILLED = """
import os, signal, sys, tempfile
from pathlib import Path
from pipedream.launch.launcher import run_folder

tempfile.tempdir = sys.argv[1]
with run_folder() as folder:
    (folder / "logs" / "0").mkdir(parents=True)
    (folder / "logs" / "0" / "out").write_text("")
    (folder / "model.pickle").write_text("weights")
    (folder / "link").symlink_to(sys.argv[2])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _leave_one(temporary: Path, kept: Path) -> Path:
    """Starts a caller and kills it in the middle of its run. Returns the folder that stays behind."""
    paths = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        [sys.executable, "-c", _KILLED, str(temporary), str(kept)],
        env=os.environ | {"PYTHONPATH": paths},
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    (left,) = temporary.iterdir()
    return left


def test_a_folder_is_this_users_alone_and_ends_with_the_run(temporary: Path) -> None:
    with run_folder() as folder:
        assert folder.parent == temporary
        assert folder.name.startswith("pipedream-")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "model.pickle").write_text("weights")
    assert not list(temporary.iterdir())


def test_what_a_killed_caller_has_left_is_removed_and_what_it_links_to_is_not(
    temporary: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "data").write_text("mine")
    left = _leave_one(temporary, kept)
    with run_folder() as folder:
        assert not left.exists()
        assert list(temporary.iterdir()) == [folder]
    assert (kept / "data").read_text() == "mine"


def test_the_folder_of_a_run_that_goes_on_is_left_alone(temporary: Path) -> None:
    with run_folder() as running:
        (running / "model.pickle").write_text("weights")
        with run_folder() as other:
            assert set(temporary.iterdir()) == {running, other}
        assert (running / "model.pickle").read_text() == "weights"


def test_folders_that_no_run_has_made_are_left_alone(temporary: Path, tmp_path: Path) -> None:
    left = _leave_one(temporary, tmp_path)
    names = {"pipedream-results", "pipedream-open", "pipedream-new", "pipedream-file", "other"}
    for name in names - {"pipedream-file"}:
        (temporary / name).mkdir(mode=0o700)
    (temporary / "pipedream-file").write_text("")
    (temporary / "pipedream-results" / "weights").write_text("mine")  # has no lock file
    (temporary / "pipedream-new" / "owner.new").write_text("")  # will have a lock file soon
    for name in ("pipedream-open", "other"):
        (temporary / name / "owner").write_text("")
    (temporary / "pipedream-open").chmod(0o755)
    elsewhere = tmp_path / "elsewhere"
    left.rename(elsewhere)
    (temporary / "pipedream-link").symlink_to(elsewhere)  # anyone may put a link there
    with run_folder() as folder:
        assert {path.name for path in temporary.iterdir()} == names | {"pipedream-link", folder.name}
    assert (elsewhere / "model.pickle").read_text() == "weights"
    assert (temporary / "pipedream-results" / "weights").read_text() == "mine"


def test_a_lock_that_is_a_link_is_not_followed(temporary: Path, tmp_path: Path) -> None:
    (temporary / "pipedream-trap").mkdir(mode=0o700)
    target = tmp_path / "target"
    target.write_text("mine")
    (temporary / "pipedream-trap" / "owner").symlink_to(target)
    with run_folder():
        assert (temporary / "pipedream-trap").exists()
    assert target.read_text() == "mine"


def test_a_folder_of_another_user_is_left_alone(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = _leave_one(temporary, tmp_path)
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with run_folder():
        assert left.exists()
