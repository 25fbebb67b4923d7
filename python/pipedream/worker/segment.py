"""A segment is the part of a run that is trained with one memory plan. Most runs have one segment.

    open     makes channels and pool as planned, and links to the other workers
    train    trains until the data are over, or until a minibatch is larger than planned
    follow   rank 0 tells all ranks whether another segment follows, before they finish
    close    leaves the process group of the replicas

An example, in which F0, B0 and U0 are the forward, the backward and the update of minibatch 0:

    F0 F1 B0 U0 F2 B1 U1 B2 U2 | minibatch 3 is larger: rehearse it, plan memory | F3 F4 B3 U3 ...

The pipeline drains between two segments. The next segment begins with only the newest version, as a new run
does. These things stay: the modules with their weights and buffers, the optimizers with their state, the loss
scaling of float16, the residuals of topk, the data (minibatch_source.py) and the reports. Runs on the
worker's compute thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from pipedream import _core
from pipedream.checkpoint.snapshot import StageSnapshot
from pipedream.common.rank_tree import children_of, parent_of
from pipedream.data.minibatch_source import MinibatchSource, exceeds
from pipedream.data.stream import ForwardedData, MinibatchStream, ReceivedStream
from pipedream.links.channels import (
    BETWEEN_REPLICAS,
    INPUTS,
    TARGETS,
    RunChannel,
    channels_of_run,
    forwarded_name,
    tree_name,
)
from pipedream.links.rendezvous import Rendezvous
from pipedream.links.replica_group import ReplicaGroup
from pipedream.links.residuals import Residuals, by_name, keep_residuals, restore_residuals
from pipedream.links.state_transfer import receive_document, send_document
from pipedream.model.draws import KeyedDraws, keyed_draws
from pipedream.model.references import gradients_noticed
from pipedream.model.seeding import backward_seed, draws_seed, evaluation_seed
from pipedream.planning.shapes import Shapes, describe_shapes
from pipedream.stage.decisions import Steered
from pipedream.stage.evaluation import EvaluationPlan
from pipedream.stage.saving import StageSaver
from pipedream.stage.spare_loop import SpareLoop
from pipedream.stage.stage_loop import WorkerLoop
from pipedream.stage.stage_runner import PreparedStage, data_mismatch
from pipedream.worker.agreed_run import AgreedRun, wait_for
from pipedream.worker.checkpointing import Checkpointing
from pipedream.worker.set_up import Rehearsed
from pipedream.worker.spare_pool import SparePool
from pipedream.worker.stage_pool import StagePool, version_term
from pipedream.worker.task_files import read_larger
from pipedream.worker.worker_links import WorkerLinks, no_word
from pipedream.worker.worker_optimizers import WorkerOptimizers

__all__ = ["Following", "Segment"]


@dataclass(frozen=True)
class Following:
    """The reason why another segment follows this one."""

    first_minibatch: int
    """The first minibatch of that segment."""
    minibatch: int
    """The minibatch that is larger than planned."""
    shapes: str
    """The shapes of that minibatch, as text for messages."""


class Segment:
    """A segment at one worker. The constructor opens it."""

    def __init__(
        self,
        run: AgreedRun,
        links: WorkerLinks,
        core: _core.Worker,
        device: torch.device,
        rehearsed: Rehearsed,
        source: MinibatchSource,
        optimizers: WorkerOptimizers,
        residuals: Residuals,
        steered: Steered,
        snapshots: dict[int, StageSnapshot],
    ) -> None:
        """core: the core that WorkerLinks has made.
        residuals: the residuals of the previous segment (keep_residuals()).
        steered: the same object in all segments.
        snapshots: by stage, the state of the run that this run continues; empty if there is none. train()
            drops them.

        Raises ValueError, with a line for each memory term, if the segment does not fit into memory.
        """
        self.core = core
        self._device = device
        self._rehearsed = rehearsed
        self._source = source
        self._forwarded = source.forwarded
        self._steered = steered
        if steered.asking is not None:
            steered.asking.check = _check_of_links(run, core)
        self._loop: WorkerLoop | None = None
        self._spare_loop: SpareLoop | None = None
        self._snapshots = snapshots
        channels = _channels_of(run, device, rehearsed, self._forwarded, optimizers)
        self.channels = links.placed_on_devices(
            run.linked, device, channels, lambda channel: channel.stages is not None, run.key
        )
        for channel in self.channels:
            channel.add_to(core, run.rank, run.plan.describe_worker)
        self._pool = StagePool(
            run,
            core,
            device,
            rehearsed.footprints,
            self.channels,
            optimizers,
            snapshots,
            evaluation_bytes=rehearsed.evaluation.peak_bytes,
        )
        served = run.served_stage
        self._spare = None if served is None else SparePool(run, core, served, self.channels, optimizers)
        core.seal()
        restore_residuals(core, residuals)
        links.connect(run.linked, self.channels, run.key("endpoints"))
        self._group = _replica_group(run, core, device, run.place.rendezvous)
        self.run = self._pool.run
        """The agreed run, with the stages that recompute to save memory."""

    def close(self) -> None:
        """Leaves the process group of the stage's replicas, if there is one. The links stay open, because
        they belong to the worker. The memory is freed when nothing refers to the segment's core any more."""
        if self._group is not None:
            self._group.close()

    @property
    def losses(self) -> list[float]:
        """The losses that this worker knows so far."""
        return [] if self._loop is None else self._loop.losses

    @property
    def minibatch(self) -> int | None:
        """The minibatch that this worker is working on; None before the segment's first minibatch."""
        return None if self._loop is None else self._loop.minibatch

    @property
    def has_updated(self) -> bool:
        return self._loop is not None and self._loop.has_updated

    def train(self, checkpointing: Checkpointing | None) -> dict[str, Any]:
        """Trains the segment, and returns this worker's report. The report of a rank that the plan does not
        use is empty."""
        run, source = self.run, self._source
        group_size = _core.minibatches_between_drains(run.schedule())
        if self._forwarded is not None:
            source.go_on(_received_stream(run, self.core, self._forwarded), group_size)
        if self._spare is not None:
            self._spare_loop = self._spare.prepare()
            return self._spare_loop.serve()
        if not run.own_stages():
            return {}
        boundary = self._rehearsed.input_boundary
        if boundary is not None and not source.stream.looks_ahead:
            source.look_ahead(functools.partial(exceeds, boundary), group_size)
        elif boundary is None and group_size > 1:
            # Reads whole groups, because the events that are due depend on whether the data end in the group.
            source.look_ahead(lambda _: False, group_size)
        self._loop = loop = self._make_loop(checkpointing)
        self._snapshots.clear()  # frees their memory, which nothing needs any more
        with gradients_noticed({**run.parameters(), **run.frozen_parameters()}):
            report = loop.train(lambda: self.following is not None)
        _note_codecs(report, self.channels)
        return report

    @functools.cached_property
    def following(self) -> Following | None:
        """The reason for another segment; None if none follows. When rank 0's own work is done, it decides
        this and tells every rank. Raises DataMismatch if this worker has read other data than rank 0."""
        run, core, rank = self.run, self.core, self.run.rank
        larger = None if self.was_stopped else self._source.larger
        mine = None
        if larger is not None:
            mine = Following(larger.first, larger.minibatch, describe_shapes(larger.shapes))
        word = None if mine is None else asdict(mine)
        if rank > 0:
            word = receive_document(core, tree_name(parent_of(rank), rank))
        for child in children_of(rank, run.place.world_size):
            send_document(core, tree_name(rank, child), word)
        following = None if word is None else Following(**word)
        if (run.reads_inputs or run.reads_targets) and following != mine:
            raise data_mismatch(self._source.num_minibatches, run.plan.describe_worker(rank))
        return following

    @property
    def was_stopped(self) -> bool:
        """Whether the run was stopped before the end of the data. False at a worker that trains no stage."""
        return isinstance(self._loop, WorkerLoop) and self._loop.was_stopped

    def wait_for_all(self) -> None:
        """Waits until no rank needs the links of this segment any more. From then on the ranks watch each
        other through the rendezvous again."""
        run, rendezvous = self.run, self.run.place.rendezvous
        key = run.key("drained")
        rendezvous.publish(f"{key}/{run.rank}", True)
        keys = [f"{key}/{rank}" for rank in range(run.place.world_size)]
        wait_for(rendezvous, keys, no_word, meanwhile=_check_of_links(run, self.core))

    @property
    def kinds(self) -> tuple[Shapes, ...]:
        """The shapes of minibatches for which this segment was planned; empty if this worker reads no
        data."""
        return self._rehearsed.kinds

    def take_snapshots(self) -> list[StageSnapshot]:
        """Copies the state of this worker. Call it when the run is over. Raises ValueError for state that
        cannot be stored."""
        loop = self._loop or self._spare_loop
        if loop is None:
            return []
        first, *others = loop.take_snapshots()
        return [replace(first, residuals=by_name(self.keep_residuals())), *others]

    def keep_residuals(self) -> Residuals:
        """Returns the residuals, the parts of tensors that the codec topk has not sent yet. The next segment
        or run starts with them."""
        return keep_residuals(self.core, self.run.rank, self.channels)

    def _make_loop(self, checkpointing: Checkpointing | None) -> WorkerLoop:
        make_saver: Callable[[Sequence[PreparedStage]], StageSaver] | None = None
        if checkpointing is not None:
            checkpointing.prepare(self._pool.copy_bytes)
            make_saver = functools.partial(
                checkpointing.make_saver,
                *(self.run, self.core, self._source, self.keep_residuals, self.kinds),
                _check_of_links(self.run, self.core),
            )
        run, pool, rehearsed = self.run, self._pool, self._rehearsed
        own = [channel for channel in self.channels if run.rank in (channel.sender, channel.receiver)]
        return WorkerLoop(
            self.core,
            run.options,
            run.place,
            schedule=run.schedule(),
            prepared=pool.prepare(self._group),
            source=self._source,
            device=self._device,
            draws=_draws_of(run, rehearsed, self._device),
            backward_seeds=_backward_seeds(run, rehearsed),
            input_boundary=rehearsed.input_boundary if len(run.stages) > 1 else None,
            boundaries=rehearsed.boundaries,
            in_microbatches=rehearsed.in_microbatches,
            edges=[
                (channel.edge, channel.name)
                for channel in own
                if channel.edge is not None and channel.edge.kind not in BETWEEN_REPLICAS
            ],
            predicted=pool.predicted,
            torch_pool=pool.make_torch_pool(),
            steered=self._steered,
            evaluation=EvaluationPlan(
                run.own_evaluated_stages(), rehearsed.evaluation.boundaries, evaluation_seed(run.base_seed)
            ),
            make_saver=make_saver,
            saves_before=None if checkpointing is None else checkpointing.saves_before,
        )


