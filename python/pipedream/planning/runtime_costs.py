"""The calibrated cost model adds the other costs of a run to a profile's layer times. They are measured on
the machine that trains.

    forward of a microbatch   scale * sum of layers * (share + (1 - first share) / m) + the runtime's own cost
    update                    fixed + per byte of parameters (+ a copy, + what replicas exchange)

m is the number of microbatches, and the sum of layers is their time for a whole minibatch. Each microbatch
repeats a `share` of that time. The rest is divided evenly among the m microbatches. The first microbatch of a
minibatch has a share of its own, because it meets a new version and no gradients. Times that were measured
for some m take precedence over this line (item_cost.py). There are also the spread of items about their mean,
and the cost of waking after a wait.

`pipedream.calibrate` measures these figures by short runs. A profile's file stores them as `runtime`. The
values never change once built; any thread; needs no torch.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipedream.common.document import check_list, check_whole, read_value, require
from pipedream.planning.factor_rule import factored_sum
from pipedream.planning.item_cost import EVEN, WORK_KINDS, ItemCost, Spread, Waking
from pipedream.planning.layer_profile import LayerProfile, Profile, pass_costs
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.synced_bytes import num_chunks

if TYPE_CHECKING:
    from pipedream import _core

__all__ = [
    "FREE",
    "POSITIONS",
    "PositionCosts",
    "RuntimeCosts",
    "StageCosts",
    "SyncCost",
    "costs_of",
    "layer_cost_ms",
    "predicted_rows",
    "runtime_of",
    "stage_costs",
]

POSITIONS = ("only", "first", "middle", "last")
"""Positions of a stage in the pipeline. The runtime's work around the model differs between them."""


@dataclass(frozen=True)
class PositionCosts:
    """The runtime's own time per work item, without the user's code and without waiting.

    The scales say how much longer a layer takes in the run than in the profile, because threads, caches and
    cores are shared.
    """

    forward: ItemCost
    backward: ItemCost
    update_ms: float
    forward_scale: float = 1.0
    backward_scale: float = 1.0


@dataclass(frozen=True)
class SyncCost:
    """The time that is added to a kind of work item because replicas exchange gradients and versions.

    Gradients leave during the backward, and versions arrive before a forward. Both evict the model's data
    from the CPU's caches.
    """

    ms: float = 0.0
    ms_per_byte: float = 0.0
    """Milliseconds per byte that a replica pushes to all other replicas between two updates."""

    def of(self, num_bytes: float) -> float:
        return self.ms + self.ms_per_byte * num_bytes


@dataclass(frozen=True)
class RuntimeCosts:
    """The calibration's figures, in milliseconds, shares, or milliseconds per byte. Raises ValueError for a
    position or kind of item without costs.
    """

    positions: Mapping[str, PositionCosts]
    """Costs for each of POSITIONS."""
    forward_share: ItemCost
    """The time of a microbatch's forward as a share of the whole minibatch's, which is 1. One part is the
    same for each microbatch. The other part is divided by the number of microbatches.
    """
    backward_share: ItemCost
    update_ms: float
    """Milliseconds of an optimizer's step, without the part that grows with the parameters."""
    update_ms_per_byte: float
    """Milliseconds that a step takes in addition, per byte of parameters."""
    copy_ms_per_byte: float
    """Additional milliseconds per byte of parameters, if the update writes to a copy because it may not write
    in place.
    """
    sync: Mapping[str, SyncCost]
    """Additional costs of a stage with replicas, by kind of item (WORK_KINDS)."""
    latency_ms: float
    """Milliseconds from sending a tensor until its receiver has it, on an otherwise idle link."""
    cut_bytes: int
    """Bytes that crossed the cut when the costs were measured. For other sizes the costs of sending are
    scaled in proportion.
    """
    num_cores: int
    """Cores of a machine. Workers on one machine slow each other. If num_cores or more compute at once, each
    one takes alone_speed times as long as alone.
    """
    alone_speed: float
    """The speed of a worker while the other workers of its machine wait, divided by its speed while num_cores
    of them compute; at least 1.
    """
    spread: Spread
    """Factors by which single items differ from their mean time."""
    waking: tuple[Waking, ...]
    """The additional cost of items after their worker has waited."""

    def __post_init__(self) -> None:
        require(self.sync, WORK_KINDS, "sync.")
        require(self.positions, POSITIONS, "positions.")
        check_whole("num_cores", self.num_cores, at_least=1)


