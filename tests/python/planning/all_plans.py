"""Makes all possible plans, with which tests compare the result of an exact search. Also makes plans of given
stages.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.planning.layer_profile import Profile
from pipedream.planning.limits import Limits
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.plan_problem import PlanProblem

__all__ = ["enumerate_plans", "make_plan"]


def enumerate_plans(num_layers: int, num_workers: int, straight: bool = False) -> Iterator[tuple[Stage, ...]]:
    """Yields all plans on at most num_workers workers. With `straight` only those with one replica per
    stage.
    """

    def extend(first: int, left: int) -> Iterator[tuple[Stage, ...]]:
        if first == num_layers:
            yield ()
            return
        for last in range(first, num_layers):
            for replicas in range(1, (min(left, 1) if straight else left) + 1):
                for rest in extend(last + 1, left - replicas):
                    yield (Stage(first, last, replicas), *rest)

    yield from extend(0, num_workers)


def make_plan(
    profile: Profile,
    stages: tuple[Stage, ...],
    bytes_per_s: float,
    *,
    num_workers: int = 0,
    cost_model: str = "paper",
    workers_per_host: int | None = None,
    schedule: str = "pipedream",
    microbatches: int | None = None,
) -> Plan:
    """Returns the plan of these stages, without a codec, with the cost model's figures."""
    problem = PlanProblem(
        profile.without_factors(),
        num_workers,
        bytes_per_s,
        cost_model,
        False,
        workers_per_host,
        schedule,
        microbatches,
        Limits(),
    )
    return problem.simulated_plan(stages) if problem.is_simulated else problem.formula_plan(stages)
