"""Writes the checkpoints of one worker, for the whole run. Runs on the worker's compute thread."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pipedream import _core
from pipedream.checkpoint.checkpoints import Checkpoints
from pipedream.checkpoint.manifest import Header
from pipedream.checkpoint.stage_files import names_of_stage
from pipedream.checkpoint.writer import CheckpointWriter
from pipedream.data.minibatch_source import MinibatchSource
from pipedream.links.residuals import Residuals
from pipedream.model.loss_state import LossState
from pipedream.planning.shapes import Shapes, listed
from pipedream.stage.decisions import Saving, stop_lead
from pipedream.stage.saving import EVALUATED, KINDS, StageSaver
from pipedream.stage.stage_loop import PreparedStage
from pipedream.worker.agreed_run import AgreedRun, wait_while_linked
from pipedream.worker.notices import LOOK_S, SaveRequests

__all__ = ["Checkpointing"]


class Checkpointing:
    """The checkpoints of a run at one worker. Construct it before the stages' modules read versions of
    their parameters."""

    def __init__(
        self, run: AgreedRun, record: Mapping[str, list[Any]], loss_state: LossState | None = None
    ) -> None:
        """record: the reports from before the checkpoint that the run continues from. loss_state: the state
        of the loss, if this worker has the last stage."""
        checkpoints = run.options.checkpoints
        assert checkpoints is not None
        self._run = run
        self._record = record
        self._loss_state = loss_state
        self._checkpoints = checkpoints
        self._names = {stage.stage_index: names_of_stage(stage, run.ties) for stage in run.own_stages()}
        self.losses: list[float] = []
        """The losses of earlier segments that this worker has reported."""
        self.evaluated: list[Any] = []
        """The evaluations of earlier segments that this worker has reported."""
        self.writer: CheckpointWriter | None = None
        self.saving = _saving_of(run, checkpoints)
        """The object that decides on checkpoints that are not planned. None if the replicas of stage 0 could
        not agree on a boundary for them."""

    def prepare(self, num_bytes: Mapping[int, int]) -> None:
        """Allocates the memory for copies. num_bytes: by stage."""
        if self.writer is None:
            memory = {stage: torch.zeros(size, dtype=torch.uint8) for stage, size in num_bytes.items()}
            self.writer = CheckpointWriter(self._checkpoints.folder, self._checkpoints.keep, memory)

    def make_saver(
        self,
        run: AgreedRun,
        source: MinibatchSource,
        keep_residuals: Callable[[], Residuals],
        kinds: Sequence[Shapes],
        check_links: Callable[[], None],
        prepared: Sequence[PreparedStage],
    ) -> StageSaver:
        """Makes the saver of a segment. run: the run with the options of this segment. kinds: the shapes of
        minibatches that the segment's memory is planned for."""
        assert self.writer is not None
        if self.saving is not None:
            self.saving.check = check_links
        record = self._record
        return StageSaver(
            self.writer,
            _header_of(run),
            {
                "settings": run.options.settings_of_state(),
                KINDS: [listed(kind) for kind in kinds],
                "begun_at": run.first_minibatch if run.oldest_minibatch is None else run.oldest_minibatch,
            },
            replica=run.plan.replica_of(run.rank),
            prepared=prepared,
            names=self._names,
            schedule=run.schedule(),
            source=source,
            before={
                "losses_before": record.get("losses", []),
                "losses": list(self.losses),
                "samples": record.get("samples", []),
                "epochs": record.get("epochs", []),
                EVALUATED: [*record.get(EVALUATED, []), *self.evaluated],
            },
            keep_residuals=keep_residuals,
            meet=functools.partial(_meet, run, check_links),
            loss_state=self._loss_state,
        )

    def close(self) -> None:
        """Waits until all copies are written."""
        if self.writer is not None:
            self.writer.close()


def _meet(run: AgreedRun, check_links: Callable[[], None], stage: int, minibatch: int) -> None:
    """Waits until all replicas of the stage have called this function."""
    rendezvous = run.place.rendezvous
    replicas = range(run.plan.stages[stage].num_replicas)
    keys = [run.key(f"saved before {minibatch}/{stage}/{replica}") for replica in replicas]
    rendezvous.publish(keys[run.plan.replica_of(run.rank)], True)
    wait_while_linked(rendezvous, keys, check_links)


class _StoredWords:
    """Carries rank 0's messages about where the run is saved, through the rendezvous
    (decisions.SaveWords)."""

    def __init__(self, run: AgreedRun, num_kept: int) -> None:
        """num_kept: how many of the newest messages stay in the rendezvous. A replica may still have to read
        them; all replicas have read the older ones."""
        self._rendezvous = run.place.rendezvous
        self._num_kept = num_kept
        self._said: deque[str] = deque()
        """The keys of the messages that are in the rendezvous."""

    def say(self, boundary: int, word: list[int]) -> None:
        self._rendezvous.publish(_word_key(boundary), word)
        self._said.append(_word_key(boundary))
        if len(self._said) > self._num_kept:
            self._rendezvous.forget(self._said.popleft())

    def hear(self, boundary: int, check: Callable[[], None]) -> list[int]:
        return list(wait_while_linked(self._rendezvous, [_word_key(boundary)], check)[0])


def _word_key(boundary: int) -> str:
    return f"word about saving/{boundary}"


def _saving_of(run: AgreedRun, checkpoints: Checkpoints) -> Saving | None:
    if not run.options.may_choose_boundaries:
        return None
    group_size = _core.minibatches_between_drains(run.schedule())
    lead = stop_lead(run.schedule(), sync_every=run.options.replication.sync_every)
    return Saving(
        _StoredWords(run, 2 * lead // group_size + 2),  # a replica may be the lead behind
        is_due=SaveRequests(checkpoints).saves_now if run.rank == 0 else None,
        lead=lead,
        first_boundary=run.first_minibatch + group_size,
        group_size=group_size,
        period_s=LOOK_S,
    )


def _header_of(run: AgreedRun) -> Header:
    options, plan = run.options, run.plan
    return Header(
        run=f"{run.place.run_id:016x}",
        minibatch=0,
        epoch=None,
        plan=plan.to_dict(),
        schedule=str(options.schedule),
        microbatches=options.microbatches,
        seed=run.base_seed,
        parts=tuple(
            (stage, replica)
            for stage in range(plan.num_stages)
            for replica in range(plan.stages[stage].num_replicas)
        ),
    )
