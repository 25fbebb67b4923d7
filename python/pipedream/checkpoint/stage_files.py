"""Writes the tensors of one stage's part of a checkpoint into safetensors files, and reads them back.

Tensors have the names of the original model's parameters and buffers. Nothing is pickled. A shard may have
only a piece of a parameter. The piece "weight[20:30]" has the elements 20 to 29 of "weight". The worker's
writer thread (writer.py) writes checkpoints. All other functions run on any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipedream.checkpoint.manifest import (
    Header,
    Part,
    PartFile,
    part_name,
    read_part,
    read_part_state,
    write_part,
    write_whole,
)
from pipedream.checkpoint.snapshot import StageSnapshot
from pipedream.checkpoint.state import saved_values, write_tensors
from pipedream.model.layers import flat_view
from pipedream.model.stage_module import StageModule, Tie

__all__ = [
    "AVERAGE",
    "FROZEN",
    "NAMES",
    "RECORD",
    "Content",
    "contents_of",
    "has_pieces",
    "join_pieces",
    "names_of_stage",
    "piece_in",
    "piece_name",
    "piece_of",
    "read_kind",
    "read_snapshot",
    "read_snapshots",
    "state_of",
    "write_snapshot",
    "write_stage",
]

NAMES = "names"
"""The key in a part's JSON under which the result of names_of_stage() is stored."""
RECORD = "record"
"""The kind of the file with losses, samples and epochs of earlier minibatches."""

AVERAGE = " / average"
"""The suffix of a parameter's average (callbacks.EMA) in a file of kind "optimizer"."""
FROZEN = "frozen"
"""The kind of the file with parameters that are not trained."""
_KINDS = ("buffers", "optimizer", "residuals")
_PLAIN_FIELDS = ("minibatch", "optimizer_document", "document")
_STRIDES = "strides"
_PIECE = re.compile(r"(.*)\[(\d+):(\d+)\]\Z")


@dataclass(frozen=True)
class Content:
    """The tensors of one file."""

    kind: str
    """One of the kinds of PartFile."""
    tensors: Mapping[str, Tensor]
    version: int | None = None
    owner: int | None = None

    @property
    def suffix(self) -> str:
        """The last part of the file's name, without extension: "version-300", "tied-0-version-300"."""
        if self.owner is not None:
            return f"{self.kind}-{self.owner}-version-{self.version}"
        return self.kind if self.version is None else f"{self.kind}-{self.version}"


def contents_of(snapshot: StageSnapshot) -> list[Content]:
    """Returns the tensors of the snapshot, one Content per file."""
    return [
        *(Content("version", tensors, version) for version, tensors in snapshot.versions.items()),
        *(
            Content("tied", tensors, version, owner)
            for owner, versions in snapshot.tied.items()
            for version, tensors in versions.items()
        ),
        *(Content(kind, getattr(snapshot, kind)) for kind in _KINDS),
        Content("tensors", snapshot.document_tensors),
    ]


def state_of(snapshot: StageSnapshot) -> dict[str, Any]:
    """Returns the snapshot's state that is not in tensors, for the part's JSON."""
    return {
        **{name: getattr(snapshot, name) for name in _PLAIN_FIELDS},
        # The versions are listed, because a stage that trains nothing has versions but no files for them.
        "versions": list(snapshot.versions),
        "tied": {str(owner): list(versions) for owner, versions in snapshot.tied.items()},
    }


def read_snapshot(folder: Path, part: Part) -> StageSnapshot:
    """Reads the snapshot of a part, the reverse of contents_of() and state_of(). The tensors are copies."""
    state = read_part_state(folder, part.stage, part.replica)
    strides: dict[str, list[int]] = state[_STRIDES]

    def read(kind: str, version: int | None = None, owner: int | None = None) -> dict[str, Tensor]:
        files = [file for file in part.of_kind(kind) if (file.version, file.owner) == (version, owner)]
        return {
            name: _with_strides(tensor, strides.get(f"{kind}: {name}"))
            for name, tensor in read_kind(folder, files).items()
        }

    fields: dict[str, Any] = {kind: read(kind) for kind in _KINDS}
    fields |= {name: state[name] for name in _PLAIN_FIELDS}
    return StageSnapshot(
        stage_index=part.stage,
        replica_index=part.replica,
        versions={version: read("version", version) for version in state["versions"]},
        tied={
            int(owner): {version: read("tied", version, int(owner)) for version in versions}
            for owner, versions in state["tied"].items()
        },
        **fields,
        document_tensors=read("tensors"),
    )


def _with_strides(tensor: Tensor, strides: list[int] | None) -> Tensor:
    """Returns a copy with these strides, because a safetensors file stores no strides. They are None if the
    tensor was contiguous."""
    if strides is None:
        return tensor.clone()
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


