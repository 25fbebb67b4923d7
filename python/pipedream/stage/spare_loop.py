"""The loop of a spare. A spare is a worker beside the replicas of a stage. It owns a shard of the stage's
parameters and has no minibatches.

    round t, the minibatches of one update
    RECV push                    gradients of the shard, from all replicas with microbatches in the round
    UPDATE                       makes the mean gradient, and version t + 1 of the shard, chunk by chunk
    SEND pull, with the update   version t + 1 of the shard, to all replicas

The core's program gives the order (transfers.h). A ParameterServer makes the means and the versions, as at
a replica. Owned by the worker's compute thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipedream import _core
from pipedream.budget.footprint import StepMeter, make_meter
from pipedream.budget.memory import MODEL, TORCH_OPTIMIZER_STATE, TRANSIENT
from pipedream.checkpoint.snapshot import StageSnapshot
from pipedream.model.boundary import TENSORS
from pipedream.stage.job import JobOptions, WorkerPlace
from pipedream.stage.position import Position, common_report, memory_rows
from pipedream.stage.user_code import UserCode
from pipedream.update.param_server import ParameterServer
from pipedream.update.stage_optimizer import StageOptimizer

__all__ = ["SpareLoop"]

_NO_FIELDS = _core.ItemFields()
# The number of updates that are measured. The first update makes the optimizer's state. Measuring slows down
# each operator, so later updates are not measured.
_NUM_MEASURED = 8


class SpareLoop:
    """Does the work items of one spare."""

    def __init__(
        self,
        core: _core.Worker,
        options: JobOptions,
        place: WorkerPlace,
        *,
        schedule: _core.ScheduleOptions,
        server: ParameterServer,
        optimizer: StageOptimizer,
        predicted: Mapping[str, int],
        newest_slot: int,
    ) -> None:
        """optimizer: the optimizer of the server. predicted: bytes of each memory term. newest_slot: the slot
        of the version with which the spare begins.
        """
        self._core = core
        self._place = place
        self._replica = options.plan.replica_of(place.rank)
        self._schedule = schedule
        self._server = server
        self._optimizer = optimizer
        self._newest_slot = newest_slot
        self._predicted = predicted
        stage = options.plan.spare_stage_of(place.rank)
        assert stage is not None
        # The position is an object of its own. A bound method of the loop would make a reference cycle that
        # keeps the loop and its pool in memory.
        self._position = Position(options.plan, place.rank, stage)
        self._user = UserCode(self._position)
        self._step_meter = StepMeter(make_meter(torch.device("cpu")))
        self._num_unmeasured = _NUM_MEASURED

    def serve(self) -> dict[str, Any]:
        """Works until the replicas say that there are no more rounds. Then writes the newest version of the
        spare's shard into the stage's parameters, and returns a report."""
        core, user = self._core, self._user
        core.start(options=self._schedule, rank=self._place.rank, edges=[], tensors=TENSORS)
        newest_slot = self._newest_slot
        work = core.next_work()
        while work.kind != "DONE":  # every item here is an UPDATE; the core does the transfers itself
            newest_slot = work.write_slot
            self._update(work)
            work = core.advance([], _NO_FIELDS, user.take_elapsed_ns(), None)
        self._server.keep_version(newest_slot)
        return self._report()

    def take_snapshots(self) -> list[StageSnapshot]:
        """Copies the state of the shard's optimizer, without weights, which the replicas save. Raises
        ValueError for state that cannot be stored."""
        minibatch = self._core.num_minibatches()
        assert minibatch is not None
        tensors, document = self._optimizer.state()
        version = _core.rounds_of(self._schedule, self._position.stage).round_of(minibatch)
        return [
            StageSnapshot(
                self._position.stage,
                self._replica,
                minibatch,
                {version: {}},
                optimizer=tensors,
                optimizer_document=document,
            )
        ]

    def _update(self, work: _core.WorkItem) -> None:
        self._position.minibatch = work.minibatch
        if self._place.board is not None:
            self._place.board.write(self._place.rank, work.minibatch)
        self._server.take(work.minibatch, 0)
        is_measured = self._num_unmeasured > 0
        self._num_unmeasured -= is_measured
        run = self._run_measured if is_measured else functools.partial(self._user.run, "optimizer")
        self._server.apply(work.read_slot, work.write_slot, 1.0, run)

    def _run_measured(self, step: Callable[[], None]) -> None:
        with self._step_meter.step():
            self._user.run("optimizer", step)

    def _memory(self) -> dict[str, dict[str, int | None]]:
        measured = {
            TRANSIENT: self._step_meter.peak_bytes + self._server.mean_peak_bytes,
            TORCH_OPTIMIZER_STATE: self._optimizer.torch_state_bytes(),
            MODEL: self._predicted.get(MODEL, 0),
        }
        return memory_rows(self._core, self._predicted, measured)

    def _report(self) -> dict[str, Any]:
        """Returns a report with the keys of a replica's report. Stages, data and losses are empty."""
        return common_report(self._core, self._memory, self._server.received_channels) | {
            "stages": {},
            "channels": {},
            "losses": [],
            "samples": [],
            "epochs": [],
            "validation": [],
            "data": {"source": "", "read_ns": 0},
        }
