"""Workers write weights into files, one per stage, for the caller of local workers and for the user. The
worker that has a stage writes the stage's file.

    model-00001-of-00002.safetensors      stage 0, of replica 0
    model-00002-of-00002.safetensors      stage 1
    model.safetensors.index.json          the file of each tensor, as in Hugging Face's checkpoints

Replicas differ only in their buffers, so each further replica of a stage writes only its buffers. The stage's
buffers are the means over all replicas, and get a separate file in the user's folder. A file is called *.part
until it is complete. The user's files keep that name until all of them are complete. Runs on the worker's
compute thread, and on the caller's thread.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from pipedream.checkpoint.stage_files import join_pieces
from pipedream.checkpoint.state import (
    average_buffers,
    mean_buffers,
    save_state,
    saved_names,
    saved_values,
    set_state,
    state_bytes,
    write_tensors,
)
from pipedream.common.errors import PipelineError, one_line
from pipedream.common.units import format_bytes
from pipedream.model.initial_weights import WEIGHT_INDEX
from pipedream.model.layers import Model, roots_of
from pipedream.model.loss_state import joined_loss_states
from pipedream.model.stage_module import StageModule
from pipedream.planning.plan import Plan
from pipedream.worker.agreed_run import AgreedRun
from pipedream.worker.task_files import read_part, write_part

__all__ = [
    "are_complete",
    "check_room",
    "drop_weights",
    "finish_weights",
    "is_keeping",
    "keep_elsewhere",
    "keep_newest",
    "load_newest",
    "load_weights",
    "move_weights",
    "read_averages",
    "read_loss_state",
    "reserve_room",
    "save_weights",
    "whole_averages",
    "write_averages",
    "write_loss_state",
]

_PART = ".part"


def check_room(model: Model, folder: str) -> None:
    """Raises ValueError if the folder has no room for the trained weights. folder: the user's `save`."""
    place = Path(folder)
    while not place.exists():
        place = place.parent
    roots = [root for _, root in roots_of(model)]
    tensors = {id(t): t for root in roots for t in (*root.parameters(), *root.buffers())}
    needed, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"save is {folder!r}, where {format_bytes(free)} are free, and the trained weights take"
            f" {format_bytes(needed)}, beside those of an earlier run until all are written: make room there,"
            " or name another folder"
        )


def reserve_room(stages: Iterable[StageModule], plan: Plan, folder: Path) -> None:
    """Reserves room before a run, so that the workers can write the trained weights even if the disk gets
    full. In a folder in host memory the room is only checked, because reserved memory would be missing in the
    run."""
    files = [
        (stage.stage_index, replica, state_bytes(stage, only_buffers=replica > 0))
        for stage in stages
        for replica in range(plan.stages[stage.stage_index].num_replicas)
    ]
    in_memory = _is_in_memory(folder)
    left = shutil.disk_usage(folder).free
    for stage_index, replica, num_bytes in files:
        path = _part_of(_file_of(folder, plan, stage_index, replica))
        try:
            left -= num_bytes
            if not in_memory:
                with path.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
            elif left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):  # the file system cannot reserve room
                return
            temporary = folder.parent
            raise PipelineError(
                f"the trained weights of stage {stage_index} ({format_bytes(num_bytes)}) come back"
                f" through {temporary}, where {format_bytes(shutil.disk_usage(temporary).free)} are free"
                f" ({one_line(error)}): make room there, or name another folder in TMPDIR"
            ) from None