_NO_SYNC = dict.fromkeys(WORK_KINDS, SyncCost())
_NOTHING = PositionCosts(ItemCost(), ItemCost(), 0.0)
FREE = RuntimeCosts(
    positions=dict.fromkeys(POSITIONS, _NOTHING),
    forward_share=ItemCost(minibatch_ms=1.0),
    backward_share=ItemCost(minibatch_ms=1.0),
    update_ms=0.0,
    update_ms_per_byte=0.0,
    copy_ms_per_byte=0.0,
    sync=_NO_SYNC,
    latency_ms=0.0,
    cut_bytes=0,
    num_cores=1,
    alone_speed=1.0,
    spread=EVEN,
    waking=(),
)
"""The costs of a runtime that takes no time: only the profile's times and the links count."""


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage of a plan, in milliseconds."""

    forward: ItemCost
    backward: ItemCost
    update_ms: float
    """Milliseconds of an update that writes in place."""
    copy_ms: float
    """Milliseconds that an update takes in addition if the stage keeps several versions."""
    shard_ms: float = 0.0
    """The time in which a replica pushes a shard to one other replica, or pulls one from it."""
    sync_latency_ms: float = 0.0
    """Latency of each push or pull, in addition to shard_ms or push_ms."""
    push_ms: float | None = None
    """The time of a push that contains factors. None: as long as shard_ms."""
    shard_update_ms: float | None = None
    """The part of update_ms that grows with the parameters that the replica updates. These are its shard,
    which is 1 / r of the parameters, and every weight whose gradient is pushed as factors. copy_ms grows in
    the same way. None if there are no replicas.
    """
    waking_ms: tuple[Mapping[str, float], ...] = ()
    """The additional cost of an item after a long wait: one mapping per waking, by kind of item."""
    num_chunks: int | None = None
    """Number of chunks in which a shard is sent; None: 1."""
    push_leads: tuple[tuple[float, float], ...] = ()
    """For each owner of a shard, two shares of a backward: the share that remains when the first gradient
    chunk for this owner can be pushed, and the share that remains when the last one can. Empty: chunks are
    pushed after the backward.
    """

    def __post_init__(self) -> None:
        for index, (first, last) in enumerate(self.push_leads):
            if not last <= first <= 1:
                raise ValueError(
                    f"push_leads[{index}] is {[first, last]}: give what is left of the backward when the"
                    " first chunk can leave, at most 1, and when the last one can, no more than that"
                )

    def stage_ms(self, num_replicas: int, rounds: _core.Rounds) -> float:
        """Returns the time per minibatch of a stage with this many replicas, including copy_ms. Each replica
        does its share of the forwards and backwards, and updates once per round, which is the work between
        two updates.
        """
        later = rounds.num_microbatches - 1
        passes = self.forward.plus(self.backward)
        passes_ms = passes.first(rounds.num_microbatches) + later * passes.later(rounds.num_microbatches)
        return passes_ms / num_replicas + (self.update_ms + self.copy_ms) / rounds.minibatches_per_round


def runtime_of(profile: Profile) -> RuntimeCosts | None:
    """Returns the calibration's figures; None if the profile was not calibrated."""
    return None if profile.runtime is None else read_value("runtime", profile.runtime, RuntimeCosts)


