"""Writes checkpoints for tests, as the workers of a run write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipedream.checkpoint.checkpoint_folder import folder_of
from pipedream.checkpoint.manifest import Header, write_manifest
from pipedream.checkpoint.stage_files import NAMES, Content, names_of_stage, write_stage
from pipedream.model.stage_module import StageModule, Tie, find_ties
from pipedream.planning.plan import Plan
from pipedream.splitting.splitter import split
from torch import nn

__all__ = ["header_of", "write_checkpoint"]


def header_of(plan: Plan, minibatch: int, *, run: str = "first") -> Header:
    return Header(
        run=run,
        minibatch=minibatch,
        epoch=0,
        plan=plan.to_dict(),
        schedule="pipedream",
        microbatches=1,
        seed=2**63 + 1,
        parts=tuple(
            (index, replica)
            for index, stage in enumerate(plan.stages)
            for replica in range(stage.num_replicas)
        ),
    )


def write_checkpoint(
    path: Path,
    model: nn.Module,
    plan: Plan,
    minibatch: int = 6,
    *,
    stages: Sequence[int] | None = None,
    run: str = "first",
) -> Path:
    """Writes a checkpoint of the model. Each stage also gets an older version, which is all zeros.

    `stages` names the stages whose parts are written. None writes all, and then the manifest.
    """
    folder = folder_of(path, minibatch)
    folder.mkdir(parents=True, exist_ok=True)
    split_model = split(model, plan)
    ties = find_ties(split_model)
    header = header_of(plan, minibatch, run=run)
    for stage_index, replica_index in header.parts:
        if stages is not None and stage_index not in stages:
            continue
        stage = split_model[stage_index]
        contents = [
            *_weights(stage, [tie for tie in ties if stage_index in tie.stages]),
            Content("frozen", dict(stage.frozen_parameters())),
            Content("buffers", {name: value + replica_index for name, value in stage.stage_buffers()}),
            Content("optimizer", {}),
        ]
        if replica_index > 0:
            contents = contents[-2:]
        state = {NAMES: names_of_stage(stage, ties), "best": float("inf")}
        write_stage(folder, header, (stage_index, replica_index), contents, state)
    write_manifest(folder)
    return folder


def _weights(stage: StageModule, ties: Sequence[Tie]) -> list[Content]:
    tied = {name: tie.stages[0] for tie in ties for name in tie.names}
    own, by_owner = {}, {}
    for name, parameter in stage.trainable_parameters():
        place = by_owner.setdefault(tied[name], {}) if name in tied else own
        place[name] = parameter.detach()
    contents = []
    for version, scale in ((5, 0.0), (6, 1.0)):
        contents.append(Content("version", {name: scale * value for name, value in own.items()}, version))
        for owner, values in by_owner.items():
            # A stage that only uses a tied parameter may have an older version than its owner.
            of_user = scale if owner == stage.stage_index else 0.5
            tensors = {name: of_user * value for name, value in values.items()}
            contents.append(Content("tied", tensors, version, owner))
    return contents
