"""Tests script_capture.py and script_state.py: a value that a script has set reaches the workers, or is named
in a message. Whether a module belongs to the user depends on how it was installed.
"""

from __future__ import annotations

import importlib
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipedream.launch import script_capture
from pipedream.launch.script_capture import Libraries, capture_script
from pipedream.worker.task_files import read_part, write_part
from torch import nn

_PARTS = """
import threading
import numpy as np
import torch

SIZE, UNREAD = 1, 2
CONFIG = {"rates": [1, 2]}
LOCK = threading.Lock()
TABLE = np.zeros(4)
MISSING = object()

def missing(value=MISSING):
    return value is MISSING

class Layer(torch.nn.Module):
    kinds = ("a",)

    def forward(self, value):
        with LOCK:
            return value * SIZE + CONFIG["rates"][0] + TABLE.sum() + missing()
"""


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of a user's."""
    (tmp_path / "carried_parts.py").write_text(_PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("carried_parts")
    del sys.modules["carried_parts"]


def _taken_over(parts: Any, folder: Path, change: Callable[[], None]) -> Any:
    """Returns the module that a worker would have. `change` changes the caller's module after its import."""
    model = parts.Layer()
    change()
    write_part(folder, "script", capture_script([model], None).state, "")
    del sys.modules["carried_parts"]
    anew = importlib.import_module("carried_parts")
    read_part(folder, "script").apply()
    return anew


def test_only_what_has_changed_is_replaced(parts: Any, tmp_path: Path) -> None:
    def change() -> None:
        parts.SIZE, parts.UNREAD = 3, 4
        parts.TABLE[1] = 5
        parts.Layer.kinds = ("a", "b")

    anew = _taken_over(parts, tmp_path, change)
    assert (anew.SIZE, anew.UNREAD) == (3, 2)
    assert anew.TABLE.tolist() == [0, 5, 0, 0]
    assert anew.Layer.kinds == ("a", "b") == parts.Layer.kinds
    # A function has it as a default.
    assert anew.MISSING is not parts.MISSING and anew.missing()
    assert torch.equal(anew.Layer()(torch.ones(2)), parts.Layer()(torch.ones(2)))


def test_what_holds_others_is_compared_by_its_contents(parts: Any, tmp_path: Path) -> None:
    def change() -> None:
        parts.CONFIG["rates"].append(3)
        parts.MISSING = types.SimpleNamespace(inside=[float("nan")])

    anew = _taken_over(parts, tmp_path, change)
    assert anew.CONFIG == {"rates": [1, 2, 3]}


def test_what_cannot_be_sent_is_named(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_capture, "_VALUE_BYTES_MAX", 1 << 20)
    parts.TABLE = np.zeros(1 << 18)
    parts.LOCK = threading.RLock()
    captured = capture_script([parts.Layer()], None)
    assert captured.state.names["carried_parts"].keys() == {"SIZE", "CONFIG", "MISSING"}
    cause = captured.likely_cause()
    assert "'LOCK' of carried_parts (RLock: cannot pickle" in cause
    assert "'TABLE' of carried_parts (ndarray of more than 1.00 MiB)" in cause
    parts.CONFIG = {"words": ["word"] * (1 << 20)}
    assert (
        "'CONFIG' of carried_parts (dict of more than 1.00 MiB)"
        in capture_script([parts.Layer()], None).likely_cause()
    )


def test_a_class_that_no_worker_can_import_is_named_and_nothing_else(parts: Any) -> None:
    class Local(parts.Layer):
        slope = 2.0

    Local.__module__ = "carried_parts"
    captured = capture_script([Local()], None)
    assert captured.state.attributes == [(parts.Layer, "kinds", ("a",))]
    assert any("Local.slope" in unsent for unsent in captured.unsent)


def test_a_file_that_was_edited_since_its_import_is_named(parts: Any, tmp_path: Path) -> None:
    captured = capture_script([parts.Layer()], None)
    assert "has changed since it was imported" not in captured.likely_cause()
    path = tmp_path / "carried_parts.py"
    path.write_text(_PARTS.replace("value * SIZE", "value + SIZE"))
    assert captured.likely_cause() == f"{path} has changed since it was imported here: start the script again"


def test_modules_of_libraries_stay_as_they_are() -> None:
    captured = capture_script([nn.Linear(2, 2), nn.functional.mse_loss], [(torch.ones(2), torch.ones(2))])
    assert captured.state == script_capture.ScriptState() and not captured.code and not captured.unsent


class _TwoWordsError(Exception):
    """An error that cannot be unpickled. Its pickle has only the text, but its constructor needs two
    arguments.
    """

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def test_what_cannot_be_made_again_from_what_is_sent_is_named(parts: Any) -> None:
    """A worker cannot rebuild MISSING. So it must not be sent, because the worker would fail."""
    parts.MISSING = _TwoWordsError("one", "other")
    parts.CONFIG = {"rates": [1, 2], "scale": torch.ones(2), "table": np.ones(2), "of": parts.missing}
    captured = capture_script([parts.Layer()], None)
    assert captured.state.names["carried_parts"].keys() >= {"SIZE", "CONFIG"}
    assert "MISSING" not in captured.state.names["carried_parts"]
    assert "'MISSING' of carried_parts (_TwoWordsError: " in captured.likely_cause()
    assert parts.missing.__defaults__ is not None and parts.missing.__defaults__[0] is not parts.MISSING


def _write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _module(name: str, path: Path) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = str(path)
    return module


@pytest.mark.parametrize("how", ["direct_url", "pth"])
def test_a_project_that_is_edited_in_place_is_a_library_to_scripts_of_others(
    how: str, tmp_path: Path
) -> None:
    """A project that is installed in place belongs to the user only in its own scripts. Otherwise its state
    would count as set by the script.
    """
    site, project = tmp_path / "site", tmp_path / "a project"
    _write(project / "pyproject.toml")
    module = _module("tool.parts", _write(project / "src" / "tool" / "parts.py"))
    if how == "pth":
        _write(site / "tool.pth", f"import tool_finder\n{project / 'src'}\n")
    else:
        origin = f'{{"url": "{project.as_uri()}", "dir_info": {{"editable": true}}}}'
        _write(site / "tool-1.dist-info" / "METADATA", "Name: tool\nVersion: 1\n")
        _write(site / "tool-1.dist-info" / "direct_url.json", origin)
    others, own = tmp_path / "experiments", project / "scripts"
    assert Libraries([str(site)], [others]).have(module)
    assert not Libraries([str(site)], [others, own]).have(module)
    assert not Libraries([str(site)], [others]).have(_module("train", others / "train.py"))


def test_a_folder_that_is_on_the_path_and_no_project_is_the_users(tmp_path: Path) -> None:
    module = _module("parts", _write(tmp_path / "code" / "parts.py"))
    _write(tmp_path / "site" / "own.pth", f"# mine\n{tmp_path / 'code'}\n")
    assert not Libraries([str(tmp_path / "site")], [tmp_path / "experiments"]).have(module)


def test_what_is_installed_beside_the_users_files_is_told_by_its_record(tmp_path: Path) -> None:
    """A PEX has its libraries beside the user's files, and so has `pip install --target`."""
    record = "wheel/__init__.py,sha256=x,0\nsingle.py,sha256=x,0\n"
    _write(tmp_path / "wheel-1.dist-info" / "RECORD", record)
    libraries = Libraries([str(tmp_path / "site")], [tmp_path])
    package = _module("wheel", tmp_path / "wheel" / "__init__.py")
    inside = _module("wheel.inner.parts", tmp_path / "wheel" / "inner" / "parts.py")
    single, own = _module("single", tmp_path / "single.py"), _module("wheels", tmp_path / "wheels.py")
    script = _module("__main__", tmp_path / "single.py")
    found = [libraries.have(module) for module in (package, inside, single, own, script)]
    assert found == [True, True, True, False, False]
