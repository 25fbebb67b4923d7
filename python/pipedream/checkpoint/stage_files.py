"""The tensors of one stage's part of a checkpoint: into safetensors files, and back.

Tensors have the names of the original model's parameters and buffers. Nothing is pickled. The worker's thread
that writes checkpoints owns what is written; any thread reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pipedream.checkpoint.manifest import Header, Part, PartFile, part_name, write_part, write_whole
from pipedream.checkpoint.state import saved_values, write_tensors
from pipedream.model.stage_module import StageModule, Tie

__all__ = ["NAMES", "Content", "names_of_stage", "read_kind", "read_newest_version", "write_stage"]

NAMES = "names"
"""The key, in a part's state, of what names_of_stage() says."""


@dataclass(frozen=True)
class Content:
    """The tensors of one file."""

    kind: str
    """A kind of PartFile's."""
    tensors: Mapping[str, Tensor]
    version: int | None = None

    @property
    def suffix(self) -> str:
        """How the file's name ends, without its extension."""
        return self.kind if self.version is None else f"{self.kind}-{self.version}"


def write_stage(
    folder: Path,
    header: Header,
    place: tuple[int, int],
    contents: Iterable[Content],
    state: Mapping[str, Any],
) -> Part:
    """Writes a file for each content with tensors, and then the part's JSON. place: (stage, replica)."""
    prefix = part_name(*place)
    files = [
        write_whole(
            folder / f"{prefix}-{content.suffix}.safetensors",
            content.kind,
            lambda file, content=content: write_tensors(content.tensors, file),  # type: ignore[misc]
            content.version,
        )
        for content in contents
        if content.tensors
    ]
    part = Part(*place, tuple(files))
    write_part(folder, header, part, state)
    return part


def read_kind(folder: Path, files: Iterable[PartFile]) -> dict[str, Tensor]:
    """The tensors of these files, whose memory is the files' until somebody copies them."""
    return {name: tensor for file in files for name, tensor in saved_values(folder / file.name).items()}


def read_newest_version(folder: Path, part: Part) -> dict[str, Tensor]:
    newest = part.newest_version
    return {} if newest is None else read_kind(folder, [newest])


def names_of_stage(stage: StageModule, ties: Sequence[Tie]) -> dict[str, Any]:
    """Tells a reader without the model what it must know of the stage's names. Ask before the stage trains.

    "aliases" has the names that a state_dict has besides, each with the name that stands in the files. "tied"
    has the parameters that another stage owns, with that one's name. "not_saved" has the buffers that no
    state_dict holds.
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
        name: tie.names[0]
        for tie in ties
        for user, name in zip(tie.stages[1:], tie.names[1:], strict=True)
        if user == stage.stage_index
    }
    persistent = stage.persistent_names()
    not_saved = [name for name, _ in stage.stage_buffers() if name not in persistent]
    return {"aliases": aliases, "tied": tied, "not_saved": not_saved}
