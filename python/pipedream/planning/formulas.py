"""Computes the figures of the paper's cost model for given stages (csrc/planner/partition.h).

StageLinks has the bandwidth and latency from each stage to the next, and between the replicas of a stage. If
links were measured, they differ in speed, and the slowest link between two stages counts. Pure; any thread;
torch-free.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipedream.planning.factor_rule import factored_sum
from pipedream.planning.layer_profile import Profile
from pipedream.planning.link_profile import LinkProfile
from pipedream.planning.plan import Stage
from pipedream.planning.plan_stage import placement_of, ranks_of
from pipedream.planning.synced_bytes import round_ms

__all__ = ["StageLinks", "formula_figures", "parameter_bytes_of", "samples_per_s"]


def formula_figures(
    profile: Profile, stages: tuple[Stage, ...], links: StageLinks, *, microbatches: int = 1
) -> dict[str, Any]:
    """Returns the paper's times and sizes for each stage and each cut between stages, by their names in
    Plan.predicted.
    """
    layers = profile.layers
    crossing = [1e3 * layers[stage.last_layer].activation_bytes for stage in stages[:-1]]
    return {
        "stage_ms": [
            _stage_ms(profile, stage, bytes_per_s, microbatches)
            for stage, bytes_per_s in zip(stages, links.replicas, strict=True)
        ],
        "boundary_ms": [
            sent / down + sent / up
            for sent, down, up in zip(crossing, links.downstream, links.upstream, strict=True)
        ],
        "stage_parameter_bytes": [parameter_bytes_of(profile, stage) for stage in stages],
        "stage_layers": [[layers[stage.first_layer].name, layers[stage.last_layer].name] for stage in stages],
    }


def samples_per_s(profile: Profile, minibatch_ms: float) -> float | None:
    if profile.batch_size is None or minibatch_ms <= 0:
        return None
    rate = profile.batch_size * 1e3 / minibatch_ms
    return rate if math.isfinite(rate) else None


def _stage_ms(profile: Profile, stage: Stage, bytes_per_s: float, microbatches: int) -> float:
    """Returns T(i..j, m) of the paper's cost model in milliseconds, for a stage of layers i to j with m
    replicas.

    There is one update per lcm(M, m) / M minibatches, where M is the number of microbatches in a minibatch.
    With spare shards round_ms() replaces the paper's time of synchronisation. csrc/planner/stage_cost.h has
    the formula for weights whose gradients are sent as factors.
    """
    replicas = stage.num_replicas
    layers = profile.layers[stage.first_layer : stage.last_layer + 1]
    factored = factored_sum(layers, replicas)
    compute_ms = sum(layer.compute_ms_with(microbatches) for layer in layers)
    compute_ms += (replicas - 1) * factored.product_ms
    num_bytes = parameter_bytes_of(profile, stage) - factored.weight_bytes
    sync_ms = 4e3 * (replicas - 1) * num_bytes / (replicas * bytes_per_s)
    per_round = math.lcm(microbatches, replicas) // microbatches
    sync_ms += 2e3 * (replicas - 1) * (factored.factor_bytes * (per_round / replicas)) / bytes_per_s
    if stage.num_spare_shards:
        sync_ms = 2 * round_ms(num_bytes, replicas, stage.num_spare_shards, bytes_per_s)
    return max(compute_ms / replicas, sync_ms / per_round)


def parameter_bytes_of(profile: Profile, stage: Stage) -> int:
    return sum(layer.parameter_bytes for layer in profile.layers[stage.first_layer : stage.last_layer + 1])


@dataclass(frozen=True)
class StageLinks:
    """The links that a plan uses, as bandwidths and latencies. A bandwidth is in bytes per second. If links
    were measured, it is infinite where there is none, such as between the replicas of a stage with one
    replica.
    """

    downstream: tuple[float, ...]
    """Bandwidth from each stage but the last to the next stage."""
    upstream: tuple[float, ...]
    """Bandwidth from each stage but the first to the stage before it."""
    replicas: tuple[float, ...]
    """Bandwidth between the replicas of each stage."""
    latency_ms: tuple[float, ...]
    """Latency between each stage and the next, in the direction where it is longer; 0 if not measured."""
    replica_latency_ms: tuple[float, ...]
    """The latency between the replicas of each stage; 0 if not measured."""

    @classmethod
    def uniform(cls, stages: Sequence[Stage], bytes_per_s: float) -> StageLinks:
        between = (bytes_per_s,) * (len(stages) - 1)
        return cls(
            between, between, (bytes_per_s,) * len(stages), (0.0,) * len(between), (0.0,) * len(stages)
        )

    @classmethod
    def measured(cls, stages: Sequence[Stage], links: LinkProfile) -> StageLinks:
        """Returns the links between the ranks on which a plan places its stages."""
        return cls.between(ranks_of(placement_of(stages)), links)

    @classmethod
    def between(cls, ranks: Sequence[Sequence[int]], links: LinkProfile) -> StageLinks:
        """Returns the links between these ranks. ranks: for each stage, the ranks of its replicas."""
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
        """Returns the bandwidth of the slowest link, or `otherwise` if all bandwidths are infinite."""
        slowest = min((*self.downstream, *self.upstream, *self.replicas))
        return slowest if math.isfinite(slowest) else otherwise
