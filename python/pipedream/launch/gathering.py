"""Gather: final weights and results go up the tree of ranks to rank 0, and the farewell comes down.

Of a stage with replicas the weights are the first's, and its floating-point buffers (the running statistics
of batch norm) the means over all: each replica has its own. Local workers write weights into files instead,
so that none of them has to hold the whole model; so does each worker where the user names a folder.

Nobody closes before everybody has all it needs. On the worker's compute thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pipedream import _core
from pipedream.checkpoint.state import (
    average_buffers,
    receive_state,
    receive_values,
    relay_state,
    send_state,
)
from pipedream.launch.agreed_run import AgreedRun
from pipedream.launch.weight_files import finish_weights, save_weights
from pipedream.links.channels import RunChannel, tree_name
from pipedream.links.rank_tree import children_of, parent_of, subtree_of
from pipedream.links.state_transfer import receive_document, relay_document, send_document
from pipedream.model.stage_module import StageModule
from pipedream.report.result import RunResult, combine_reports

__all__ = ["gather"]


def gather(
    run: AgreedRun, core: _core.Worker, channels: Sequence[RunChannel], report: dict[str, Any]
) -> RunResult:
    """The result at every rank, what the trace shows at rank 0 only. report: this rank's; channels: of the
    run."""
    _save(run)
    if run.rank != 0:
        _hand_up(run, core, report)
        return _hear_farewell(run, core)
    plan, num_ranks = run.plan, run.plan.workers_used
    reports = {0: report}
    buffers: dict[int, dict[int, dict[str, Tensor]]] = {}  # by stage and replica, but the first
    for child in children_of(0, num_ranks):
        for other in subtree_of(child, num_ranks):
            for stage in _gathered_stages_of(run, other):
                if plan.replica_of(other) == 0:
                    receive_state(core, tree_name(child, 0), stage)
                else:
                    of_stage = buffers.setdefault(stage.stage_index, {})
                    of_stage[plan.replica_of(other)] = receive_values(core, tree_name(child, 0))
            reports[other] = receive_document(core, tree_name(child, 0))
    for stage_index, by_replica in buffers.items():
        average_buffers(run.stages[stage_index], [by_replica[replica] for replica in sorted(by_replica)])
    if run.options.save is not None:
        finish_weights(run, Path(run.options.save))
    between = [channel for channel in channels if channel.stages is not None]
    in_order = [reports[rank] for rank in range(num_ranks)]
    result = combine_reports(plan, run.options.schedule_options(), between, in_order)
    # The farewell: nobody closes before everybody has all it needs.
    shared = result.to_dict() | {"spans": [], "transfers": []}  # the trace is rank 0's: it can be large
    _hand_down(run, core, shared)
    return result


def _hand_up(run: AgreedRun, core: _core.Worker, report: dict[str, Any]) -> None:
    rank, num_ranks = run.rank, run.plan.workers_used
    if rank >= num_ranks:
        return
    above = tree_name(rank, parent_of(rank))
    for stage in _gathered_stages_of(run, rank):
        send_state(core, above, stage, only_buffers=run.plan.replica_of(rank) > 0)
    send_document(core, above, report)
    for child in children_of(rank, num_ranks):
        for other in subtree_of(child, num_ranks):
            for _ in _gathered_stages_of(run, other):
                relay_state(core, tree_name(child, rank), above)
            relay_document(core, tree_name(child, rank), above)


def _hear_farewell(run: AgreedRun, core: _core.Worker) -> RunResult:
    above = tree_name(parent_of(run.rank), run.rank)
    shared = receive_document(core, above)
    _hand_down(run, core, shared, above)
    return RunResult.from_dict(shared)


def _hand_down(run: AgreedRun, core: _core.Worker, shared: dict[str, Any], above: str = "") -> None:
    """The result, and all weights where all ranks want them. above: whence they come, but at rank 0."""
    rank = run.rank
    below = [tree_name(rank, child) for child in children_of(rank, run.place.world_size)]
    for channel in below:
        send_document(core, channel, shared)
    to_all = run.options.gather == "all" and run.place.folder is None
    for stage in run.stages if to_all else []:
        if above:
            receive_state(core, above, stage)
        for channel in below:
            send_state(core, channel, stage)


def _gathered_stages_of(run: AgreedRun, rank: int) -> list[StageModule]:
    by_files = run.options.gather == "none" or run.place.folder is not None
    return [] if by_files else run.stages_of(rank)


def _save(run: AgreedRun) -> None:
    """Before the report goes up, so that rank 0 finds all files."""
    if run.options.save is not None:
        save_weights(run, Path(run.options.save), persistent=True)
    if run.place.folder is not None and run.options.gather != "none":
        save_weights(run, run.place.folder, persistent=False)
