"""At the end of a run, final weights and results are sent up the tree of ranks to rank 0. Then the result is
sent down the tree to all ranks.

If a stage has replicas, replica 0 sends the stage's weights. Each replica has its own floating-point buffers
(the running statistics of batch norm), so the stage's buffers are the means over all replicas. Local workers
write weights into files instead, so that none of them has to hold the whole model. If the user names a folder
(`save`), every worker writes its weights into files there, too.

The reports of several segments (segment.py) are joined. Counts and times are added, without the time between
two segments. The joined memory figures are the highest of all segments.

No worker closes its links before rank 0 has received everything. Runs on the worker's compute thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pipedream import _core
from pipedream.checkpoint.run_state import RunState, WorkerState
from pipedream.checkpoint.snapshot import on_host
from pipedream.checkpoint.state import (
    average_buffers,
    receive_values,
    relay_state,
    send_state,
    send_values,
    set_state,
)
from pipedream.common.errors import PipelineError, one_line
from pipedream.common.rank_tree import children_of, parent_of, subtree_of
from pipedream.links.channels import RunChannel, tree_name
from pipedream.links.state_transfer import receive_document, relay_document, send_document
from pipedream.model.loss_state import LossState, joined_loss_states, set_loss_state
from pipedream.model.stage_module import StageModule
from pipedream.report.result import RunResult
from pipedream.report.worker_reports import combine_reports
from pipedream.update.asynchronous_server import NUM_ORDERED_MAX
from pipedream.worker.agreed_run import AgreedRun
from pipedream.worker.weight_files import (
    drop_weights,
    finish_weights,
    keep_elsewhere,
    move_weights,
    save_weights,
    whole_averages,
    write_averages,
    write_loss_state,
)

__all__ = ["gather", "join_reports"]

_UNSAVED = "unsaved"  # key of a report: lines about weights that could not be saved
_STATE = "state"  # key of a report: the state's JSON


def gather(
    run: AgreedRun,
    core: _core.Worker,
    channels: Sequence[RunChannel],
    report: dict[str, Any],
    loss_state: LossState | None,
    kept: WorkerState | None,
    record: Mapping[str, list[Any]],
    averages: Mapping[str, Tensor],
) -> RunResult:
    """Gathers weights and reports, and returns the result at every rank. Only rank 0's result has the spans
    and transfers of the trace.

    report: this rank's report.
    channels: the run's channels.
    loss_state: the state of the loss, at the last stage.
    kept: this rank's part of the run's state.
    record: the reports of the minibatches before the checkpoint from which the run continues.
    averages: the averages of callbacks.EMA for the weights that this rank updates.

    If trained weights that are in no file yet cannot be gathered or saved, the error says where they are.
    """
    of_loss = {} if loss_state is None else loss_state.changed()
    report[_UNSAVED] = _save(run, of_loss)
    if run.place.folder is not None and run.options.output.gather != "none" and averages:
        write_averages(run.place.folder, run.rank, averages)
    try:
        result, unsaved, document = _gather(run, core, channels, report, of_loss, record, averages)
    except _core.RunFailure as failure:
        kind, message = failure.args
        has_saved = run.options.output.save is not None and run.options.output.gather == "none"
        if run.place.folder is not None or has_saved or not run.own_stages():
            raise
        raise _core.RunFailure(
            kind, f"{message}; the training was over here, and {_weights_of(run)}: {keep_elsewhere(run)}"
        ) from None
    if unsaved:
        where = ["the model of rank 0 has the trained weights"] if _gathers(run) else []
        raise PipelineError("; ".join([*unsaved, *where]))
    result.keep(RunState(document, kept))
    return result


def _gather(
    run: AgreedRun,
    core: _core.Worker,
    channels: Sequence[RunChannel],
    report: dict[str, Any],
    of_loss: dict[str, Tensor],
    record: Mapping[str, list[Any]],
    averages: Mapping[str, Tensor],
) -> tuple[RunResult, list[str], dict[str, Any]]:
    """Returns (the result, lines about weights that could not be saved, the part of the state that all ranks
    know)."""
    if run.rank != 0:
        _hand_up(run, core, report, of_loss, averages)
        return _hear_farewell(run, core)
    found = {name: on_host(value) for name, value in averages.items()} if _sends_averages(run) else {}
    plan, num_ranks = run.plan, run.plan.workers_used
    reports = {0: report}
    # By stage and replica. Replica 0's buffers are not here, because they go into the model at once.
    buffers: dict[int, dict[int, dict[str, Tensor]]] = {}
    of_losses = {plan.replica_of(0): of_loss} if _sends_loss(run, 0) else {}
    for child in children_of(0, num_ranks):
        for other in subtree_of(child, num_ranks):
            for stage in _gathered_stages_of(run, other):
                if plan.replica_of(other) == 0:
                    set_state(stage, receive_values(core, tree_name(child, 0)))
                else:
                    of_stage = buffers.setdefault(stage.stage_index, {})
                    of_stage[plan.replica_of(other)] = receive_values(core, tree_name(child, 0))
            if _sends_loss(run, other):
                of_losses[plan.replica_of(other)] = receive_values(core, tree_name(child, 0))
            if _sends_averages(run):
                found |= receive_values(core, tree_name(child, 0))
            reports[other] = receive_document(core, tree_name(child, 0))
    for stage_index, by_replica in buffers.items():
        average_buffers(run.stages[stage_index], [by_replica[replica] for replica in sorted(by_replica)])
    unsaved = [text for rank in range(num_ranks) for text in reports[rank].pop(_UNSAVED)]
    document = _joined_state([reports[rank].pop(_STATE) for rank in range(num_ranks)])
    of_loss = joined_loss_states([of_losses[replica] for replica in sorted(of_losses)])
    set_loss_state(run.options.loss_fn, of_loss)
    if run.options.output.save is not None:
        unsaved += _finish(run, Path(run.options.output.save), unsaved)
    between = [channel for channel in channels if channel.stages is not None]
    in_order = [reports[rank] for rank in range(num_ranks)]
    schedule = run.options.schedule_options(first_minibatch=run.options.first_minibatch)
    result = combine_reports(plan, schedule, between, in_order, record)
    if found:
        result.ema = whole_averages(run.stages, found)
    # The result also tells the ranks that rank 0 has received everything, so that they may close their links.
    # Only rank 0 gets the trace, because it can be large.
    shared = result.to_dict() | {"spans": [], "transfers": [], _UNSAVED: unsaved, _STATE: document}
    _hand_down(run, core, shared, of_loss)
    return result, unsaved, document


def _joined_state(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns rank 0's state. If some ranks could not store their state, it has the reason of the first of
    them."""
    missing = [of_rank["missing"] for of_rank in of_ranks if of_rank["missing"]]
    return of_ranks[0] | {"missing": missing[0] if missing else ""}