def stage_costs(
    profile: Profile,
    runtime: RuntimeCosts,
    stages: Sequence[Stage],
    bytes_per_s: Sequence[float],
    *,
    latency_ms: Sequence[float] | None = None,
    minibatches: Sequence[float] | None = None,
) -> list[StageCosts]:
    """Returns each stage's costs by the calibrated cost model.

    bytes_per_s, latency_ms: for each stage, bandwidth and latency of the links between its replicas. The
    calibration has measured a latency, too, and the longer of the two is used. minibatches: for each stage,
    the number of minibatches that one replica trains per update; None: 1.
    """
    costs = []
    for stage_index, stage in enumerate(stages):
        layers = profile.layers[stage.first_layer : stage.last_layer + 1]
        position = runtime.positions[_position_of(stage_index, len(stages))]
        before = profile.layers[stage.first_layer - 1].activation_bytes if stage_index else 0
        behind = layers[-1].activation_bytes if stage_index + 1 < len(stages) else 0
        num_bytes = sum(layer.parameter_bytes for layer in layers)
        replicas, of_round = stage.num_replicas, 1 if minibatches is None else minibatches[stage_index]
        factored = factored_sum(layers, replicas, minibatches=of_round)
        product_ms = factored.product_ms * position.backward_scale
        dense_bytes = num_bytes - factored.weight_bytes
        # A replica updates its shard, and the whole of each weight whose gradient it computes from all
        # factors.
        updated_bytes = dense_bytes / replicas + factored.weight_bytes
        update_ms = position.update_ms + replicas * of_round * product_ms
        shard_update_ms = runtime.update_ms_per_byte * updated_bytes
        if num_bytes:
            update_ms += runtime.update_ms + shard_update_ms
        # A replica pushes (r - 1) / r of its gradients, and pulls as many bytes of new versions.
        exchanged = dense_bytes * (replicas - 1) / replicas + (replicas - 1) * factored.factor_bytes
        per_byte_ms = 1e3 / bytes_per_s[stage_index]
        sync_ms = {kind: cost.of(exchanged) if replicas > 1 else 0.0 for kind, cost in runtime.sync.items()}
        forward, backward = _passes(layers, runtime, position, product_ms)
        forward = forward.plus(_sending(position.forward, behind, runtime.cut_bytes))
        backward = backward.plus(_sending(position.backward, before, runtime.cut_bytes))
        is_dense = replicas > 1 and not factored.num_weights
        whole_ms = {"FORWARD": forward.first(1), "BACKWARD": backward.first(1), "UPDATE": update_ms}
        costs.append(
            StageCosts(
                forward=forward.plus(ItemCost(minibatch_ms=sync_ms["FORWARD"])),
                backward=backward.plus(ItemCost(minibatch_ms=sync_ms["BACKWARD"])),
                update_ms=update_ms + sync_ms["UPDATE"],
                copy_ms=runtime.copy_ms_per_byte * updated_bytes,
                shard_ms=per_byte_ms * dense_bytes / replicas if replicas > 1 else 0.0,
                sync_latency_ms=max(runtime.latency_ms, latency_ms[stage_index] if latency_ms else 0.0)
                if replicas > 1
                else 0.0,
                push_ms=per_byte_ms * (dense_bytes / replicas + factored.factor_bytes)
                if factored.num_weights
                else None,
                shard_update_ms=shard_update_ms if replicas > 1 else None,
                waking_ms=tuple(
                    {kind: share * whole_ms[kind] for kind, share in waking.shares.items()}
                    for waking in runtime.waking
                ),
                num_chunks=num_chunks(num_bytes, replicas) if is_dense else None,
                push_leads=_push_leads(layers, replicas) if is_dense and profile.is_of_host else (),
            )
        )
    return costs