def _is_in_memory(folder: Path) -> bool:
    """Whether files in the folder use host memory. The type of the file system decides. False if the type is
    unknown."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            place, _, kind = line.partition(" - ")
            if place.split()[2] == number:
                return kind.split()[0] in ("tmpfs", "ramfs")
    return False


def save_weights(run: AgreedRun, folder: Path, *, persistent: bool) -> None:
    """Writes the weights of this worker's stages. persistent: whether the files are the user's. A user's file
    has only the tensors of a state_dict. It keeps the name *.part until finish_weights()."""
    for stage in run.own_stages():
        replica = run.plan.replica_of(run.rank)
        names = stage.persistent_names() if persistent else None
        path = _file_of(folder, run.plan, stage.stage_index, replica)
        folder.mkdir(parents=True, exist_ok=True)
        save_state(stage, _part_of(path), names=names, only_buffers=replica > 0)
        if not persistent:
            _part_of(path).replace(path)


def write_averages(folder: Path, rank: int, averages: Mapping[str, Tensor]) -> None:
    with (folder / _averages_file(rank)).open("wb") as file:
        write_tensors(averages, file)


def read_averages(stages: Sequence[StageModule], plan: Plan, folder: Path) -> dict[str, Tensor] | None:
    """Reads the averages that all local workers have written; None if the run has no averages. The caller of
    the workers calls it."""
    paths = [folder / _averages_file(rank) for rank in range(plan.workers_used)]
    found = {name: value for path in paths if path.exists() for name, value in saved_values(path).items()}
    return whole_averages(stages, found) if found else None


def whole_averages(stages: Sequence[StageModule], pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies of the averages of whole parameters. Pieces from several replicas are joined."""
    named = [pair for stage in stages for pair in stage.trainable_parameters()]
    layouts = {name: [list(parameter.shape), list(parameter.stride())] for name, parameter in named}
    joined = join_pieces(pieces, {"layouts": layouts})
    return {name: value.clone() if name in pieces else value for name, value in joined.items()}


def _averages_file(rank: int) -> str:
    return f"averages-{rank}.safetensors"


def write_loss_state(folder: Path, replica: int, state: dict[str, Tensor]) -> None:
    """Writes the state of the loss for the caller. Local workers of the last stage call it."""
    write_part(folder, _loss_file(replica), state, "")


def read_loss_state(plan: Plan, folder: Path) -> dict[str, Tensor]:
    replicas = range(plan.stages[-1].num_replicas)
    return joined_loss_states([read_part(folder, _loss_file(replica)) for replica in replicas])


def _loss_file(replica: int) -> str:
    return f"loss-replica-{replica}"


def are_complete(plan: Plan, folder: Path) -> bool:
    """Whether all local workers have saved their weights for the caller."""
    return all(
        _file_of(folder, plan, stage, replica).exists()
        for stage in range(plan.num_stages)
        for replica in range(plan.stages[stage].num_replicas)
    )


def load_weights(stages: Iterable[StageModule], plan: Plan, folder: Path) -> None:
    """Gives the stages the weights that all workers have saved. If that fails, moves the files into a new
    folder, and raises PipelineError that names this folder."""
    try:
        for stage in stages:
            index = stage.stage_index
            set_state(stage, saved_values(_file_of(folder, plan, index)))
            average_buffers(stage, _of_other_replicas(folder, plan, index))
    except Exception as error:
        kept = Path(tempfile.mkdtemp(prefix="trained-weights-", dir=folder.parent))
        for path in folder.glob("model-*.safetensors"):
            path.replace(kept / path.name)
        raise PipelineError(
            f"the trained weights could not be put into the model ({one_line(error)}): they are in {kept}"
        ) from error


def keep_newest(run: AgreedRun) -> None:
    """Writes this worker's stages for the caller of local workers, after a failure. Every replica writes its
    whole stages, because it may be the only replica that is left."""
    folder = run.place.folder
    assert folder is not None
    replica = run.plan.replica_of(run.rank)
    for stage in run.own_stages():
        path = _newest_file(folder, stage.stage_index, replica)
        reserved = _part_of(_file_of(folder, run.plan, stage.stage_index, replica))
        if reserved.exists():
            reserved.replace(_part_of(path))
        save_state(stage, _part_of(path))
        _part_of(path).replace(path)


def is_keeping(folder: Path) -> bool:
    """Whether any worker is still writing in keep_newest()."""
    return any(folder.glob(f"newest-*{_PART}"))


def load_newest(stages: Iterable[StageModule], plan: Plan, folder: Path) -> list[int] | None:
    """Loads the weights that keep_newest() has written. Returns the stages without a file. Returns None if
    there are no files at all; the model is then unchanged."""
    missing: list[int] = []
    has_loaded = False
    for stage in stages:
        replicas = range(plan.stages[stage.stage_index].num_replicas)
        paths = [_newest_file(folder, stage.stage_index, replica) for replica in replicas]
        kept = [path for path in paths if path.exists()]
        if not kept:
            missing.append(stage.stage_index)
            continue
        has_loaded = True
        set_state(stage, saved_values(kept[0]))
        average_buffers(stage, [saved_values(path) for path in kept[1:]])
    return missing if has_loaded else None


