"""What the replicas of a stage send each other in a round, by a profile: gradients to the shards of others
and versions from them, or factors of gradients where these are smaller and asked for.

The rule is stage/factors.py's. Pure; any thread; needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipedream.planning.layer_profile import LayerProfile

__all__ = ["SyncedBytes", "shares_of_a_shard", "synced_bytes"]


class SyncedBytes(NamedTuple):
    """From one replica to one other, in a round."""

    pushed: float
    pulled: float


def synced_bytes(
    layers: Sequence[LayerProfile], num_replicas: int, *, factors: bool = False, minibatches: int = 1
) -> SyncedBytes:
    """Of a stage of these layers. minibatches: that a replica has of a round."""
    dense_bytes = sum(layer.parameter_bytes for layer in layers)
    factor_bytes = 0
    weights = [weight for layer in layers for weight in layer.factors or ()] if factors else []
    for weight in weights:
        of_round = minibatches * weight.factor_bytes
        if num_replicas * of_round < 2 * weight.weight_bytes:
            dense_bytes -= weight.weight_bytes
            factor_bytes += of_round
    shard_bytes = dense_bytes / num_replicas
    return SyncedBytes(shard_bytes + factor_bytes, shard_bytes)


def shares_of_a_shard(
    layers: Sequence[LayerProfile], num_replicas: int, *, factors: bool, minibatches: int
) -> SyncedBytes:
    """The same over what each of both would be without factors."""
    dense = synced_bytes(layers, num_replicas).pulled
    if dense == 0:
        return SyncedBytes(1.0, 1.0)
    found = synced_bytes(layers, num_replicas, factors=factors, minibatches=minibatches)
    return SyncedBytes(found.pushed / dense, found.pulled / dense)
