"""The loop of one worker. It gets work items from the core, passes each item to the object that does it, and
reports it to the core as done.

    FORWARD, RECOMPUTE, BACKWARD, UPDATE    the stage's runner         stage_runner.py
    EVALUATE                                the evaluations            evaluation.py
    SEND, RECV                              the transfers              edge_transfers.py

A run whose memory is planned again has several segments (worker/segment.py). Each segment has a loop of its
own. Owned by the worker's compute thread.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipedream import _core
from pipedream.budget.torch_pool import TorchPool
from pipedream.checkpoint.snapshot import StageSnapshot
from pipedream.common.errors import afterwards
from pipedream.data.batch_reader import BatchReader, ValidationReader
from pipedream.data.minibatch_source import MinibatchSource
from pipedream.model.boundary import TENSORS, Boundary
from pipedream.model.draws import KeyedDraws
from pipedream.report.losses import LossRecord, make_loss_record
from pipedream.report.progress import RunProgress
from pipedream.report.status import StatusBoard
from pipedream.stage.boundaries import (
    EVALUATE,
    SNAPSHOT,
    Boundaries,
    BoundaryListener,
    Planned,
    StageZeroGate,
)
from pipedream.stage.decisions import STOP, Steered
from pipedream.stage.device_clock import make_device_clock, make_user_code
from pipedream.stage.edge_transfers import EdgeTransfers
from pipedream.stage.evaluation import EvaluatedStage, EvaluationPlan, Evaluations, Measures, evaluation_name
from pipedream.stage.first_gradients import make_first_gradients
from pipedream.stage.job import JobOptions, WorkerPlace
from pipedream.stage.measured_memory import MeasuredMemory, measured_until
from pipedream.stage.position import Position, common_report, located
from pipedream.stage.saving import StageSaver
from pipedream.stage.stage_runner import PreparedStage, StageParts, StageRunner
from pipedream.update.asynchronous_server import AsynchronousServer
from pipedream.update.gradients import GradientFigures, NormExchange, clip_scale
from pipedream.update.shard_client import ShardClient
from pipedream.update.stage_state import take_snapshot

__all__ = ["WorkerLoop"]

_NO_FIELDS = _core.ItemFields()


class WorkerLoop:
    """Does the work items of one worker."""

    def __init__(
        self,
        core: _core.Worker,
        options: JobOptions,
        place: WorkerPlace,
        *,
        schedule: _core.ScheduleOptions,
        prepared: Sequence[PreparedStage],
        source: MinibatchSource,
        device: torch.device,
        draws: KeyedDraws | None,
        backward_seeds: Mapping[int, int],
        input_boundary: Boundary | None,
        boundaries: Mapping[int, Boundary],
        in_microbatches: bool,
        edges: Sequence[tuple[_core.Edge, str]],
        predicted: Mapping[str, int],
        torch_pool: TorchPool | None,
        steered: Steered,
        evaluation: EvaluationPlan,
        make_saver: Callable[[Sequence[PreparedStage]], StageSaver] | None,
        saves_before: Callable[[int], bool] | None,
    ) -> None:
        """prepared: this worker's stages in ascending order.
        input_boundary: the planned tensors that the inputs of stage 0 are checked against. None checks
        nothing.
        draws: makes the random draws of these stages depend on the microbatch. None: draws come from the
        process's generators.
        backward_seeds: seeds of the backwards' random draws, by stage.
        boundaries: the cuts at these stages, by the index of the stage upstream.
        in_microbatches: whether the data yield Microbatches.
        edges: the edges with one end at this worker, each with the name of its channel.
        predicted: bytes of each memory term.
        torch_pool: the memory in which forwards and backwards make their tensors. None: torch allocates them.
        steered: the objects through which callbacks and users change the run or end it early.
        evaluation: the plan of the evaluations.
        make_saver: makes the saver of the stages; None if no checkpoint is written.
        saves_before: returns whether a checkpoint is due at a boundary for a reason that does not follow from
        the data, such as the time."""
        self._core = core
        self._options = options
        self._schedule = schedule
        self._place = place
        self._prepared = prepared
        self._device = device
        self._data = source
        self._steered = steered
        self._edges = edges
        self._predicted = predicted
        self._in_microbatches = in_microbatches
        self._memory: MeasuredMemory | None = None  # None before train()
        self._torch_pool = torch_pool
        self._describe = options.plan.describe_worker(place.rank)
        self._position = Position(options.plan, place.rank, prepared[0].stage.stage_index)
        self._clock = make_device_clock(device, core.add_compute)
        self._user = make_user_code(self._position, self._clock)
        self._measured_until = measured_until(options.plan, schedule, device)
        last = options.plan.num_stages - 1
        self._replica = options.plan.replica_of(place.rank)
        stages = [part.stage.stage_index for part in prepared]
        weight_fn = options.weight_fn
        if weight_fn is not None:
            weight_fn = functools.partial(self._user.run, "weight_fn", weight_fn)
        self._reader = BatchReader(
            source,
            options.microbatches,
            is_first=0 in stages,
            is_last=last in stages,
            check_inputs=functools.partial(_check_inputs, input_boundary),
            weight_fn=weight_fn,
        )
        self._progress = RunProgress(
            enabled=options.output.progress and last in stages and self._replica == 0,
            num_minibatches=_end_of(source, is_continued=options.continues is not None),
            num_epochs=options.epochs,
            schedule=schedule,
        )
        self._losses = self._make_losses()
        self.has_updated = False
        """Whether any stage has made an update."""
        self._saves_before = saves_before
        self._saver = None if make_saver is None else make_saver(prepared)
        self.was_stopped = False
        """Whether the run ended before its data did."""
        self._evaluations = self._make_evaluations(evaluation)
        self._boundaries = Boundaries(schedule, stages, self._boundary_listeners())
        self._gate = self._make_gate() if 0 in stages else None
        self._runners = {
            part.stage.stage_index: self._make_runner(
                part, boundaries, backward_seeds.get(part.stage.stage_index)
            )
            for part in prepared
        }
        if self._saver is not None:
            self._saver.runners = self._runners
            self._saver.losses = self._losses.values
            self._saver.evaluated = () if self._evaluations is None else self._evaluations.results
        self._draws = draws
        self._servers = _servers_of(prepared)
        self._reads = any(runner.parts.reader is not None for runner in self._runners.values())
        rounds = _core.rounds_of(schedule, stages[0]).minibatches_per_round
        self._mean_scale = functools.partial(_mean_scale, core, rounds)
        self._norms = self._make_norms()
        tied = {part.stage.stage_index: part.tied for part in prepared}
        self._transfers = EdgeTransfers(schedule, tied, self._norms.get(stages[0]), self._servers)
        self._poisons = _core.poisons_released_slots()
        self._first_gradients = make_first_gradients(place.folder, options.microbatches)

    def _make_norms(self) -> dict[int, NormExchange]:
        """Returns the exchange of norms by stage; empty if no norms are measured. If the schedule drains, all
        stages of this worker share one exchange. Otherwise each stage has its own."""
        if not self._options.measures_gradients:
            return {}
        found: dict[int, NormExchange] = {}
        drains = _core.drains_every_minibatch(self._schedule)
        is_first = self._place.rank == 0 if drains else self._replica == 0
        for together in [list(self._runners)] if drains else [[stage] for stage in self._runners]:
            runners = [self._runners[stage] for stage in together]
            measure = functools.partial(_figures_of, runners, self._mean_scale)
            norms = NormExchange(measure, is_first=is_first or not self._schedule.exchanges_norms)
            found |= dict.fromkeys(together, norms)
        return found

    def _make_gate(self) -> StageZeroGate:
        steered = self._steered
        return StageZeroGate(
            self._data,
            self._boundaries.group_size,
            self._planned_events(),
            stopping=steered.stopping,
            asking=steered.asking,
            evaluates=self._evaluations is not None,
            first_of_run=self._data.first_minibatch,
            begins_with=self._first_events(),
            saves_before=self._saves_before,
        )

    def _first_events(self) -> int:
        """Returns the events that are still due at the checkpoint that the run continues from; 0 if it
        continues from none."""
        continues = self._options.continues
        if continues is None or self._data.first_minibatch != continues.minibatch:
            return 0
        is_evaluated = continues.evaluates and self._options.validation is not None
        stops = any(due == continues.minibatch for due, _, _ in continues.answers)
        return (EVALUATE if is_evaluated else 0) | (STOP if stops else 0)

    def _planned_events(self) -> list[Planned]:
        """Returns the events whose boundaries follow from the data. They are the same at every replica of
        stage 0."""
        validation, checkpoints = self._options.validation, self._options.checkpoints
        planned = [] if validation is None else [Planned(EVALUATE, validation.every)]
        if checkpoints is not None:
            # A checkpoint that is due by time is not planned here, because rank 0 decides on it. At the end
            # of the data all replicas save.
            planned.append(Planned(SNAPSHOT, "end"))
            if not checkpoints.seconds:
                planned.append(Planned(SNAPSHOT, checkpoints.every))
        return planned

    def _boundary_listeners(self) -> list[BoundaryListener]:
        """Returns this worker's listeners. At a boundary they are called in this order."""
        listeners = (self._steered.rate_changes, self._saver, self._evaluations)
        return [listener for listener in listeners if listener is not None]

    def _make_evaluations(self, plan: EvaluationPlan) -> Evaluations | None:
        """Makes the evaluations. Returns None without validation, and at all replicas of a stage except
        replica 0, which alone evaluates."""
        options, last = self._options, self._options.plan.num_stages - 1
        validation = options.validation
        if validation is None or self._replica > 0:
            return None
        with_parts = {
            part.stage.stage_index: EvaluatedStage(
                stage,
                part.stage,
                part.weights,
                part.tied,
                part.optimizer.averages if validation.ema else None,
                plan.boundaries.get(part.stage.stage_index - 1),
                plan.boundaries.get(part.stage.stage_index),
            )
            for part, stage in zip(self._prepared, plan.stages, strict=True)
        }
        reads = not with_parts.keys().isdisjoint((0, last))
        return Evaluations(
            self._core,
            self._schedule,
            with_parts,
            reader=ValidationReader(validation.data, plan.seed) if reads else None,
            measures=Measures(validation, options.loss_fn, options.weight_fn) if last in with_parts else None,
            show=self._show_evaluation,
            user=self._user,
            device=self._device,
            autocast=options.autocast,
            describe=self._describe,
        )

    def _tells_losses(self) -> bool:
        """Whether the last stage sends its losses to the first stage, for callbacks. Local workers do not,
        because their caller reads the losses from the status board."""
        return self._options.call_points.at_epochs and self._place.folder is None

    def _show_evaluation(self, boundary: int, samples: int, figures: Mapping[str, float]) -> None:
        self._progress.show_evaluation(boundary, samples, figures)
        if not self._options.call_points.at_epochs:
            return
        evaluated = {"minibatch": boundary, "samples": samples, "figures": dict(figures)}
        self._place.rendezvous.publish(evaluation_name(boundary), evaluated)  # for callbacks

    def _make_losses(self) -> LossRecord:
        show = LossDisplay(self._progress, self._data, self._place.board, self._replica)
        record = make_loss_record(self._options.on_nonfinite, show, self._device)
        if self._tells_losses():
            record.parts = collections.deque()
        return record

    def _make_runner(
        self, part: PreparedStage, boundaries: Mapping[int, Boundary], backward_seed: int | None
    ) -> StageRunner:
        stage_index, last = part.stage.stage_index, self._options.plan.num_stages - 1
        is_first, is_last = stage_index == 0, stage_index == last
        # Autograd saves data, and a recompute reads them again. So data are copied if their memory may change
        # while they are in flight. Stage 0 also copies inputs if its first layer works in place. Otherwise
        # the layer would change the data that stage 0 reads in the next epoch, and the last stage would read
        # other data. None: only the first forward shows whether the layer works in place.
        copies_data = self._data.stream.may_reuse_memory and self._has_several_in_flight(stage_index)
        clones_inputs: bool | None = copies_data
        if is_first and not is_last and not copies_data:
            clones_inputs = None
        parts = StageParts(
            boundary_in=None if is_first else boundaries[stage_index - 1],
            boundary_out=None if is_last else boundaries[stage_index],
            in_microbatches=self._in_microbatches,
            reader=self._reader if is_first or is_last else None,
            losses=self._losses if is_last else None,
            boundaries=self._boundaries,
            gate=self._gate if is_first else None,
            tells_losses=self._tells_losses(),
            backward_seed=backward_seed,
            clones_inputs=clones_inputs,
            copies_targets=copies_data,
            torch_region=None if self._torch_pool is None else self._torch_pool.region,
        )
        return StageRunner(
            self._options, self._schedule, part, parts, self._device, self._user, self._describe
        )

    def _has_several_in_flight(self, stage_index: int) -> bool:
        """Whether the stage may read the next minibatch before the backward of this one is over."""
        drains = _core.drains_every_minibatch(self._schedule)
        return not drains and self._schedule.in_flight[stage_index] > 1

    @property
    def losses(self) -> list[float]:
        """The losses so far. The list is empty if another worker runs the last stage, or if the last stage
        has replicas."""
        return self._losses.values if self._options.plan.stages[-1].num_replicas == 1 else []

    @property
    def minibatch(self) -> int | None:
        return None if self._position.minibatch < 0 else self._position.minibatch

    def train(self, goes_on: Callable[[], bool]) -> dict[str, Any]:
        """Trains until the data of this segment are over or the run is stopped, and returns the report.
        goes_on: called at the end. It returns whether another segment of the run follows."""
        core = self._core
        core.start(options=self._schedule, rank=self._place.rank, edges=self._edges, tensors=TENSORS)
        newest_slots = {part.stage.stage_index: part.start.newest_slot for part in self._prepared}
        self._memory = MeasuredMemory(self._predicted, self._runners, self._servers, self._device)
        # restore() gives the user's modules their own parameters back, even after a failure.
        restore = functools.partial(self._restore, newest_slots)
        with self._progress, afterwards(restore), located(self._position), contextlib.ExitStack() as around:
            if self._draws is not None:
                around.enter_context(self._draws.installed())
            for part in self._prepared:
                part.stage.draws = self._draws
                around.enter_context(part.gradients.running())
            work = self._work_through(core, newest_slots)
            self._end_boundary(work, newest_slots)
            if self._clock is not None:
                self._clock.finish()
            for part in self._prepared:
                part.weights.check_gradients_taken()
            is_over = not goes_on()
            for stage, runner in self._runners.items():
                runner.finish(newest_slots[stage], is_over=is_over)
        return self._report()

    def take_snapshots(self) -> list[StageSnapshot]:
        """Copies the state of the stages. Call it after all work is done. Raises ValueError for state that
        cannot be stored."""
        minibatch = self._core.num_minibatches()
        assert minibatch is not None
        return [
            take_snapshot(
                self._core,
                part.stage,
                part.weights,
                part.tied,
                part.optimizer,
                part.loss_scaling,
                self._runners[part.stage.stage_index].kept,
                replica=self._replica,
                minibatch=minibatch,
            )
            for part in self._prepared
        ]

    def _end_boundary(self, done: _core.WorkItem, newest_slots: dict[int, int]) -> None:
        """Does the work that is due at the boundary after the last minibatch. newest_slots: as in
        _work_through()."""
        self.was_stopped = bool(done.boundary_events & STOP)
        if not self.was_stopped:  # after a stop there may be more data
            self._check_end(done.num_minibatches)
        self._boundaries.end(done.num_minibatches, done.boundary_events)
        if self._evaluations is not None and done.boundary_events & EVALUATE:
            self._work_through(self._core, newest_slots)

    def _work_through(self, core: _core.Worker, newest_slots: dict[int, int]) -> _core.WorkItem:
        """Does all work items. Returns the core's last item, DONE. newest_slots: by stage, the slot of the
        newest version. This function updates it."""
        user, position = self._user, self._position
        work = core.next_work()
        while work.kind != "DONE":
            if self._clock is not None:
                self._clock.tell_done()
            stage, minibatch = work.stage, work.minibatch
            if minibatch != position.minibatch:
                self._begin_minibatch(minibatch)
            position.stage, position.minibatch = stage, minibatch
            runner, done = self._runners[stage], work
            made = self._do(runner, work)
            if made is None:
                user.drop_elapsed()
                assert self._gate is not None
                if self._gate.evaluates_first:
                    core.evaluate_first()
                else:
                    core.end_of_data(*self._gate.end)
                work = core.next_work()
            elif work.edge is not None:  # a transfer's time counts in the span of the next item
                work = core.advance(made, _NO_FIELDS, 0, self._prepare)
            else:
                if work.kind == "UPDATE":
                    newest_slots[stage] = work.write_slot
                    self.has_updated = True
                work = core.advance(made, runner.fields, user.take_elapsed_ns(), self._prepare)
                if done.kind == "UPDATE":
                    self._boundaries.note_update(stage, minibatch)
            if self._poisons and done.kind == "BACKWARD":
                runner.poison(done, work.freed_slot)
        return work

    def _do(self, runner: StageRunner, work: _core.WorkItem) -> list[Tensor] | None:
        """Does the work item, and returns the tensors to send. Returns None for a forward whose minibatch is
        not admitted (StageZeroGate.admits)."""
        kind = work.kind
        if work.edge is not None:
            return self._transfers.do(work, runner.gradient_slot)
        if kind == "FORWARD":
            return runner.forward(work)
        if kind == "BACKWARD":
            if not runner.stashes:
                if self._core.num_minibatches() is not None:
                    runner.keep_version(work, runner.kept)
                if self._saver is not None:
                    self._saver.before_backward(work)
            made = runner.backward(work)
            if self._first_gradients is not None:
                self._first_gradients.note(work, runner)
            return made
        if kind == "RECOMPUTE":
            return runner.recompute(work)
        if kind == "EVALUATE":
            assert self._evaluations is not None
            runner.begin_evaluation(work)
            made = self._evaluations.evaluate(work)
            runner.fields = self._evaluations.fields
            return made
        self._update(runner, work)
        return []

    def _prepare(self, upcoming: _core.WorkItem | None) -> None:
        """Reads data ahead and binds weights while the core waits for the tensors of the next work item.
        upcoming: the next item; None if it is not known."""
        if self._reads:
            self._reader.read_ahead()
        if upcoming is not None:
            self._runners[upcoming.stage].prepare(upcoming)

    def _begin_minibatch(self, minibatch: int) -> None:
        if self._place.board is not None:
            self._place.board.write(self._place.rank, minibatch)
        if self._measured_until is not None and minibatch > self._measured_until:
            self._measured_until = None
            assert self._memory is not None
            self._memory.stop()

    def _update(self, runner: StageRunner, work: _core.WorkItem) -> None:
        if not self._norms:
            runner.prepared.gradients.take(work.minibatch, runner.gradient_slot)
            runner.update(work, self._mean_scale(runner, work.minibatch))
            return
        total = self._norms[work.stage].total(work.minibatch)
        runner.hear(work.minibatch, total)
        if work.stage == 0 and self._steered.asking is not None:
            self._steered.asking.note_norm(math.sqrt(total.squared_norm))
        clip = self._clip_scale(total)
        runner.update(work, None if clip is None else clip * self._mean_scale(runner, work.minibatch))

    def _clip_scale(self, figures: GradientFigures) -> float | None:
        """Returns the factor by which gradients are clipped; None after an overflow."""
        if self._options.autocast is torch.float16 and figures.overflowed:
            return None
        return clip_scale(figures.squared_norm, self._options.max_grad_norm)

    def _restore(self, newest_slots: Mapping[int, int]) -> None:
        if self._memory is not None:
            self._memory.stop()
        if self._evaluations is not None:
            self._evaluations.finish()
        for part in self._prepared:
            part.stage.draws = None
            if part.offload is not None:
                part.offload.finish()
            part.weights.own.restore(part.gradients.whole_slot(newest_slots[part.stage.stage_index]))
            for owner, slot in part.tied.newest_slots.items():
                part.weights.tied[owner].restore(slot)

    def _check_end(self, num_minibatches: int) -> None:
        """Checks that this worker's data end at the same minibatch as the data of the worker that found the
        end. Without shards, each replica of stage 0 finds the end itself and checks nothing."""
        replicas, looks_ahead = bool(self._servers), self._data.looks_ahead
        for runner in self._runners.values():
            is_told = replicas if runner.is_first else runner.is_last
            # Data that look ahead may also end because a minibatch is larger than planned. fetch() finds the
            # reason, so every worker with such data calls it. With other data only the last stage checks.
            if not is_told or not (runner.is_last or looks_ahead):
                continue
            if self._user.run("reading data", self._data.fetch, num_minibatches):
                raise runner.data_mismatch(num_minibatches)

    def _source(self) -> str:
        reads = any(runner.is_first or runner.is_last for runner in self._runners.values())
        return self._data.stream.source if reads else ""

    def _report(self) -> dict[str, Any]:
        num_minibatches = self._core.num_minibatches()
        assert num_minibatches is not None and self._memory is not None
        num_done = num_minibatches - self._data.first_minibatch
        torch_state_bytes = sum(part.optimizer.torch_state_bytes() for part in self._prepared)
        memory = functools.partial(
            self._memory.rows, self._core, torch_state_bytes, self._torch_pool, self._saver
        )
        received = [name for server in self._servers.values() for name in server.received_channels]
        common = common_report(self._core, memory, received)
        stats, transports = self._core.channel_stats(), self._core.channel_transports()
        between = [name for edge, name in self._edges if edge.kind in ("activation", "gradient")]
        return common | {
            "stages": {str(part.stage.stage_index): self._report_of(part) for part in self._prepared},
            "channels": {name: stats[name] | {"transport": transports.get(name)} for name in between},
            "losses": self._losses.values,
            "samples": self._data.samples[:num_done],
            "epochs": self._data.epochs[:num_done],
            "stopped": self.was_stopped,
            "validation": [] if self._evaluations is None else self._evaluations.results,
            "checkpoints": {} if self._saver is None else self._saver.figures(),
            "data": {"source": self._source(), "read_ns": self._data.read_ns},
        }

    def _report_of(self, part: PreparedStage) -> dict[str, Any]:
        stage, recompute, gradients = part.stage.stage_index, self._schedule.recompute, part.gradients
        return {
            "versions": self._core.versions(stage),
            "recompute": bool(recompute) and recompute[stage],
            "offload": [] if part.offload is None else part.offload.names(),
            "shard": gradients.record() if isinstance(gradients, AsynchronousServer) else None,
        }


