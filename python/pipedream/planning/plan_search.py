"""Finds the best plan for a PlanProblem. Pure; any thread; needs no torch.

by formulas    The exact optimum of the paper's formulas, by a search in C++ (csrc/planner). The formulas know
               one bandwidth. With measured links a search (search.py) starts from several such optima.
by simulation  The best simulated time. A search (search.py) starts from the formulas' plans.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from pipedream.common.units import format_bytes
from pipedream.planning.factor_rule import FACTOR_CODEC
from pipedream.planning.layer_profile import Profile
from pipedream.planning.limits import NothingFitsError, nothing_fits
from pipedream.planning.link_profile import LinkProfile
from pipedream.planning.plan import Plan, Stage
from pipedream.planning.plan_problem import PlanProblem, Stages
from pipedream.planning.runtime_costs import layer_cost_ms
from pipedream.planning.search import OnPlan, search

__all__ = ["best_plan", "compared_with_factors"]

_SEARCHED_PLANS = 400
_COUNTS_MAX = 64
_SPEEDS_SOLVED_MAX = 8
_MEMORY_SOUGHT_MAX = 1_000  # layers times workers up to which _enough_memory() searches
_ALL_BYTES = 2.0**60


def best_plan(problem: PlanProblem, on_plan: OnPlan | None = None) -> Plan:
    """Returns the best plan, as far as a search finds it. Raises ValueError if no plan keeps to the limits.

    on_plan: called for every plan that the search scores, with the number of plans scored so far, the largest
    number that it may score, and the least milliseconds per minibatch so far.
    """
    if problem.is_simulated:
        return _by_simulation(problem, on_plan)
    if problem.links is not None and len(problem.links.speeds_of_first(problem.num_workers)) > 1:
        return _by_measured_links(problem, problem.links, on_plan)
    return _by_formulas(problem)


def compared_with_factors(plan: Plan, problem: PlanProblem, profile: Profile) -> Plan:
    """Adds to a plan the predicted time of the best plan with factors. Returns the plan unchanged if it is
    for factors already, if there are limits or measured links, or if the profile has no factors. profile: the
    problem's profile, with its factors.
    """
    has_factors = any(layer.factors for layer in profile.layers)
    if problem.codec or problem.limits.any or problem.links or not has_factors:
        return plan
    by_factors = _by_formulas(replace(problem, profile=profile, codec=FACTOR_CODEC))
    return replace(plan, predicted=plan.predicted | {"with_factors_ms": by_factors.bottleneck_ms})


def _by_formulas(problem: PlanProblem) -> Plan:
    layers_ms = [layer.compute_ms_with(problem.microbatches or 1) for layer in problem.profile.layers]
    try:
        stages, bottleneck_s, figures = problem.solve(layers_ms, problem.num_workers, problem.straight)
    except NothingFitsError as error:
        enough_bytes = _enough_memory(problem, layers_ms)
        known = "" if enough_bytes is None else f"; {format_bytes(enough_bytes)} each is enough"
        raise NothingFitsError(f"{error}{known}") from None
    plan = problem.formula_plan(stages, bottleneck_s * 1e3)
    return replace(plan, predicted=plan.predicted | figures)


def _enough_memory(problem: PlanProblem, layers_ms: list[float]) -> float | None:
    """Returns the memory per worker with which some plan would fit, to within two percent. Returns None if no
    memory is enough, because of other limits, or if the search would take long.
    """
    limits, num_workers = problem.limits, problem.num_workers
    if not limits.memory_bytes or problem.profile.num_layers * num_workers > _MEMORY_SOUGHT_MAX:
        return None

    def fits(num_bytes: float) -> bool:
        roomier = replace(problem, limits=replace(limits, memory_bytes=(num_bytes,) * num_workers))
        with contextlib.suppress(NothingFitsError):
            roomier.solve(layers_ms, num_workers, problem.straight)
            return True
        return False

    too_few, enough = 1.0, _ALL_BYTES
    if not fits(enough):
        return None
    while enough > too_few * 1.01:
        middle = math.sqrt(too_few * enough)
        too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
    return enough * 1.005  # the message rounds this number, and the rounded one must be enough, too


def _by_measured_links(problem: PlanProblem, links: LinkProfile, on_plan: OnPlan | None) -> Plan:
    """Searches for the plan that is fastest over the links of its own ranks."""
    layers_ms = [layer.compute_ms_with(problem.microbatches or 1) for layer in problem.profile.layers]

    def optimum_at(bytes_per_s: float, num_workers: int, straight: bool) -> Stages:
        return replace(problem, bytes_per_s=bytes_per_s).solve(layers_ms, num_workers, straight)[0]

    starts = _measured_starts(links, problem.num_workers, optimum_at, straight=problem.straight)
    allowed = [stages for stages in starts if problem.is_allowed(stages)] or starts[:1]
    return _found_from(problem, allowed, problem.formula_plan, problem.formula_plan, on_plan)


def _measured_starts(
    links: LinkProfile,
    num_workers: int,
    optimum_at: Callable[[float, int, bool], Stages],
    *,
    straight: bool,
) -> list[Stages]:
    """Returns starts for a search. They are the optima for some of the links' bandwidths, and plans whose
    stages have equal numbers of replicas. Such plans suit machines with equal numbers of workers.

    optimum_at: function of (bandwidth in bytes per second, number of workers, whether each stage has one
    replica) that returns the formulas' optimum. If no plan keeps to the limits, its error is raised.
    """
    speeds = links.speeds_of_first(num_workers)
    starts = [optimum_at(bytes_per_s, num_workers, straight) for bytes_per_s in _some_of(speeds)]
    for count in range(1, num_workers + 1) if not straight else ():
        if num_workers % count == 0:
            with contextlib.suppress(NothingFitsError):
                stages = optimum_at(speeds[0], count, True)
                starts.append(tuple(replace(stage, num_replicas=num_workers // count) for stage in stages))
    return starts


def _some_of(ascending: list[float]) -> list[float]:
    """Returns the slowest bandwidth, the fastest, and some between them, at evenly spaced positions in the
    list.
    """
    last, count = len(ascending) - 1, min(len(ascending), _SPEEDS_SOLVED_MAX)
    return [ascending[index * last // max(count - 1, 1)] for index in range(count)]


def _by_simulation(problem: PlanProblem, on_plan: OnPlan | None) -> Plan:
    m = problem.microbatches or 1
    layers_ms = [layer_cost_ms(layer, problem.runtime, m) for layer in problem.profile.layers]
    limits = problem.limits
    starts: list[Stages] = []
    for count in _some_counts(problem.num_workers):
        for straight in {problem.straight, True}:
            with contextlib.suppress(NothingFitsError):
                if limits.memory_bytes:
                    # The formulas count memory as for another schedule, so they might refuse this start.
                    roomy = replace(problem, limits=replace(limits, memory_bytes=()))
                    starts.append(roomy.solve(layers_ms, count, straight)[0])
                starts.append(problem.solve(layers_ms, count, straight)[0])
    if problem.rules.has_equal_replicas and not problem.straight:
        # The schedule 2bw has equal numbers of replicas at all stages, as in PipeDream-2BW's planner.
        equal = [
            tuple(replace(stage, num_replicas=problem.num_workers // len(stages)) for stage in stages)
            for stages in starts
        ]
        starts += equal
    allowed = [stages for stages in starts if problem.is_allowed(stages)]
    if not allowed:
        raise NothingFitsError(_why_none_is_allowed(problem, starts))
    without_spread = functools.partial(problem.simulated_plan, spreads=False)
    return _found_from(problem, allowed, without_spread, problem.simulated_plan, on_plan)


def _some_counts(num_workers: int) -> list[int]:
    """Returns the numbers of workers for which a start is computed: all from 1 to num_workers, or if these
    are too many, evenly spaced ones that include num_workers.
    """
    most = min(num_workers, _COUNTS_MAX)
    return [-(-num_workers * index // most) for index in range(1, most + 1)]


def _why_none_is_allowed(problem: PlanProblem, starts: Sequence[Stages]) -> str:
    if starts and not any(map(problem.has_microbatches, starts)):
        given = problem.microbatches is not None
        count = problem.microbatches if given else problem.profile.batch_size
        return (
            f"{'microbatches' if given else 'batch_size'} is {count}, and schedule {problem.schedule!r} needs"
            " as many microbatches as are in flight: give more, or fewer workers"
        )
    return nothing_fits(problem.num_workers, problem.limits, problem.straight)


def _found_from(
    problem: PlanProblem,
    starts: Sequence[Stages],
    scored: Callable[[Stages], Plan],
    planned: Callable[[Stages], Plan],
    on_plan: OnPlan | None,
) -> Plan:
    """Searches for the plan with the least bottleneck.

    scored: makes the plan of given stages; the search compares the bottlenecks of these plans. planned: makes
    the final plan of the stages that the search has found. Unlike scored, it may let the times of single
    items vary (item_cost.py), which slows plans whose workers wait for each other. So the final plan is also
    made for one worker alone, and the faster of the two is returned.
    """
    found = search(
        starts,
        lambda stages: scored(stages).bottleneck_ms or 0.0,
        num_layers=problem.profile.num_layers,
        num_workers=problem.num_workers,
        straight=problem.straight,
        plans_max=_SEARCHED_PLANS,
        allowed=problem.is_allowed,
        on_plan=on_plan,
    )
    alone: Stages = (Stage(0, problem.profile.num_layers - 1),)
    finalists = {stages: None for stages in (alone, found.stages) if problem.is_allowed(stages)}
    # min() returns the first of equally fast plans. That is the plan for one worker.
    plan = min(map(planned, finalists or [found.stages]), key=lambda plan: plan.bottleneck_ms or 0.0)
    figures = {"search": found.to_dict()}
    if problem.limits.any:
        figures |= problem.limits_of(plan, plan.microbatches or 1)
    return replace(plan, predicted=plan.predicted | figures)
