"""Chooses the schedule and the number of microbatches for partition() if one of the two is "auto". Every
combination of the two is planned and simulated. Among the combinations whose delay is at most delay_max
updates, the fastest one wins. Rates within 1 % of the highest count as equal. Of these the smallest delay
wins.

At stage s the mean delay of "pipedream" and "unstashed" is (n_s - 1) / c_s updates. n_s is the number of
microbatches in flight at each replica, c_s the number of one replica's microbatches between two updates
(csrc/schedule/rounds.h). "flush" has no delay. Pure; any thread; needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipedream.planning.formulas import samples_per_s
from pipedream.planning.limits import NothingFitsError
from pipedream.planning.partition_arguments import AUTO, CHOSEN_AMONG
from pipedream.planning.plan_problem import PlanProblem
from pipedream.planning.plan_schedule import mean_delay, schedule_of, versions_kept
from pipedream.planning.plan_search import best_plan
from pipedream.planning.program import rules_of
from pipedream.planning.runtime_costs import costs_of
from pipedream.planning.search import OnPlan

if TYPE_CHECKING:
    from pipedream import _core
    from pipedream.planning.plan import Plan

__all__ = ["best_of_schedules"]

_SAME_RATE = 0.01  # rates that differ by less count as the same
_ROUNDING = 1e-9


@dataclass(frozen=True)
class _Candidate:
    problem: PlanProblem
    """The problem with this candidate's schedule and microbatches."""
    plan: Plan | None
    """The candidate's plan; None if no plan keeps to the limits."""
    ms: float = 0.0
    """Milliseconds per minibatch."""
    delay: float = 0.0
    """Mean delay in updates, from mean_delay()."""
    bubble: float = 0.0
    """Share of the workers' time that they spend waiting, as RunResult.bubble_share."""
    versions: int = 0
    """Weight versions at the stage that keeps the most."""
    memory_bytes: float = 0.0
    """Bytes of the worker that needs the most memory."""

    def to_dict(self, *, is_chosen: bool) -> dict[str, Any]:
        named = {"schedule": self.problem.schedule, "microbatches": self.problem.microbatches}
        if self.plan is None:
            return named | {"fits": False}
        return named | {
            "chosen": is_chosen,
            "replicas": [stage.num_replicas for stage in self.plan.stages],
            "delay": self.delay,
            "bubble": self.bubble,
            "versions": self.versions,
            "memory_bytes": self.memory_bytes,
            "ms": self.ms,
            "samples_per_s": samples_per_s(self.problem.profile, self.ms),
        }


def best_of_schedules(
    problem: PlanProblem,
    delay_max: float,
    finished: Callable[[Plan, PlanProblem], Plan] | None,
    on_plan: OnPlan | None = None,
) -> tuple[Plan, PlanProblem]:
    """Returns the plan with the best schedule and number of microbatches, and the problem with both filled
    in. If the problem already has one of the two, no other value of it is tried.

    finished: a function that completes each plan that is found. Raises ValueError if no candidate keeps to
    the limits.
    """
    candidates: list[_Candidate] = []
    why: NothingFitsError | None = None
    for m in _counts(problem):
        for schedule in _schedules(problem):
            asked = replace(
                problem,
                schedule=schedule,
                microbatches=m,
                limits=replace(problem.limits, drains=rules_of(schedule).drains),
            )
            try:
                plan = _plan_for(asked, candidates, on_plan)
            except NothingFitsError as error:
                if why is None or asked.rules.has_cost_formulas:
                    why = error  # this error says how much memory would be enough
                candidates.append(_Candidate(asked, None))
                continue
            candidates.append(_finished(plan, asked, finished, delay_max))
    if why is not None and all(candidate.plan is None for candidate in candidates):
        raise why
    chosen = _chosen(candidates, delay_max)
    assert chosen.plan is not None
    rate = samples_per_s(problem.profile, chosen.ms)
    candidates.sort(key=lambda candidate: CHOSEN_AMONG.index(candidate.problem.schedule))
    rows = [candidate.to_dict(is_chosen=candidate is chosen) for candidate in candidates]
    figures: dict[str, Any] = {"samples_per_s": rate, "candidates": rows, "delay_max": delay_max}
    m = chosen.problem.microbatches or 1
    if problem.cost_model == "paper" and problem.profile.microbatches_timed is None:
        figures["microbatch_times"] = "scaled"
    plan = replace(
        chosen.plan,
        schedule=chosen.problem.schedule,
        microbatches=m,
        bottleneck_ms=chosen.ms,
        predicted=chosen.plan.predicted | figures,
    )
    return plan, chosen.problem


