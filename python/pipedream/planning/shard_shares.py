"""What the owners of a stage's shards carry in a round: replicas, and spares beside them.

Of n replicas each owns the share a of the parameters, of k spares each b, so that all links have as much to
carry, and as little as can be (BytePS, OSDI'20, section 4.1):

    a = (n - k) / D    b = 2 (n - 1) / D    D = n^2 + k n - 2 k    round = 2 n (n - 1) M / (D B)

M bytes of parameters, B bytes per second in each direction. For k = 0 that is 2 (n - 1) / n M / B, for k = n
M / B; two replicas gain nothing. Pure; any thread; needs no torch.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ShardShares", "round_ms", "shard_shares"]


class ShardShares(NamedTuple):
    """Of a stage's parameters."""

    of_replica: float
    of_spare: float
    """0 where there is none."""


def shard_shares(num_replicas: int, num_spares: int = 0) -> ShardShares:
    """As the core deals them (csrc/param_server/dealing.h)."""
    if num_spares == 0:
        return ShardShares(1 / num_replicas, 0.0)
    total = _total(num_replicas, num_spares)
    return ShardShares((num_replicas - num_spares) / total, 2 * (num_replicas - 1) / total)


def round_ms(num_bytes: float, num_replicas: int, num_spares: int, bytes_per_s: float) -> float:
    """In which every link carries, in each direction, what a round needs."""
    total = _total(num_replicas, num_spares)
    return 2e3 * num_replicas * (num_replicas - 1) * num_bytes / (total * bytes_per_s)


def _total(num_replicas: int, num_spares: int) -> int:
    return num_replicas**2 + num_spares * num_replicas - 2 * num_spares
