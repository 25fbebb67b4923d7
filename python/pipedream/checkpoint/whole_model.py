"""Reads the whole model from a checkpoint, without a run. Loads it into a model, or writes it into one file.

Each parameter has its newest version. Floating-point buffers of a stage are the means over its replicas, as
after a run. Runs on the caller's thread.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipedream.checkpoint.checkpoint_folder import find_checkpoint
from pipedream.checkpoint.manifest import Manifest, Part, read_part_state, write_whole
from pipedream.checkpoint.stage_files import AVERAGE, FROZEN, NAMES, has_pieces, join_pieces, read_kind
from pipedream.checkpoint.state import mean_buffers, write_tensors
from pipedream.model.layers import Model, dtype_name, roots_of
from pipedream.model.stand_ins import is_on_meta

__all__ = [
    "WholeState",
    "check_fits",
    "export_checkpoint",
    "load_checkpoint",
    "read_averages",
    "read_whole_state",
]

_STATE_DICT_SUFFIXES = (".pt", ".pth")
_SAFETENSORS = ".safetensors"


@dataclass(frozen=True)
class WholeState:
    """The state of the whole model, by full names. A tensor with several names is in the dict under each of
    them."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def load_checkpoint(path: str | os.PathLike[str], model: Model) -> None:
    """Loads the parameters and buffers of a checkpoint into a model, in place.

    path: one checkpoint, or a folder of checkpoints, from which the newest whole one is loaded.
    model: the model that was trained, as an nn.Module or a list of layers. The number of stages does not
    matter.

    Raises ValueError if there is no whole checkpoint, if the model is on the meta device, or if it has other
    parameters. The last error names the first parameter that differs. After an error the model is unchanged.
    """
    checkpoint, manifest, _ = find_checkpoint(Path(path))
    state = read_whole_state(checkpoint, manifest)
    roots = roots_of(model)
    if is_on_meta(root for _, root in roots):
        raise ValueError(
            "the model is on the meta device: `pipedream checkpoint export` writes a safetensors file, which"
            " pipedream.materialise(model, FILE) reads"
        )
    check_fits(checkpoint, state.parameters, roots)
    with torch.no_grad():
        for prefix, root in roots:
            for name, parameter in root.named_parameters():
                parameter.copy_(state.parameters[prefix + name])
    modules = {
        (prefix + name).rstrip("."): module for prefix, root in roots for name, module in root.named_modules()
    }
    for name, saved in state.buffers.items():
        path_of_module, _, own_name = name.rpartition(".")
        if path_of_module in modules:
            _load_buffer(modules[path_of_module], own_name, saved)


def _load_buffer(module: nn.Module, name: str, saved: Tensor) -> None:
    """Loads one buffer. The module may lack the buffer or have another shape, because some layers make
    buffers in the first forward."""
    buffer = module._buffers.get(name)
    if buffer is not None and buffer.shape == saved.shape and buffer.dtype == saved.dtype:
        with torch.no_grad():
            buffer.copy_(saved)  # in place, because the user may hold the tensor
    else:
        known = [buffer, *module.parameters(), *module.buffers()]
        device = next((tensor.device for tensor in known if tensor is not None), saved.device)
        module._buffers[name] = saved.clone().to(device)


def check_fits(
    checkpoint: Path, parameters: Mapping[str, Tensor], roots: Sequence[tuple[str, nn.Module]]
) -> None:
    """Raises ValueError if model and checkpoint do not have the same parameters with the same dtypes and
    shapes. The error names the first parameter that differs. roots: the model's modules, from
    layers.roots_of()."""
    own = {
        prefix + name: parameter
        for prefix, root in roots
        for name, parameter in root.named_parameters(remove_duplicate=False)
    }
    remedy = "give the model that was trained, or another folder"
    for name, parameter in own.items():
        if name not in parameters:
            raise ValueError(f"the model has a parameter {name!r}, and {checkpoint} has none: {remedy}")
        here, there = _describe(parameter), _describe(parameters[name])
        if here != there:
            raise ValueError(
                f"parameter {name!r} is {here} in the model and {there} in {checkpoint}: {remedy}"
            )
    for name in parameters:
        if name not in own:
            raise ValueError(f"{checkpoint} has a parameter {name!r}, and the model has none: {remedy}")


