"""Weights in files, one per stage, each written by the worker that has it: for the caller of local workers,
and for the user.

    model-00001-of-00002.safetensors      stage 0, of replica 0
    model-00002-of-00002.safetensors      stage 1
    model.safetensors.index.json          by name, as Hugging Face's checkpoints have it

Of a stage with replicas each one more writes its buffers, whose means over all are the stage's; the user's
folder gets them in a file of their own. On the worker's compute thread, and the caller's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from pipedream.checkpoint.state import (
    average_buffers,
    load_state,
    mean_buffers,
    save_state,
    saved_names,
    saved_values,
)
from pipedream.launch.agreed_run import AgreedRun
from pipedream.model.initial_weights import WEIGHT_INDEX
from pipedream.model.stage_module import StageModule
from pipedream.planning.plan import Plan

__all__ = ["finish_weights", "load_weights", "save_weights"]


def save_weights(run: AgreedRun, folder: Path, *, persistent: bool) -> None:
    """Those of this worker's stages. persistent: only what a state_dict holds."""
    for stage in run.own_stages():
        replica = run.plan.replica_of(run.rank)
        names = stage.persistent_names() if persistent else None
        path = _file_of(folder, run.plan, stage.stage_index, replica)
        save_state([stage], path, names=names, only_buffers=replica > 0)


def load_weights(stages: Iterable[StageModule], plan: Plan, folder: Path) -> None:
    """Makes what all workers saved the stages' state."""
    for stage in stages:
        index = stage.stage_index
        load_state([stage], _file_of(folder, plan, index))
        average_buffers(stage, _of_other_replicas(folder, plan, index))


def finish_weights(run: AgreedRun, folder: Path) -> None:
    """When all workers have saved theirs: the buffers' means, and the index. At rank 0."""
    plan = run.plan
    file_of: dict[str, str] = {}
    means: dict[str, Tensor] = {}
    for stage in range(plan.num_stages):
        path = _file_of(folder, plan, stage)
        file_of |= dict.fromkeys(saved_names(path), path.name)
        others = _of_other_replicas(folder, plan, stage)
        if others:
            means |= mean_buffers(saved_values(path, others[0]), others)
        for replica in range(1, plan.stages[stage].num_replicas):
            _file_of(folder, plan, stage, replica).unlink()
    if means:
        path = folder / "model-buffers.safetensors"
        save_file(means, path, metadata={"format": "pt"})
        file_of |= dict.fromkeys(means, path.name)
    num_bytes = sum((folder / name).stat().st_size for name in set(file_of.values()))
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(file_of.items()))}
    (folder / WEIGHT_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _of_other_replicas(folder: Path, plan: Plan, stage: int) -> list[dict[str, Tensor]]:
    replicas = range(1, plan.stages[stage].num_replicas)
    return [saved_values(_file_of(folder, plan, stage, replica)) for replica in replicas]


def _file_of(folder: Path, plan: Plan, stage: int, replica: int = 0) -> Path:
    suffix = f"-replica-{replica}" if replica > 0 else ""
    return folder / f"model-{stage + 1:05}-of-{plan.num_stages:05}{suffix}.safetensors"
