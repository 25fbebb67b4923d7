"""Plans the memory of one worker's stages in its core's pool, such as weight versions, optimizer state,
pushed gradients, and host memory for offloaded versions and activations.

The pool consists of terms. A term has a name and a number of equal slots. The constructor adds terms to the
pool, so it runs before the core is sealed. prepare() runs afterwards, and gives the slots to the stages. Runs
on the worker's compute thread.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from pipedream import _core
from pipedream.budget.copy_streams import make_copy_streams
from pipedream.budget.footprint import Footprint
from pipedream.budget.memory import (
    AVERAGES,
    GRADIENTS,
    MASTERS,
    OFFLOADED_ACTIVATIONS,
    OFFLOADED_VERSIONS,
    OPTIMIZER_STATE,
    PUSHES,
    SHARD,
    SHARD_ANSWERS,
    STASH,
    TRANSIENT,
    WEIGHT_VERSIONS,
    MemoryPlan,
    PushedFactors,
    PushedGradients,
    StageBytes,
    choose_savings,
    model_bytes,
    num_activation_homes,
    tied_term,
)
from pipedream.budget.offload import Offload, StageOffload, forced_offload
from pipedream.budget.optimizer_memory import (
    native_step_bytes,
    predict_state_bytes,
    predict_step_bytes,
    sparse_bytes,
)
from pipedream.budget.resident_versions import ResidentVersions, num_resident_versions
from pipedream.budget.torch_pool import SEGMENT_SLACK_BYTES, TORCH_TENSORS, TorchPool, wants_torch_pool
from pipedream.checkpoint.snapshot import StageSnapshot
from pipedream.checkpoint.writer import CopyMemory
from pipedream.links.channels import RunChannel, edge_name
from pipedream.links.replica_channels import ReplicaChannels
from pipedream.links.replica_group import ReplicaGroup
from pipedream.model.factored import factorable
from pipedream.model.stage_module import StageModule
from pipedream.planning.codec_choice import codec_of_pushes
from pipedream.stage.stage_runner import PreparedStage
from pipedream.update.asynchronous_server import AsynchronousServer
from pipedream.update.factors import FactorExchange, FactorLayer
from pipedream.update.gradients import StageGradients
from pipedream.update.param_server import ParameterServer
from pipedream.update.reduced import LocalSteps, ReducedGradients
from pipedream.update.shard_client import ShardClient
from pipedream.update.stage_optimizer import StageOptimizer
from pipedream.update.stage_state import StageStart
from pipedream.update.tied import TiedParameters, ties_by_owner
from pipedream.update.weights import StageWeights, split_tied, weight_layout
from pipedream.worker.agreed_run import AgreedRun
from pipedream.worker.worker_optimizers import WorkerOptimizers

__all__ = ["StagePool", "bytes_with_optimizer", "hold_slots", "stage_term", "version_term"]


class StagePool:
    """The memory of this worker's stages in the pool of its core."""

    def __init__(
        self,
        run: AgreedRun,
        core: _core.Worker,
        device: torch.device,
        footprints: Mapping[int, Footprint],
        channels: Sequence[RunChannel],
        optimizers: WorkerOptimizers,
        snapshots: Mapping[int, StageSnapshot],
        *,
        evaluation_bytes: int,
    ) -> None:
        """Decides which stages recompute and which offload. footprints: by stage of this worker, the memory
        that a rehearsal has measured. snapshots: by stage, the state from which the stage continues; empty if
        the run does not continue an earlier run."""
        self.run = run
        """The agreed run, with the stages that recompute to save memory."""
        self.predicted: dict[str, int] = {}
        """The bytes of each term of RunResult.memory."""
        self.copy_bytes: dict[int, int] = {}
        """By stage, bytes of the memory into which a checkpoint copies the stage."""
        self._core = core
        self._device = device
        self._worker_optimizers = optimizers
        self._optimizers = optimizers.by_stage
        self._offload: dict[int, Offload] = {}  # by stage, the parts that it offloads
        self._torch_pool_bytes = 0
        self._channels = channels
        self._snapshots = snapshots
        self._evaluation_bytes = evaluation_bytes
        if run.own_stages():
            self._plan(footprints, channels)

    def _plan(self, footprints: Mapping[int, Footprint], channels: Sequence[RunChannel]) -> None:
        options = self.run.options
        self._check_recompute(footprints)
        memory = choose_savings(
            self._memory_plan(footprints, channels), options.memory.recompute, options.memory.limit_bytes
        )
        chosen = replace(options.memory, recompute=tuple(memory.schedule.recompute))
        self.run = replace(self.run, options=replace(options, memory=chosen))
        self.predicted = memory.terms()
        self.copy_bytes = {stage: figures.copy for stage, figures in memory.stages.items()}
        self._add_terms(memory)
        if wants_torch_pool(self._device):
            self._pool_torch_terms()
            steps = [figures.step for figures in memory.stages.values()]
            self.predicted[TRANSIENT] = max(steps)  # updates do not use the torch pool
        if not all(footprints[stage.stage_index].is_measured for stage in self.run.own_stages()):
            for term in (STASH, TRANSIENT, GRADIENTS):
                self.predicted.pop(term, None)

    def _check_recompute(self, footprints: Mapping[int, Footprint]) -> None:
        """Raises ValueError for a stage whose recompute would differ from its first forward."""
        recompute = self.run.options.memory.recompute
        for stage, footprint in footprints.items():
            if recompute is not None and recompute[stage] and not footprint.is_repeatable:
                raise ValueError(
                    f"recompute names {self.run.plan.describe_worker(self.run.rank, stage)}, whose forward"
                    " gives something else when it is done again with the same input: it remembers"
                    " something in attributes or draws from random or numpy; keep that in buffers and draw"
                    " from torch, or leave the stage out of recompute"
                )

    def prepare(self, group: ReplicaGroup | None) -> list[PreparedStage]:
        """Returns the stages with their weights and optimizer state in the pool. group: the process group of
        the replicas of this worker's only stage; None if they use no all-reduce."""
        return [self._prepare(stage, group) for stage in self.run.own_stages()]

    def make_torch_pool(self) -> TorchPool | None:
        if self._torch_pool_bytes == 0:
            return None
        return TorchPool(from_dlpack(self._core.hold_slot(TORCH_TENSORS)))

    def _memory_plan(self, footprints: Mapping[int, Footprint], channels: Sequence[RunChannel]) -> MemoryPlan:
        """Returns this worker's memory plan before any stage recomputes or offloads."""
        stages = {stage.stage_index: self._bytes_of(stage) for stage in self.run.own_stages()}
        return MemoryPlan(
            self.run.options.plan,
            self.run.rank,
            self.run.schedule(),
            footprints,
            channels,
            stages,
            model_bytes(self.run.stages_in_memory(self._device.type)),
            self._device.type,
            dict.fromkeys(stages, forced_offload()),
            self._evaluation_bytes,
        )

    def _bytes_of(self, stage: StageModule) -> StageBytes:
        index, options = stage.stage_index, self.run.options
        own, _ = split_tied(stage, self.run.tied_parameters_of(index))
        weights = _core.slot_stride_bytes(weight_layout(own)[0])
        found = replace(
            bytes_with_optimizer(weights, stage, self._optimizers[index], self._device.type),
            tied={
                owner: _core.slot_stride_bytes(weight_layout(split_tied(stage, parameters)[1])[0])
                for owner, parameters in self._tied_parameters(index).items()
            },
        )
        if index in self._worker_optimizers.factored:
            found = replace(found, factors=self._pushed_factors(index))
        if options.has_shards_at(index):
            found = replace(found, pushes=self._pushed_gradients(index))
        if options.is_asynchronous_at(index):
            layout = self._worker_optimizers.layouts[index]
            content_bytes = sum(c.num_bytes for c in layout.chunks_of(self._replica))
            served_step = found.step + layout.whole_tensors * content_bytes
            found = replace(found, shard=_core.slot_stride_bytes(content_bytes), served_step=served_step)
        return found if options.checkpoints is None else replace(found, copy=self._copy_bytes(stage, found))

    def _copy_bytes(self, stage: StageModule, figures: StageBytes) -> int:
        schedule, index = self.run.schedule(), stage.stage_index
        # Without stashing, a checkpoint also has copies of the older versions that the first microbatches
        # after the boundary read.
        stashes = _core.stashes_versions(schedule, index)
        num_versions = _core.num_versions_kept(schedule, index) if stashes else schedule.in_flight[index]
        tied = [
            _core.num_tied_versions_kept(schedule, owner) * num_bytes
            for owner, num_bytes in figures.tied.items()
        ]
        num_tensors = (num_versions + 5) * len(stage.trainable_parameters()) + len(stage.stage_buffers())
        return (
            num_versions * figures.weights
            + sum(tied)
            + figures.num_states * _core.slot_stride_bytes(figures.state_slot)
            + figures.torch_state
            + _core.slot_stride_bytes(figures.averages)
            + sum(buffer.nbytes for _, buffer in stage.stage_buffers())
            + CopyMemory.bytes_beside(num_tensors)
        )

    def _pushed_gradients(self, stage: int) -> PushedGradients:
        layout, num_replicas = (
            self._worker_optimizers.layouts[stage],
            self.run.plan.stages[stage].num_replicas,
        )
        own_chunks = layout.chunks_of(self._replica)
        own_sizes = [sum(piece.num_bytes for piece in chunk.pieces) for chunk in own_chunks]
        mean_bytes = 0
        if layout.whole_tensors or self.run.options.measures_gradients:
            mean_bytes = sum(own_sizes)
        elif _core.rounds_of(self.run.schedule(), stage).minibatches_per_round > num_replicas:
            mean_bytes = max(own_sizes, default=0)  # the mean of a short last round may need its own memory
        return PushedGradients(
            self._push_slot_bytes(stage),
            sparse_bytes(self.run.stages[stage]),
            mean_bytes,
            self._num_rounds_kept(stage),
        )

    def _num_rounds_kept(self, stage: int) -> int:
        """Returns the number of rounds whose gradients a replica may have at once. A spare, a worker that
        only updates parameters, takes a chunk of gradients only when it can use the chunk. So with spares the
        gradients of one more round may wait to be sent. They do not wait if the stage keeps one version,
        because the next round's forwards need the spare's new version first."""
        schedule, has_spares = self.run.schedule(), self.run.plan.stages[stage].num_spare_shards > 0
        waits = has_spares and _core.num_versions_kept(schedule, stage) > 1
        return _core.num_gradients_kept(schedule, stage) + waits

    def _pushed_factors(self, stage: int) -> PushedFactors:
        layers = self._worker_optimizers.factored[stage]
        at_once = self.run.options.measures_gradients or self._worker_optimizers.layouts[stage].whole_tensors
        num_replicas = self.run.plan.stages[stage].num_replicas
        weights = [layer.weight_bytes for layer in layers]
        factors = [layer.factor_bytes for layer in layers]
        stacked_bytes = num_replicas * max(factors, default=0)
        product_bytes = sum(weights) if at_once else max(weights, default=0)
        return PushedFactors(sum(weights), sum(factors), product_bytes + stacked_bytes)

    def _pool_torch_terms(self) -> None:
        """Replaces the terms of torch's tensors by one term of the pool."""
        parts = [self.predicted.pop(term, 0) for term in (STASH, TRANSIENT, GRADIENTS)]
        self._torch_pool_bytes = sum(parts) + SEGMENT_SLACK_BYTES
        self._core.add_term(TORCH_TENSORS, self._torch_pool_bytes, 1)

    def _add_terms(self, memory: MemoryPlan) -> None:
        posted = {channel.posted_into for channel in memory.channels}
        for stage in memory.stages:
            offload = Offload(memory.offloads_versions(stage), memory.offloads_activations(stage))
            self._offload[stage] = offload
            for term in memory.pool_terms(stage):
                name = stage_term(term.name, stage)
                self._core.add_term(name, *term[1:], is_posted_into=name in posted)

    def _prepare(self, stage: StageModule, group: ReplicaGroup | None) -> PreparedStage:
        index, schedule = stage.stage_index, self.run.schedule()

        def slots(term: str, num_slots: int) -> list[Tensor]:
            return hold_slots(self._core, term, index, num_slots)

        num_versions = _core.num_versions_kept(schedule, index)
        offload = self._offload[index]
        copies = make_copy_streams(self._device)
        own_slots = slots(
            WEIGHT_VERSIONS, num_resident_versions(num_versions) if offload.versions else num_versions
        )
        resident: ResidentVersions | None = None
        if offload.versions:
            resident = ResidentVersions(own_slots, slots(OFFLOADED_VERSIONS, num_versions), copies)
        of_ties = {
            owner: (parameters, slots(tied_term(owner), _core.num_tied_versions_kept(schedule, owner)))
            for owner, parameters in self._tied_parameters(index).items()
        }
        start = StageStart.of(schedule, index, self._snapshots.get(index))
        weights = StageWeights(
            stage,
            own_slots,
            of_ties,
            resident,
            newest_slot=start.newest_slot,
            older=start.older,
            older_tied=start.older_tied,
        )
        optimizer = self._optimizers[index]
        optimizer.place_state(
            slots(OPTIMIZER_STATE, optimizer.num_placed_states), slots(MASTERS, optimizer.num_placed_masters)
        )
        if optimizer.averages is not None and optimizer.averages.slot_bytes:
            optimizer.averages.place(*slots(AVERAGES, 1))
        tied = TiedParameters(
            schedule,
            index,
            self.run.ties,
            weights.tied,
            replica=self._replica,
            pieces=self._worker_optimizers.tied_pieces(index),
            wait_until_sent=self._wait_for_users(index),
            averages=optimizer.averages,
        )
        stage_offload: StageOffload | None = None
        if offload.names():
            frozen = [parameter for _, parameter in stage.frozen_parameters()]
            num_homes = num_activation_homes(schedule, index) if offload.activations else 0
            homes = slots(OFFLOADED_ACTIVATIONS, num_homes)
            stage_offload = StageOffload(
                self._device,
                copies,
                homes,
                resident,
                [*own_slots, *itertools.chain(*(held for _, held in of_ties.values())), *frozen],
            )
        if self.run.plan.stages[index].num_replicas > 1 and group is None:
            gradients: StageGradients = self._make_server(index, weights, optimizer, tied, start.slot_of)
        elif group is not None:
            gradients = self._make_reduced(index, weights, optimizer, tied, group)
        else:
            gradients = StageGradients(weights, optimizer, tied)
        loss_scaling = self._worker_optimizers.loss_scaling.get(index)
        return PreparedStage(stage, weights, tied, optimizer, stage_offload, gradients, loss_scaling, start)

    def _tied_parameters(self, stage: int) -> dict[int, list[nn.Parameter]]:
        by_owner = ties_by_owner(stage, self.run.ties)
        return {owner: [tie.parameter for tie in ties] for owner, ties in by_owner.items()}

    def _wait_for_users(self, stage: int) -> Callable[[int, int], None]:
        """Makes the function wait_until_sent of TiedParameters."""
        schedule, replica = self.run.schedule(), self._replica
        names: dict[int, list[str]] = {}
        for edge in _core.edges_of(schedule):
            is_mine = edge.kind == "tied_version" and (edge.from_stage, edge.from_replica) == (stage, replica)
            if is_mine and schedule.placement.rank_of(edge.to_stage, edge.to_replica) != self.run.rank:
                names.setdefault(edge.to_stage, []).append(edge_name(edge, schedule.placement))

        def wait(user: int, num_left_max: int) -> None:
            for name in names.get(user, ()):
                self._core.wait_until_sent(name, num_left_max)

        return wait

    @property
    def _replica(self) -> int:
        return self.run.plan.replica_of(self.run.rank)

    def _make_server(
        self,
        stage: int,
        weights: StageWeights,
        optimizer: StageOptimizer,
        tied: TiedParameters,
        slot_of: Mapping[int, int],
    ) -> ShardClient:
        schedule, replica = self.run.schedule(), self._replica
        factors = self._worker_optimizers.factored[stage]
        make: Callable[..., ShardClient] = ParameterServer
        if self.run.options.is_asynchronous_at(stage):
            make = self._asynchronous_server(stage, weights)
        return make(
            weights,
            optimizer,
            tied,
            core=self._core,
            layout=self._worker_optimizers.layouts[stage],
            rounds=_core.rounds_of(schedule, stage),
            replica=replica,
            channels=ReplicaChannels.of_owner(
                schedule, stage, replica, has_factors=bool(factors), posted_from=self._posted_from(stage)
            ),
            push_codec=codec_of_pushes(self.run.options.links.codec),
            push_slots=self._push_slots(stage),
            slot_of=slot_of,
            factors=None
            if not factors
            else FactorExchange(
                factors,
                self._layers_of(stage, factors),
                replica=replica,
                num_replicas=self.run.plan.stages[stage].num_replicas,
                device=self._device,
            ),
        )

    def _push_slots(self, stage: int) -> list[Tensor]:
        """Returns zeroed slots for pushed gradients: one slot for each round whose gradients this replica may
        have at once."""
        num_rounds = self._num_rounds_kept(stage)
        if self._push_slot_bytes(stage) == 0:  # no other owner has a shard to push to
            return [torch.empty(0)] * num_rounds
        return [slot.zero_() for slot in hold_slots(self._core, PUSHES, stage, num_rounds)]

    def _push_slot_bytes(self, stage: int) -> int:
        codec = codec_of_pushes(self.run.options.links.codec)
        return self._worker_optimizers.layouts[stage].push_slot_bytes(self._replica, codec)

    def _posted_from(self, stage: int) -> frozenset[int]:
        """Returns the owners of shards whose versions are received directly into the weight slots."""
        edges = [channel.edge for channel in self._channels if channel.posted_into == version_term(stage)]
        return frozenset(edge.from_replica for edge in edges if edge is not None)

    def _layers_of(self, stage: int, weights: Sequence[FactorLayer]) -> dict[str, list[nn.Linear]]:
        found = factorable(self.run.stages[stage], self.run.stages[stage].trainable_parameters())
        return {weight.name: found[weight.name] for weight in weights}

    def _asynchronous_server(self, stage: int, weights: StageWeights) -> Callable[..., ShardClient]:
        others = [o for o in range(self.run.plan.stages[stage].num_replicas) if o != self._replica]
        has_chunks = bool(self._worker_optimizers.layouts[stage].chunks_of(self._replica))

        def memory(term: str) -> Tensor:
            return hold_slots(self._core, term, stage, 1)[0] if has_chunks else torch.empty(0)

        return functools.partial(
            AsynchronousServer,
            master=memory(SHARD),
            answers={other: memory(SHARD_ANSWERS) for other in others},
            names=weights.own.names,
            where=self.run.plan.describe_worker(self.run.rank),
        )

    def _make_reduced(
        self,
        stage: int,
        weights: StageWeights,
        optimizer: StageOptimizer,
        tied: TiedParameters,
        group: ReplicaGroup,
    ) -> StageGradients:
        sync_every = self.run.options.replication.sync_every
        make = ReducedGradients if sync_every == 1 else functools.partial(LocalSteps, sync_every=sync_every)
        return make(
            weights,
            optimizer,
            tied,
            group=group,
            rounds=_core.rounds_of(self.run.schedule(), stage),
            replica=self._replica,
            num_minibatches=self._core.num_minibatches,
        )


