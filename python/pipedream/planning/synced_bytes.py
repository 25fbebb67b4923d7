"""Computes how many bytes a stage's replicas and spares send each other in a round, which is the work between
two updates. Pure; any thread; needs no torch.

Replicas push gradients to the owners of shards and pull versions from them. With the codec "factors" they
push factors of gradients where these are smaller (factor_rule.py).

A stage has M bytes of parameters, n replicas and k spares. B is the bandwidth in bytes per second in each
direction, C the size of a chunk of a spare's shard (csrc/schedule/shard_sizes.h explains the shares):

                             share of a replica    share of a spare    seconds of a round
    no spares                1 / n                                     2 (n - 1) / n M / B
    n^2 <= 2 k (k - 1)       0                     1 / k               (n / k M + n C) / B
    other numbers of spares  1 / (n + 2 k)         2 / (n + 2 k)       (2 (n + k - 1) / (n + 2 k) M + n C) / B

A spare sends nothing until it has received its first chunk from all replicas. Therefore a round takes n C / B
longer. Two replicas gain nothing from spares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipedream.planning.factor_rule import factored_sum
from pipedream.planning.layer_profile import LayerProfile, Profile
from pipedream.planning.plan_stage import Stage

__all__ = [
    "ShardShares",
    "SyncedBytes",
    "all_reduce_ms",
    "exchange_times",
    "num_chunks",
    "round_ms",
    "shard_shares",
    "shares_of_a_shard",
    "spare_link_ms",
]

_MANY_BYTES = 1e15


class SyncedBytes(NamedTuple):
    """Bytes that one replica sends to one other replica between two updates."""

    pushed: float
    pulled: float


def shares_of_a_shard(
    layers: Sequence[LayerProfile], num_replicas: int, *, minibatches: float
) -> SyncedBytes:
    """Returns the bytes that replicas of a stage of these layers send, as multiples of the bytes of a shard
    without factors. minibatches: how many minibatches one replica trains per update.
    """
    num_bytes = sum(layer.parameter_bytes for layer in layers)
    if num_bytes == 0:
        return SyncedBytes(1.0, 1.0)
    found = factored_sum(layers, num_replicas, minibatches=minibatches)
    pulled = 1 - found.weight_bytes / num_bytes
    return SyncedBytes(pulled + num_replicas * found.factor_bytes / num_bytes, pulled)


def exchange_times(stage: Stage, all_ms: float, num_bytes: float | None = None) -> dict[str, Any]:
    """Returns arguments of StageDurations for the exchange between replicas and spares.

    all_ms: time in which one link carries all the stage's parameters. num_bytes: bytes of the parameters;
    None assumes so many bytes that the time of one chunk does not matter.
    """
    replicas, spares = stage.num_replicas, stage.num_spare_shards
    of_replica, of_spare = shard_shares(replicas, spares)
    times: dict[str, Any] = {"pull_ms": all_ms * of_replica}
    if spares:
        num_bytes = num_bytes or _MANY_BYTES
        in_all = round_ms(num_bytes, replicas, spares, 1e3 * num_bytes)  # as a multiple of all_ms
        pushed = (replicas - 1) * of_replica + spares * of_spare
        times |= {
            "num_replicas": replicas,
            "spare_push_ms": all_ms * of_spare,
            # After all pushes have arrived, the round goes on for this time. It is divided among the
            # replicas.
            "spare_pull_ms": all_ms * max(0.0, in_all - pushed) / replicas,
        }
    return times


def all_reduce_ms(stage: Stage, all_ms: float) -> float:
    """Returns the time of a ring all-reduce: each replica sends and receives 2 (r - 1) / r of the stage's
    gradients. all_ms: time in which one link carries all gradients.
    """
    return 2 * (stage.num_replicas - 1) / stage.num_replicas * all_ms


def spare_link_ms(stage: Stage, profile: Profile, bytes_per_s: float) -> float:
    """Returns the milliseconds per minibatch for which a spare's link is busy with versions for the
    replicas.
    """
    layers = profile.layers[stage.first_layer : stage.last_layer + 1]
    num_bytes = sum(layer.parameter_bytes for layer in layers)
    return 1e3 * shard_shares(stage.num_replicas, stage.num_spare_shards).of_spare * num_bytes / bytes_per_s


class ShardShares(NamedTuple):
    """Shares of a stage's parameters that one replica and one spare own."""

    of_replica: float
    of_spare: float
    """Share of one spare; 0 if there are no spares."""


def shard_shares(num_replicas: int, num_spares: int = 0) -> ShardShares:
    """Returns the shares that the core assigns (csrc/schedule/shard_sizes.h). Raises ValueError for more
    spares than replicas, and for spares of one replica.
    """
    from pipedream import _core

    shares = _core.shard_shares(num_replicas, num_spares)
    of_replica, of_last = shares[0] / sum(shares), shares[-1] / sum(shares)
    return ShardShares(of_replica, of_last if num_spares else 0.0)


def num_chunks(num_bytes: float, num_replicas: int) -> int:
    """Returns the number of chunks in which a shard is sent if the stage has num_bytes of parameters and no
    spares.
    """
    from pipedream import _core

    shard_bytes = math.ceil(num_bytes / num_replicas)
    return max(1, math.ceil(shard_bytes / _core.shard_chunk_bytes_max(shard_bytes)))


def round_ms(num_bytes: float, num_replicas: int, num_spares: int, bytes_per_s: float) -> float:
    """Returns the milliseconds in which the links carry a round's traffic."""
    from pipedream import _core

    of_replica, of_spare = shard_shares(num_replicas, num_spares)
    if num_spares == 0:
        return 2e3 * (num_replicas - 1) * of_replica * num_bytes / bytes_per_s
    spare_bytes = of_spare * num_bytes
    chunk_bytes = spare_bytes / max(1, math.ceil(spare_bytes / _core.SHARD_CHUNK_BYTES_MIN))
    carried = 2 * of_replica * (num_replicas - 1 + num_spares) + num_replicas * (of_spare - 2 * of_replica)
    return 1e3 * (carried * num_bytes + num_replicas * chunk_bytes) / bytes_per_s
