"""What the replicas of a stage send each other, and spares, in a round, by a profile: gradients to the shards
of others and versions from them, or factors of gradients where these are smaller and asked for.

The rule is factor_rule.py's. Pure; any thread; needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pipedream.planning.factor_rule import FactoredSum, factored_sum
from pipedream.planning.layer_profile import LayerProfile, Profile
from pipedream.planning.plan_stage import Stage
from pipedream.planning.shard_shares import shard_shares

__all__ = ["SyncedBytes", "exchange_times", "shares_of_a_shard", "spare_link_ms", "synced_bytes"]


class SyncedBytes(NamedTuple):
    """From one replica to one other, in a round."""

    pushed: float
    pulled: float


def synced_bytes(
    layers: Sequence[LayerProfile], num_replicas: int, *, factors: bool = False, minibatches: int = 1
) -> SyncedBytes:
    """Of a stage of these layers. minibatches: that a replica has of a round."""
    found = factored_sum(layers, num_replicas, minibatches=minibatches) if factors else FactoredSum()
    shard_bytes = (sum(layer.parameter_bytes for layer in layers) - found.weight_bytes) / num_replicas
    return SyncedBytes(shard_bytes + found.factor_bytes, shard_bytes)


def shares_of_a_shard(
    layers: Sequence[LayerProfile], num_replicas: int, *, factors: bool, minibatches: int
) -> SyncedBytes:
    """The same over what each of both would be without factors."""
    dense = synced_bytes(layers, num_replicas).pulled
    if dense == 0:
        return SyncedBytes(1.0, 1.0)
    found = synced_bytes(layers, num_replicas, factors=factors, minibatches=minibatches)
    return SyncedBytes(found.pushed / dense, found.pulled / dense)


def exchange_times(stage: Stage, all_ms: float, share: SyncedBytes) -> dict[str, Any]:
    """The arguments of StageTimes. all_ms: of all the stage's parameters over one link. share: of a shard,
    what is pushed to its owner and pulled from it."""
    replicas, spares = stage.num_replicas, stage.num_spare_shards
    of_replica, of_spare = shard_shares(replicas, spares)
    times: dict[str, Any] = {
        "shard_ms": all_ms * of_replica * share.pulled,
        "push_ms": all_ms * of_replica * share.pushed,
    }
    if spares:
        times |= {
            "num_replicas": replicas,
            "spare_push_ms": all_ms * of_spare * share.pushed,
            # To all replicas as long as these, after the pushes, take for what they own.
            "spare_shard_ms": all_ms * of_replica * (replicas - 1) / replicas * share.pulled,
        }
    return times


def spare_link_ms(stage: Stage, profile: Profile, bytes_per_s: float) -> float:
    """Per minibatch, in which a spare's link carries versions to the replicas."""
    layers = profile.layers[stage.first_layer : stage.last_layer + 1]
    num_bytes = sum(layer.parameter_bytes for layer in layers)
    return 1e3 * shard_shares(stage.num_replicas, stage.num_spare_shards).of_spare * num_bytes / bytes_per_s