def bytes_with_optimizer(
    weights: int, stage: StageModule, optimizer: StageOptimizer, device_type: str
) -> StageBytes:
    """Returns the bytes of the stage's weights and optimizer. weights: bytes of one version."""
    if optimizer.is_native:
        torch_state, step = 0, native_step_bytes(stage, optimizer.num_parameters)
    else:
        torch_state = predict_state_bytes(optimizer.optimizer)
        step = predict_step_bytes(optimizer.optimizer, device_type)
    return StageBytes(
        weights,
        state_slot=optimizer.state_slot_bytes,
        num_states=optimizer.num_placed_states,
        masters=optimizer.num_placed_masters * optimizer.masters_slot_bytes,
        averages=0 if optimizer.averages is None else optimizer.averages.slot_bytes,
        torch_state=torch_state,
        step=step,
    )


def hold_slots(core: _core.Worker, name: str, stage_index: int, num_slots: int) -> list[Tensor]:
    """Takes slots of the stage's term from the pool. Their order does not matter, because the slots of a term
    are equal."""
    return [from_dlpack(core.hold_slot(stage_term(name, stage_index))) for _ in range(num_slots)]


def version_term(stage_index: int) -> str:
    return stage_term(WEIGHT_VERSIONS, stage_index)


def stage_term(name: str, stage_index: int) -> str:
    return f"{name} of stage {stage_index}"
