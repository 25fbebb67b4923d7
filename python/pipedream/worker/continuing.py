"""Continues a run from a checkpoint, which gives each worker its initial state.

    same plan, schedule, microbatches, ...    each worker gets all versions that were saved for it, so the run
                                              continues exactly, as with run(state=)
    another plan or schedule                  each worker gets the newest version of its parameters and their
                                              optimizer state, found by the parameters' names

The caller of local workers, or rank 0, calls found_checkpoint(), kinds_of() and read_record() before the
workers begin. The workers call read_record() and all other functions on their compute threads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipedream.checkpoint.checkpoint_folder import go_on_after, make_folder, mark_of, remove_incomplete
from pipedream.checkpoint.checkpoints import Checkpoints
from pipedream.checkpoint.manifest import Manifest, Part, read_manifest, read_part_state
from pipedream.checkpoint.run_state import RunState, WorkerState
from pipedream.checkpoint.snapshot import StageSnapshot, decode
from pipedream.checkpoint.stage_files import (
    FROZEN,
    NAMES,
    RECORD,
    has_pieces,
    join_pieces,
    read_kind,
    read_snapshot,
)
from pipedream.checkpoint.state import set_state
from pipedream.checkpoint.whole_model import check_fits, read_averages, read_whole_state
from pipedream.data.minibatch_source import MinibatchSource
from pipedream.data.stream import DataStream
from pipedream.model.layers import Model, roots_of
from pipedream.model.loss_state import joined_loss_states, set_loss_state
from pipedream.model.seeding import RngState, base_seed, seed_data
from pipedream.planning.shapes import Shapes, checked_shapes
from pipedream.report.progress import skipping_shown
from pipedream.report.status import losses_of
from pipedream.stage.job import Continued, JobOptions
from pipedream.stage.saving import DATA, EVALUATED, KINDS, LOSS, PENDING, PROCESS

if TYPE_CHECKING:
    from pipedream.worker.agreed_run import AgreedRun

__all__ = [
    "found_checkpoint",
    "go_to_position",
    "kinds_of",
    "position_of_data",
    "read_averages_of",
    "read_record",
    "take_loss_state",
    "take_newest",
    "with_checkpoint",
]

_log = logging.getLogger("pipedream")

_Versions = dict[int, dict[str, Tensor]]


def found_checkpoint(
    checkpoints: Checkpoints, model: Model, group_size: int, evaluates_every: int | str | None
) -> Continued | None:
    """Returns the checkpoint to continue from. Returns None if there is no checkpoint, so that the run begins
    with minibatch 0. Raises ValueError if the checkpoint does not fit the model, or if the folder cannot be
    written.

    Makes the folder if it is missing. Removes incomplete checkpoints of an earlier run from the folder, and
    renames checkpoints that this run would overwrite.

    group_size: number of minibatches after which all replicas of the plan have made their updates.
    evaluates_every: Validation's `every`; None without validation."""
    found = checkpoints.find()
    make_folder(checkpoints.folder, mark_of(checkpoints.folder, "start"))
    remove_incomplete(checkpoints.folder)
    if found is None:
        return None
    for line in found.unused:
        _log.warning("%s: continuing from %s", line, found.checkpoint.name)
    state = read_whole_state(found.checkpoint, found.manifest)
    check_fits(found.checkpoint, state.parameters, roots_of(model))
    reached = found.manifest.header.minibatch
    minibatch = reached - reached % group_size
    if minibatch < reached:
        _log.warning(
            "%s is at minibatch %d, and this plan's replicas update after every %d: those from %d on are"
            " trained on again",
            found.checkpoint,
            reached,
            group_size,
            minibatch,
        )
    _log.info("continuing from %s, at minibatch %d", found.checkpoint, minibatch)
    epoch = _epoch_at(found.checkpoint, found.manifest, minibatch)
    evaluates = tells_later = False
    if minibatch == reached:
        last = read_part_state(found.checkpoint, _last_stage_of(found.manifest))
        # A run that was ended by Ctrl-C may have left out the evaluation that was planned at this minibatch.
        is_due = _is_due(found.checkpoint, found.manifest, evaluates_every, group_size, epoch)
        is_done = any(each[0] == minibatch for each in last.get(EVALUATED, ()))
        evaluates = last.get(PENDING, False) or (is_due and not is_done)
        tells_later = not is_due and (evaluates or is_done)
    place = go_on_after(found.checkpoint, minibatch, checkpoints.folder)
    return Continued(str(place), minibatch, epoch, evaluates, tells_later)


