"""Runs one worker, in these phases:

    agree      all take rank 0's plan and seed                                agreed_run.py
    read       the first minibatch, at workers that read data                 set_up.py
    share      all take rank 0's initial weights                              set_up.py
    rehearse   each worker measures its stages with one microbatch            set_up.py
    open       pool sealed, channels to other workers open                    segment.py, stage_pool.py
    train      next work item -> forward, backward or update -> completion    stage/stage_loop.py
    again      if a minibatch is larger than planned: rehearse, open, train
    gather     weights and results go to rank 0, the result to all ranks      gathering.py

Runs on the thread that called run(), or on the main thread of a local worker. It is the core's compute
thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from pipedream import _core
from pipedream.callbacks.steering import Steering
from pipedream.checkpoint.snapshot import StageSnapshot
from pipedream.common.errors import afterwards, describe_error, position_kept, raise_failure
from pipedream.data.minibatch_source import MinibatchSource
from pipedream.data.stream import DataStream, ForwardedData, MinibatchStream, ReceivedStream
from pipedream.links.residuals import Residuals, from_names
from pipedream.model.layers import Model
from pipedream.model.loss_state import LossState, loss_on
from pipedream.report.result import RunResult
from pipedream.stage.decisions import Steered
from pipedream.stage.job import JobOptions, WorkerPlace
from pipedream.worker.agreed_run import AgreedRun, agree
from pipedream.worker.cautions import warn_if_coarse, warn_if_late
from pipedream.worker.checkpointing import Checkpointing
from pipedream.worker.continuing import (
    go_to_position,
    position_of_data,
    read_averages_of,
    read_record,
    take_loss_state,
    take_newest,
)
from pipedream.worker.devices import choose_device
from pipedream.worker.factor_choice import FactorChoice
from pipedream.worker.gathering import gather, join_reports
from pipedream.worker.interrupts import interrupts_end, interrupts_stop
from pipedream.worker.kept_state import keep_state, snapshots_of
from pipedream.worker.segment import Following, Segment
from pipedream.worker.set_up import OwnPart, Rehearsed, rehearse_again, set_up
from pipedream.worker.steering import steered
from pipedream.worker.weight_files import keep_newest
from pipedream.worker.worker_links import WorkerLinks
from pipedream.worker.worker_optimizers import WorkerOptimizers

__all__ = ["run_worker"]

_log = logging.getLogger("pipedream")

# Seconds for which closing links wait between two segments (segment.py). Nobody waits for data on these links
# any more. But a process of a DataLoader may have inherited a socket, and the peer considers the link open
# until that process closes the socket.
_LAST_WORDS_S = 1.0


def run_worker(
    place: WorkerPlace,
    options: JobOptions,
    model: Model,
    data: Iterable[Any] | ForwardedData,
    *,
    steering: Steering | None = None,
    note_error: Callable[[Exception], None] = lambda error: None,
    note_begin: Callable[[], None] = lambda: None,
) -> RunResult:
    """Runs this rank's part of the run. Returns the result of the whole run at every rank. Only rank 0's
    result has the figures of the trace.

    steering: calls the callbacks, at rank 0 of torchrun.
    note_begin: called when the training begins.
    note_error: called with the error if the run fails.

    Under torchrun `model` then has the trained weights and buffers of this rank's stages, or of all stages if
    options.output.gather says so. A local worker writes its weights for the caller instead, also after a
    failure, unless gather is "none". Before a failure is raised here, it is reported to the other workers and
    to note_error."""
    worker = _Worker(place, steering, note_begin)
    with afterwards(worker.close):
        try:
            with position_kept(worker.losses, worker.minibatch):
                return worker.run(options, model, data)
        except BaseException as error:
            worker.links.say_why(worker.describe(error))
            if isinstance(error, Exception):
                note_error(error)
            worker.keep_newest()
            raise


class _Worker:
    """The phases of a worker, in the order of the module's docstring."""

    def __init__(self, place: WorkerPlace, steering: Steering | None, note_begin: Callable[[], None]) -> None:
        self._note_begin = note_begin
        self.links = WorkerLinks(place.rendezvous)
        self._steering = steering
        self._place = place
        self._segment: Segment | None = None
        self._optimizers: WorkerOptimizers | None = None
        self._steered: Steered | None = None
        self._losses_before: list[float] = []  # losses of earlier segments
        self._residuals: Residuals = {}  # residuals of the codec topk, from the previous segment
        self._loss_state: LossState | None = None  # None except at the last stage
        self._snapshots: dict[int, StageSnapshot] = {}  # by stage, until the pipeline has started from them
        self._parts_before: list[Any] = []  # optimizer states of another plan's stages, from a checkpoint
        self._record: dict[str, list[Any]] = {}  # reports from before the checkpoint of a continued run
        self._checkpointing: Checkpointing | None = None

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
        self.links.close()
        if self._checkpointing is not None:
            self._checkpointing.close()

    def losses(self) -> list[float]:
        """Returns the losses of the finished minibatches that this worker knows."""
        before = [*self._record.get("losses", []), *self._losses_before]
        return [*before, *([] if self._segment is None else self._segment.losses)]

    def minibatch(self) -> int | None:
        """Returns the minibatch that this worker is working on; None before its first minibatch, and while
        memory is planned again."""
        return None if self._segment is None else self._segment.minibatch

    def describe(self, error: BaseException) -> str:
        """Returns a description of this worker's error for the other workers. An Exception in the user's code
        already names its place; any other error, such as sys.exit(), gets its place here."""
        if isinstance(error, Exception):
            return describe_error(error)
        rank, minibatch = self._place.rank, self.minibatch()
        where = f"rank {rank}" if self._segment is None else self._segment.run.plan.describe_worker(rank)
        at = "" if minibatch is None else f" at minibatch {minibatch}"
        return f"{where} ended{at}: {describe_error(error)}"

    def keep_newest(self) -> None:
        """Writes the newest versions for the caller of local workers, after the run has failed. Does nothing
        under torchrun, with gather="none", or if no update was made. Ignores errors, such as a full disk."""
        segment = self._segment
        if segment is None or segment.run.place.folder is None or segment.run.options.output.gather == "none":
            return
        if segment.has_updated or self._losses_before:
            with contextlib.suppress(Exception):
                keep_newest(segment.run)

    def run(self, options: JobOptions, model: Model, data: Iterable[Any] | ForwardedData) -> RunResult:
        torch.set_num_threads(options.num_threads)
        _core.keep_freed_memory()
        rendezvous = self._place.rendezvous
        # The device is chosen before join(). Making a CUDA context holds the GIL, so this process could not
        # send signs of life meanwhile.
        is_spare = options.plan.spare_stage_of(self._place.rank) is not None
        device = torch.device("cpu") if is_spare else choose_device(self._place.local_rank)
        rendezvous.join(options.links.peer_timeout_s)
        rendezvous.enter("agreeing on the plan")
        run, generators = agree(self._place, options, model)
        if isinstance(data, ForwardedData):
            # Segment replaces it when the channels are open.
            stream: MinibatchStream = ReceivedStream(data, None, None)
        else:
            notes_positions = options.checkpoints is not None
            stream = DataStream(
                data,
                epochs=options.epochs,
                generators=generators,
                notes_positions=notes_positions,
                goes_to=position_of_data(run),
            )
        source = MinibatchSource(stream, run.first_minibatch)
        part = OwnPart(run, device)
        loss_placed = contextlib.ExitStack()
        if run.reads_targets:
            loss_placed.enter_context(loss_on(options.loss_fn, device))
            self._loss_state = LossState(options.loss_fn, run.stages)
        with afterwards(part.give_back), afterwards(loss_placed.close):
            try:
                part.place()
                rehearsed = set_up(run, self.links, device, source.stream, part)
                if run.options.state is not None:
                    self._snapshots = snapshots_of(run, run.options.state)
                    stored = [snapshot.residuals for snapshot in self._snapshots.values()]
                    self._residuals = from_names(dict(itertools.chain(*(each.items() for each in stored))))
                self._parts_before = take_newest(run)
                take_loss_state(run)
                self._record = read_record(run.options.continues)
                if run.options.checkpoints is not None:
                    self._checkpointing = Checkpointing(run, self._record, self._loss_state)
                with self._interrupts_stop():
                    return self._train(run, device, rehearsed, source, part)
            except _core.RunFailure as failure:
                raise_failure(*failure.args)

    def _interrupts_stop(self) -> AbstractContextManager[None]:
        """Makes an interrupt end the run early with a result, or at once if the run cannot end early. A local
        worker does nothing, because its caller handles interrupts."""
        order = self._place.stop_order
        if self._place.board is not None:
            return contextlib.nullcontext()
        if order is None:
            return interrupts_end(speaks=self._place.rank == 0)
        return interrupts_stop(order.ask_for_stop, lambda: True, speaks=self._place.rank == 0)

    def _train(
        self,
        run: AgreedRun,
        device: torch.device,
        rehearsed: Rehearsed,
        source: MinibatchSource,
        part: OwnPart,
    ) -> RunResult:
        """Trains one segment after another, and gathers the result."""
        reports: list[dict[str, Any]] = []
        drained_at: list[int] = []
        self._segment = segment = self._open(run, device, rehearsed, source)
        go_to_position(run, source)
        self._note_begin()
        while True:
            reports.append(segment.train(self._checkpointing))
            if self._checkpointing is not None:
                self._checkpointing.losses += reports[-1].get("losses", [])
                self._checkpointing.evaluated += reports[-1].get("validation", [])
            following = segment.following
            if following is None:
                break
            began_s = time.monotonic()
            drained_at.append(following.first_minibatch)
            self._leave(segment, following)
            del segment
            run = replace(
                run,
                segment_index=run.segment_index + 1,
                first_minibatch=following.first_minibatch,
                oldest_minibatch=None,
            )
            with _told_for(following):
                rehearsed = rehearse_again(
                    run, self.links, device, rehearsed, following.minibatch, source.larger
                )
                self._segment = segment = self._open(run, device, rehearsed, source)
            if run.rank == 0:
                _log.warning(
                    "minibatch %d is larger than planned (%s): the memory was planned again in %.2f s; name"
                    " the largest before the run, plan = plan.fitting(batch), to spare that",
                    following.minibatch,
                    following.shapes,
                    time.monotonic() - began_s,
                )
        part.take_back_others()
        if self._checkpointing is not None:
            self._checkpointing.close()
        report = join_reports(reports, drained_at)
        kept = keep_state(segment, source, report)
        assert self._optimizers is not None
        last = (self._loss_state, kept, self._record, self._optimizers.averages())
        return gather(segment.run, segment.core, segment.channels, report, *last)

    def _open(
        self,
        run: AgreedRun,
        device: torch.device,
        rehearsed: Rehearsed,
        source: MinibatchSource,
    ) -> Segment:
        rendezvous = run.place.rendezvous
        rendezvous.enter("opening links")
        core = self.links.make_core(run.linked, device)
        if self._optimizers is None:
            self._optimizers = WorkerOptimizers(run, FactorChoice(run, device, rehearsed.footprints))
            for stage, snapshot in self._snapshots.items():
                self._optimizers.go_on(stage, snapshot)
            for optimizer in self._optimizers.by_stage.values() if self._parts_before else ():
                optimizer.go_on_from_parts(self._parts_before)
            self._parts_before = []
            if run.options.call_points.ema_decay is not None:
                self._optimizers.go_on_with_averages(*read_averages_of(run.options.continues))
            if run.rank == 0 and run.place.returns_model:  # the caller of local workers has already warned
                made = [one.optimizer for one in self._optimizers.by_stage.values() if one.optimizer]
                warn_if_late(run.plan, run.schedule(), made)
                warn_if_coarse(made)
        else:
            self._optimizers.plan_again(run, device, rehearsed.footprints)
        if self._steered is None:
            self._steered = steered(run, self._optimizers, self._steering)
        segment = Segment(
            *(run, self.links, core, device, rehearsed, source),
            *(self._optimizers, self._residuals, self._steered, self._snapshots),
        )
        rendezvous.leave()
        return segment

    def _leave(self, segment: Segment, following: Following) -> None:
        """Ends a segment. Afterwards its pool holds nothing that is still used, and its links are closed."""
        rendezvous = segment.run.place.rendezvous
        if segment.run.place.board is not None:
            segment.run.place.board.write(segment.run.rank, following.minibatch)
        rendezvous.join(segment.run.links.peer_timeout_s)
        rendezvous.enter(f"planning again for minibatch {following.minibatch}")
        segment.wait_for_all()
        self._losses_before += segment.losses
        self._residuals = segment.keep_residuals()
        segment.close()
        self._segment = None
        assert self._optimizers is not None
        self._optimizers.leave_slots()
        self.links.close(_LAST_WORDS_S)


@contextlib.contextmanager
def _told_for(following: Following) -> Iterator[None]:
    """Names the larger minibatch in an error that the with block raises while memory is planned again."""
    what = (
        f"minibatch {following.minibatch} is larger than planned ({following.shapes}), and there is no plan"
    )
    try:
        yield
    except ValueError as error:
        if str(error).startswith(what):  # the error comes from another worker, which has added the text
            raise
        raise ValueError(f"{what} for it: {error}") from error
