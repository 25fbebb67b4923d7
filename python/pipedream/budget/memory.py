"""Predicts a worker's memory before the first minibatch, as a sum of named terms (docs/inside-memory.md).

The pool is the memory that the core allocates once for a worker; its terms are exact. Torch allocates all
other memory; a rehearsal predicts most of those terms. If a worker would exceed a given limit,
choose_savings() turns recompute and offloading on. Pure; any thread.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from pipedream import _core
from pipedream.budget.footprint import Footprint, storage_bytes
from pipedream.budget.offload import Offload
from pipedream.budget.resident_versions import num_resident_versions
from pipedream.common.table import format_table
from pipedream.common.units import format_bytes
from pipedream.links.channels import RunChannel, num_of_edge_in_flight
from pipedream.model.stage_module import StageModule
from pipedream.planning.plan import Plan
from pipedream.planning.plan_schedule import minibatches_per_body

__all__ = [
    "AVERAGES",
    "CHECKPOINT_COPY",
    "EVALUATION",
    "GRADIENTS",
    "MASTERS",
    "MODEL",
    "OFFLOADED_ACTIVATIONS",
    "OFFLOADED_VERSIONS",
    "OPTIMIZER_STATE",
    "PUSHES",
    "SHARD",
    "SHARD_ANSWERS",
    "SHARD_STEP",
    "STASH",
    "TIED_VERSIONS",
    "TORCH_OPTIMIZER_STATE",
    "TRANSIENT",
    "WEIGHT_VERSIONS",
    "MemoryPlan",
    "PoolTerm",
    "PushedFactors",
    "PushedGradients",
    "StageBytes",
    "channel_terms",
    "choose_savings",
    "describe_memory",
    "list_terms",
    "model_bytes",
    "num_activation_homes",
    "num_in_flight_upstream",
    "optimizer_terms",
    "tied_term",
]

# The names of the pool's terms. The terms of a channel have names that contain the channel's name.
WEIGHT_VERSIONS = "weight versions"
TIED_VERSIONS = "tied weight versions"
OPTIMIZER_STATE = "optimizer state"
MASTERS = "float32 masters"  # float32 copies of bfloat16 parameters, which the optimizer updates
AVERAGES = "averages of weights"  # the averages of callbacks.EMA
PUSHES = "pushed chunks"
# With asynchronous shards a replica has the newest version of its own shard, and one copy of it for each
# other replica.
SHARD = "own shard"
SHARD_ANSWERS = "own shard for the others"
# These terms of the pool are always in host memory.
OFFLOADED_VERSIONS = "offloaded weight versions"
OFFLOADED_ACTIVATIONS = "offloaded activations"
# The names of the terms that torch allocates.
MODEL = "model as given"
STASH = "stashed activations"
GRADIENTS = "parameter gradients"
CHECKPOINT_COPY = "copy for a checkpoint"
TRANSIENT = "largest transient"
TORCH_OPTIMIZER_STATE = "optimizer state of torch"
SHARD_STEP = "step for another replica"
EVALUATION = "evaluation"

_NUM_RELEASED_LATE = 1  # items that the receiver has used but whose memory the sender has not freed yet
_NO_LIMIT = 1 << 60
_PERIOD_MAX = 1 << 12  # the most microbatches that _num_within_rounds() looks at
_GENERATOR_BYTES = 8192  # the states of torch's random generators, which a recompute needs

Terms = dict[str, int]


@dataclass(frozen=True)
class PushedFactors:
    """Sizes of a stage's gradients at one replica if some are pushed as factors. A factor is one of two
    matrices whose product is the gradient of a weight. A round is the minibatches of one update."""

    weight_bytes: int = 0
    """Bytes of the weights that are pushed as factors. No backward makes their gradients."""
    factor_bytes: int = 0
    """The most bytes of factors in one round."""
    step_bytes: int = 0
    """Bytes of the gradients that an update computes from factors and holds at once, and of the stacked
    factors of one of them."""


@dataclass(frozen=True)
class PushedGradients:
    """Sizes of the memory that a replica needs, in addition to its gradients, to push them to its stage's
    shards. A round is the minibatches of one update.
    """

    slot_bytes: int = 0
    """Bytes of a push slot, which serves one round. It has copies of the small gradients that are sent
    together in a chunk, and flags that say which gradients exist."""
    dense_bytes: int = 0
    """Bytes of the dense copies of sparse gradients in one round."""
    mean_bytes: int = 0
    """Bytes of the gradients' means over the replicas that an update holds at once."""
    num_rounds: int = 1
    """Number of rounds whose gradients may be in memory at once: the round whose backwards run, and earlier
    rounds whose gradients have not been sent."""