def write_stage(
    folder: Path,
    header: Header,
    place: tuple[int, int],
    contents: Sequence[Content],
    state: Mapping[str, Any],
    *,
    lasts: bool = True,
) -> Part:
    """Writes a file for each content that has tensors, then the part's JSON. place: (stage, replica). lasts:
    see manifest.write_whole()."""
    prefix = part_name(*place)
    files = []
    strides: dict[str, list[int]] = {}
    for content in contents:
        if content.tensors:
            files.append(_write_content(folder / f"{prefix}-{content.suffix}.safetensors", content, lasts))
        for name, tensor in content.tensors.items():
            if not tensor.is_contiguous():
                strides[f"{content.kind}: {name}"] = list(tensor.stride())
    part = Part(*place, tuple(files))
    write_part(folder, header, part, {**state, _STRIDES: strides}, lasts=lasts)
    return part


def write_snapshot(folder: Path, snapshot: StageSnapshot) -> None:
    """Writes one snapshot outside a checkpoint. Another process of this machine reads it."""
    place = (snapshot.stage_index, snapshot.replica_index)
    header = Header("state", snapshot.minibatch, None, {}, "state", 1, 0, (place,))
    write_stage(folder, header, place, contents_of(snapshot), state_of(snapshot), lasts=False)


def read_snapshots(folder: Path) -> list[StageSnapshot]:
    """Reads all snapshots that write_snapshot() wrote into the folder, in the order of their stages."""
    parts = [read_part(path)[1] for path in folder.glob("stage-*.json")]
    parts.sort(key=lambda part: (part.stage, part.replica))
    return [read_snapshot(folder, part) for part in parts]


def _write_content(path: Path, content: Content, lasts: bool) -> PartFile:
    def write(file: Any) -> None:
        write_tensors(content.tensors, file)

    how = {"version": content.version, "owner": content.owner}
    return write_whole(path, content.kind, write, **how, lasts=lasts)


def read_kind(folder: Path, files: Iterable[PartFile]) -> dict[str, Tensor]:
    """Returns the tensors of these files. They lie in the memory of the mapped files, so copy them to keep
    them."""
    return {name: tensor for file in files for name, tensor in saved_values(folder / file.name).items()}


def piece_of(name: str, tensor: Tensor, first: int, count: int) -> tuple[str, Tensor]:
    """Returns the name and the values of a piece: `count` elements from `first` on, in the order of the
    parameter's memory."""
    return piece_name(name, first, count), flat_view(tensor)[first : first + count]


def piece_name(name: str, first: int, count: int) -> str:
    """Returns the name of a piece: 10 elements from element 20 of "weight" are "weight[20:30]"."""
    return f"{name}[{first}:{first + count}]"


def piece_in(name: str) -> tuple[str, int, int]:
    """Returns ("weight", 20, 30) for the piece "weight[20:30]", and ("weight", 0, 0) for the whole
    "weight"."""
    match = _PIECE.match(name)
    return (name, 0, 0) if match is None else (match.group(1), int(match.group(2)), int(match.group(3)))


def has_pieces(names: Iterable[str]) -> bool:
    """Whether one of these names is the name of a piece."""
    return any(_PIECE.match(name) for name in names)


def join_pieces(tensors: Mapping[str, Tensor], names: Mapping[str, Any]) -> dict[str, Tensor]:
    """Joins pieces into whole parameters. Whole tensors stay as they are. names: from names_of_stage()."""
    joined: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _PIECE.match(name)
        if match is None:
            joined[name] = tensor
            continue
        whole, first = match.group(1), int(match.group(2))
        if whole not in joined:
            shape, strides = names["layouts"][whole]
            joined[whole] = torch.empty_strided(shape, strides, dtype=tensor.dtype)
        flat_view(joined[whole])[first : first + tensor.numel()] = tensor
    return joined


def names_of_stage(stage: StageModule, ties: Sequence[Tie]) -> dict[str, Any]:
    """Returns facts about the names of the stage's tensors, for readers of the files that have no model. Call
    it before the stage trains.

    aliases: {further name of a tensor in a state_dict: its name in the files}.
    tied: {parameter that another stage owns: [owner stage, its name there]}.
    not_saved: names of buffers that no state_dict has.
    layouts: {trained parameter: [shape, strides]}.
    """
    held = (*stage.trainable_parameters(), *stage.frozen_parameters(), *stage.stage_buffers())
    name_in_files = {id(tensor): name for name, tensor in held}
    aliases: dict[str, str] = {}
    for prefix, root in stage.roots():
        tensors = (
            *root.named_parameters(remove_duplicate=False),
            *root.named_buffers(remove_duplicate=False),
        )
        for own_name, tensor in tensors:
            known = name_in_files.get(id(tensor))
            if known is not None and known != prefix + own_name:
                aliases[prefix + own_name] = known
    tied = {
        name: [tie.stages[0], tie.names[0]]
        for tie in ties
        for user, name in zip(tie.stages[1:], tie.names[1:], strict=True)
        if user == stage.stage_index
    }
    persistent = stage.persistent_names()
    not_saved = [name for name, _ in stage.stage_buffers() if name not in persistent]
    layouts = {name: [list(p.shape), list(p.stride())] for name, p in stage.trainable_parameters()}
    return {"aliases": aliases, "tied": tied, "not_saved": not_saved, "layouts": layouts}