def _is_due(
    checkpoint: Path, manifest: Manifest, every: int | str | None, group_size: int, epoch: int
) -> bool:
    """Whether an evaluation is planned at the checkpoint's minibatch. epoch: the epoch of that minibatch."""
    minibatch = manifest.header.minibatch
    if isinstance(every, int):
        return (minibatch - group_size) // every != minibatch // every
    epochs: list[int] = _read_record_of(checkpoint, manifest.parts[0])["epochs"]
    return every == "epoch" and 0 < minibatch <= len(epochs) and epochs[minibatch - 1] != epoch


def _epoch_at(checkpoint: Path, manifest: Manifest, minibatch: int) -> int:
    """Returns the epoch of the minibatch, which must not be after the checkpoint's minibatch."""
    if minibatch == manifest.header.minibatch and manifest.header.epoch is not None:
        return manifest.header.epoch
    epochs: list[int] = _read_record_of(checkpoint, manifest.parts[0])["epochs"]
    return epochs[min(minibatch, len(epochs) - 1)]


def kinds_of(continued: Continued) -> list[Shapes]:
    """Returns the shapes of minibatches for which the earlier run had planned its memory. They may be larger
    than the first minibatch of this run."""
    facts = read_part_state(Path(continued.path), 0)
    return [checked_shapes(KINDS, kind) for kind in facts.get(KINDS, ())]


class _CheckpointState(RunState):
    """The state of each worker, read from a checkpoint of a run with the same plan."""

    def __init__(self, checkpoint: Path, options: JobOptions) -> None:
        manifest = read_manifest(checkpoint)
        facts = read_part_state(checkpoint, 0)
        super().__init__(
            {
                "name": checkpoint.name,
                "minibatch": manifest.header.minibatch,
                "begun_at": facts["begun_at"],
                "base_seed": manifest.header.seed,
                "seed": options.seed,
                "multiple": 1,
                "is_gathered": False,
                "settings": facts["settings"],
                "data_generators": None,
                "missing": "",
            }
        )
        self._checkpoint = checkpoint
        self._manifest = manifest
        self._options = options

    def of_rank(self, rank: int) -> WorkerState:
        plan = self._options.plan
        replica = plan.replica_of(rank)
        return WorkerState([self._snapshot(stage, replica) for stage in plan.stages_of(rank)], {}, None)

    def _snapshot(self, stage: int, replica: int) -> StageSnapshot:
        """Returns the snapshot of a replica. The versions of the tied parameters that it uses come from the
        snapshots of the owner stages."""
        parts = _parts_by_place(self._manifest)
        snapshot = read_snapshot(self._checkpoint, parts[stage, replica])
        snapshot = replace(snapshot, versions=self._whole_versions(snapshot.versions, stage, "version"))
        if stage in snapshot.tied:
            snapshot.tied[stage] = self._whole_versions(snapshot.tied[stage], stage, "tied")
        names: dict[str, list[Any]] = read_part_state(self._checkpoint, stage)[NAMES]["tied"]
        for owner in sorted({owner for owner, _ in names.values()}):
            # With sync_every each replica has its own version of a tied parameter. It came from the replica
            # of the owner that has the same minibatches.
            part = parts.get((owner, replica), parts[owner, 0])
            of_owner = read_snapshot(self._checkpoint, part).tied[owner]
            snapshot.tied[owner] = {
                version: {name: values[known] for name, (its, known) in names.items() if its == owner}
                for version, values in self._whole_versions(of_owner, owner, "tied").items()
            }
        return snapshot

    def _whole_versions(self, own: _Versions, stage: int, kind: str) -> _Versions:
        """Returns a stage's versions with whole parameters. If replicas have shards, the newest version is
        joined from the pieces of all replicas. Replica 0 has stored the older versions whole. own: the
        versions that one replica has stored. kind: the kind of the files, "version" or "tied"."""
        parts = [part for part in self._manifest.parts if part.stage == stage]
        files = [file for part in parts for file in part.newest_of_kind(kind)]
        newest = read_kind(self._checkpoint, files)
        if not has_pieces(newest):
            return own
        first = read_snapshot(self._checkpoint, parts[0])
        older = first.versions if kind == "version" else first.tied[stage]
        return {**older, max(older): join_pieces(newest, read_part_state(self._checkpoint, stage)[NAMES])}

    def restore_generators(self, rank: int, stream: Any) -> None:
        """Does nothing, because go_to_position() restores the generators."""

    def seed_data(self) -> None:
        seed_data(self.base_seed, self._options.seed, self._options.plan.workers_used)

    def __reduce__(self) -> Any:
        return _CheckpointState, (self._checkpoint, self._options)