@dataclass(frozen=True)
class StageBytes:
    """The figures of one stage from which its memory terms are computed. Sizes are in bytes."""

    weights: int
    """One version of the stage's own parameters."""
    tied: Mapping[int, int] = field(default_factory=dict)
    """One version of the parameters that the stage shares with other stages, by the stage that owns them."""
    state_slot: int = 0
    """One slot of optimizer state in the pool. A slot has one state tensor per parameter, such as the
    momentum."""
    num_states: int = 0
    """The number of slots of optimizer state, such as 2 for Adam."""
    masters: int = 0
    """The optimizer's masters that lie in the pool."""
    averages: int = 0
    torch_state: int = 0
    """The optimizer's state that torch allocates, outside the pool."""
    step: int = 0
    """The memory that the optimizer's step allocates and frees."""
    factors: PushedFactors = PushedFactors()
    pushes: PushedGradients | None = None
    """Sizes for pushing gradients; None if the stage has no shards."""
    shard: int = 0
    """One version of the replica's own shard, if shards are asynchronous."""
    served_step: int = 0
    """The memory that a step with another replica's gradient allocates and frees, if shards are asynchronous.
    It counts beside `step`, because both steps may run at the same time."""
    copy: int = 0
    """The host memory into which the stage is copied for a checkpoint."""


class PoolTerm(NamedTuple):
    """A term of the pool for one stage: slots of equal size."""

    name: str
    slot_bytes: int
    num_slots: int
    staging: bool = False
    """Whether the slots are in host memory even if the worker computes on a GPU."""

    @property
    def num_bytes(self) -> int:
        return self.num_slots * _core.slot_stride_bytes(self.slot_bytes)


def tied_term(owner: int) -> str:
    """Returns the name of the term for weight versions that another stage owns and this stage reads."""
    return f"{TIED_VERSIONS} from stage {owner}"


def optimizer_terms(stage: StageBytes) -> list[PoolTerm]:
    terms = [
        PoolTerm(OPTIMIZER_STATE, stage.state_slot, stage.num_states),
        PoolTerm(MASTERS, stage.masters, 1 if stage.masters else 0),
    ]
    return [term for term in terms if term.num_slots]


