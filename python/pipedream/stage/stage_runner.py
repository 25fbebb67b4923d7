"""The runner executes these work items of one stage, which have these inputs and outputs:

    FORWARD    data or received tensors -> outputs, and a stash for the backward
    RECOMPUTE  the stash -> the stash with its graph
    BACKWARD   the stash, received gradients -> gradients of the parameters and of the received tensors
    UPDATE     gradients of the parameters -> the next version

The worker's compute thread owns the runner and everything that the runner is given.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipedream import _core
from pipedream.budget.footprint import StepMeter, WorkMeter
from pipedream.budget.offload import StageOffload
from pipedream.common.errors import DataMismatch, NonFiniteLoss
from pipedream.data.batch_reader import BatchReader, Microbatch
from pipedream.model.batch_norm import EvaluatedNorms, MinibatchStatistics
from pipedream.model.boundary import Boundary, to_device
from pipedream.model.seeding import seed_torch
from pipedream.model.stage_module import StageModule
from pipedream.report.losses import LossRecord
from pipedream.stage.boundaries import Boundaries, StageZeroGate
from pipedream.stage.decisions import bits_of_loss, loss_of_bits
from pipedream.stage.job import JobOptions
from pipedream.stage.outgoing import gradients_of, nothing_like, settled, written_memory
from pipedream.stage.passes import OffloadedStash, RecomputedPasses, StagePasses, Stashed
from pipedream.stage.user_code import UserCode
from pipedream.update.gradients import GradientFigures, StageGradients
from pipedream.update.loss_scale import LossScaling
from pipedream.update.stage_optimizer import StageOptimizer
from pipedream.update.stage_state import HeldVersions, StageStart
from pipedream.update.tied import TiedParameters
from pipedream.update.weights import StageWeights

__all__ = ["PreparedStage", "StageParts", "StageRunner", "data_mismatch"]

_NO_SLOTS: dict[int, int] = {}


@dataclass(frozen=True)
class PreparedStage:
    """One stage of this worker, with its weights in the pool, ready to run."""

    stage: StageModule
    weights: StageWeights
    tied: TiedParameters
    optimizer: StageOptimizer
    offload: StageOffload | None
    gradients: StageGradients
    loss_scaling: LossScaling | None
    """The scale of the loss; None unless autocast is float16."""
    start: StageStart


@dataclass(frozen=True)
class StageParts:
    """The objects of a worker that the runner of one stage uses."""

    boundary_in: Boundary | None
    """The tensors that cross from the stage upstream; None at the first stage."""
    boundary_out: Boundary | None
    """The tensors that cross to the stage downstream; None at the last stage."""
    in_microbatches: bool
    """Whether the data yield Microbatches. Then batch norms count each batch of a minibatch as one step."""
    reader: BatchReader | None
    """Reads the data at the first and the last stage; None at others."""
    losses: LossRecord | None
    """The record of losses; None except at the last stage."""
    boundaries: Boundaries
    """The points between minibatches at which the worker has events such as checkpoints (boundaries.py)."""
    gate: StageZeroGate | None
    """Decides which minibatches are trained; None except at the first stage."""
    tells_losses: bool
    """Whether the losses are sent back to the first stage, in the headers of gradients."""
    backward_seed: int | None
    """Seed of the backward's random draws. None if the backward draws nothing, or if it draws from the
    process's generators."""
    clones_inputs: bool | None
    """Whether the first stage works on copies of the inputs. None: the first forward decides."""
    copies_targets: bool
    """Whether the last stage works on copies of the targets."""
    torch_region: Callable[[], contextlib.AbstractContextManager[None]] | None
    """The region in which torch computes, so that its tensors lie in the pool. None: torch allocates its
    memory itself.
    """


