"""The links that the stages of a plan use: between a stage and the next one, and between its replicas.

Of measured links the slowest that a stage's replicas have counts, as every one of them is used. Pure;
torch-free; any thread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipedream.planning.link_profile import LinkProfile
from pipedream.planning.plan import Stage
from pipedream.planning.plan_stage import ranks_of

__all__ = ["StageLinks"]


@dataclass(frozen=True)
class StageLinks:
    """Bytes per second; infinite where no link is."""

    downstream: tuple[float, ...]
    """To the next stage, of all stages but the last."""
    upstream: tuple[float, ...]
    """From the next stage."""
    replicas: tuple[float, ...]
    """Between the replicas of each stage."""
    latency_ms: tuple[float, ...]
    """To or from the next stage, whichever is longer; 0 where none was measured."""
    replica_latency_ms: tuple[float, ...]
    """Likewise, between the replicas of each stage."""

    @classmethod
    def uniform(cls, stages: Sequence[Stage], bytes_per_s: float) -> StageLinks:
        between = (bytes_per_s,) * (len(stages) - 1)
        return cls(
            between, between, (bytes_per_s,) * len(stages), (0.0,) * len(between), (0.0,) * len(stages)
        )

    @classmethod
    def measured(cls, stages: Sequence[Stage], links: LinkProfile) -> StageLinks:
        """Between the ranks that the stages of a plan have."""
        return cls.between(ranks_of(stages), links)

    @classmethod
    def between(cls, ranks: Sequence[Sequence[int]], links: LinkProfile) -> StageLinks:
        """ranks: of each stage's replicas."""
        pairs = list(itertools.pairwise(ranks))
        return cls(
            tuple(links.slowest_bytes_per_s(here, below) for here, below in pairs),
            tuple(links.slowest_bytes_per_s(below, here) for here, below in pairs),
            tuple(links.slowest_bytes_per_s(own, own) for own in ranks),
            tuple(
                max(links.largest_latency_us(here, below), links.largest_latency_us(below, here)) / 1e3
                for here, below in pairs
            ),
            tuple(links.largest_latency_us(own, own) / 1e3 for own in ranks),
        )

    def without_latency(self) -> StageLinks:
        return replace(
            self, latency_ms=(0.0,) * len(self.latency_ms), replica_latency_ms=(0.0,) * len(self.replicas)
        )

    def slowest(self, otherwise: float) -> float:
        """Returns the slowest link that is used. otherwise: the value if none is."""
        slowest = min((*self.downstream, *self.upstream, *self.replicas))
        return slowest if math.isfinite(slowest) else otherwise
