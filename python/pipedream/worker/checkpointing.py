"""Writes the checkpoints of one worker, for all segments of a run (segment.py). A checkpoint is made at a
boundary between groups of minibatches (stage/boundaries.py). Runs on the worker's compute thread."""

from __future__ import annotations

import functools
import time
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
from pipedream.stage.decisions import stop_lead
from pipedream.stage.saving import EVALUATED, KINDS, StageSaver
from pipedream.stage.stage_runner import PreparedStage
from pipedream.worker.agreed_run import AgreedRun, wait_while_linked
from pipedream.worker.notices import LOOK_S, SaveRequests

__all__ = ["Checkpointing"]


class Checkpointing:
    """Writes the checkpoints of a run at one worker. Construct it before the modules of the stages read
    weight versions."""

    def __init__(
        self, run: AgreedRun, record: Mapping[str, list[Any]], loss_state: LossState | None = None
    ) -> None:
        """record: the reports of the minibatches before the checkpoint from which the run continues.
        loss_state: the state of the loss, if this worker has the last stage."""
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
        self._saving = _Saving(run, checkpoints) if run.options.may_choose_boundaries else None

    @property
    def saves_before(self) -> Callable[[int], bool] | None:
        """A function that says at a boundary whether an unplanned checkpoint is due. None if the replicas of
        stage 0 could not agree on a boundary for it."""
        return None if self._saving is None else self._saving.saves_before

    def prepare(self, num_bytes: Mapping[int, int]) -> None:
        """Allocates the memory for copies of the stages. num_bytes: bytes by stage."""
        if self.writer is None:
            memory = {stage: torch.zeros(size, dtype=torch.uint8) for stage, size in num_bytes.items()}
            self.writer = CheckpointWriter(self._checkpoints.folder, self._checkpoints.keep, memory)

    def make_saver(
        self,
        run: AgreedRun,
        core: _core.Worker,
        source: MinibatchSource,
        keep_residuals: Callable[[], Residuals],
        kinds: Sequence[Shapes],
        check_links: Callable[[], None],
        prepared: Sequence[PreparedStage],
    ) -> StageSaver:
        """Makes the saver of a segment. run: the run with this segment's options. kinds: the shapes of
        minibatches for which the segment's memory is planned."""
        assert self.writer is not None
        if self._saving is not None:
            self._saving.check = check_links
        record = self._record
        return StageSaver(
            core,
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
        """Waits until the writer has written all copies, and closes it."""
        if self.writer is not None:
            self.writer.close()


def _meet(run: AgreedRun, check_links: Callable[[], None], stage: int, minibatch: int) -> None:
    """Waits until all replicas of the stage have called this function for this minibatch."""
    rendezvous = run.place.rendezvous
    replicas = range(run.plan.stages[stage].num_replicas)
    keys = [run.key(f"saved before {minibatch}/{stage}/{replica}") for replica in replicas]
    rendezvous.publish(keys[run.plan.replica_of(run.rank)], True)
    wait_while_linked(rendezvous, keys, check_links)


class _Saving:
    """Decides where a run is saved for a reason that does not follow from the data, such as the time. If
    stage 0 has one replica, rank 0 saves at its next boundary.

    If stage 0 has replicas, all must save at the same boundary. So rank 0 publishes a message, the word, at
    some boundaries B, which all replicas know in advance:

        rank 0    at B           says whether to save at B + lead, and names the next B
        all       at B + lead    read the word, and save or do not save

    A replica seldom waits for the word. It cannot reach B + lead without the gradients or weights that rank 0
    sends in the rounds before, so rank 0 has passed B by then."""

    def __init__(self, run: AgreedRun, checkpoints: Checkpoints) -> None:
        self._rendezvous = run.place.rendezvous
        self._is_due = SaveRequests(checkpoints).saves_now if run.rank == 0 else None
        self._lead = stop_lead(run.schedule(), sync_every=run.options.replication.sync_every)
        """Minibatches from a word to the boundary where it takes effect; 0 if stage 0 has one replica."""
        self._group_size = _core.minibatches_between_drains(run.schedule())
        self._says = self._hears = run.first_minibatch + self._group_size
        """The boundaries of the next word that rank 0 says, and of the next word that this rank hears."""
        self._said: deque[str] = deque()
        """The keys of rank 0's messages (words) that are in the rendezvous."""
        self._num_between = 0  # minibatches between the last two words
        self._spoke_s = time.monotonic()
        self.check: Callable[[], None] = lambda: None
        """Raises the failure of a link, if the segment has had one."""

    def saves_before(self, group: int) -> bool:
        if self._lead == 0:
            return self._is_due is not None and self._is_due()
        if self._is_due is not None and group >= self._says:
            said_at, self._says = self._says, self._says + self._num_to_next_word()
            self._say(said_at, [int(self._is_due()), self._says])
        if group < self._hears + self._lead:
            return False
        words = wait_while_linked(self._rendezvous, [_word_key(self._hears)], self.check)
        is_saved, self._hears = words[0]
        return bool(is_saved)

    def _say(self, boundary: int, word: list[int]) -> None:
        self._rendezvous.publish(_word_key(boundary), word)
        self._said.append(_word_key(boundary))
        # A replica may be up to `lead` minibatches behind, so the newest words are kept. All replicas have
        # read the older words.
        if len(self._said) > 2 * self._lead // self._group_size + 2:
            self._rendezvous.forget(self._said.popleft())

    def _num_to_next_word(self) -> int:
        """Returns the number of minibatches until the next word, in whole groups. At the pace since the last
        word they take about LOOK_S seconds."""
        now_s = time.monotonic()
        pace = self._num_between / max(now_s - self._spoke_s, 1e-9)
        num_wanted = min(pace * LOOK_S, 2 * self._num_between)
        self._spoke_s = now_s
        self._num_between = max(1, int(num_wanted // self._group_size)) * self._group_size
        return self._num_between


def _word_key(boundary: int) -> str:
    return f"word about saving/{boundary}"


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
