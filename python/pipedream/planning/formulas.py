"""Figures of the paper's cost model for given stages (design.md, section 5). Pure; any thread; torch-free."""

from __future__ import annotations

import math
from typing import Any

from pipedream.planning.factor_rule import factored_sum
from pipedream.planning.layer_profile import Profile
from pipedream.planning.plan import Stage
from pipedream.planning.shard_shares import round_ms
from pipedream.planning.stage_links import StageLinks

__all__ = ["formula_figures", "parameter_bytes_of", "samples_per_s"]


def formula_figures(
    profile: Profile, stages: tuple[Stage, ...], links: StageLinks, *, microbatches: int = 1
) -> dict[str, Any]:
    """Returns the figures of each stage and boundary as a plan's `predicted` has them."""
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
    """T(i..j, m) of the cost model, in milliseconds, with rounds of lcm(M, m) / M minibatches of M
    microbatches; with spare shards their round in the place of its own, both directions of a link as there.
    Weights that go as factors as csrc/planner/stage_cost.h has them."""
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