def _hand_up(
    run: AgreedRun,
    core: _core.Worker,
    report: dict[str, Any],
    of_loss: dict[str, Tensor],
    averages: Mapping[str, Tensor],
) -> None:
    rank, num_ranks = run.rank, run.plan.workers_used
    if rank >= num_ranks:
        return
    above = tree_name(rank, parent_of(rank))
    for stage in _gathered_stages_of(run, rank):
        send_state(core, above, stage, only_buffers=run.plan.replica_of(rank) > 0)
    if _sends_loss(run, rank):
        send_values(core, above, of_loss)
    if _sends_averages(run):
        send_values(core, above, averages)
    send_document(core, above, report)
    for child in children_of(rank, num_ranks):
        for other in subtree_of(child, num_ranks):
            for _ in _gathered_stages_of(run, other):
                relay_state(core, tree_name(child, rank), above)
            if _sends_loss(run, other):
                relay_state(core, tree_name(child, rank), above)
            if _sends_averages(run):
                relay_state(core, tree_name(child, rank), above)
            relay_document(core, tree_name(child, rank), above)


def _hear_farewell(run: AgreedRun, core: _core.Worker) -> tuple[RunResult, list[str], dict[str, Any]]:
    above = tree_name(parent_of(run.rank), run.rank)
    shared: dict[str, Any] = receive_document(core, above)
    _hand_down(run, core, shared, {}, above)
    unsaved, document = shared.pop(_UNSAVED), shared.pop(_STATE)
    return RunResult.from_dict(shared), unsaved, document


def _hand_down(
    run: AgreedRun,
    core: _core.Worker,
    shared: dict[str, Any],
    of_loss: dict[str, Tensor],
    above: str = "",
) -> None:
    """Sends the result down the tree. With gather="all" also sends all weights and the state of the loss.
    above: the channel from the rank above; empty at rank 0."""
    rank = run.rank
    below = [tree_name(rank, child) for child in children_of(rank, run.place.world_size)]
    for channel in below:
        send_document(core, channel, shared)
    to_all = run.options.output.gather == "all" and run.place.folder is None
    for stage in run.stages if to_all else []:
        if above:
            set_state(stage, receive_values(core, above))
        for channel in below:
            send_state(core, channel, stage)
    if to_all:
        if above:
            of_loss = receive_values(core, above)
            set_loss_state(run.options.loss_fn, of_loss)
        for channel in below:
            send_values(core, channel, of_loss)


def _gathers(run: AgreedRun) -> bool:
    """Whether weights are sent up the tree. They are not with gather="none", or if they go through files."""
    return run.options.output.gather != "none" and run.place.folder is None


def _gathered_stages_of(run: AgreedRun, rank: int) -> list[StageModule]:
    return run.stages_of(rank) if _gathers(run) else []


def _sends_averages(run: AgreedRun) -> bool:
    return _gathers(run) and run.options.call_points.ema_decay is not None


def _sends_loss(run: AgreedRun, rank: int) -> bool:
    return _gathers(run) and run.plan.num_stages - 1 in run.plan.stages_of(rank)


