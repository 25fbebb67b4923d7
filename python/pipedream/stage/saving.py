"""The saver copies a worker's stages at boundaries, for checkpoints (boundaries.py).

    when                                                          what is copied
    begin   before the stage's first forward after the boundary   its buffers, the data's position, generators
    before each backward from begin to reach, without stashing    the version that the next update overwrites
    reach   after the last update before the boundary             versions, optimizer, losses so far

An example for boundary 5 with two minibatches in flight (F5 is the forward of minibatch 5, B a backward, U an
update):

    stage 0   F4 B3 U3 | F5    B4 U4      B5 U5
                     begin       reach             version 4, which F5 read, keeps its slot until U5

The tensors are copied at once (checkpoint/writer.py), because the next update overwrites them. Replicas
with asynchronous shards wait for each other before and after the copy. So each shard has the gradients of
all minibatches before the boundary, and of no later one. Owned by the worker's compute thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipedream import _core
from pipedream.checkpoint.manifest import Header
from pipedream.checkpoint.snapshot import StageSnapshot, encode, on_host
from pipedream.checkpoint.stage_files import FROZEN, NAMES, RECORD, Content, contents_of, piece_of, state_of
from pipedream.checkpoint.writer import CheckpointWriter
from pipedream.data.minibatch_source import MinibatchSource
from pipedream.data.stream import DataStream
from pipedream.links.residuals import Residuals, by_name
from pipedream.model.loss_state import LossState
from pipedream.model.seeding import RngState
from pipedream.model.stage_module import FrozenWrites
from pipedream.stage.boundaries import EVALUATE, SNAPSHOT
from pipedream.stage.stage_runner import PreparedStage, StageRunner
from pipedream.update.asynchronous_server import AsynchronousServer
from pipedream.update.shard_client import ShardClient
from pipedream.update.shards import Piece, ShardLayout
from pipedream.update.stage_state import HeldVersions

__all__ = ["DATA", "EVALUATED", "KINDS", "LOSS", "PENDING", "PROCESS", "Record", "StageSaver"]

# Keys of the JSON that a checkpoint has for each replica of a stage, its part (checkpoint/manifest.py).
KINDS = "kinds"
"""Key of a list: the shapes of minibatches that memory is planned for."""
EVALUATED, PENDING = "evaluated", "evaluates"
"""EVALUATED: the evaluations so far, as replica 0 of the last stage reports them. PENDING: whether an
evaluation is due at the snapshot's boundary and runs after the snapshot."""
DATA, PROCESS, LOSS = "data", "process", "loss"
"""DATA: the data's position, at the first stage. PROCESS: the generators of the worker's process. LOSS: the
state of the loss, at the last stage (LossState.changed)."""
Record = Mapping[str, Sequence[Any]]
"""Reports of earlier minibatches. "losses" has this worker's losses in this run, and "losses_before" all
workers' losses in the earlier runs. The other keys are "samples", "epochs" and "evaluated"."""


@dataclass
class _Begun:
    """A boundary at one stage, between the calls of begin() and reach()."""

    minibatch: int
    buffers: dict[str, Tensor]
    state: dict[str, Any]
    tensors: dict[str, Tensor]
    """The tensors that `state` names."""
    frozen: dict[str, Tensor]
    """Copies of the frozen parameters that forwards may write."""
    held: HeldVersions = field(default_factory=HeldVersions)


