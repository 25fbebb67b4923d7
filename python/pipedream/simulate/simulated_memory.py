"""Computes how much memory each worker uses along a simulated timeline. Pure; any thread; needs no torch.

    all the time                         weight versions, the model as given, gradients, the optimizer's
                                         state, and what replicas exchange, as partition(memory=) counts it
    from a forward to its backward       what the layers save for the backward; if the stage recomputes, from
                                         the recompute on
    from arrival to its backward         what a stage receives: its input, and the gradient of its output
    until it has been sent               what a stage sends: its output, and the gradient of its input

The sizes are the profile's. Temporaries of a backward, empty slots and the data are not counted. So a run
allocates more. partition(memory=) plans with the bytes that a run allocates.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pipedream.planning.factor_rule import factored_sum
from pipedream.planning.layer_profile import Profile
from pipedream.planning.plan import Plan
from pipedream.planning.simulator import Simulation, TimedInstruction
from pipedream.planning.synced_bytes import shard_shares

if TYPE_CHECKING:
    from pipedream import _core

__all__ = ["MemoryUse", "memory_in_use"]

_BETWEEN_STAGES = ("activation", "gradient")


class MemoryUse(NamedTuple):
    """The memory that a worker uses from this time until the next entry."""

    begin_ms: float
    num_bytes: float


def memory_in_use(
    simulation: Simulation,
    plan: Plan,
    profile: Profile,
    schedule: _core.ScheduleOptions,
    *,
    optimizer_copies: float = 1.0,
) -> list[list[MemoryUse]]:
    """Returns each worker's memory in the order of time. optimizer_copies: as in partition()."""
    stages = [
        _StageBytes.of(plan, profile, stage, schedule, optimizer_copies) for stage in range(plan.num_stages)
    ]
    arrivals_ms: _Times = defaultdict(deque)
    departures_ms: _Times = defaultdict(deque)
    for what, sender, receiver, minibatch, microbatch, _, end_ms in simulation.transfers:
        departures_ms[what, sender, minibatch, microbatch].append(end_ms)
        arrivals_ms[what, receiver, minibatch, microbatch].append(end_ms)
    uses = []
    for worker, row in enumerate(simulation.timeline):
        fixed = sum(stages[stage].weights for stage in plan.stages_of(worker))
        served = plan.spare_stage_of(worker)
        if served is not None:
            fixed = stages[served].of_spare
        changes = _changes(row, worker, stages, arrivals_ms, departures_ms)
        uses.append(_summed(fixed, changes))
    return uses


# End times of transfers by (kind, worker, minibatch, microbatch). The worker is the receiver in arrivals_ms
# and the sender in departures_ms.
_Times = defaultdict[tuple[str, int, int, int], deque[float]]


def _changes(
    row: Sequence[TimedInstruction],
    worker: int,
    stages: Sequence[_StageBytes],
    arrivals_ms: _Times,
    departures_ms: _Times,
) -> Iterator[tuple[float, float]]:
    """Yields (time, change in bytes) for each change of a worker's memory."""
    held: defaultdict[tuple[int, int, int], float] = defaultdict(float)  # freed by the backward
    for instruction, begin_ms, end_ms in row:
        own = stages[instruction.stage]
        place = (instruction.stage, instruction.minibatch, instruction.microbatch)
        stash = instruction.traits.stash
        if stash == own.saves_at:
            held[place] += own.saved
            yield end_ms, own.saved
        elif stash == "released":
            yield end_ms, -held.pop(place, 0.0)
        elif instruction.edge is not None and instruction.edge.kind in _BETWEEN_STAGES:
            kind = instruction.edge.kind
            item = (kind, worker, instruction.minibatch, instruction.microbatch)
            receives = instruction.opcode == "RECV"
            # A stage receives its input as an activation and sends the input's gradient. It sends its output
            # and receives the output's gradient.
            num_bytes = own.input if receives == (kind == "activation") else own.output
            times_ms = (arrivals_ms if receives else departures_ms)[item]
            if not times_ms:
                continue  # no transfer: both stages are at this worker
            if receives:
                held[place] += num_bytes
                yield times_ms.popleft(), num_bytes
            else:
                yield begin_ms, num_bytes
                yield times_ms.popleft(), -num_bytes


class _StageBytes(NamedTuple):
    """Memory of one stage in bytes. `saved`, `input` and `output` are for one microbatch."""

    weights: float
    """Bytes of a replica that do not depend on the data."""
    of_spare: float
    """Bytes of a spare. It has the versions and the optimizer's state of its shard, and slots for chunks from
    each replica.
    """
    saved: float
    input: float
    output: float
    saves_at: str
    """The value of `OpcodeTraits.stash` for the opcode after which the tensors for the backward are kept:
    FORWARD's, or RECOMPUTE's if the stage recomputes.
    """

    @classmethod
    def of(
        cls,
        plan: Plan,
        profile: Profile,
        index: int,
        schedule: _core.ScheduleOptions,
        optimizer_copies: float,
    ) -> _StageBytes:
        from pipedream import _core

        stage, m = plan.stages[index], schedule.num_microbatches
        layers = profile.layers[stage.first_layer : stage.last_layer + 1]
        saved = sum(
            layer.activation_bytes if layer.saved_bytes is None else layer.saved_bytes for layer in layers
        )
        before = profile.layers[stage.first_layer - 1].activation_bytes if index else 0
        replicas = stage.num_replicas
        minibatches = _core.rounds_of(schedule, index).own_per_round / m
        num_versions = _core.num_versions_kept(schedule, index)
        parameters = sum(layer.parameter_bytes for layer in layers)
        factored = factored_sum(layers, replicas, minibatches=minibatches)
        shares = shard_shares(replicas, stage.num_spare_shards)
        costs = _core.MemoryCosts(
            state_copies=optimizer_copies,
            asynchronous=schedule.asynchronous,
            reduces_together=schedule.uses_allreduce,
            posts_versions=profile.is_of_host,  # pulled versions are received directly into place
            has_spares=shares.of_spare > 0,
            staleness=schedule.staleness,
        )
        weights = _core.replica_weight_bytes(
            parameters,
            max(layer.parameter_bytes for layer in layers),
            num_replicas=replicas,
            num_versions=num_versions - schedule.staleness,
            costs=costs,
            share=shares.of_replica,
            factored_bytes=factored.weight_bytes,
            factor_bytes=factored.factor_bytes,
        )
        shard_bytes = shares.of_spare * parameters
        slots_bytes = replicas * min(shard_bytes, _core.NUM_SPARE_SLOTS * _core.SHARD_CHUNK_BYTES_MIN)
        return cls(
            weights=weights,
            of_spare=(num_versions + optimizer_copies) * shard_bytes + slots_bytes,
            saved=saved / m,
            input=before / m,
            output=layers[-1].activation_bytes / m,
            saves_at="restored" if schedule.recompute and schedule.recompute[index] else "kept",
        )


def _summed(fixed: float, changes: Iterable[tuple[float, float]]) -> list[MemoryUse]:
    uses, num_bytes = [MemoryUse(0.0, fixed)], fixed
    for when_ms, group in itertools.groupby(sorted(changes), key=lambda change: change[0]):
        num_bytes += sum(change for _, change in group)
        uses.append(MemoryUse(when_ms, num_bytes))
    return uses