# The functions below are not methods. A bound method refers to the loop. If an object of the loop stored such
# a method, a reference cycle would keep the loop and its pool in memory.


def _servers_of(prepared: Sequence[PreparedStage]) -> dict[int, ShardClient]:
    return {
        part.stage.stage_index: part.gradients for part in prepared if isinstance(part.gradients, ShardClient)
    }


def _check_inputs(boundary: Boundary | None, inputs: Any, minibatch: int) -> None:
    if boundary is not None:
        boundary.checked(inputs, stage=0, minibatch=minibatch)


def _end_of(source: MinibatchSource, *, is_continued: bool) -> int | None:
    """Returns the index after the last minibatch; None if the data have no length. is_continued: whether the
    run continues from a checkpoint. Then the data begin with minibatch 0, and not with the first minibatch
    that this run trains."""
    num_minibatches = source.stream.num_minibatches
    if is_continued:
        return num_minibatches
    return None if num_minibatches is None else source.first_minibatch + num_minibatches


class LossDisplay:
    """Shows the losses of the minibatches in which this replica of the last stage has microbatches."""

    def __init__(
        self, progress: RunProgress, source: MinibatchSource, board: StatusBoard | None, replica: int
    ) -> None:
        self._progress = progress
        self._source = source
        self._board = board
        self._replica = replica
        # Counts minibatches, including those without a microbatch of this replica.
        self._num_shown = 0

    def __call__(self, minibatch: int, loss: float, share: float) -> None:
        """Shows a loss. loss: this replica's part of the minibatch's loss. share: the fraction of the
        minibatch that the replica computes."""
        if self._progress.is_shown:
            index = minibatch - self._source.first_minibatch
            samples = sum(self._source.samples[self._num_shown : index + 1])
            self._num_shown = index + 1
            self._progress.advance(minibatch, self._source.epochs[index], loss / (share or 1.0), samples)
        if self._board is not None:
            self._board.add_loss(loss, self._replica)


