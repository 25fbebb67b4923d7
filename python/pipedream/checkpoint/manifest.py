"""Writes and reads the JSON files of a checkpoint. A checkpoint has one part per replica of a stage, and a
manifest, which makes it complete.

    checkpoint-000000300/
        checkpoint.json                       the manifest: minibatch, plan, and each file's size and checksum
        stage-0.json                          the JSON of stage 0's part: all state that is not in tensors
        stage-0-version-300.safetensors       one file per weight version that the stage keeps
        stage-0-optimizer.safetensors
        stage-1-replica-1.json                the JSON of the part of stage 1's replica 1

Each worker writes the files of its own part, then the part's JSON. A worker that then finds all parts in the
folder writes the manifest. So no worker waits for the files of another. Two workers may write the manifest at
the same time, but they write the same bytes. A file has a temporary name until it is complete and on the
disk. Torch-free; any thread.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pipedream.common.document import (
    check_format,
    check_list,
    check_object,
    check_text,
    check_whole,
    read_value,
    require,
    write_value,
)
from pipedream.common.errors import FileFormatError
from pipedream.planning.plan import Plan

__all__ = [
    "MANIFEST_NAME",
    "Header",
    "Manifest",
    "Part",
    "PartFile",
    "part_name",
    "part_path",
    "problems_of",
    "read_manifest",
    "read_part",
    "read_part_state",
    "write_manifest",
    "write_part",
    "write_whole",
]

MANIFEST_NAME = "checkpoint.json"
_KIND, _PART_KIND, _VERSION = "checkpoint", "checkpoint-part", 1
_UNFINISHED = ".part"
_CHUNK_BYTES = 1 << 20
_Parsed = TypeVar("_Parsed")
_NOT_FINITE = "not finite"  # {"not finite": "inf"} stands for infinity, which JSON lacks


@dataclass(frozen=True)
class PartFile:
    """One file of a checkpoint, other than the manifest."""

    name: str
    kind: str
    """The kind of content: "version", "tied", "frozen", "buffers", "optimizer", "residuals", "tensors"
    (tensors to which the part's JSON refers), "record" (losses, samples and epochs of earlier minibatches),
    or "state" (the part's JSON)."""
    bytes: int
    crc32: str
    """The CRC-32 of the content, in hexadecimal digits."""
    version: int | None = None
    """The weight version in a file of kind "version" or "tied"; otherwise None."""
    owner: int | None = None
    """The stage that owns the shared parameters in a file of kind "tied"; otherwise None."""

    def __post_init__(self) -> None:
        if os.path.basename(self.name) != self.name or self.name in ("", ".", ".."):
            raise ValueError(f"name is {self.name!r}: it must be a file of the checkpoint's own folder")


@dataclass(frozen=True)
class Part:
    """The files of one replica of a stage."""

    stage: int
    replica: int
    files: tuple[PartFile, ...]

    def of_kind(self, kind: str) -> list[PartFile]:
        return [file for file in self.files if file.kind == kind]

    @property
    def newest_weights(self) -> list[PartFile]:
        """The files with the newest version of the parameters that the stage updates. These are its unshared
        parameters and the shared parameters that it owns."""
        return [*self.newest_of_kind("version"), *self.newest_of_kind("tied")]

    def newest_of_kind(self, kind: str) -> list[PartFile]:
        """Returns a list with the newest file of kind "version" or "tied". The list is empty if the stage
        owns no such parameters."""
        files = [file for file in self.of_kind(kind) if file.owner in (None, self.stage)]
        return [max(files, key=lambda file: file.version or 0)] if files else []


@dataclass(frozen=True)
class Header:
    """The fields that all parts of a checkpoint have in common."""

    run: str
    """An id of one start of the run. If the run is started again, its parts get another id."""
    minibatch: int
    """The checkpoint has the updates of all minibatches before this one, and no other updates."""
    epoch: int | None = field(compare=False)
    """The epoch of minibatch `minibatch`; None in the parts of stages that read no data."""
    plan: Mapping[str, Any]
    schedule: str
    """The schedule's name, or the text of a written program."""
    microbatches: int
    seed: int
    parts: tuple[tuple[int, int], ...]
    """(stage, replica) of each part."""


@dataclass(frozen=True)
class Manifest:
    """The content of checkpoint.json."""

    header: Header
    parts: tuple[Part, ...]

    @property
    def files(self) -> list[PartFile]:
        return [file for part in self.parts for file in part.files]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, without the manifest itself."""
        return sum(file.bytes for file in self.files)

    def to_dict(self) -> dict[str, Any]:
        format_ = {"format": f"pipedream.{_KIND}/{_VERSION}"}
        return format_ | _header_to_dict(self.header) | {"parts": write_value(self.parts)}


class _Checksummed:
    """Writes into a file, and computes the size and the checksum of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, view.nbytes, _CHUNK_BYTES):  # a chunk stays in the CPU's cache for both reads
            chunk = view[begin : begin + _CHUNK_BYTES]
            self.crc32 = zlib.crc32(chunk, self.crc32)
            self._file.write(chunk)
        self.num_bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        self._file.flush()


def write_whole(
    path: Path,
    kind: str,
    write: Callable[[Any], None],
    *,
    version: int | None = None,
    owner: int | None = None,
    lasts: bool = True,
) -> PartFile:
    """Calls `write` with an open temporary file, and renames the file when it is complete. After a failure no
    file is left.

    lasts: whether to wait until the bytes are on the disk before the renaming, so that they survive a crash
    of the machine."""
    # The random digits make the temporary names differ if two workers write the same manifest.
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_UNFINISHED}")
    try:
        with unfinished.open("wb") as file:
            checked = _Checksummed(file)
            write(checked)
            file.flush()
            if lasts:
                os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    return PartFile(path.name, kind, checked.num_bytes, _hexadecimal(checked.crc32), version, owner)


