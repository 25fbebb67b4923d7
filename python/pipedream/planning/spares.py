"""Spare shards in a plan: how many pay, and what is said of it. Pure; any thread; needs no torch.

A spare shortens only what the replicas' synchronisation keeps: the formulas choose (shard_shares.py), and the
simulator, which sees what computing hides, confirms or refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipedream.planning.plan import Plan, Stage

__all__ = ["with_spares"]

_GAIN_MIN = 1e-3  # of the time per minibatch; below that a worker is better kept for something else

Stages = tuple[Stage, ...]


def with_spares(
    plan: Plan,
    spare_workers: int,
    figures_of: Callable[[Stages], dict[str, Any]],
    simulated_ms: Callable[[Plan], float],
) -> Plan:
    """The plan with as many of the spare workers as pay, each at the stage that is slowest then, and in
    `predicted` what that brings, or why it brings nothing. figures_of: what the formulas say of stages.
    simulated_ms: per minibatch."""
    if spare_workers == 0:
        return plan
    stages, figures, why = plan.stages, figures_of(plan.stages), ""
    while sum(stage.num_spare_shards for stage in stages) < spare_workers:
        more, why = _one_more(stages, figures)
        if more is None:
            break
        of_more = figures_of(more)
        if _bottleneck_ms(of_more) > _bottleneck_ms(figures) * (1 - _GAIN_MIN):
            why = "the slowest stage would not be faster"
            break
        stages, figures = more, of_more
    said: dict[str, Any] = {"offered": spare_workers, "used": 0, "why": why}
    if stages == plan.stages:
        return replace(plan, predicted=plan.predicted | {"spare_shards": said})
    spared = replace(plan, stages=stages)
    before_ms, after_ms = simulated_ms(plan), simulated_ms(spared)
    if after_ms > before_ms * (1 - _GAIN_MIN):
        said["why"] = "simulated, the replicas' exchange hides behind what they compute"
        return replace(plan, predicted=plan.predicted | {"spare_shards": said})
    formula_ms = plan.bottleneck_ms or 0.0
    said |= {
        "used": spared.num_spares,
        "why": "",
        "without_ms": formula_ms,
        "simulated_without_ms": before_ms,
        "simulated_ms": after_ms,
    }
    bottleneck_ms = _bottleneck_ms(figures)
    rate = plan.predicted.get("samples_per_s")
    faster = {"samples_per_s": None if rate is None else rate * formula_ms / bottleneck_ms}
    predicted = plan.predicted | figures | faster | {"spare_shards": said}
    return replace(spared, bottleneck_ms=bottleneck_ms, predicted=predicted)


def _bottleneck_ms(figures: dict[str, Any]) -> float:
    slowest: float = max([*figures["stage_ms"], *figures["boundary_ms"]])
    return slowest


def _one_more(stages: Stages, figures: dict[str, Any]) -> tuple[Stages | None, str]:
    """With one more spare at the slowest stage; or why not."""
    stage_ms = figures["stage_ms"]
    slowest = stage_ms.index(max(stage_ms))
    stage = stages[slowest]
    if max(figures["boundary_ms"], default=0.0) >= stage_ms[slowest]:
        return None, "a link between stages is slowest"
    if stage.num_replicas == 1:
        return None, f"stage {slowest}, the slowest, has no replicas"
    if stage.num_replicas == 2:
        return None, f"stage {slowest} has 2 replicas, whose links carry as much with spares as without"
    if stage.num_spare_shards == stage.num_replicas:
        return None, f"stage {slowest} has as many spares as replicas"
    more = replace(stage, num_spare_shards=stage.num_spare_shards + 1)
    return (*stages[:slowest], more, *stages[slowest + 1 :]), ""
