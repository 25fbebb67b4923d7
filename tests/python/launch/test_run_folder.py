"""run_folder.py: a folder for a run, and what becomes of those that killed callers have left."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from pipedream.launch.run_folder import run_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files are, meanwhile."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


_KILLED = """
import os, signal, sys, tempfile
from pathlib import Path
from pipedream.launch.run_folder import run_folder

tempfile.tempdir = sys.argv[1]
with run_folder() as folder:
    (folder / "logs" / "0").mkdir(parents=True)
    (folder / "logs" / "0" / "out").write_text("")
    (folder / "model.pickle").write_text("weights")
    (folder / "link").symlink_to(sys.argv[2])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _leave_one(temporary: Path, kept: Path) -> Path:
    """What a caller leaves that is killed in the middle of a run."""
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
    (temporary / "pipedream-results" / "weights").write_text("mine")  # has no lock
    (temporary / "pipedream-new" / "owner.new").write_text("")  # will have one
    for name in ("pipedream-open", "other"):
        (temporary / name / "owner").write_text("")
    (temporary / "pipedream-open").chmod(0o755)
    elsewhere = tmp_path / "elsewhere"
    left.rename(elsewhere)
    (temporary / "pipedream-link").symlink_to(elsewhere)  # somebody could put one there
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
