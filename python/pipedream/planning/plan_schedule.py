"""A plan with a schedule, as the core takes both. Pure; any thread; needs no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, overload

from pipedream.planning.layer_profile import Profile
from pipedream.planning.plan import Plan
from pipedream.planning.program import Program, schedule_name

if TYPE_CHECKING:
    from pipedream import _core

__all__ = [
    "any_schedule_of",
    "mean_delay",
    "mean_delays",
    "microbatches_min",
    "minibatches_of_round",
    "minibatches_per_body",
    "profile_of_rounds",
    "schedule_of",
    "schedule_to_run",
    "versions_kept",
]


def schedule_of(plan: Plan, schedule: str, num_microbatches: int) -> _core.ScheduleOptions:
    from pipedream import _core

    return _core.ScheduleOptions(schedule, list(plan.in_flight), num_microbatches, plan.placement)


@overload
def schedule_to_run(plan: Plan, schedule: str, microbatches: int | None) -> tuple[str, int]: ...
@overload
def schedule_to_run(
    plan: Plan, schedule: str | Program, microbatches: int | None
) -> tuple[str | Program, int]: ...
def schedule_to_run(
    plan: Plan, schedule: str | Program, microbatches: int | None
) -> tuple[str | Program, int]:
    """The schedule by its own name, and the microbatches: those of the plan where schedule is "auto", a
    program's own where it is one. microbatches: 1 or None where they were not given. Raises ValueError where
    the plan does not say, or does not go with the schedule."""
    if isinstance(schedule, Program):
        return schedule, _microbatches_of(schedule, plan, microbatches)
    if schedule != "auto":
        return schedule_name(schedule), microbatches or 1
    for name, value in (("schedule", plan.schedule), ("microbatches", plan.microbatches)):
        if value is None:
            raise ValueError(
                f"schedule is 'auto', which takes the plan's, and the plan has no {name}: make it by"
                " partition(..., schedule='auto'), or name the schedule here"
            )
    if microbatches not in (None, 1, plan.microbatches):
        raise ValueError(
            f"microbatches is {microbatches}, and schedule='auto' takes the plan's, {plan.microbatches}:"
            f" leave microbatches out, or give schedule={plan.schedule!r}"
        )
    assert plan.schedule is not None and plan.microbatches is not None
    return plan.schedule, plan.microbatches


def _microbatches_of(program: Program, plan: Plan, microbatches: int | None) -> int:
    if _ranks_of(program.listed.placement) != _ranks_of(plan.placement):
        of_plan = "-".join(str(stage.num_replicas) for stage in plan.stages)
        of_program = "-".join(map(str, program.replicas))
        raise ValueError(
            f"schedule is a program of stages {of_program} on {program.num_workers} workers, and the plan has"
            f" {of_plan} on {plan.placement.num_ranks}: give a plan of as many of each, by"
            f" partition(..., replicas={program.replicas})"
        )
    if microbatches not in (None, 1, program.microbatches):
        raise ValueError(
            f"microbatches is {microbatches}, and the program of schedule has {program.microbatches}: leave"
            " microbatches out"
        )
    return program.microbatches


def _ranks_of(placement: _core.Placement) -> list[list[int]]:
    """The ranks, by stage and replica."""
    return [
        [placement.rank_of(stage, replica) for replica in range(placement.num_replicas(stage))]
        for stage in range(placement.num_stages)
    ]


def microbatches_min(plan: Plan, schedule: str) -> int:
    """The fewest that a minibatch can have."""
    from pipedream import _core

    return _core.num_microbatches_min(schedule, list(plan.in_flight), plan.placement)


def any_schedule_of(plan: Plan, schedule: str) -> _core.ScheduleOptions:
    """The schedule with the fewest microbatches that it can have."""
    return schedule_of(plan, schedule, microbatches_min(plan, schedule))


def mean_delays(options: _core.ScheduleOptions) -> list[float]:
    """The mean delay of each stage, in its updates: how much older the version that a microbatch's forward
    reads is than the one that its gradient changes, long after the start. (n_s - 1) / c_s where a stage
    counts its own microbatches."""
    from pipedream import _core

    return [_core.mean_delay(options, stage) for stage in range(options.num_stages)]


def minibatches_per_body(options: _core.ScheduleOptions) -> int:
    """Number of minibatches after which a program repeats its lists."""
    return 1 if options.program is None else options.program.minibatches_per_body


def versions_kept(options: _core.ScheduleOptions) -> list[int]:
    """Number of weight versions that each stage keeps."""
    from pipedream import _core

    return [_core.num_versions_kept(options, stage) for stage in range(options.num_stages)]


def mean_delay(options: _core.ScheduleOptions) -> float:
    """The largest of mean_delays()."""
    return max(mean_delays(options))


def minibatches_of_round(options: _core.ScheduleOptions) -> list[float]:
    """Minibatches of a round that each replica has, by stage: less than 1 where it has some of one's
    microbatches."""
    from pipedream import _core

    rounds = [_core.rounds_of(options, index) for index in range(options.num_stages)]
    return [of_stage.own_per_round / of_stage.num_microbatches for of_stage in rounds]


def profile_of_rounds(profile: Profile, plan: Plan, options: _core.ScheduleOptions) -> Profile:
    """The profile with factors as large as those of a round."""
    if not any(layer.factors for layer in profile.layers):
        return profile
    layers = list(profile.layers)
    for stage, count in zip(plan.stages, minibatches_of_round(options), strict=True):
        for index in range(stage.first_layer, stage.last_layer + 1):
            weights = layers[index].factors or ()
            scaled = tuple(one._replace(factor_bytes=round(count * one.factor_bytes)) for one in weights)
            layers[index] = replace(layers[index], factors=scaled)
    return replace(profile, layers=tuple(layers))
