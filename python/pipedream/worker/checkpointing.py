"""The checkpoints that one worker writes, for the whole run. On the worker's compute thread."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pipedream.checkpoint.checkpoints import Checkpoints
from pipedream.checkpoint.manifest import Header
from pipedream.checkpoint.stage_files import names_of_stage
from pipedream.checkpoint.writer import CheckpointWriter
from pipedream.common.errors import failures_of_others
from pipedream.data.minibatch_source import MinibatchSource
from pipedream.links.residuals import Residuals
from pipedream.planning.shapes import Shapes, listed
from pipedream.stage.decisions import Saving, stop_lead
from pipedream.stage.saving import EVALUATED, KINDS, StageSaver
from pipedream.stage.stage_loop import PreparedStage
from pipedream.worker.agreed_run import AgreedRun
from pipedream.worker.notices import SaveRequests, saves_on_notice

__all__ = ["Checkpointing"]


class Checkpointing:
    """The checkpoints of a run at one worker. It is made before the stages' modules read versions of their
    parameters."""

    def __init__(self, run: AgreedRun, record: Mapping[str, list[Any]]) -> None:
        """record: what was reported before the checkpoint that the run continues from."""
        checkpoints = run.options.checkpoints
        assert checkpoints is not None
        self._run = run
        self._record = record
        self._checkpoints = checkpoints
        self._names = {stage.stage_index: names_of_stage(stage, run.ties) for stage in run.own_stages()}
        self.losses: list[float] = []
        """Losses of the segments before, as this worker has reported them."""
        self.evaluated: list[Any] = []
        """Likewise, evaluations."""
        self.writer: CheckpointWriter | None = None
        self.saving = _saving_of(run, checkpoints)
        """At replicas of stage 0, beside what is planned; None where they could not agree."""

    def prepare(self, num_bytes: Mapping[int, int]) -> None:
        """Allocates what copies go into. num_bytes: by stage."""
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
        """Makes the saver of a segment. run: as of the segment. kinds: of minibatches that its memory is
        planned for."""
        assert self.writer is not None
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
        )

    def close(self) -> None:
        """Returns when all that was copied is written."""
        if self.writer is not None:
            self.writer.close()


def _meet(run: AgreedRun, check_links: Callable[[], None], stage: int, minibatch: int) -> None:
    """Waits until all replicas of the stage are here."""
    rendezvous = run.place.rendezvous
    replicas = range(run.plan.stages[stage].num_replicas)
    keys = [run.key(f"saved before {minibatch}/{stage}/{replica}") for replica in replicas]
    rendezvous.publish(keys[run.plan.replica_of(run.rank)], True)
    with failures_of_others():
        rendezvous.wait_for(keys, math.inf, lambda missing: f"no {missing[0]}", meanwhile=check_links)


class _OwnOrder:
    """The order of the only replica of stage 0 (decisions.SaveOrder)."""

    save_at = -1


def _saving_of(run: AgreedRun, checkpoints: Checkpoints) -> Saving | None:
    if not saves_on_notice(run.options, under_torchrun=run.place.board is None):
        return None
    is_due = SaveRequests(checkpoints).saves_now if run.rank == 0 else None
    lead = stop_lead(run.schedule(), sync_every=run.options.replication.sync_every)
    return Saving(run.place.board or _OwnOrder(), is_due=is_due, lead=lead)


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
