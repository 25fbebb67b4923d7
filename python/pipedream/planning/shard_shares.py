"""The load of the owners of a stage's shards in a round: replicas, and spares beside them.

A replica sends every other one what it pushes there and then its own shard of the next version, and a spare
what it pushes: to n - 1 replicas 2 a M of the M bytes of parameters each, to k spares b M each. What it sends
to several shares its link evenly, so that with b = 2 a all end at once; a spare's link has nothing to send
until its first chunk has come from all replicas, and after their last bytes has one chunk left for each:

    a = 1 / (n + 2 k)    b = 2 / (n + 2 k)    round = (2 (n + k - 1) / (n + 2 k) M + n C) / B
    a = 0                b = 1 / k            round = (n / k M + n C) / B    where n^2 <= 2 k (k - 1)

B bytes per second in each direction, chunks of C bytes of a spare's shard. For k = 1 and k = n these are the
shares of BytePS (OSDI'20, section 4.1); without spares a round takes 2 (n - 1) / n M / B; two replicas gain
nothing. Pure; any thread; needs no torch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["ShardShares", "num_chunks", "round_ms", "shard_shares"]


class ShardShares(NamedTuple):
    """Shares of a stage's parameters."""

    of_replica: float
    of_spare: float
    """0 where there is none."""


def shard_shares(num_replicas: int, num_spares: int = 0) -> ShardShares:
    """The core deals shards so (csrc/schedule/shard_sizes.h). Raises ValueError for more spares than
    replicas, and for spares of one replica."""
    from pipedream import _core

    shares = _core.shard_shares(num_replicas, num_spares)
    of_replica, of_last = shares[0] / sum(shares), shares[-1] / sum(shares)
    return ShardShares(of_replica, of_last if num_spares else 0.0)


def num_chunks(num_bytes: float, num_replicas: int) -> int:
    """In which a shard of so many bytes of parameters travels, where there are no spares."""
    from pipedream import _core

    return max(1, math.ceil(num_bytes / (num_replicas * _core.SHARD_CHUNK_BYTES_MAX)))


def round_ms(num_bytes: float, num_replicas: int, num_spares: int, bytes_per_s: float) -> float:
    """In which the links carry what a round needs."""
    from pipedream import _core

    of_replica, of_spare = shard_shares(num_replicas, num_spares)
    if num_spares == 0:
        return 2e3 * (num_replicas - 1) * of_replica * num_bytes / bytes_per_s
    spare_bytes = of_spare * num_bytes
    chunk_bytes = spare_bytes / max(1, math.ceil(spare_bytes / _core.SPARE_CHUNK_BYTES_MAX))
    carried = 2 * of_replica * (num_replicas - 1 + num_spares) + num_replicas * (of_spare - 2 * of_replica)
    return 1e3 * (carried * num_bytes + num_replicas * chunk_bytes) / bytes_per_s