@dataclass(frozen=True)
class MemoryPlan:
    """The figures from which one worker's memory terms are computed."""

    plan: Plan
    rank: int
    schedule: _core.ScheduleOptions
    footprints: Mapping[int, Footprint]
    channels: Sequence[RunChannel]
    stages: Mapping[int, StageBytes]
    """The figures of the worker's stages."""
    model_bytes: int
    device_type: str = "cpu"
    offload: Mapping[int, Offload] = field(default_factory=dict)
    evaluation_bytes: int = 0
    """Bytes of an evaluation's forward, without its channels."""

    def pool_terms(self, stage: int) -> list[PoolTerm]:
        """Returns the stage's terms of the pool, without those of channels."""
        figures, pushes = self.stages[stage], self.pushes_of(stage)
        versions = _core.num_versions_kept(self.schedule, stage)
        terms: list[PoolTerm] = []
        if self.offloads_versions(stage):
            terms.append(PoolTerm(OFFLOADED_VERSIONS, figures.weights, versions, staging=True))
            versions = num_resident_versions(versions)
        terms.append(PoolTerm(WEIGHT_VERSIONS, figures.weights, versions))
        if self.offloads_activations(stage):
            homes = num_activation_homes(self.schedule, stage)
            offloadable_bytes = self.footprints[stage].offloadable_bytes
            terms.append(PoolTerm(OFFLOADED_ACTIVATIONS, offloadable_bytes, homes, staging=True))
        for owner, num_bytes in figures.tied.items():
            num_versions = _core.num_tied_versions_kept(self.schedule, owner)
            terms.append(PoolTerm(tied_term(owner), num_bytes, num_versions))
        if figures.shard:
            num_others = self.plan.stages[stage].num_replicas - 1
            terms.append(PoolTerm(SHARD, figures.shard, 1))
            terms.append(PoolTerm(SHARD_ANSWERS, figures.shard, num_others))
        if pushes.slot_bytes:
            terms.append(PoolTerm(PUSHES, pushes.slot_bytes, pushes.num_rounds))
        terms += optimizer_terms(figures)
        if figures.averages:
            terms.append(PoolTerm(AVERAGES, figures.averages, 1))
        return terms

    def terms(self) -> Terms:
        """Returns the predicted bytes of every term, by the term's name."""
        terms: Terms = {}
        for channel in self.channels:
            terms |= channel_terms(channel, self.rank, self.device_type)
        for stage in self.plan.stages_of(self.rank):
            figures = self.stages[stage]
            for name, num_bytes in (
                *((term.name, term.num_bytes) for term in self.pool_terms(stage)),
                (SHARD_STEP, figures.served_step),
                (TORCH_OPTIMIZER_STATE, figures.torch_state),
                (CHECKPOINT_COPY, figures.copy),
            ):
                kind = TIED_VERSIONS if name.startswith(TIED_VERSIONS) else name
                terms[kind] = terms.get(kind, 0) + num_bytes
        for name, num_bytes in self._torch_terms().items():
            terms[name] = num_bytes
        terms[MODEL] = self.model_bytes
        terms[EVALUATION] = self.evaluation_bytes
        return {name: num_bytes for name, num_bytes in terms.items() if num_bytes > 0}

    def counted_bytes(self) -> int:
        """Returns the bytes that count towards a limit. They are the bytes in the GPU's memory if the worker
        computes on a GPU, otherwise all bytes.
        """
        return sum(self.counted_terms().values())

    def counted_terms(self) -> Terms:
        return {name: num_bytes for name, num_bytes in self.terms().items() if not self._lies_apart(name)}

    def pushes_of(self, stage: int) -> PushedGradients:
        return self.stages[stage].pushes or PushedGradients()

    def offloads_versions(self, stage: int) -> bool:
        """Whether the stage's weight versions are offloaded. They are if offloading is on and saves
        memory."""
        versions = _core.num_versions_kept(self.schedule, stage)
        # Replicas write shards into each other's weight slots. So the slots of a replicated stage must stay
        # in place.
        asked = self.offload.get(stage, Offload()).versions and self.plan.stages[stage].num_replicas == 1
        return asked and num_resident_versions(versions) < versions and self.stages[stage].weights > 0

    def offloads_activations(self, stage: int) -> bool:
        """Whether the stage's activations are offloaded. They are if offloading is on and there are
        activations to move. A stage that recomputes has none."""
        asked = self.offload.get(stage, Offload()).activations
        homes = num_activation_homes(self.schedule, stage)
        return asked and not self._recomputes(stage) and homes * self.footprints[stage].offloadable_bytes > 0

    def with_offload(self, stage: int, offload: Offload) -> MemoryPlan:
        return replace(self, offload={**self.offload, stage: offload})

    def with_recompute(self, recompute: Sequence[bool]) -> MemoryPlan:
        return replace(self, schedule=self.schedule.with_recompute(list(recompute)))

    def _torch_terms(self) -> Terms:
        """Returns the terms for the tensors that torch allocates in forwards, backwards and updates."""
        stash = transient = gradients = 0
        for stage in self.plan.stages_of(self.rank):
            footprint, figures = self.footprints[stage], self.stages[stage]
            in_flight = _core.num_microbatches_in_flight(self.schedule, stage)
            kept, extra = footprint.stash_bytes, 0
            if self._recomputes(stage):
                kept = _GENERATOR_BYTES
                extra = footprint.input_bytes + footprint.stash_bytes
            elif self.offloads_activations(stage):
                # Two microbatches have activations on the device: the microbatch whose backward is next, and
                # one whose activations are being copied to or from the host.
                kept = max(footprint.stash_bytes - footprint.offloadable_bytes, 0)
                stash += 2 * footprint.offloadable_bytes
            saves = self._recomputes(stage) or self.offloads_activations(stage)
            if saves and stage + 1 < self.plan.num_stages:
                # Outputs may wait to be sent. Without recompute and offloading they are part of the stash.
                stash += (in_flight + _NUM_RELEASED_LATE) * footprint.output_bytes
            # A microbatch of the data is a view of its minibatch, so the whole minibatch stays in memory.
            m, replicas = self.schedule.num_microbatches, self.plan.stages[stage].num_replicas
            num_of_data = min(in_flight, 1 - (-(in_flight - 1) * replicas // m)) * m
            if stage == 0:
                stash += in_flight * kept + num_of_data * footprint.input_bytes
            else:
                stash += self._kept_beside_gradients(stage, kept) + num_of_data * footprint.target_bytes
            # Gradients of tied parameters wait to be sent to the owner: one set per minibatch in flight, and
            # one more.
            stash += sum(figures.tied.values()) * (self.schedule.in_flight[0] + 1)
            factors, pushes = figures.factors, self.pushes_of(stage)
            step_bytes = figures.step + factors.step_bytes + pushes.mean_bytes
            transient = max(transient, footprint.transient_bytes + extra, step_bytes)
            fewer_bytes = factors.weight_bytes - factors.factor_bytes
            of_round = footprint.gradient_bytes - fewer_bytes + pushes.dense_bytes
            num_rounds = pushes.num_rounds
            if factors.weight_bytes > 0 or (figures.pushes is None and self._is_replicated(stage)):
                num_rounds += 1  # the gradients of the round before may still wait to be sent or all-reduced
            gradients += num_rounds * of_round
        return {STASH: stash, TRANSIENT: transient, GRADIENTS: gradients}

    def _kept_beside_gradients(self, stage: int, kept: int) -> int:
        """Returns the most bytes that a stage keeps for its microbatches in flight. A microbatch has a stash
        before its backward. After it, its input's gradient waits until the stage upstream has a free slot.

        stage: not the first. kept: bytes of one microbatch's stash.
        """
        footprint = self.footprints[stage]
        gradient_bytes = footprint.input_bytes - footprint.target_bytes
        # A microbatch with a stash or a waiting gradient is still in flight upstream. So stashes and
        # gradients are at most `upstream` together. The sum of their bytes is largest with no stash or with
        # the most stashes, because it is linear in the number of stashes.
        upstream = num_in_flight_upstream(self.schedule, stage)
        here_max = _core.num_microbatches_in_flight(self.schedule, stage)
        return _NUM_RELEASED_LATE * gradient_bytes + max(
            here * kept + (upstream - here) * gradient_bytes for here in (0, min(here_max, upstream))
        )

    def _is_replicated(self, stage: int) -> bool:
        return self.plan.stages[stage].num_replicas > 1

    def _recomputes(self, stage: int) -> bool:
        return bool(self.schedule.recompute) and self.schedule.recompute[stage]

    def _lies_apart(self, name: str) -> bool:
        """Whether the worker computes on a GPU, but the term lies in host memory."""
        if self.device_type == "cpu":
            return False
        on_host = {channel.name for channel in self.channels if not channel.on_device}
        on_host |= {_core.STAGING_TERM + channel.name for channel in self.channels}
        return name in (OFFLOADED_VERSIONS, OFFLOADED_ACTIVATIONS, CHECKPOINT_COPY) or name in on_host


def num_activation_homes(schedule: _core.ScheduleOptions, stage: int) -> int:
    """Returns how many microbatches' activations can be offloaded at once. All microbatches in flight count,
    except the one whose backward is next."""
    return _core.num_microbatches_in_flight(schedule, stage) - 1


def num_in_flight_upstream(schedule: _core.ScheduleOptions, stage: int) -> int:
    """Returns how many of the microbatches that one replica of this stage computes may be in flight at the
    stage upstream at once.

    The result is the smaller of two bounds: the microbatches that the edges from the stage upstream may have
    in flight, and _num_within_rounds(). It holds even if gradients travel slowly and activations travel fast.

    stage: not the first.
    """
    upstream, here = (schedule.placement.num_replicas(index) for index in (stage - 1, stage))
    stride = math.lcm(upstream, here)
    of_edges = stride // here * num_of_edge_in_flight(schedule, stage - 1, stride)
    return min(of_edges, _num_within_rounds(schedule, stage))


def _num_within_rounds(schedule: _core.ScheduleOptions, stage: int) -> int:
    """Returns a bound on the microbatches in flight, from the weight versions that the stage upstream reads.

    A version contains the gradients of all earlier rounds, from every replica. So if a replica upstream reads
    a version, no microbatch of those rounds is in flight any more. Returns _NO_LIMIT if this gives no bound.
    """
    upstream, here = (schedule.placement.num_replicas(index) for index in (stage - 1, stage))
    m = schedule.num_microbatches
    per_round = _core.rounds_of(schedule, stage - 1).minibatches_per_round * m
    # Long after the start every period gives the same bound, so the code looks at one period.
    per_body = minibatches_per_body(schedule) * m
    period = math.lcm(per_round, here, schedule.placement.num_replicas(0), per_body)
    is_shared = upstream > 1 and not schedule.asynchronous and not schedule.uses_allreduce
    if not is_shared or period > _PERIOD_MAX:
        return _NO_LIMIT
    begin = period * (2 + _core.num_versions_kept(schedule, 0) + _core.num_versions_kept(schedule, stage - 1))
    begin += 0 if schedule.program is None else schedule.program.num_minibatches_listed * period
    begin += -(-schedule.first_minibatch * m // period) * period

    def first_open(last: int) -> int:
        return _core.forward_version(schedule, stage - 1, *divmod(last, m)) * per_round

    return max((last - first_open(last)) // here + 1 for last in range(begin, begin + period))


def choose_savings(
    memory: MemoryPlan, recompute: Sequence[bool] | None, limit_bytes: int | None
) -> MemoryPlan:
    """Returns the plan with the savings that its worker needs to fit into the limit.

    There are three savings, in this order: recompute (unless `recompute` is given), offloaded weight
    versions, offloaded activations. Each is turned on stage by stage until the worker fits, first at the
    stage where it saves most. At the end recompute is turned off again where offloading has saved enough.
    Other workers need not know of these savings. Raises ValueError, which lists the terms, if the worker does
    not fit even with all savings.
    """
    memory = memory.with_recompute(recompute or (False,) * memory.plan.num_stages)
    if limit_bytes is None:
        return memory
    steps: list[_Step] = [_more_recompute] if recompute is None else []
    steps += [functools.partial(_more_offloaded, part) for part in ("versions", "activations")]
    for step in steps:
        memory = _save(memory, step, limit_bytes)
    if memory.counted_bytes() > limit_bytes:
        raise ValueError(_does_not_fit(memory, limit_bytes))
    return _without_needless(memory, limit_bytes) if recompute is None else memory


_Step = Callable[[MemoryPlan], Iterator[MemoryPlan]]
"""A function that yields variants of a plan. Each variant saves memory in one more way at one stage."""


def _save(memory: MemoryPlan, step: _Step, limit_bytes: int) -> MemoryPlan:
    while (needed := memory.counted_bytes()) > limit_bytes:
        best = min(step(memory), key=MemoryPlan.counted_bytes, default=memory)
        if best.counted_bytes() >= needed:
            break
        memory = best
    return memory


def _more_recompute(memory: MemoryPlan) -> Iterator[MemoryPlan]:
    for stage in memory.plan.stages_of(memory.rank):
        if not memory.schedule.recompute[stage] and memory.footprints[stage].is_repeatable:
            yield _with_recompute_at(memory, stage, True)


def _more_offloaded(part: str, memory: MemoryPlan) -> Iterator[MemoryPlan]:
    """Yields a variant for each stage in which one more part of the stage is offloaded. part: a field of
    Offload."""
    for stage in memory.plan.stages_of(memory.rank):
        yield memory.with_offload(stage, replace(memory.offload.get(stage, Offload()), **{part: True}))


def _without_needless(memory: MemoryPlan, limit_bytes: int) -> MemoryPlan:
    """Turns recompute off at stages where it is not needed, because offloading has saved enough."""
    for stage in memory.plan.stages_of(memory.rank):
        without = _with_recompute_at(memory, stage, False)
        if without.counted_bytes() <= limit_bytes:
            memory = without
    return memory


def _with_recompute_at(memory: MemoryPlan, stage: int, recompute: bool) -> MemoryPlan:
    flags = list(memory.schedule.recompute)
    flags[stage] = recompute
    return memory.with_recompute(flags)


def _does_not_fit(memory: MemoryPlan, limit_bytes: int) -> str:
    terms = memory.counted_terms()
    total = sum(terms.values())
    listed = list_terms(terms)
    return (
        f"memory is {format_bytes(limit_bytes)}, but {memory.plan.describe_worker(memory.rank)} needs"
        f" {format_bytes(total)}, {format_bytes(total - limit_bytes)} more, with what recompute and"
        f" offloading may save ({listed}): give more memory, more stages, smaller minibatches, or a"
        " schedule that keeps fewer versions, as '2bw' or 'flush'"
    )


def list_terms(terms: Mapping[str, int]) -> str:
    """Returns the terms as one line for an error, the largest first."""
    return ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in _largest_first(terms))


def _largest_first(terms: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(terms.items(), key=lambda entry: -entry[1])


def describe_memory(
    worker_names: Sequence[str], memory: Sequence[Mapping[str, Mapping[str, int | None]]]
) -> str:
    """Returns RunResult.memory as a table: predicted and peak bytes per worker and term."""
    rows: list[tuple[str, ...]] = []
    for worker, terms in zip(worker_names, memory, strict=True):
        label = worker
        for name, figures in sorted(terms.items(), key=lambda entry: -(entry[1]["predicted"] or 0)):
            rows.append((label, name, *(_bytes_or_blank(figures[kind]) for kind in ("predicted", "peak"))))
            label = ""
        sums = [sum(figures[kind] or 0 for figures in terms.values()) for kind in ("predicted", "peak")]
        rows.append(("", "sum", *map(format_bytes, sums)))
    return format_table(("worker", "term", "predicted", "peak"), rows, "<<>>")


def _bytes_or_blank(num_bytes: int | None) -> str:
    return "not measured" if num_bytes is None else format_bytes(num_bytes)


def channel_terms(channel: RunChannel, rank: int, device_type: str) -> Terms:
    """Returns the memory terms that a rank needs for a channel. Staging buffers are counted only if tensors
    are encoded. On a GPU, tensors are encoded in the GPU's memory."""
    if rank not in (channel.sender, channel.receiver):
        return {}
    item_bytes, wire_bytes, residual_bytes, encodes = _core.channel_bytes(channel.tensors, channel.codec)
    item, wire, residual = map(_core.slot_stride_bytes, (item_bytes, wire_bytes, residual_bytes))
    terms: Terms = {}
    if encodes and device_type != "cpu":
        terms[_core.ENCODED_TERM + channel.name] = wire
    if channel.receiver == rank:
        terms[channel.name] = 0 if channel.posted_into else channel.num_slots * item
        if encodes:
            terms[_core.STAGING_TERM + channel.name] = channel.num_slots * wire
    elif encodes:
        terms[_core.STAGING_TERM + channel.name] = channel.num_unsent_max * wire
        terms[_core.RESIDUAL_TERM + channel.name] = channel.num_residuals * residual
    return terms


def model_bytes(stages: Sequence[StageModule]) -> int:
    """Returns the bytes of the stages' parameters and buffers, each tensor once. They include the stand-ins
    for tensors of other stages that a stage reads."""
    tensors: list[Tensor] = []
    for stage in stages:
        tensors += [tensor for _, tensor in (*stage.trainable_parameters(), *stage.frozen_parameters())]
        tensors += [buffer for _, buffer in stage.stage_buffers()]
        tensors += stage.strays()
    return storage_bytes(list({id(tensor): tensor for tensor in tensors}.values()))
