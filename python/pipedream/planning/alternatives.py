"""What else could be run than a plan: how long a minibatch takes with each. Pure; any thread; torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipedream.planning.layer_profile import Profile
from pipedream.planning.limits import Limits, NothingFitsError
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.plan_problem import PlanProblem, Stages
from pipedream.planning.runtime_costs import layer_cost_ms

__all__ = ["with_alternatives"]


def with_alternatives(plan: Plan, problem: PlanProblem) -> Plan:
    """The plan, which says how long a minibatch takes with each of them, and what was given."""
    layers_ms = [layer_cost_ms(layer, problem.runtime) for layer in problem.profile.layers]
    speeds = problem.limits.speeds
    free = replace(problem, limits=Limits(speeds=speeds), schedule="pipedream", microbatches=None)
    fastest_first = Limits(speeds=tuple(sorted(speeds, reverse=True)))
    straight = free.solve(layers_ms, problem.num_workers, True)[0]
    with contextlib.suppress(NothingFitsError):
        limits = replace(problem.limits, last_layers=(), num_replicas=())
        straight = replace(problem, limits=limits).solve(layers_ms, problem.num_workers, True)[0]

    def minibatch_ms(stages: Stages) -> float:
        is_alone = sum(stage.num_replicas for stage in stages) == 1
        chosen = replace(free, limits=fastest_first) if is_alone else free
        one = chosen.simulated_plan(stages) if free.is_simulated else chosen.formula_plan(stages)
        return one.bottleneck_ms or 0.0

    def one_at_a_time_ms(stages: Stages) -> float:
        if not free.is_simulated:
            boundary_ms = free.formula_plan(stages).predicted["boundary_ms"]
            return _model_parallel_ms(free.limits.slowed(free.profile, stages), boundary_ms)
        return replace(free, schedule="model_parallel").simulated_plan(stages).bottleneck_ms or 0.0

    whole = Stage(0, problem.profile.num_layers - 1)
    others = {
        "one_worker": (whole,),
        "data_parallel": (replace(whole, num_replicas=problem.num_workers),),
        "straight": straight,
    }
    times = {name: minibatch_ms(stages) for name, stages in others.items()}
    # Model parallelism runs the straight plan, one minibatch at a time.
    figures: dict[str, Any] = {"alternatives_ms": times | {"model_parallel": one_at_a_time_ms(straight)}}
    if speeds:
        figures["speeds"] = list(speeds[: plan.workers_used])
    given = {"boundaries": problem.limits.last_layers, "replicas": problem.limits.num_replicas}
    if any(given.values()):
        figures["given"] = [name for name, value in given.items() if value]
    if problem.limits.memory_bytes:
        figures["without_room"] = [name for name, stages in others.items() if not problem.has_room(stages)]
    return replace(plan, predicted=plan.predicted | figures)


def _model_parallel_ms(profile: Profile, boundary_ms: Sequence[float]) -> float:
    """By the paper's figures: all layers one after the other, and every boundary both ways."""
    return profile.compute_ms + sum(boundary_ms)
