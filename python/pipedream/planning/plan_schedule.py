"""A plan with a schedule, as the core takes both. Pure; any thread; needs no torch."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pipedream.planning.layer_profile import Profile
from pipedream.planning.plan import Plan

if TYPE_CHECKING:
    from pipedream import _core

__all__ = ["any_schedule_of", "microbatches_min", "minibatches_of_round", "profile_of_rounds", "schedule_of"]


def schedule_of(plan: Plan, schedule: str, num_microbatches: int) -> _core.ScheduleOptions:
    from pipedream import _core

    return _core.ScheduleOptions(schedule, list(plan.in_flight), num_microbatches, plan.placement)


def microbatches_min(plan: Plan, schedule: str) -> int:
    """The fewest that a minibatch can have."""
    if schedule != "2bw":
        return 1

    def are_enough(m: int) -> bool:
        """Whether every replica has as many of an update as are in flight beside one."""
        counts = ((n, stage.num_replicas) for n, stage in zip(plan.in_flight, plan.stages, strict=True))
        return all(math.lcm(m, replicas) // replicas >= n - 1 for n, replicas in counts)

    return next(m for m in itertools.count(1) if are_enough(m))


def any_schedule_of(plan: Plan, schedule: str) -> _core.ScheduleOptions:
    """With some number of microbatches that it can have."""
    return schedule_of(plan, schedule, microbatches_min(plan, schedule))


def minibatches_of_round(options: _core.ScheduleOptions) -> list[float]:
    """By stage, that each replica has of a round: less than 1 where it has some microbatches of one."""
    from pipedream import _core

    rounds = [_core.rounds_of(options, index) for index in range(options.num_stages)]
    return [of_stage.own_per_round / of_stage.num_microbatches for of_stage in rounds]


def profile_of_rounds(profile: Profile, plan: Plan, schedule: str) -> Profile:
    """With factors as large as those of a round."""
    if not any(layer.factors for layer in profile.layers):
        return profile
    layers = list(profile.layers)
    for stage, count in zip(plan.stages, minibatches_of_round(any_schedule_of(plan, schedule)), strict=True):
        for index in range(stage.first_layer, stage.last_layer + 1):
            weights = layers[index].factors or ()
            scaled = tuple(one._replace(factor_bytes=round(count * one.factor_bytes)) for one in weights)
            layers[index] = replace(layers[index], factors=scaled)
    return replace(profile, layers=tuple(layers))
