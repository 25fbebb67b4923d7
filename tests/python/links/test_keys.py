"""Tests keys.py: CURVE keys and their files."""

from __future__ import annotations

import json
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
from pipedream.common.errors import FileFormatError
from pipedream.links.keys import (
    CurveKeys,
    keys_of,
    load_keys,
    make_keys,
    save_keys,
    write_key_file,
    write_key_folder,
)

_PUBLIC, _SECRET, _OTHER = "p" * 40, "s" * 40, "#" * 40


def _fields(**changes: Any) -> dict[str, Any]:
    fields = {
        "format": "pipedream.keys/1",
        "public": _PUBLIC,
        "secret": _SECRET,
        "allowed": [_PUBLIC, _OTHER],
    }
    return {name: value for name, value in (fields | changes).items() if value is not ...}


def _write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_a_file_gives_back_what_was_saved_and_is_its_owners_alone(tmp_path: Path) -> None:
    keys = CurveKeys(_PUBLIC, _SECRET, (_PUBLIC, _OTHER))
    path = tmp_path / "keys.json"
    umask = os.umask(0)
    try:
        save_keys(keys, path)
    finally:
        os.umask(umask)
    assert load_keys(path) == keys
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == _fields()


def test_the_secret_is_not_in_the_text_of_the_keys() -> None:
    keys = CurveKeys(_PUBLIC, _SECRET, (_PUBLIC,))
    assert _PUBLIC in repr(keys)
    assert _SECRET not in repr(keys) + str(keys) + f"{keys}"
    assert pickle.loads(pickle.dumps(keys)).secret == _SECRET


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    path = _write(tmp_path / "keys.json", "mine")
    with pytest.raises(ValueError, match=r"keys\.json: is there already, and keys are never overwritten"):
        write_key_file(path)
    assert path.read_text() == "mine"


def test_a_link_to_nowhere_is_not_written_through(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="never overwritten"):
        write_key_file(path)
    assert not (tmp_path / "elsewhere").exists()


def test_one_file_for_all_machines_allows_its_own_pair(tmp_path: Path) -> None:
    keys = write_key_file(tmp_path / "keys.json")
    assert keys.allowed == (keys.public,)
    assert load_keys(tmp_path / "keys.json") == keys
    assert keys.public != keys.secret
    assert make_keys().public != keys.public


def test_machines_have_pairs_of_their_own_and_allow_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    paths, made = write_key_folder(folder, 3)
    assert [path.name for path in paths] == ["machine-0.json", "machine-1.json", "machine-2.json"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    loaded = [load_keys(path) for path in paths]
    assert loaded == made
    publics = tuple(keys.public for keys in loaded)
    assert len(set(publics)) == len({keys.secret for keys in loaded}) == 3
    assert all(keys.allowed == publics for keys in loaded)


def test_a_folder_with_a_machines_file_is_left_as_it_was(tmp_path: Path) -> None:
    _write(tmp_path / "machine-1.json", "mine")
    with pytest.raises(ValueError, match=r"machine-1\.json: is there already"):
        write_key_folder(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["machine-1.json"]


def test_a_folder_that_is_a_file_and_no_machines_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "keys.json", "mine")
    with pytest.raises(ValueError, match=r"keys\.json: is a file, give a folder"):
        write_key_folder(path, 2)
    with pytest.raises(ValueError, match="machines is 0: give at least 1"):
        write_key_folder(tmp_path / "keys", 0)
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601, 0o777], ids=oct)
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = _write(tmp_path / "keys.json", json.dumps(_fields()), mode)
    with pytest.raises(ValueError) as caught:
        load_keys(path)
    assert str(caught.value) == (
        f"keys is '{path}', which others may use (mode {mode:04o}): run chmod 600 {path}"
    )


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_its_owner_alone_is_read(tmp_path: Path, mode: int) -> None:
    assert load_keys(_write(tmp_path / "keys.json", json.dumps(_fields()), mode)).allowed == (_PUBLIC, _OTHER)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (_fields(format="pipedream.plan/1"), "format is 'pipedream.plan/1', not 'pipedream.keys/1'"),
        (_fields(format="pipedream.keys/2"), "install a later one"),
        (_fields(public=...), "public is missing"),
        (_fields(secret=...), "secret is missing"),
        (_fields(allowed=...), "allowed is missing"),
        (_fields(public=7), "public is a int: a key is 40 characters of Z85 text"),
        (_fields(public="p" * 39), "public is 39 characters"),
        (_fields(secret="s" * 41), "secret is 41 characters"),
        (_fields(secret="s" * 39 + '"'), "secret is 40 characters: a key is 40 characters of Z85"),
        (_fields(secret=None), "secret is a NoneType"),
        (_fields(allowed=[]), "allowed is empty"),
        (_fields(allowed=_PUBLIC), "allowed is"),
        (_fields(allowed=[_PUBLIC, "ü" * 40]), "allowed[1] is 40 characters: a key is"),
        (_fields(allowed=[None]), "allowed[0] is a NoneType"),
    ],
)
def test_a_file_in_another_form_is_refused_by_name_without_its_secret(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    path = _write(tmp_path / "keys.json", json.dumps(fields))
    with pytest.raises(FileFormatError) as caught:
        load_keys(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "ssss" not in str(caught.value)


def test_what_is_no_file_of_keys_is_refused(tmp_path: Path) -> None:
    missing = r"gone\.json': No such file or directory; copy this machine's file here, or where no machine"
    with pytest.raises(ValueError, match=missing):
        load_keys(tmp_path / "gone.json")
    with pytest.raises(ValueError, match="a folder: give this machine's file in it"):
        load_keys(tmp_path)
    with pytest.raises(FileFormatError, match="not JSON"):
        load_keys(_write(tmp_path / "keys.json", "{"))


def test_run_takes_keys_or_their_path(tmp_path: Path) -> None:
    keys = CurveKeys(_PUBLIC, _SECRET, (_PUBLIC,))
    save_keys(keys, tmp_path / "keys.json")
    assert keys_of(keys) is keys
    assert keys_of(tmp_path / "keys.json") == keys_of(str(tmp_path / "keys.json")) == keys
    wrong: Any = 3
    with pytest.raises(TypeError, match="keys is a int: give the path of a file that `pipedream keys` made"):
        keys_of(wrong)
