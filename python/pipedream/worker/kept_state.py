"""Stores one worker's part of a run's state at the end of the run, so that a later run can continue.

Local workers write their parts and their weights into the run's folder. If the state cannot be stored, the
run still ends without an error, and the state says why. Runs on the worker's compute thread.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipedream import _core
from pipedream.checkpoint.run_state import RunState, WorkerState
from pipedream.checkpoint.snapshot import StageSnapshot
from pipedream.checkpoint.state import set_state
from pipedream.common.errors import PipelineError, one_line
from pipedream.common.units import format_bytes
from pipedream.data.minibatch_source import MinibatchSource
from pipedream.data.stream import DataStream
from pipedream.model.seeding import RngStream, data_seed
from pipedream.model.stage_module import StageModule
from pipedream.planning.program import Program
from pipedream.planning.shapes import Shapes, listed
from pipedream.worker.agreed_run import AgreedRun
from pipedream.worker.segment import Segment

__all__ = ["STATE_FOLDER", "check_room", "keep_state", "snapshots_of"]

STATE_FOLDER = "state"
"""Name of the folder for states, inside the run's folder."""


def snapshots_of(run: AgreedRun, state: RunState) -> dict[int, StageSnapshot]:
    """Returns this worker's snapshots, by stage index, and loads the buffers of each snapshot into its stage.

    If the earlier run has not gathered its weights into the model, also loads the weights. Otherwise raises
    ValueError for a weight that has changed since then."""
    snapshots = {snapshot.stage_index: snapshot for snapshot in state.of_rank(run.rank).snapshots}
    for stage in run.own_stages():
        snapshot = snapshots[stage.stage_index]
        if state.is_gathered:
            _check_unchanged(stage, snapshot)
        else:
            _take_weights(stage, snapshot)
        set_state(stage, snapshot.buffers)
    return snapshots


def _check_unchanged(stage: StageModule, snapshot: StageSnapshot) -> None:
    named, before = dict(stage.trainable_parameters()), snapshot.weights
    if named.keys() != before.keys():
        name = sorted(named.keys() ^ before.keys())[0]
        raise ValueError(
            f"stage {stage.stage_index} trains {'also' if name in named else 'no longer'} {name!r}, other"
            " than the run that state is of: freeze and thaw between runs without state"
        )
    for name, parameter in named.items():
        if not _is_same(parameter.detach().cpu(), before[name]):
            raise ValueError(
                f"parameter {name!r} of stage {stage.stage_index} was changed since the run that state is"
                " of: go on with the weights as that run left them, or leave state out"
            )


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _take_weights(stage: StageModule, snapshot: StageSnapshot) -> None:
    before = snapshot.weights
    with torch.no_grad():
        for name, parameter in stage.trainable_parameters():
            parameter.copy_(before[name])


def keep_state(segment: Segment, source: MinibatchSource, report: dict[str, Any]) -> WorkerState | None:
    """Stores this worker's part of the state after the run. A local worker writes the part into the run's
    folder and returns None. Under torchrun the part is returned. If the part cannot be stored, returns None,
    and the report says why. Raises the failure of a link or of another worker."""
    run, place = segment.run, segment.run.place
    state: dict[str, Any] = {"missing": ""}
    report["state"] = state
    if run.rank >= run.plan.workers_used:  # the plan does not use this rank, so it has no state
        return WorkerState.of([], None)
    end = segment.core.num_minibatches()
    assert end is not None
    if run.rank == 0:
        state |= _document_of(run, end, segment.kinds)
    try:
        if isinstance(run.options.schedule, Program):
            raise ValueError("its schedule is a program, which begins with the version that is there")
        stream = _data_generators(segment, source, end)
        kept = WorkerState.of(segment.take_snapshots(), stream)
        if run.rank == 0:
            of_process = kept.process if run.plan.workers_used == 1 else kept.data
            state["data_generators"] = of_process
        if place.folder is None:
            return kept
        folder = place.folder / STATE_FOLDER
        check_room(place.folder, kept.num_bytes, run.plan.workers_used)
        kept.save(folder, run.rank)
    except (_core.RunFailure, PipelineError):
        raise
    except Exception as error:  # an optimizer's state_dict(), reading data or a full disk may raise it
        state["missing"] = f"{run.plan.describe_worker(run.rank)} could not keep its part: {one_line(error)}"
    return None


def _data_generators(segment: Segment, source: MinibatchSource, end: int) -> RngStream | None:
    """Returns the generators from which the next run's data draw. Returns None with one worker, because its
    data draw from the process's generators, and if the caller has forwarded all data. If a run was stopped,
    its readers have read ahead by different numbers of minibatches. Then all of them begin with new
    generators, whose seed follows from the minibatch."""
    run = segment.run
    if segment.was_stopped:
        if run.plan.workers_used == 1:
            return None
        stream = RngStream(data_seed(run.base_seed, end))
        with stream:
            return stream
    if run.reads_inputs or run.reads_targets:
        # A replica may not have read up to the end of the data. This call moves its generators there.
        source.fetch(end)
    return source.stream.generators if isinstance(source.stream, DataStream) else None


def _document_of(
    run: AgreedRun,
    minibatch: int,
    kinds: Sequence[Shapes],
) -> dict[str, Any]:
    """Returns the part of the state that is the same at all ranks. keep_state() adds the generators of the
    process that reads the data. kinds: the shapes of minibatches for which memory is planned."""
    options = run.options
    return {
        "name": secrets.token_hex(8),
        "minibatch": minibatch,
        "begun_at": run.first_minibatch if run.oldest_minibatch is None else run.oldest_minibatch,
        "base_seed": run.base_seed,
        "seed": options.seed if options.state is None else options.state.document["seed"],
        "multiple": _multiple_of(run),
        "is_gathered": options.output.gather != "none",
        "settings": options.settings_of_state(),
        "kinds": [listed(kind) for kind in kinds],
        "data_generators": None,
    }


def check_room(folder: Path, num_bytes: int, num_workers: int) -> None:
    """Raises ValueError if num_workers states of this size would fill more than half of the free room in the
    folder. The other half is left for files that the user saves."""
    free = shutil.disk_usage(folder).free
    if 2 * num_workers * num_bytes > free:
        raise ValueError(
            f"it takes {format_bytes(num_bytes)}, and {folder.parent}, where {num_workers} workers keep"
            f" theirs, has {format_bytes(free)} free"
        )


def _multiple_of(run: AgreedRun) -> int:
    """Returns m: a run can be continued only after a multiple of m minibatches. Then no round is half done,
    and all replicas have the same weights."""
    return _core.minibatches_between_drains(run.schedule()) * run.options.replication.sync_every