def _draws_of(run: AgreedRun, rehearsed: Rehearsed, device: torch.device) -> KeyedDraws | None:
    """Returns an object that makes the random draws of this worker's stages depend on the microbatch. Returns
    None if the plan has one worker, which draws as a plain training loop does, or if this worker has no
    stage."""
    stages = run.own_stages()
    if run.plan.workers_used == 1 or not stages:
        return None
    seen = [rehearsed.footprints[stage.stage_index].draws for stage in stages]
    return keyed_draws(draws_seed(run.base_seed), stages, seen, device)


def _backward_seeds(run: AgreedRun, rehearsed: Rehearsed) -> dict[int, int]:
    footprints = rehearsed.footprints if run.plan.workers_used > 1 else {}
    return {
        stage: backward_seed(run.base_seed, stage)
        for stage, footprint in footprints.items()
        if footprint.draws.in_backward
    }


def _channels_of(
    run: AgreedRun,
    device: torch.device,
    rehearsed: Rehearsed,
    forwarded: ForwardedData | None,
    optimizers: WorkerOptimizers,
) -> list[RunChannel]:
    options = run.options
    channels = channels_of_run(
        run.plan,
        run.schedule(),
        run.place.world_size,
        rehearsed.boundaries,
        optimizers.tie_specs(),
        forwarded,
        codec=options.links.codec,
        shards=optimizers.shards(),
        evaluated=rehearsed.evaluation.boundaries,
    )
    if device.type != "cuda" and not options.is_asynchronous:
        channels = _posted_into_versions(run, channels, optimizers)
    return channels