def with_checkpoint(options: JobOptions) -> tuple[JobOptions, int | None]:
    """Returns (options, base seed). The options have the checkpoint's state if the run can continue exactly.
    The seed is None without a checkpoint. Raises ValueError if the user gives another seed than the
    checkpoint's."""
    if options.continues is None:
        return options, None
    checkpoint, manifest = _opened(options.continues)
    seed = manifest.header.seed
    if options.seed is not None and base_seed(options.seed) != seed:
        raise ValueError(
            f"seed is {options.seed}, and {checkpoint} is of a run with another: give the same, or leave seed"
            " out"
        )
    is_at_boundary = manifest.header.minibatch == options.continues.minibatch
    if not is_at_boundary or read_part_state(checkpoint, 0)["settings"] != options.settings_of_state():
        return options, seed
    return replace(options, state=_CheckpointState(checkpoint, options)), seed


def read_record(continued: Continued | None) -> dict[str, list[Any]]:
    """Returns the losses, samples, epochs and evaluations of the minibatches before the checkpoint; an empty
    dictionary without a checkpoint."""
    if continued is None:
        return {}
    checkpoint, manifest = _opened(continued)
    last = _last_stage_of(manifest)
    of_last = [_read_record_of(checkpoint, part) for part in manifest.parts if part.stage == last]
    of_first = _read_record_of(checkpoint, manifest.parts[0])
    losses = losses_of([record["losses"] for record in of_last], manifest.header.microbatches)
    record = {
        "losses": [*of_last[0]["losses_before"], *losses],
        "samples": of_first["samples"],
        "epochs": of_first["epochs"],
    }
    before = {name: values[: continued.minibatch] for name, values in record.items()}
    evaluated = read_part_state(checkpoint, last).get(EVALUATED, [])
    return before | {EVALUATED: [each for each in evaluated if each[0] <= continued.minibatch]}


def _read_record_of(checkpoint: Path, part: Part) -> dict[str, list[Any]]:
    return {name: values.tolist() for name, values in read_kind(checkpoint, part.of_kind(RECORD)).items()}


def position_of_data(run: AgreedRun) -> tuple[int, Mapping[str, Any]] | None:
    """Returns the checkpoint's minibatch and the position of its data; None if this worker reads no data, or
    if the run does not continue from a checkpoint."""
    continued = run.options.continues
    if continued is None or not (run.reads_inputs or run.reads_targets):
        return None
    checkpoint, manifest = _opened(continued)
    tensors = read_kind(checkpoint, manifest.parts[0].of_kind("tensors"))
    return continued.minibatch, decode(read_part_state(checkpoint, 0)[DATA], tensors)