def _describe(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def export_checkpoint(
    path: str | os.PathLike[str], output: str | os.PathLike[str], *, ema: bool = False
) -> dict[str, Any]:
    """Writes the state_dict of the whole model into one file.

    The output's suffix chooses the format: .safetensors, or .pt and .pth for torch.save(). ema: whether to
    write the averages of callbacks.EMA instead of the trained weights. Returns facts about the written file.
    Raises ValueError for another suffix, if there is no whole checkpoint, or if it has no averages.
    """
    target = Path(output)
    if target.suffix not in (_SAFETENSORS, *_STATE_DICT_SUFFIXES):
        raise ValueError(
            f"{target}: the name must end in {_SAFETENSORS}, or in {' or '.join(_STATE_DICT_SUFFIXES)} for a"
            " state_dict as torch.save writes it"
        )
    checkpoint, manifest, unused = find_checkpoint(Path(path))
    whole = read_whole_state(checkpoint, manifest, persistent=True)
    state = whole.parameters | whole.buffers
    if ema:
        averages, count = read_averages(checkpoint, manifest)
        if not count:
            raise ValueError(f"{checkpoint} has no averages: its run had no pipedream.callbacks.EMA")
        state |= averages

    def write(file: Any) -> None:
        if target.suffix == _SAFETENSORS:
            write_tensors(state, file)
        else:
            torch.save(state, file)

    written = write_whole(target, "export", write)
    return {
        "checkpoint": os.fspath(checkpoint),
        "minibatch": manifest.header.minibatch,
        "output": os.fspath(target),
        "tensors": len(state),
        "bytes": written.bytes,
        "unused": unused,
    }


def read_averages(checkpoint: Path, manifest: Manifest) -> tuple[dict[str, Tensor], int]:
    """Returns the averages of callbacks.EMA by full parameter name, and the number of versions in them.
    Returns ({}, 0) if the run kept no averages.
    """
    of_parts = [read_part_state(checkpoint, part.stage, part.replica) for part in manifest.parts]
    count = max(state.get("optimizer_document", {}).get("averaged", 0) for state in of_parts)
    if not count:
        return {}, 0
    averages: dict[str, Tensor] = {}
    known_as: dict[str, str] = {}
    for parts, names in _stages_of(checkpoint, manifest):
        saved = read_kind(checkpoint, [file for part in parts for file in part.of_kind("optimizer")])
        own = {name.removesuffix(AVERAGE): value for name, value in saved.items() if name.endswith(AVERAGE)}
        # The average of a shared parameter is read from the owner, because a stage that only uses the
        # parameter may be a version behind.
        averages |= join_pieces({n: v for n, v in own.items() if n not in names["tied"]}, names)
        known_as |= _known_as(names)
    return _with_all_names(averages, known_as), count


def read_whole_state(checkpoint: Path, manifest: Manifest, *, persistent: bool = False) -> WholeState:
    """Reads the state of all stages. persistent: whether to leave out the buffers that no state_dict has."""
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    known_as: dict[str, str] = {}  # another name -> the name with the value
    for parts, names in _stages_of(checkpoint, manifest):
        newest = _newest_of(checkpoint, parts, names)
        parameters |= {name: tensor for name, tensor in newest.items() if name not in names["tied"]}
        parameters |= read_kind(checkpoint, parts[0].of_kind(FROZEN))
        left_out = names["not_saved"] if persistent else ()
        means = _mean_of([read_kind(checkpoint, part.of_kind("buffers")) for part in parts])
        buffers |= {name: tensor for name, tensor in means.items() if name not in left_out}
        known_as |= _known_as(names)
    return WholeState(_with_all_names(parameters, known_as), _with_all_names(buffers, known_as))


def _stages_of(checkpoint: Path, manifest: Manifest) -> Iterator[tuple[list[Part], dict[str, Any]]]:
    """Yields the replicas' parts and the names_of_stage() of each stage."""
    for stage_index, parts in itertools.groupby(manifest.parts, lambda part: part.stage):
        yield [*parts], read_part_state(checkpoint, stage_index)[NAMES]


def _known_as(names: Mapping[str, Any]) -> dict[str, str]:
    """Returns {further name of a tensor: the name under which its value is stored}. names: from
    names_of_stage()."""
    # Both stages of a traced model know a shared parameter by the same name, which needs no entry.
    tied = {name: known for name, (_, known) in names["tied"].items() if known != name}
    aliases: dict[str, str] = names["aliases"]
    return tied | aliases


def _with_all_names(tensors: dict[str, Tensor], known_as: Mapping[str, str]) -> dict[str, Tensor]:
    for name in known_as:
        known = name
        while known in known_as:
            known = known_as[known]
        if known in tensors:
            tensors[name] = tensors[known]
    return tensors


def _newest_of(checkpoint: Path, parts: Sequence[Part], names: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns a stage's newest weights from its replicas' parts. Joins the shards if the replicas have
    shards. Otherwise takes the means over the replicas, because with sync_every their weights differ."""
    of_parts = [read_kind(checkpoint, part.newest_weights) for part in parts]
    found = {name: tensor for of_part in of_parts for name, tensor in of_part.items()}
    return join_pieces(found, names) if has_pieces(found) else _mean_of(of_parts)


def _mean_of(of_replicas: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the first replica's tensors. Floating-point tensors that differ between replicas are replaced
    by their means."""
    mine, *others = of_replicas
    return mine | mean_buffers(mine, others)