def _posted_into_versions(
    run: AgreedRun, channels: Sequence[RunChannel], optimizers: WorkerOptimizers
) -> list[RunChannel]:
    """Changes the channels on which this worker pulls versions. Versions are received directly into the
    weight slots, so these channels need no slots of their own. A stage that owns tied parameters keeps its
    channels unchanged, because its versions lie in two terms of the pool. Returns all channels."""

    def posted(channel: RunChannel) -> RunChannel:
        edge = channel.edge
        if edge is None or edge.kind != "pull" or channel.receiver != run.rank:
            return channel
        if any(chunk.is_tied for chunk in optimizers.layouts[edge.to_stage].chunks):
            return channel
        return replace(channel, posted_into=version_term(edge.to_stage))

    return [posted(channel) for channel in channels]


def _replica_group(
    run: AgreedRun, core: _core.Worker, device: torch.device, rendezvous: Rendezvous
) -> ReplicaGroup | None:
    """Makes the process group of this worker's stage. Returns None if the stage has one replica, or if
    replicas use no all-reduce."""
    stages = run.plan.stages_of(run.rank) if run.options.reduces_together else []
    num_replicas = run.plan.stages[stages[0]].num_replicas if stages else 1
    if num_replicas == 1:
        return None
    return ReplicaGroup(
        rendezvous.store_for(run.key(f"replicas of stage {stages[0]}")),
        run.plan.replica_of(run.rank),
        num_replicas,
        device,
        bind_host=run.options.links.bind_host,
        check_links=_check_of_links(run, core),
    )


