"""Translates a plan and a schedule into the core's options. Pure; any thread; needs no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from pipedream.planning.layer_profile import Profile
from pipedream.planning.plan import Plan
from pipedream.planning.plan_stage import ranks_of
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


_Schedule = TypeVar("_Schedule", bound=str | Program)


def schedule_to_run(plan: Plan, schedule: _Schedule, microbatches: int | None) -> tuple[_Schedule | str, int]:
    """Returns the schedule and the number of microbatches of a run. "auto" takes both from the plan. A
    program contains its number of microbatches. An old name of a schedule is replaced by its present one.

    microbatches: 1 or None if the user gave none. Raises ValueError if a value contradicts the plan or the
    program, or if "auto" finds no schedule in the plan.
    """
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
    if ranks_of(program.listed.placement) != ranks_of(plan.placement):
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


def microbatches_min(plan: Plan, schedule: str) -> int:
    """Returns the fewest microbatches that a minibatch may have with this plan and schedule."""
    from pipedream import _core

    return _core.num_microbatches_min(schedule, list(plan.in_flight), plan.placement)


def any_schedule_of(plan: Plan, schedule: str) -> _core.ScheduleOptions:
    """Returns the core's options for the plan and schedule, with the fewest microbatches that are
    possible.
    """
    return schedule_of(plan, schedule, microbatches_min(plan, schedule))


def mean_delays(options: _core.ScheduleOptions) -> list[float]:
    """Returns each stage's mean delay, in updates of that stage, long after the start.

    The delay of a microbatch is the version that its gradient updates minus the version that its forward
    read. Under `pipedream` and `unstashed` the mean is (n_s - 1) / c_s plus the staleness. n_s is the number
    of microbatches in flight at each replica, c_s the number of one replica's microbatches between two
    updates. VersionRule in csrc/schedule/rounds.h has the formula of all named schedules.
    """
    from pipedream import _core

    return [_core.mean_delay(options, stage) for stage in range(options.num_stages)]


def minibatches_per_body(options: _core.ScheduleOptions) -> int:
    """Returns the number of minibatches after which a program's lists of instructions repeat. It is 1 for
    named schedules.
    """
    return 1 if options.program is None else options.program.minibatches_per_body


def versions_kept(options: _core.ScheduleOptions) -> list[int]:
    """Returns the number of weight versions that each stage keeps."""
    from pipedream import _core

    return [_core.num_versions_kept(options, stage) for stage in range(options.num_stages)]


def mean_delay(options: _core.ScheduleOptions) -> float:
    """Returns the largest of mean_delays()."""
    return max(mean_delays(options))


def minibatches_of_round(options: _core.ScheduleOptions) -> list[float]:
    """Returns for each stage how many minibatches one replica trains in a round, which is the work between
    two updates. The number is below 1 if a replica gets only some microbatches of a minibatch.
    """
    from pipedream import _core

    rounds = [_core.rounds_of(options, index) for index in range(options.num_stages)]
    return [of_stage.own_per_round / of_stage.num_microbatches for of_stage in rounds]


def profile_of_rounds(profile: Profile, plan: Plan, options: _core.ScheduleOptions) -> Profile:
    """Returns the profile with factor_bytes for the minibatches of a round, instead of for one minibatch."""
    if not any(layer.factors for layer in profile.layers):
        return profile
    layers = list(profile.layers)
    for stage, count in zip(plan.stages, minibatches_of_round(options), strict=True):
        for index in range(stage.first_layer, stage.last_layer + 1):
            weights = layers[index].factors or ()
            scaled = tuple(one._replace(factor_bytes=round(count * one.factor_bytes)) for one in weights)
            layers[index] = replace(layers[index], factors=scaled)
    return replace(profile, layers=tuple(layers))