class StageSaver:
    """Saves the stages of one worker in checkpoints. Each segment, a part of the run with one plan of the
    memory, has a saver of its own."""

    def __init__(
        self,
        core: _core.Worker,
        writer: CheckpointWriter,
        header: Header,
        facts: Mapping[str, Any],
        *,
        replica: int,
        prepared: Sequence[PreparedStage],
        names: Mapping[int, Mapping[str, Any]],
        schedule: _core.ScheduleOptions,
        source: MinibatchSource,
        before: Record,
        keep_residuals: Callable[[], Residuals],
        meet: Callable[[int, int], None],
        loss_state: LossState | None = None,
    ) -> None:
        """header: the header of every checkpoint, without its position.
        facts: entries of the JSON of every part.
        names: by stage, the result of names_of_stage().
        before: the reports of the minibatches before this segment.
        keep_residuals: returns the residuals of the worker's channels, once everything is sent. A residual is
            the part of a tensor that the codec topk has not sent.
        meet: called with a stage and a minibatch. It waits until all replicas of the stage have made the same
            call.
        loss_state: the state of the loss, if the worker has the last stage.
        """
        self._core = core
        self._writer = writer
        self._header = header
        self._facts = facts
        self._replica = replica
        self._parts = {part.stage.stage_index: part for part in prepared}
        self._names = names
        self._schedule = schedule
        self._source = source
        self._before = before
        self._keep_residuals = keep_residuals
        self._meet = meet
        self._loss_state = loss_state
        self._frozen = {stage: FrozenWrites(part.stage) for stage, part in self._parts.items()}
        self._begun: dict[int, list[_Begun]] = {stage: [] for stage in self._parts}
        self.losses: Sequence[float] = ()
        """The losses of this segment so far, if the worker has the last stage."""
        self.evaluated: Sequence[Any] = ()
        """The evaluations of this segment so far, if the worker has the last stage."""
        self.runners: Mapping[int, StageRunner] = {}

    # The calls of a BoundaryListener.

    def begin(self, stage: int, minibatch: int, events: int) -> None:
        if not events & SNAPSHOT:
            return
        buffers = {name: on_host(buffer) for name, buffer in self._parts[stage].stage.stage_buffers()}
        state: dict[str, Any] = {PROCESS: RngState.capture().to_document(), PENDING: bool(events & EVALUATE)}
        tensors: dict[str, Tensor] = {}
        stream = self._source.stream
        if self.runners[stage].is_first and isinstance(stream, DataStream):
            state[DATA] = encode(stream.position(minibatch), DATA, tensors)
        if self.runners[stage].is_last and self._loss_state is not None:
            state[LOSS] = encode(self._loss_state.changed(), LOSS, tensors)
        frozen = {name: on_host(parameter) for name, parameter in self._frozen[stage].suspects()}
        self._begun[stage].append(_Begun(minibatch, buffers, state, tensors, frozen))

    def reach(self, stage: int, minibatch: int, events: int) -> None:
        if not events & SNAPSHOT:
            return
        begun = self._begun[stage].pop(0)
        assert begun.minibatch == minibatch
        part = self._parts[stage]
        server = part.gradients if isinstance(part.gradients, AsynchronousServer) else None
        if server is not None:
            server.wait_for_minibatches(minibatch)
        snapshot = self._snapshot(stage, begun)
        contents = [
            *contents_of(snapshot),
            Content(FROZEN, {**dict(part.stage.frozen_parameters()), **begun.frozen}),
            Content(RECORD, self._record(stage, minibatch)),
        ]
        if self.runners[stage].is_last:
            begun.state[EVALUATED] = [*self._before[EVALUATED], *self.evaluated]
        state = {**self._facts, **begun.state, NAMES: self._names[stage], **state_of(snapshot)}
        header = dataclasses.replace(
            self._header, minibatch=minibatch, epoch=self._epoch_of(stage, minibatch)
        )
        self._writer.save(header, (stage, self._replica), contents, state)
        if server is not None:
            self._meet(stage, minibatch)

    @property
    def peak_bytes(self) -> int:
        return self._writer.peak_bytes()

    def figures(self) -> dict[str, int]:
        return vars(self._writer.figures)

    def before_backward(self, work: _core.WorkItem) -> None:
        """Copies the newest version of a stage that does not stash, if a checkpoint's boundary has begun and
        is not reached. The next update may overwrite the stage's only slot."""
        for begun in self._begun[work.stage]:
            self.runners[work.stage].keep_version(work, begun.held)

    # Parts of a snapshot.

    def _snapshot(self, stage: int, begun: _Begun) -> StageSnapshot:
        part, minibatch = self._parts[stage], begun.minibatch
        scaling = part.loss_scaling
        held = {**self.runners[stage].kept.contents, **begun.held.contents}
        kept = part.weights.own.contents_at_once(self._core.kept_versions(stage, minibatch))
        # If another stage owns tied parameters of this stage, their newest version may not be here yet. A run
        # that continues reads that version from the owner's snapshot.
        owned_slots = part.tied.kept_owned_slots(minibatch)
        owned = part.weights.tied[stage].contents_at_once(owned_slots) if owned_slots else {}
        if isinstance(part.gradients, AsynchronousServer):
            # A continued run starts all microbatches from the newest version, so only that one is saved.
            kept = {max(kept): part.gradients.newest_pieces()}
        elif isinstance(part.gradients, ShardClient):
            pieces, tied_pieces = self._own_pieces(part.gradients.layout)
            kept, owned = self._own_part(kept, pieces), self._own_part(owned, tied_pieces)
        tensors, document = part.optimizer.state(to_host=Tensor.detach)
        residuals = by_name(self._keep_residuals())
        return StageSnapshot(
            stage,
            self._replica,
            minibatch,
            versions=held | kept,
            tied={stage: owned} if owned else {},
            buffers=begun.buffers,
            optimizer=tensors,
            optimizer_document=document,
            document={} if scaling is None else {"loss_scaling": scaling.state(minibatch)},
            residuals=residuals if stage == min(self._parts) else {},
            document_tensors=begun.tensors,
        )

    def _own_pieces(self, layout: ShardLayout) -> tuple[list[Piece], list[Piece]]:
        """Returns two lists with the pieces of the newest version that this replica saves: pieces of untied
        parameters, and pieces of tied parameters that the stage owns. A replica saves only its own shard,
        because it may not have the other replicas' shards of that version yet."""
        own = [chunk for chunk in layout.chunks_of(self._replica) if not chunk.is_tied]
        shared = layout.shared_pieces() if self._replica == 0 else []
        pieces = [piece for chunk in own for piece in chunk.pieces]
        return [*pieces, *shared], layout.tied_pieces_of(self._replica)

    def _own_part(
        self, versions: Mapping[int, Mapping[str, Tensor]], pieces: Sequence[Piece]
    ) -> dict[int, dict[str, Tensor]]:
        """Returns the parts of the versions that this replica saves: its own pieces of the newest version,
        and at replica 0 the older versions, which all replicas have."""
        own: dict[int, dict[str, Tensor]] = {}
        for version, contents in versions.items():
            if version == max(versions):
                named = list(contents.items())
                own[version] = dict(
                    piece_of(*named[piece.parameter], piece.first, piece.count) for piece in pieces
                )
            elif self._replica == 0:
                own[version] = dict(contents)
        return own

    def _record(self, stage: int, minibatch: int) -> dict[str, Tensor]:
        """Returns the worker's reports of the minibatches before this boundary, as tensors by key."""
        runner, source, before = self.runners[stage], self._source, self._before
        record: dict[str, Sequence[float]] = {}
        if runner.is_last:
            num_own = self._num_own(minibatch) - self._num_own(self._schedule.first_minibatch)
            record["losses_before"] = before["losses_before"]
            record["losses"] = [*before["losses"], *self.losses[:num_own]]
        if runner.is_first:
            num_read = minibatch - source.first_minibatch
            record["samples"] = [*before["samples"], *source.samples[:num_read]]
            record["epochs"] = [*before["epochs"], *source.epochs[:num_read]]
        return {
            name: torch.tensor(values, dtype=torch.float64 if name.startswith("loss") else torch.int64)
            for name, values in record.items()
        }

    def _num_own(self, minibatch: int) -> int:
        """Returns how many of the minibatches before this boundary have microbatches at this replica of the
        last stage."""
        rounds = _core.rounds_of(self._schedule, self._schedule.num_stages - 1)
        return minibatch // max(1, rounds.num_replicas // self._schedule.num_microbatches)

    def _epoch_of(self, stage: int, minibatch: int) -> int | None:
        if not self.runners[stage].is_first:
            return None
        epochs, index = self._source.epochs, minibatch - self._source.first_minibatch
        return epochs[index] if index < len(epochs) else epochs[-1] + 1