def _check_of_links(run: AgreedRun, core: _core.Worker) -> Callable[[], None]:
    """Makes a function that raises the failure of a link if there is one. The function does not wait."""
    neighbour = parent_of(run.rank) if run.rank > 0 else 1  # rank 1 is a child of rank 0 in the tree

    def check() -> None:
        if run.place.world_size > 1:
            core.wait_until_sent(tree_name(run.rank, neighbour), 1 << 20)

    return check


def _received_stream(run: AgreedRun, core: _core.Worker, data: ForwardedData) -> MinibatchStream:
    def receiver(channel: str) -> Callable[[], tuple[list[Tensor], int] | None]:
        def receive() -> tuple[list[Tensor], int] | None:
            # Waiting for data counts as the user's time, even if the caller reads the data and sends them.
            item = core.receive_item(channel, counts_as_wait=False)
            assert item is not None  # there is no time-out
            if item.is_end:
                return None
            tensors = [from_dlpack(capsule) for capsule in item.take_tensors()]
            return tensors, item.fields.data_fingerprint

        return receive

    replica = run.plan.replica_of(run.rank) if run.own_stages() else 0
    inputs, targets = (forwarded_name(channel, replica) for channel in (INPUTS, TARGETS))
    return ReceivedStream(
        data,
        receiver(inputs) if run.reads_inputs else None,
        receiver(targets) if run.reads_targets else None,
        functools.partial(read_larger, run.place.folder, run.segment_index + 1),
    )


def _note_codecs(report: dict[str, Any], channels: Iterable[RunChannel]) -> None:
    """Notes in each channel's figures the codec that the channel has really used."""
    for channel in channels:
        if channel.name in report["channels"]:
            report["channels"][channel.name]["codec"] = channel.codec_used