def _passes(
    layers: Sequence[LayerProfile], runtime: RuntimeCosts, position: PositionCosts, product_ms: float
) -> tuple[ItemCost, ItemCost]:
    """Returns the costs of a stage's forward and backward. Times of microbatches come from the calibration.
    Without a calibration they come from the profile's times of each layer. product_ms: the part of the
    backward that the update computes instead.
    """
    if runtime is FREE:
        forward, backward = pass_costs(layers)
        return forward, backward.plus(ItemCost(minibatch_ms=-product_ms)) if product_ms else backward
    return (
        runtime.forward_share.scaled(sum(layer.forward_ms for layer in layers) * position.forward_scale),
        runtime.backward_share.scaled(
            sum(layer.backward_ms for layer in layers) * position.backward_scale - product_ms
        ),
    )


def _push_leads(layers: Sequence[LayerProfile], num_replicas: int) -> tuple[tuple[float, float], ...]:
    """Returns the shares of a backward that remain when chunks can be pushed (StageCosts.push_leads). A chunk
    can be pushed when the backward has finished the layer in which the chunk begins. The stage's chunks
    belong to the owners in turn.
    """
    ends_bytes = [*itertools.accumulate(layer.parameter_bytes for layer in layers)]
    done_ms = [0.0, *itertools.accumulate(layer.backward_ms for layer in layers)]
    num_bytes, all_ms = ends_bytes[-1], done_ms[-1]
    if num_bytes == 0 or all_ms == 0:
        return ()
    in_all = num_replicas * num_chunks(num_bytes, num_replicas)

    def lead(chunk: int) -> float:
        return done_ms[bisect.bisect_right(ends_bytes, num_bytes * chunk / in_all)] / all_ms

    return tuple((lead(in_all - num_replicas + owner), lead(owner)) for owner in range(num_replicas))


def layer_cost_ms(layer: LayerProfile, runtime: RuntimeCosts, num_microbatches: int = 1) -> float:
    """Returns the milliseconds that a layer adds to its stage's forward, backward and update together. The
    paper's formulas need such a cost, because they sum the costs of layers.
    """
    if runtime is FREE:
        return layer.compute_ms_with(num_microbatches)
    per_byte = runtime.update_ms_per_byte + runtime.copy_ms_per_byte
    inner = runtime.positions["middle"]
    compute_ms = layer.forward_ms * inner.forward_scale + layer.backward_ms * inner.backward_scale
    return compute_ms + per_byte * layer.parameter_bytes


def costs_of(plan: Plan, *, drains: bool = False) -> list[StageCosts] | None:
    """Returns the stage costs that a plan has stored; None if it has none. Raises ValueError naming a field.

    drains: whether the schedule drains. Such a schedule trains more minibatches between two updates if
    stages have different numbers of replicas. With factors, updates and pushes then take longer. So a plan
    with factors stores separate costs for schedules that drain.
    """
    name = "drained_costs" if drains and "drained_costs" in plan.predicted else "stage_costs"
    if plan.predicted.get(name) is None:
        return None
    return predicted_rows(plan, name, StageCosts, plan.num_stages, "stages")


def predicted_rows(plan: Plan, name: str, kind: Any, count: int, of_what: str) -> list[Any]:
    """Returns a list of the plan's `predicted`. kind: the type of an entry, for read_value(). Raises
    ValueError naming a field, or if the list does not have `count` entries.
    """
    where = f"predicted.{name}"
    rows = check_list(where, plan.predicted.get(name, []))
    if len(rows) != count:
        raise ValueError(f"{where} has {len(rows)} entries for {count} {of_what}: give one for each")
    return [read_value(f"{where}[{index}]", row, kind) for index, row in enumerate(rows)]


def _position_of(stage_index: int, num_stages: int) -> str:
    if num_stages == 1:
        return "only"
    if stage_index == 0:
        return "first"
    return "last" if stage_index == num_stages - 1 else "middle"


def _sending(cost: ItemCost, num_bytes: int, measured_bytes: int) -> ItemCost:
    """Scales the cost of sending by the number of bytes sent. The part of the cost that grows with the
    minibatch is mostly the copying of these bytes.
    """
    if num_bytes == 0 or measured_bytes == 0:
        return cost
    return cost.growing(num_bytes / measured_bytes)