def finish_weights(plan: Plan, folder: Path) -> None:
    """Finishes the user's files: writes the means of the buffers and the index, and renames the files. Rank 0
    calls it when all workers have written their files."""
    file_of: dict[str, str] = {}
    means: dict[str, Tensor] = {}
    for stage in range(plan.num_stages):
        path = _file_of(folder, plan, stage)
        file_of |= dict.fromkeys(saved_names(_part_of(path)), path.name)
        others = _of_other_replicas(folder, plan, stage, suffix=_PART)
        if others:
            means |= mean_buffers(saved_values(_part_of(path), others[0]), others)
    if means:
        path = folder / "model-buffers.safetensors"
        save_file(means, _part_of(path), metadata={"format": "pt"})
        file_of |= dict.fromkeys(means, path.name)
    num_bytes = sum(_part_of(folder / name).stat().st_size for name in set(file_of.values()))
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(file_of.items()))}
    text = json.dumps(index, indent=2) + "\n"
    _part_of(folder / WEIGHT_INDEX).write_text(text, encoding="utf-8")
    for name in (*set(file_of.values()), WEIGHT_INDEX):
        _part_of(folder / name).replace(folder / name)
    drop_weights(plan, folder)  # this removes the buffers' files of other replicas


def drop_weights(plan: Plan, folder: Path) -> None:
    for path in _unfinished(plan, folder):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def move_weights(plan: Plan, folder: Path) -> Path | None:
    """Moves the files of weights that are written but not finished into a new folder. It is called if weights
    of some stages are missing, or if files could not be renamed. Returns the folder; None if there are no
    such files."""
    written = [path for path in _unfinished(plan, folder) if path.exists()]
    if not written:
        return None
    kept = Path(tempfile.mkdtemp(prefix="trained-weights-", dir=folder))
    for path in written:
        path.replace(kept / path.name.removesuffix(_PART))
    return kept


def keep_elsewhere(run: AgreedRun) -> str:
    """Writes this worker's weights into a new folder on a disk with enough room. Returns a text that says
    where they are."""
    for place in (tempfile.gettempdir(), os.getcwd()):
        with contextlib.suppress(OSError):
            kept = Path(tempfile.mkdtemp(prefix="trained-weights-", dir=place))
            try:
                save_weights(run, kept, persistent=True)
            except OSError:
                shutil.rmtree(kept, ignore_errors=True)
                raise
            for part in kept.glob(f"*{_PART}"):
                part.replace(kept / part.name.removesuffix(_PART))
            return f"they are in {kept}"
    return f"nor in {tempfile.gettempdir()} or {os.getcwd()}, so they are lost"


def _unfinished(plan: Plan, folder: Path) -> list[Path]:
    stages = range(plan.num_stages)
    replicas = [range(plan.stages[stage].num_replicas) for stage in stages]
    paths = [_file_of(folder, plan, stage, replica) for stage in stages for replica in replicas[stage]]
    others = [folder / "model-buffers.safetensors", folder / WEIGHT_INDEX]
    return [_part_of(path) for path in (*paths, *others)]


def _of_other_replicas(folder: Path, plan: Plan, stage: int, suffix: str = "") -> list[dict[str, Tensor]]:
    replicas = range(1, plan.stages[stage].num_replicas)
    paths = [_file_of(folder, plan, stage, replica) for replica in replicas]
    return [saved_values(path.with_name(path.name + suffix)) for path in paths]


def _part_of(path: Path) -> Path:
    return path.with_name(path.name + _PART)


def _newest_file(folder: Path, stage: int, replica: int) -> Path:
    return folder / f"newest-{stage}-{replica}.safetensors"


def _file_of(folder: Path, plan: Plan, stage: int, replica: int = 0) -> Path:
    suffix = f"-replica-{replica}" if replica > 0 else ""
    return folder / f"model-{stage + 1:05}-of-{plan.num_stages:05}{suffix}.safetensors"