def part_name(stage_index: int, replica_index: int) -> str:
    """Returns the prefix of the names of a part's files: "stage-0", or "stage-0-replica-1"."""
    return f"stage-{stage_index}" + (f"-replica-{replica_index}" if replica_index > 0 else "")


def part_path(folder: Path, stage_index: int, replica_index: int = 0) -> Path:
    """Returns the path of a part's JSON."""
    return folder / f"{part_name(stage_index, replica_index)}.json"


def write_part(
    folder: Path, header: Header, part: Part, state: Mapping[str, Any], *, lasts: bool = True
) -> None:
    """Writes the part's JSON. Call it after all files of the part are written.

    state: all state that is not in tensors; its floats may be infinite or NaN. lasts: see write_whole()."""
    fields = {
        "format": f"pipedream.{_PART_KIND}/{_VERSION}",
        **write_value(part),
        "checkpoint": _header_to_dict(header) | {"parts": [list(place) for place in header.parts]},
        "state": _finite(state),
    }
    path = part_path(folder, part.stage, part.replica)
    write_whole(path, "state", lambda file: file.write(_to_bytes(fields)), lasts=lasts)
    if lasts:
        _sync_folder(folder)


def write_manifest(folder: Path) -> Manifest | None:
    """Writes the manifest and returns it. Returns None if a part of the checkpoint is missing in the folder.

    Raises FileFormatError if the parts come from different runs."""
    manifest = _joined(folder)
    if manifest is not None:
        content = _to_bytes(manifest.to_dict())
        write_whole(folder / MANIFEST_NAME, "manifest", lambda file: file.write(content))
        _sync_folder(folder)
    return manifest