def _mean_scale(
    core: _core.Worker,
    minibatches_per_round: int,
    runner: StageRunner,
    minibatch: int,
) -> float:
    """Returns the factor that turns a stage's gradients into their mean over a round, without the loss scale.

    A round is the minibatches of one update. At a stage with replicas the gradients are means already. At a
    stage without replicas they are a sum over the round, because the stage computes all of the round's
    minibatches. If no stage has replicas, a round is one minibatch.
    minibatch: the round's first minibatch."""
    if runner.prepared.gradients.takes_means:
        return 1.0
    if minibatches_per_round == 1:
        return 1.0 / runner.loss_scale
    num_minibatches = core.num_minibatches()
    left = math.inf if num_minibatches is None else num_minibatches - minibatch
    return 1.0 / (min(minibatches_per_round, left) * runner.loss_scale)


def _figures_of(
    runners: Iterable[StageRunner], mean_scale: Callable[[StageRunner, int], float], minibatch: int
) -> GradientFigures:
    """Returns the figures of the mean gradients of a worker's stages, without the loss scale. Call it when
    all gradients of the round have arrived. minibatch: the round's first minibatch."""
    figures = GradientFigures()
    for runner in runners:
        runner.prepared.gradients.take(minibatch, runner.gradient_slot)
        measured = runner.figures(minibatch)
        scale = mean_scale(runner, minibatch)
        figures += measured._replace(squared_norm=measured.squared_norm * scale**2)
    return figures