def go_to_position(run: AgreedRun, source: MinibatchSource) -> None:
    """Sets the data and the process's generators to the checkpoint's position. Call it before the run starts
    to train."""
    continued = run.options.continues
    if continued is None:
        return
    checkpoint, _ = _opened(continued)
    if (run.reads_inputs or run.reads_targets) and isinstance(source.stream, DataStream):
        is_shown = run.options.output.progress and run.reads_inputs and run.rank == 0
        with skipping_shown(continued.minibatch, is_shown=is_shown) as tell:
            source.stream.go_on(tell)
    if run.options.state is not None and run.plan.workers_used > 1:
        stage = run.own_stages()[0].stage_index
        state = read_part_state(checkpoint, stage, run.plan.replica_of(run.rank))
        RngState.from_document(state[PROCESS]).restore()


def take_newest(run: AgreedRun) -> list[tuple[Mapping[str, Tensor], Mapping[str, Any]]]:
    """Loads the newest parameters and the buffers from the checkpoint into this worker's stages. Returns the
    optimizer states of all stages, for StageOptimizer.go_on_from_parts(). If the run continues exactly, loads
    only frozen parameters, and returns an empty list."""
    continued = run.options.continues
    if continued is None:
        return []
    checkpoint, manifest = _opened(continued)
    if run.options.state is not None:
        _take_frozen(run, checkpoint, manifest)
        return []
    whole = read_whole_state(checkpoint, manifest)
    for stage in run.own_stages():
        with torch.no_grad():
            for name, parameter in (*stage.trainable_parameters(), *stage.frozen_parameters()):
                parameter.copy_(whole.parameters[name])
        own = {name: buffer for name, buffer in whole.buffers.items() if stage.owns(name)}
        set_state(stage, own)
    snapshots = [read_snapshot(checkpoint, part) for part in manifest.parts]
    return [
        ({**snapshot.optimizer, **snapshot.document_tensors}, snapshot.optimizer_document)
        for snapshot in snapshots
    ]


def _take_frozen(run: AgreedRun, checkpoint: Path, manifest: Manifest) -> None:
    """Loads the frozen parameters of this worker's stages. The model may have other values of them, and
    forwards of the earlier run may have written them."""
    parts = _parts_by_place(manifest)
    for stage in run.own_stages():
        part = parts[stage.stage_index, run.plan.replica_of(run.rank)]
        kept = read_kind(checkpoint, part.of_kind(FROZEN))
        with torch.no_grad():
            for name, parameter in stage.frozen_parameters():
                parameter.copy_(kept[name])


def take_loss_state(run: AgreedRun) -> None:
    """Loads the state of the loss from the checkpoint, at workers with the last stage. If the run does not
    continue exactly, it is the joined state of the last stage's replicas."""
    continued = run.options.continues
    if continued is None or not run.reads_targets:
        return
    checkpoint, manifest = _opened(continued)
    last = _last_stage_of(manifest)
    states = {}
    for part in manifest.parts:
        state = read_part_state(checkpoint, last, part.replica) if part.stage == last else {}
        if LOSS in state:
            tensors = read_kind(checkpoint, part.of_kind("tensors"))
            states[part.replica] = decode(state[LOSS], tensors)
    own = states.get(run.plan.replica_of(run.rank)) if run.options.state is not None else None
    set_loss_state(
        run.options.loss_fn, joined_loss_states([states[q] for q in sorted(states)]) if own is None else own
    )


def read_averages_of(continued: Continued | None) -> tuple[dict[str, Tensor], int]:
    """Returns read_averages() of the checkpoint from which the run continues; ({}, 0) without a
    checkpoint."""
    if continued is None:
        return {}, 0
    return read_averages(*_opened(continued))


def _opened(continued: Continued) -> tuple[Path, Manifest]:
    checkpoint = Path(continued.path)
    return checkpoint, read_manifest(checkpoint)


def _last_stage_of(manifest: Manifest) -> int:
    return max(part.stage for part in manifest.parts)


def _parts_by_place(manifest: Manifest) -> dict[tuple[int, int], Part]:
    return {(part.stage, part.replica): part for part in manifest.parts}