class StageRunner:
    """Runs one stage's forward, recompute, backward and update. forward(), recompute() and backward() return
    the tensors to send."""

    def __init__(
        self,
        options: JobOptions,
        schedule: _core.ScheduleOptions,
        prepared: PreparedStage,
        parts: StageParts,
        device: torch.device,
        user: UserCode,
        describe: str,
    ) -> None:
        """describe: the name of the worker, for errors."""
        stage = prepared.stage
        self.stage_index = stage.stage_index
        self.is_first = parts.boundary_in is None
        self.is_last = parts.boundary_out is None
        self.prepared = prepared
        self.parts = parts
        self._follows_in_hand = parts.boundaries.has_stage(self.stage_index - 1)
        self._weights, self._gradients = prepared.weights, prepared.gradients
        self._losses, self._boundaries = parts.losses, parts.boundaries
        self._gate, self._tells_losses = parts.gate, parts.tells_losses
        self.fields = self._activation_fields = _core.ItemFields()
        """The header fields that the core sends with the tensors of the latest item."""
        self._gradient_fields = _core.ItemFields()
        self.gradient_slot = 0
        """The slot of the version whose leaves hold the gradients."""
        self.loss_scale = 1.0
        """The factor by which the latest backward's loss is multiplied. With _sums_shares and replicas of the
        stage, it is instead the sum of the weights of this replica's microbatches in the round so far."""
        self._share = 0.0
        self.meter: WorkMeter | None = None
        """Measures forwards, recomputes and backwards; None if nothing is measured."""
        self.step_meter: StepMeter | None = None
        """Measures updates; None if nothing is measured."""
        self._device = device
        self._user = user
        self._describe = describe
        self._rounds = _core.rounds_of(schedule, self.stage_index)
        self._own_per_round = self._rounds.own_per_round
        microbatches = range(schedule.num_microbatches)
        self._begins_minibatch = [self._rounds.is_first_of_minibatch(index) for index in microbatches]
        """By microbatch: whether it is the first of its minibatch at this replica."""
        self._ends_minibatch = [self._rounds.is_last_of_minibatch(index) for index in microbatches]
        self._sums_shares = options.sums_shares
        self._recomputes = bool(schedule.recompute) and schedule.recompute[self.stage_index]
        self._statistics: MinibatchStatistics | None = None
        if schedule.num_microbatches > 1 and not parts.in_microbatches:
            self._statistics = MinibatchStatistics(stage) or None
        self._evaluated_norms: EvaluatedNorms | None = None  # known after the first forward
        self._has_in_flight = _core.num_microbatches_in_flight(schedule, self.stage_index) > 1
        self._written_memory: set[int] = set()  # it is found after the first forward, which may make buffers
        self._has_looked = False
        self._in_flight: dict[tuple[int, int], Stashed] = {}
        self._reads_losses_late = parts.losses is not None and parts.losses.reads_late
        self._tied = prepared.tied or None
        self.stashes = _core.stashes_versions(schedule, self.stage_index)
        self._held = prepared.start.held
        """Versions of an earlier run for the first microbatches; None after these microbatches."""
        self.kept = HeldVersions()
        """Copies of versions that no slot holds any more, for a run that continues this one."""
        self._schedule = schedule
        self._loss_scaling = prepared.loss_scaling
        self._offload: OffloadedStash | None = None
        if prepared.offload is not None:
            self._offload = OffloadedStash(prepared.offload, stage, prepared.weights)
        # A bind is not early with offloading, which moves weights, or with ties, whose versions come later.
        self._binds_early = prepared.offload is None and self._tied is None
        self._passes = (RecomputedPasses if self._recomputes else StagePasses)(
            stage,
            parts.boundary_in,
            parts.boundary_out,
            loss_fn=options.loss_fn,
            user=user,
            device=device,
            autocast=options.autocast,
            statistics=self._statistics,
            torch_region=parts.torch_region,
            around_backward=prepared.gradients.around_backward,
            clones_inputs=parts.clones_inputs,
            offload=self._offload,
        )

    def prepare(self, work: _core.WorkItem) -> None:
        """Binds the weights of the next work item while its tensors are still on their way."""
        if self._binds_early:
            self._bind(work)

    # Forward.

    def forward(self, work: _core.WorkItem) -> list[Tensor] | None:
        """Returns the outputs; an empty list at the last stage. Returns None if the first stage does not
        admit the minibatch, for example at the end of the data."""
        piece = self._read(work)
        if piece is None:
            return None
        minibatch, microbatch = work.minibatch, work.microbatch
        self.fields = fields = self._activation_fields
        fields.boundary_events = self._begin_boundary(work)
        if not self.is_last:
            fields.data_fingerprint, fields.is_empty = piece.fingerprint, piece.is_empty
        self._begin_forward(work)
        scale = 1.0 if self._loss_scaling is None else self._loss_scaling.scale
        if piece.is_empty:
            work.tensors.clear()
            self._in_flight[minibatch, microbatch] = Stashed(
                minibatch, [], None, piece, work.read_slot, scale
            )
            return self._forward_nothing(minibatch, microbatch)
        if self._held is not None:
            self._load_held(work, is_forward=True)
        leaves, value = self._passes.take_input(piece, work.tensors)
        work.tensors.clear()
        stashed = Stashed(minibatch, leaves, value, piece, work.read_slot, scale, microbatch=microbatch)
        del value, leaves
        self._bind(work)
        if piece.uneven_labels:
            self._judge_labels(stashed)
        if self.meter is None:
            output = self._passes.forward(stashed, is_next=not self._in_flight)
        else:
            with self.meter.forward():
                output = self._passes.forward(stashed, is_next=not self._in_flight)
        if not self._has_looked:
            self._look_at_what_was_made()
        self._in_flight[minibatch, microbatch] = stashed
        if self._evaluated_norms is not None:
            self._evaluated_norms.check((minibatch, microbatch), self._in_flight)
        if self.is_last:
            self._add_loss(stashed, output, closes=self._ends_minibatch[microbatch])
            return []
        crossing = self._passes.crossing(output, minibatch)
        if not self._recomputes:
            stashed.outputs = crossing if self._offload is None else self._offload.roots(stashed, crossing)
        if self._ends_minibatch[microbatch]:
            self._close_minibatch(minibatch)
        boundary = self.parts.boundary_out
        assert boundary is not None
        return boundary.sent([settled(tensor, self._written_memory) for tensor in crossing])

    def _judge_labels(self, stashed: Stashed) -> None:
        """Raises ValueError if the loss ignores labels (-100) that the microbatches have in unequal numbers.
        A microbatch's share of the samples would then be a wrong weight in the loss."""
        reader, piece = self.parts.reader, stashed.piece
        assert reader is not None
        for uneven in piece.uneven_labels:
            labels = uneven.of(piece.targets)
            loss_with = functools.partial(self._passes.loss_with, stashed, labels)
            reader.ignored_labels.judge(
                uneven,
                labels,
                loss_with,
                minibatch=stashed.minibatch,
                num_microbatches=self._schedule.num_microbatches,
            )

    def _read(self, work: _core.WorkItem) -> Microbatch | None:
        """Returns the microbatch's data; None if the first stage does not admit its minibatch. Raises
        DataMismatch at the last stage if the first stage has read other data."""
        reader = self.parts.reader
        if reader is None:
            return Microbatch(fingerprint=work.data_fingerprint, is_empty=work.is_empty)
        is_over = self._begins_minibatch[work.microbatch] and not self._admits(work.minibatch)
        piece = None if is_over else reader.read(work.minibatch, work.microbatch)
        if not self.is_first and (
            piece is None or piece.fingerprint != work.data_fingerprint or piece.is_empty != work.is_empty
        ):
            raise self.data_mismatch(work.minibatch)  # the first stage has read other data
        if piece is not None and self.parts.copies_targets:
            piece.targets = to_device(piece.targets, self._device, copy=True)
        return piece

    def _admits(self, minibatch: int) -> bool:
        """Reads the minibatch's data. Returns False if there are none. At the first stage also returns False
        if the run ends before the minibatch, or if an evaluation comes first."""
        assert self.parts.reader is not None
        source = self.parts.reader.source
        fetch = functools.partial(self._user.run, "reading data", source.fetch)
        return fetch(minibatch) if self._gate is None else self._gate.admits(minibatch, fetch)

    def _begin_boundary(self, work: _core.WorkItem) -> int:
        """Returns the events that are due at the boundary before the forward's group of minibatches, and
        tells the boundary's listeners."""
        events = work.boundary_events
        if self._gate is not None:
            events = self._gate.events
        elif not events and self._follows_in_hand:
            events = self._boundaries.events_in_hand(work.minibatch)
        if events:
            self._boundaries.begin(self.stage_index, work.minibatch, events)
        return events

    def _begin_forward(self, work: _core.WorkItem) -> None:
        if self._loss_scaling is not None:
            overflowed, told = self._take_overflow(), work.gradients_overflowed
            if told:
                self._loss_scaling.note_told(work.minibatch)
            self._loss_scaling.begin_forward(work.minibatch, overflowed=overflowed, told=told)
            self.fields.gradients_overflowed = overflowed or told

    def _take_overflow(self) -> bool:
        """Returns whether an update was skipped since the last call, perhaps in an earlier segment or run."""
        assert self._loss_scaling is not None
        before = self._loss_scaling.take_kept()
        return self._gradients.take_overflow() or before

    def keep_version(self, work: _core.WorkItem, kept: HeldVersions) -> None:
        """Puts a copy of the version that the next backward reads into `kept`. The update after that backward
        may overwrite the version, and a run that continues this one needs it."""
        if self._held is not None:  # a short run's forwards may all have read older versions
            self._load_held(work, is_forward=False)
        version = _core.backward_version(self._schedule, self.stage_index, work.minibatch, work.microbatch)
        kept.keep(version, self._weights.own, work.read_slot)

    def _load_held(self, work: _core.WorkItem, *, is_forward: bool) -> None:
        """Copies the version that the item reads into the stage's slot, from the versions that the earlier
        run kept. If the item reads a newer version, the newest of the kept versions is loaded."""
        assert self._held is not None
        read = _core.forward_version if is_forward else _core.backward_version
        version = read(self._schedule, self.stage_index, work.minibatch, work.microbatch)
        self._held.load(version, self._weights.own, work.read_slot)
        self._held = self._held or None

    def begin_evaluation(self, work: _core.WorkItem) -> None:
        """Makes sure that the stage's slot has the weights of the boundary, and no older version that an
        earlier run has kept for this run's first forwards."""
        if self._held is not None:
            self._held.load_newest(self._weights.own, work.read_slot)

    def _bind(self, work: _core.WorkItem) -> None:
        if self._tied is None:
            self._weights.bind(work.read_slot, _NO_SLOTS)
        else:
            self._weights.bind(work.read_slot, self._tied.slots_read_by(work.minibatch, work.microbatch))

    def _look_at_what_was_made(self) -> None:
        """Finds the buffers that the first forward has made, and the references to parameters that layers
        stored during it. Raises ValueError for hooks that the forward has registered at parameters."""
        self._has_looked = True
        self._written_memory = written_memory(self.prepared.stage)
        self._weights.follow_new_references()
        self._weights.check_no_hooks()
        if self._has_in_flight:
            self._evaluated_norms = EvaluatedNorms(self.prepared.stage) or None

    def _add_loss(self, stashed: Stashed, loss: Tensor, *, closes: bool) -> None:
        losses = self._losses
        assert losses is not None
        targets = stashed.piece.targets
        if not self._recomputes:
            self._keep_loss(stashed, loss)
        if self._reads_losses_late:
            self._read_losses()
        try:
            losses.add(stashed.minibatch, loss, stashed.piece.weight)
        except NonFiniteLoss as error:
            raise self._explained(error, stashed, targets) from None
        if closes:
            self._close_minibatch(stashed.minibatch)

    def _explained(self, error: NonFiniteLoss, stashed: Stashed, targets: Any) -> NonFiniteLoss:
        origins = self._passes.origins_of_nan(stashed, targets)
        if not origins:
            return error
        text, _, advice = str(error).partition(": ")
        return NonFiniteLoss(
            f"{text}, at stage {self.stage_index} from {' and '.join(origins[:2])}: {advice}"
        )

    def _keep_loss(self, stashed: Stashed, loss: Tensor) -> None:
        if not loss.requires_grad:
            self._check_trains_nothing(stashed)
        stashed.outputs = [loss]
        stashed.piece.targets = None

    def _check_trains_nothing(self, stashed: Stashed) -> None:
        if self._weights.has_parameters or any(leaf.requires_grad for leaf in stashed.leaves):
            raise ValueError(
                f"the loss of minibatch {stashed.minibatch} needs no gradient, so nothing would be trained:"
                " loss_fn must not detach, and run() must not be called under torch.no_grad()"
            )

    def _close_minibatch(self, minibatch: int) -> None:
        """Ends the minibatch at this stage, after the forward of its last microbatch at this replica."""
        if self._statistics is not None:
            self._statistics.update()
        if self._losses is not None:
            self._losses.close(minibatch)

    def _forward_nothing(self, minibatch: int, microbatch: int) -> list[Tensor]:
        if self._ends_minibatch[microbatch]:
            self._close_minibatch(minibatch)
        boundary = self.parts.boundary_out
        return [] if boundary is None else nothing_like(boundary, self._device, gradients=False)

    def _read_losses(self) -> None:
        """Reads losses that are due. A device may report an error of earlier user code here, so the error's
        message names that code."""
        assert self._losses is not None
        self._user.run("forward or loss_fn", self._losses.read_pending)

    # Recompute.

    def recompute(self, work: _core.WorkItem) -> list[Tensor]:
        """Runs the forward again, now with its graph. Returns an empty list, because nothing is sent."""
        stashed = self._in_flight[work.minibatch, work.microbatch]
        if stashed.piece.is_empty:
            return []
        assert isinstance(self._passes, RecomputedPasses)
        if self._held is not None:
            self._load_held(work, is_forward=False)
        self._bind(work)
        with contextlib.nullcontext() if self.meter is None else self.meter.recompute():
            output = self._passes.recompute(stashed)
        if self.is_last:
            self._keep_loss(stashed, output)
        else:
            stashed.outputs = self._passes.crossing(output, work.minibatch)
        return []

    # Backward.

    def backward(self, work: _core.WorkItem) -> list[Tensor]:
        """Returns the gradients that go upstream; an empty list at the first stage."""
        minibatch, microbatch, read_slot = work.minibatch, work.microbatch, work.read_slot
        stashed = self._in_flight.pop((minibatch, microbatch))
        self.fields = self._gradient_fields
        if self._own_per_round > 1:
            self._join_round(work)
        self.gradient_slot = read_slot
        if self._loss_scaling is not None or self._sums_shares:
            self._note_scale(work, stashed)
        if self._held is not None:
            self._load_held(work, is_forward=False)
        # Layers with activation checkpointing run their forward again in the backward, so the backward needs
        # the weights bound.
        self._bind(work)
        following: Stashed | None = None
        if self._offload is not None:  # backwards run in the order of the forwards
            following = next(iter(self._in_flight.values()), None)
        if self.parts.backward_seed is not None:
            of_minibatch = _core.derived_seed(self.parts.backward_seed, minibatch)
            seed_torch(_core.derived_seed(of_minibatch, microbatch))
        self._gradients.begin_backward()
        if self._ends_minibatch[microbatch]:
            self._gradients.begin_last_backward(minibatch, self.loss_scale)
        if self.meter is None:
            self._passes.backward(stashed, work.tensors, following)
        else:
            with self.meter.backward():
                self._passes.backward(stashed, work.tensors, following)
        if self._own_per_round > 1:
            self._gradients.separate_gradients(read_slot)
        work.tensors.clear()
        if self._reads_losses_late:  # a NaN loss must end the run before gradients are sent
            self._read_losses()
        if self._tells_losses:
            self._tell_loss(work, stashed)
        boundary = self.parts.boundary_in
        if boundary is None:
            return []
        if stashed.piece.is_empty:
            return nothing_like(boundary, self._device, gradients=True)
        return boundary.sent(gradients_of(stashed.leaves, self._device), gradients=True)

    def _tell_loss(self, work: _core.WorkItem, stashed: Stashed) -> None:
        """Puts the loss into the header of the gradients, which bring it to the first stage."""
        bits = work.data_fingerprint
        if self._losses is not None:
            parts = self._losses.parts
            assert parts is not None
            # Backwards run in the order of the forwards.
            part = 0.0 if stashed.piece.is_empty else parts.popleft()
            bits = bits_of_loss(part)
        self.fields.data_fingerprint = bits
        if self._gate is not None:
            self._gate.note_loss(work.minibatch, loss_of_bits(bits))

    def _join_round(self, work: _core.WorkItem) -> None:
        """Moves the gradients of the round so far to the leaves of the version that this backward reads."""
        if work.read_slot != self.gradient_slot:
            self._gradients.move(self.gradient_slot, work.read_slot)
        if self._tied is not None:
            self._tied.begin_backward(work.minibatch, work.microbatch)

    def _note_scale(self, work: _core.WorkItem, stashed: Stashed) -> None:
        """Updates `loss_scale`, the factor in the gradients of the round. If the scale has changed within the
        round, rescales the gradients so far."""
        begins = self._rounds.is_first_of_round(work.minibatch, work.microbatch)
        if self._sums_shares:  # the update divides the replica's gradients by the sum of their weights
            share = stashed.piece.weight if self.is_last else work.loss_scale
            self.fields.loss_scale = share
            if self._rounds.num_replicas > 1:
                self._share = share if begins else self._share + share
                self.loss_scale = self._share or 1.0
            return
        scale = self.fields.loss_scale = stashed.scale if self.is_last else work.loss_scale
        if not begins and scale != self.loss_scale:
            self._gradients.rescale(self.gradient_slot, scale / self.loss_scale)
        self.loss_scale = scale

    def poison(self, done: _core.WorkItem, freed_slot: int) -> None:
        """Overwrites versions with NaN after the last backward that reads them. freed_slot: the slot of such
        a version; -1 if there is none."""
        if freed_slot >= 0:
            self._gradients.poison(freed_slot)
        self.prepared.tied.poison_freed_by(done.minibatch, done.microbatch)

    # Update.

    def figures(self, minibatch: int) -> GradientFigures:
        """Returns the figures of an update's gradients. Their flag `told` says whether an activation of the
        round has reported an overflow. minibatch: the round's first minibatch."""
        told = self._loss_scaling is not None and self._loss_scaling.take_told(minibatch)
        return self._gradients.figures()._replace(told=told)

    def hear(self, minibatch: int, total: GradientFigures) -> None:
        """Notes the sum of an update's figures over all workers that exchange figures. minibatch: the round's
        first minibatch."""
        if self._loss_scaling is not None:
            round_index = self._rounds.round_of(minibatch)
            self._loss_scaling.hear(round_index, overflowed=total.overflowed or total.told)

    def update(self, work: _core.WorkItem, gradient_scale: float | None) -> None:
        """Makes the next version. gradient_scale: the factor by which gradients are multiplied. None skips
        the update after an overflow."""
        read_slot, write_slot = work.read_slot, work.write_slot
        gradients, own = self._gradients, self._weights.own
        own.begin_update(read_slot, write_slot)
        if gradient_scale is None:
            if self._loss_scaling is not None:
                self._loss_scaling.note_skipped(self._rounds.round_of(work.minibatch))
            self._run_step(functools.partial(gradients.skip, read_slot, write_slot))
        else:
            gradients.apply(read_slot, write_slot, gradient_scale, self._run_step)
        own.end_update(write_slot)

    def finish(self, newest_slot: int, *, is_over: bool) -> None:
        """Ends a segment, a part of the run with one memory plan. Call it after all updates. newest_slot: the
        slot of the last version. is_over: whether the run is over, too."""
        self._gradients.finish(newest_slot, is_over=is_over)
        if self._loss_scaling is not None and not is_over:
            self._loss_scaling.keep(overflowed=self._gradients.take_overflow())

    def _run_step(self, step: Callable[[], None]) -> None:
        if self.step_meter is None:
            self._user.run("optimizer", step)
            return
        with self.step_meter.step():
            self._user.run("optimizer", step)

    def data_mismatch(self, minibatch: int) -> DataMismatch:
        return data_mismatch(minibatch, self._describe)


def data_mismatch(minibatch: int, worker: str) -> DataMismatch:
    """Returns the error for data that differ between workers. worker: describes the worker whose data differ
    from rank 0's."""
    return DataMismatch(
        f"minibatch {minibatch} is not the same data at stage 0 (rank 0) and {worker}:"
        " every worker iterates all of `data` itself, so no rank may have a part of its own (as"
        " DistributedSampler gives), and the order must follow from the seeded generators of torch, random"
        " and numpy, or be fixed"
    )
