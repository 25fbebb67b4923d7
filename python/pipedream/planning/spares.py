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
    stages, figures, why = _most_that_pay(plan.stages, spare_workers, figures_of)
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


def _most_that_pay(
    stages: Stages, spare_workers: int, figures_of: Callable[[Stages], dict[str, Any]]
) -> tuple[Stages, dict[str, Any], str]:
    """With as many spares as make the plan faster, and their figures; or why none does. Where several stages
    are as slow as each other the first spare pays only with the second."""
    best, best_figures = stages, figures_of(stages)
    figures, why = best_figures, "other stages are as slow, and there are too few spare workers for all"
    for _ in range(spare_workers):
        slowest = figures["stage_ms"].index(max(figures["stage_ms"]))
        refused = _why_no_more(stages, figures, slowest)
        if refused:
            why = refused
            break
        stages = _one_more(stages, slowest)
        of_more = figures_of(stages)
        if of_more["stage_ms"][slowest] >= figures["stage_ms"][slowest] * (1 - _GAIN_MIN):
            why = "the slowest stage would not be faster"
            break
        figures = of_more
        if _bottleneck_ms(figures) <= _bottleneck_ms(best_figures) * (1 - _GAIN_MIN):
            best, best_figures = stages, figures
    return best, best_figures, why


def _why_no_more(stages: Stages, figures: dict[str, Any], slowest: int) -> str:
    stage = stages[slowest]
    if max(figures["boundary_ms"], default=0.0) >= figures["stage_ms"][slowest]:
        return "a link between stages is slowest"
    if stage.num_replicas == 1:
        return f"stage {slowest}, the slowest, has no replicas"
    if stage.num_replicas == 2:
        return f"stage {slowest} has 2 replicas, whose links carry as much with spares as without"
    if stage.num_spare_shards == stage.num_replicas:
        return f"stage {slowest} has as many spares as replicas"
    return ""


def _one_more(stages: Stages, slowest: int) -> Stages:
    more = replace(stages[slowest], num_spare_shards=stages[slowest].num_spare_shards + 1)
    return (*stages[:slowest], more, *stages[slowest + 1 :])