def _joined(folder: Path) -> Manifest | None:
    """Makes the manifest from the parts. Returns None if a part is missing."""
    known: dict[tuple[int, int], Part] = {}
    header: Header | None = None
    for path in sorted(folder.glob("stage-*.json")):
        of_part, part, _ = read_part(path)
        if header is not None and of_part != header:
            raise FileFormatError(f"{path}: is of another run than the other parts in {folder}: remove them")
        if header is None or header.epoch is None:
            header = of_part
        content = path.read_bytes()
        own = PartFile(path.name, "state", len(content), _hexadecimal(zlib.crc32(content)))
        known[part.stage, part.replica] = replace(part, files=(*part.files, own))
    if header is None or set(known) != set(header.parts):
        return None
    return Manifest(header, tuple(known[place] for place in header.parts))


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest. Raises FileFormatError that names file and field, and OSError if the file cannot be
    read."""
    path = folder / MANIFEST_NAME
    fields = _read(path, _KIND)
    return _told_for(path, lambda: _manifest_of(fields))


def read_part(path: Path) -> tuple[Header, Part, dict[str, Any]]:
    """Reads a part's JSON. Returns the checkpoint's header, the part, and the state that is not in tensors.
    Raises the same errors as read_manifest()."""
    fields = _read(path, _PART_KIND)

    def parse() -> tuple[Header, Part, dict[str, Any]]:
        require(fields, ("checkpoint", "state"), "")
        header = check_object("checkpoint", fields["checkpoint"])
        require(header, ("parts",), "checkpoint.")
        places = [tuple(check_list("checkpoint.parts", place)) for place in header["parts"]]
        return _header_of(header, places), read_value("part", fields, Part), _restored(fields["state"])

    return _told_for(path, parse)


def read_part_state(folder: Path, stage_index: int, replica_index: int = 0) -> dict[str, Any]:
    """Returns the state of a part that is not in tensors."""
    return read_part(part_path(folder, stage_index, replica_index))[2]


def problems_of(folder: Path, manifest: Manifest, *, checksums: bool = True) -> list[str]:
    """Returns a line for each file that is missing, or that has changed in size or content since it was
    written. checksums: False compares only the sizes."""
    found = []
    for file in manifest.files:
        path = folder / file.name
        try:
            num_bytes = path.stat().st_size
            if num_bytes != file.bytes:
                found.append(f"{path} has {num_bytes} bytes and was written with {file.bytes}")
            elif checksums and _crc32_of(path) != file.crc32:
                found.append(f"{path} is corrupted: its checksum differs from the one in {MANIFEST_NAME}")
        except FileNotFoundError:
            found.append(f"{path} is missing")
        except OSError as error:
            found.append(f"{path} cannot be read: {error.strerror}")
    if checksums and not found and not _is_of_its_parts(folder, manifest):
        found.append(f"{folder / MANIFEST_NAME} is corrupted: its stages' files say something else")
    return found


def _is_of_its_parts(folder: Path, manifest: Manifest) -> bool:
    """Whether the manifest agrees with the parts. The manifest has no checksum, so this comparison shows
    whether it was changed."""
    try:
        joined = _joined(folder)
    except (FileFormatError, OSError):
        return False
    return joined is not None and joined.to_dict() == manifest.to_dict()


def _crc32_of(path: Path) -> str:
    crc32 = 0
    with path.open("rb") as file:
        while content := file.read(_CHUNK_BYTES):
            crc32 = zlib.crc32(content, crc32)
    return _hexadecimal(crc32)


def _hexadecimal(crc32: int) -> str:
    return f"{crc32:08x}"


def _sync_folder(folder: Path) -> None:
    """Waits until the folder's list of files is on the disk, if the file system can do this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some file systems refuse it for folders
        pass
    finally:
        os.close(descriptor)


# JSON.


def _to_bytes(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, indent=1, allow_nan=False).encode() + b"\n"


def _read(path: Path, kind: str) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise FileFormatError(f"{path}: not JSON: {why}") from None
    check_format(fields, kind, _VERSION, os.fspath(path))
    return dict(fields)


def _told_for(path: Path, parse: Callable[[], _Parsed]) -> _Parsed:
    try:
        return parse()
    except ValueError as error:
        raise FileFormatError(f"{path}: {error}") from None


def _header_to_dict(header: Header) -> dict[str, Any]:
    fields = {name: value for name, value in vars(header).items() if name != "parts"}
    return fields | {"seed": str(header.seed)}  # text, because some JSON readers lack 64-bit integers


def _header_of(fields: Mapping[str, Any], places: Iterable[Any]) -> Header:
    require(fields, ("run", "minibatch", "epoch", "plan", "schedule", "microbatches", "seed"), "")
    return Header(
        run=check_text("run", fields["run"]),
        minibatch=check_whole("minibatch", fields["minibatch"]),
        epoch=None if fields["epoch"] is None else check_whole("epoch", fields["epoch"]),
        plan=check_object("plan", fields["plan"]),
        schedule=check_text("schedule", fields["schedule"]),
        microbatches=check_whole("microbatches", fields["microbatches"], at_least=1),
        seed=int(check_text("seed", fields["seed"])),
        parts=tuple(
            (check_whole("stage", stage), check_whole("replica", replica)) for stage, replica in places
        ),
    )


def _manifest_of(fields: Mapping[str, Any]) -> Manifest:
    require(fields, ("parts",), "")
    parts = read_value("parts", fields["parts"], tuple[Part, ...])
    header = _header_of(fields, [(part.stage, part.replica) for part in parts])
    num_stages = Plan.from_dict(header.plan, source="plan").num_stages
    stages = sorted({part.stage for part in parts})
    if stages != list(range(num_stages)):
        raise ValueError(f"parts has stages {stages}, and the plan has 0 to {num_stages - 1}")
    return Manifest(header, parts)


def _finite(value: Any) -> Any:
    """Replaces infinite floats and NaN, which JSON lacks, by objects such as {"not finite": "inf"}."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_NOT_FINITE: str(value)}
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _restored(value: Any) -> Any:
    """Undoes _finite()."""
    if isinstance(value, dict):
        if set(value) == {_NOT_FINITE}:
            return float(value[_NOT_FINITE])
        return {name: _restored(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value
