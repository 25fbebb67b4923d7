"""CURVE keys of the machines of a run, and their files. Torch-free; any thread.

    {"format": "pipedream.keys/1", "public": "...", "secret": "...", "allowed": ["...", ...]}

A key is 32 bytes, written as 40 characters of Z85 (ZeroMQ RFC 32). "allowed" lists the public keys of all
machines that may take part, including this machine's. A key file has mode 0600 and is never overwritten.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipedream import _core
from pipedream.common.agreement import OWN
from pipedream.common.document import check_list, read_document, require
from pipedream.common.errors import FileFormatError
from pipedream.planning.plan_stage import WORKERS_MAX

__all__ = [
    "CurveKeys",
    "find_libzmq",
    "keys_of",
    "load_keys",
    "make_keys",
    "save_keys",
    "write_key_file",
    "write_key_folder",
]

_KIND, _VERSION = "keys", 1
_KEY_CHARACTERS = 40
_Z85 = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class CurveKeys:
    """One machine's key pair, and the public keys of the machines that may talk to it. All are Z85 text."""

    public: str
    secret: str = field(repr=False, metadata=OWN)
    allowed: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raises ValueError that names the field. It never shows the secret key."""
        _check_key("public", self.public)
        _check_key("secret", self.secret)
        if not self.allowed:
            raise ValueError("allowed is empty: list the public keys of the machines that take part")
        for position, key in enumerate(self.allowed):
            _check_key(f"allowed[{position}]", key)


def _check_key(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) != _KEY_CHARACTERS or not _Z85.issuperset(value):
        found = f"{len(value)} characters" if isinstance(value, str) else f"a {type(value).__name__}"
        raise ValueError(f"{name} is {found}: a key is {_KEY_CHARACTERS} characters of Z85 text")


def keys_of(keys: CurveKeys | str | os.PathLike[str]) -> CurveKeys:
    """Returns the keys, which a caller gives as CurveKeys or as the path of their file."""
    if isinstance(keys, CurveKeys):
        return keys
    if not isinstance(keys, (str, os.PathLike)):
        raise TypeError(
            f"keys is a {type(keys).__name__}: give the path of a file that `pipedream keys` made"
        )
    return load_keys(keys)


def load_keys(path: str | os.PathLike[str]) -> CurveKeys:
    """Returns the keys in a file that `pipedream keys` made.

    Raises ValueError, naming file and field, if the file is missing, if other users may read or write it, or
    if it is not a valid key file.
    """
    source = os.fspath(path)
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise ValueError(
            f"keys is {source!r}: {error.strerror}; copy this machine's file here, or where no machine of the"
            f" run has one yet, make it once with `pipedream keys {source}`"
        ) from None
    if stat.S_ISDIR(mode):
        raise ValueError(f"keys is {source!r}, a folder: give this machine's file in it")
    if mode & _OTHERS:
        raise ValueError(
            f"keys is {source!r}, which others may use (mode {stat.S_IMODE(mode):04o}):"
            f" run chmod 600 {source}"
        )
    try:
        fields = read_document(path, _KIND, _VERSION)
    except OSError as error:
        raise ValueError(f"keys is {source!r}: {error.strerror}") from None
    try:
        require(fields, ("public", "secret", "allowed"), "")
        allowed = check_list("allowed", fields["allowed"])
        return CurveKeys(fields["public"], fields["secret"], tuple(allowed))
    except ValueError as error:
        raise FileFormatError(f"{source}: {error}") from None


def make_keys() -> CurveKeys:
    """Makes a new key pair. Only machines that have this same pair may talk to each other."""
    public, secret = _core.make_curve_keys(find_libzmq())
    return CurveKeys(public, secret, (public,))


def save_keys(keys: CurveKeys, path: str | os.PathLike[str]) -> None:
    """Writes a file of mode 0600. Raises ValueError if the path exists already."""
    fields = {
        "format": f"pipedream.{_KIND}/{_VERSION}",
        "public": keys.public,
        "secret": keys.secret,
        "allowed": list(keys.allowed),
    }
    try:
        # With O_EXCL no existing file or link is written to. With the mode no other user can ever open the
        # file.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR)
    except FileExistsError:
        raise ValueError(_is_there(Path(path))) from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(json.dumps(fields, indent=1) + "\n")


def write_key_file(path: Path) -> CurveKeys:
    """Makes one key file, which all machines of a run share."""
    keys = make_keys()
    save_keys(keys, path)
    return keys


def write_key_folder(folder: Path, num_machines: int) -> tuple[list[Path], list[CurveKeys]]:
    """Makes one key file per machine. Each machine gets its own key pair, and each file allows all machines.

    Raises ValueError and writes nothing if one of the files exists already."""
    if num_machines < 1:
        raise ValueError(f"machines is {num_machines}: give at least 1")
    if num_machines > WORKERS_MAX:
        raise ValueError(f"machines is {num_machines}: a run has at most {WORKERS_MAX} workers")
    paths = [folder / f"machine-{machine}.json" for machine in range(num_machines)]
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is a file, give a folder for the machines' files")
    for path in paths:
        if os.path.lexists(path):
            raise ValueError(_is_there(path))
    folder.mkdir(mode=stat.S_IRWXU, exist_ok=True)
    made = _allow_each_other([make_keys() for _ in paths])
    for path, keys in zip(paths, made, strict=True):
        save_keys(keys, path)
    return paths, made


def _allow_each_other(made: Sequence[CurveKeys]) -> list[CurveKeys]:
    allowed = tuple(keys.public for keys in made)
    return [CurveKeys(keys.public, keys.secret, allowed) for keys in made]


def _is_there(path: Path) -> str:
    return f"{path}: is there already, and keys are never overwritten: give another path, or remove it first"


def find_libzmq() -> str:
    """Returns the path of the libzmq inside the pyzmq wheel. "" leaves the search to the core."""
    import zmq

    bundled = Path(zmq.__file__).parent.parent / "pyzmq.libs"
    found = sorted(bundled.glob("libzmq*.so*")) if bundled.is_dir() else []
    return str(found[0]) if found else ""
