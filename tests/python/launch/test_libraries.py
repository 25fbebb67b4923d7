"""libraries.py: whose a module is, by how it was installed."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
from pipedream.launch.libraries import Libraries


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
    """Its state counted as what the script had set."""
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
    """A PEX has libraries so, and `pip install --target`."""
    record = "wheel/__init__.py,sha256=x,0\nsingle.py,sha256=x,0\n"
    _write(tmp_path / "wheel-1.dist-info" / "RECORD", record)
    libraries = Libraries([str(tmp_path / "site")], [tmp_path])
    package = _module("wheel", tmp_path / "wheel" / "__init__.py")
    inside = _module("wheel.inner.parts", tmp_path / "wheel" / "inner" / "parts.py")
    single, own = _module("single", tmp_path / "single.py"), _module("wheels", tmp_path / "wheels.py")
    script = _module("__main__", tmp_path / "single.py")
    found = [libraries.have(module) for module in (package, inside, single, own, script)]
    assert found == [True, True, True, False, False]