def _save(run: AgreedRun, of_loss: dict[str, Tensor]) -> list[str]:
    """Saves this worker's files before the report is sent, so that rank 0 finds all files. Returns a line if
    the weights cannot be saved in the user's folder. With gather="none" the weights are then saved in another
    folder, which the line names. The lines become the run's error at its end."""
    if run.place.folder is not None and run.options.output.gather != "none":
        if run.reads_targets:
            write_loss_state(run.place.folder, run.plan.replica_of(run.rank), of_loss)
        save_weights(run, run.place.folder, persistent=False)  # reserve_room() has reserved the room
    if run.options.output.save is None:
        return []
    try:
        save_weights(run, Path(run.options.output.save), persistent=True)
    except OSError as error:
        text = f"{_weights_of(run)} could not be saved in {run.options.output.save} ({one_line(error)})"
        if run.options.output.gather == "none":
            return [f"{text}: {keep_elsewhere(run)}"]
        return [text]
    return []


def _finish(run: AgreedRun, folder: Path, unsaved: Sequence[str]) -> list[str]:
    """Renames the user's files to their final names if all workers have saved their weights. Otherwise
    renames none. Returns lines that say what failed, and where the weights are."""
    text = ""
    if not unsaved:
        try:
            finish_weights(run.plan, folder)
            return []
        except OSError as error:
            text = f"the trained weights could not be saved in {folder} ({one_line(error)})"
    if run.options.output.gather != "none":
        drop_weights(run.plan, folder)
        return [text] if text else []
    moved = move_weights(run.plan, folder)
    of_others = [] if moved is None else [f"those of {'all' if text else 'other'} stages are in {moved}"]
    return [*([text] if text else []), *of_others]


def _weights_of(run: AgreedRun) -> str:
    stages = [stage.stage_index for stage in run.own_stages()]
    return f"the trained weights of stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}"


_NUM_SPANS_MAX = 50_000  # the newest spans that are kept, as many as of one segment
_OF_THE_LAST = ("chunk_bytes", "transport", "codec")  # a channel's figures that the last segment gives

_Report = dict[str, Any]


def join_reports(reports: Sequence[_Report], drained_at: Sequence[int]) -> _Report:
    """Joins the reports of the segments. reports: in order; empty at a rank that the plan does not use.
    drained_at: the first minibatches of all segments except the first."""
    last = reports[-1]
    if not last:
        return {}
    joined = last | {"drained_at": list(drained_at)}
    if len(reports) == 1:
        return joined
    return joined | {
        "stages": {
            stage: _joined_stage([report["stages"][stage] for report in reports]) for stage in last["stages"]
        },
        "totals": _sums([report["totals"] for report in reports]),
        "spans": _chained(report["spans"] for report in reports)[-_NUM_SPANS_MAX:],
        "transfers": [_joined_transfers([report["transfers"][end] for report in reports]) for end in (0, 1)],
        "memory": _joined_memory([report["memory"] for report in reports]),
        "synced_bytes": sum(report["synced_bytes"] for report in reports),
        "channels": {
            name: _sums([report["channels"][name] for report in reports]) for name in last["channels"]
        },
        "losses": _chained(report["losses"] for report in reports),
        "validation": _chained(report["validation"] for report in reports),
    }


def _joined_stage(of_segments: Sequence[_Report]) -> _Report:
    last = of_segments[-1]
    joined = last | {"versions": _chained(each["versions"] for each in of_segments)}
    if last["shard"] is not None:
        joined["shard"] = _joined_shard([each["shard"] for each in of_segments])
    return joined


def _joined_shard(of_segments: Sequence[_Report]) -> _Report:
    """Joins the records of an asynchronous shard (AsynchronousServer.record). A segment's first version is
    the last version of the previous segment, with all of its gradients. So the previous segment's last figure
    is left out."""
    *before, last = of_segments
    order = _chained(each["order"] for each in of_segments)
    is_known = all(each["order"] or _num_rounds(each) == 0 for each in of_segments)
    return last | {
        "order": order if is_known and len(order) <= NUM_ORDERED_MAX else [],
        "contained": [*_chained(each["contained"][:-1] for each in before), *last["contained"]],
    }


def _num_rounds(shard: _Report) -> int:
    return len(shard["contained"]) - 1


def _chained(lists: Iterable[Sequence[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def _sums(figures: Sequence[_Report]) -> _Report:
    last = figures[-1]
    return {
        name: value if name in _OF_THE_LAST else sum(each[name] for each in figures)
        for name, value in last.items()
    }


def _joined_transfers(of_segments: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: _chained(each.get(name, []) for each in of_segments) for name in of_segments[-1]}


def _joined_memory(
    of_segments: Sequence[dict[str, dict[str, int | None]]],
) -> dict[str, dict[str, int | None]]:
    terms: dict[str, list[dict[str, int | None]]] = {}
    for memory in of_segments:
        for name, figures in memory.items():
            terms.setdefault(name, []).append(figures)
    return {
        name: {which: _most(each[which] for each in figures) for which in ("predicted", "peak")}
        for name, figures in terms.items()
    }


def _most(values: Iterable[int | None]) -> int | None:
    """Returns the highest value; None if any value is unknown."""
    found = list(values)
    known = [value for value in found if value is not None]
    return max(known) if len(known) == len(found) else None