def _finished(
    plan: Plan,
    problem: PlanProblem,
    finished: Callable[[Plan, PlanProblem], Plan] | None,
    delay_max: float,
) -> _Candidate:
    """Returns the candidate of a plan that `finished` has completed. The function may put more microbatches
    in flight and so raise the delay. If this raises the delay above delay_max, the plan stays as it is.
    """
    plain = _looked_at(plan, problem)
    if finished is None:
        return plain
    raised = _looked_at(finished(plan, problem), problem)
    return plain if plain.delay <= delay_max < raised.delay else raised


def _schedules(problem: PlanProblem) -> Sequence[str]:
    return CHOSEN_AMONG if problem.schedule == AUTO else (problem.schedule,)


def _counts(problem: PlanProblem) -> Sequence[int]:
    if problem.microbatches is not None:
        return [problem.microbatches]
    return problem.profile.microbatch_counts(2 * problem.num_workers)


def _plan_for(problem: PlanProblem, others: Sequence[_Candidate], on_plan: OnPlan | None) -> Plan:
    """Returns the best plan for a problem. If memory is not limited, schedules whose workers do the same work
    have the same best stages. The stages of an earlier candidate are then reused.
    """
    if not problem.limits.memory_bytes:
        for other in others:
            is_alike = problem.rules.works_as(other.problem.rules)
            if is_alike and other.problem.microbatches == problem.microbatches and other.plan is not None:
                return problem.simulated_plan(other.plan.stages)
    return best_plan(problem, on_plan)


def _looked_at(plan: Plan, problem: PlanProblem) -> _Candidate:
    m = problem.microbatches or 1
    costed = problem.costed(plan)
    options = schedule_of(costed, problem.schedule, m)
    simulated_ms = plan.bottleneck_ms if problem.is_simulated else None
    ms = problem.simulated_ms(plan) if simulated_ms is None else simulated_ms
    memory_bytes = plan.predicted.get("memory_bytes")
    if memory_bytes is None:
        memory_bytes = problem.limits.memory_with(plan.stages, problem.profile, options)["memory_bytes"]
    busy_ms = _busy_ms(costed, options)
    return _Candidate(
        problem,
        plan,
        ms,
        delay=mean_delay(options),
        bubble=max(0.0, 1 - busy_ms / ms) if ms > 0 else 0.0,
        versions=max(versions_kept(options)),
        memory_bytes=memory_bytes,
    )


def _busy_ms(plan: Plan, options: _core.ScheduleOptions) -> float:
    """Returns for how many milliseconds per minibatch a worker computes, as the mean over the workers."""
    from pipedream import _core

    costs = costs_of(plan, drains=_core.drains_every_minibatch(options)) or []
    total_ms, num_workers = 0.0, 0
    for index, (cost, stage) in enumerate(zip(costs, plan.stages, strict=True)):
        stage_ms = cost.stage_ms(stage.num_replicas, _core.rounds_of(options, index))
        total_ms += stage.num_replicas * stage_ms
        num_workers += stage.num_replicas
    return total_ms / num_workers


def _chosen(candidates: Sequence[_Candidate], delay_max: float) -> _Candidate:
    fitting = [candidate for candidate in candidates if candidate.plan is not None]
    allowed = [candidate for candidate in fitting if candidate.delay <= delay_max + _ROUNDING]
    if not allowed:
        least = min(candidate.delay for candidate in fitting)
        raise ValueError(
            f"delay_max is {delay_max:g}, and every plan that was found is later, by {least:.3g} updates or"
            " more: raise it, or give schedule='auto', which may choose 'flush', without a delay"
        )
    near_ms = min(candidate.ms for candidate in allowed) / (1 - _SAME_RATE)
    near = [candidate for candidate in allowed if candidate.ms <= near_ms]
    order = CHOSEN_AMONG.index
    return min(near, key=lambda one: (one.delay, order(one.problem.schedule), one.problem.microbatches))
