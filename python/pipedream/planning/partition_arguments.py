"""Checks of the arguments of partition(), each refused in one line. Pure; any thread; needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipedream.common.checks import is_number, is_whole
from pipedream.planning.layer_profile import Profile
from pipedream.planning.link_profile import LinkProfile
from pipedream.planning.program import rules_of

if TYPE_CHECKING:
    from pipedream import _core

__all__ = [
    "AUTO",
    "CHOSEN_AMONG",
    "DELAY_MAX",
    "check_microbatches",
    "check_partition_arguments",
]

SYNCS = ("bsp", "ssp", "asp", "allreduce")
"""How the replicas of a stage may be kept alike."""
_COST_MODELS = ("paper", "calibrated")
AUTO = "auto"
"""The schedule, or the microbatches, that partition() is to choose."""
CHOSEN_AMONG = ("flush", "pipedream", "unstashed")
"""By preference, where delay and rate are the same."""
DELAY_MAX = 1.0


def check_partition_arguments(
    profile: Any,
    num_workers: Any,
    links: LinkProfile | None,
    *,
    workers_per_host: Any,
    microbatches: Any,
    delay_max: Any,
    spare_workers: Any,
    cost_model: str,
    schedule: str,
    has_speeds: bool,
    has_factors: bool,
    sync: Any,
    staleness: Any,
) -> None:
    """Raises as partition(). links: where bandwidth is what was measured."""
    if not isinstance(profile, Profile):
        raise TypeError(
            f"profile is a {type(profile).__name__}: give a Profile, for example Profile.load(path)"
        )
    if not is_whole(num_workers):
        raise TypeError(f"num_workers is {num_workers!r}: give a whole number")
    if num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}: give at least 1")
    chooses_m = microbatches == AUTO
    given_m = None if chooses_m else microbatches
    for name, value in (("workers_per_host", workers_per_host), ("microbatches", given_m)):
        if value is not None and (not is_whole(value) or value < 1):
            raise ValueError(f"{name} is {value!r}: give at least 1, or leave it out")
    check_microbatches(given_m, profile)
    _check_delay_max(delay_max, is_chosen=chooses_m or schedule == AUTO)
    if cost_model not in _COST_MODELS:
        raise ValueError(f"cost_model is {cost_model!r}: it is one of {', '.join(_COST_MODELS)}")
    if workers_per_host is not None and cost_model != "calibrated":
        raise ValueError(
            f"workers_per_host is {workers_per_host}, which cost_model='calibrated' alone counts: give that,"
            " or leave workers_per_host out"
        )
    rules = None if schedule == AUTO else _rules_of_planned(schedule)
    has_formulas = rules is not None and rules.has_cost_formulas
    if chooses_m and rules is not None and rules.name not in CHOSEN_AMONG:
        raise ValueError(
            f"microbatches is 'auto', which is for schedule 'auto', {', '.join(map(repr, CHOSEN_AMONG))}, and"
            f" schedule is {schedule!r}: leave microbatches out, or give a number"
        )
    if has_speeds and (cost_model == "calibrated" or not has_formulas):
        raise ValueError(
            "speeds are planned for by cost_model='paper' with schedule 'pipedream': leave them out"
        )
    if links is not None and links.num_workers < num_workers:
        raise ValueError(
            f"bandwidth has the links of {links.num_workers} workers, but num_workers is {num_workers}:"
            " measure them with as many ranks"
        )
    if not is_whole(spare_workers) or spare_workers < 0:
        raise ValueError(f"spare_workers is {spare_workers!r}: give a number of workers, 0 or more")
    if spare_workers and (cost_model == "calibrated" or not has_formulas or links is not None):
        raise ValueError(
            "spare_workers are planned for by cost_model='paper' with schedule 'pipedream' and one bandwidth:"
            " leave them out, or give a plan's stages num_spare_shards yourself"
        )
    if spare_workers and has_factors:
        raise ValueError(
            "spare_workers own shards, and of factors replicas make versions by themselves: leave out"
            " spare_workers or codec"
        )
    if sync not in SYNCS:
        raise ValueError(f"sync is {sync!r}: it is one of {', '.join(SYNCS)}")
    is_asynchronous = rules is not None and rules.may_be_asynchronous
    if sync == "asp" and (not is_asynchronous or spare_workers or has_factors):
        raise ValueError(
            "sync is 'asp', which has schedule 'pipedream', no spare_workers and no factors: leave them out"
        )
    if sync == "allreduce" and (spare_workers or has_factors):
        raise ValueError("sync is 'allreduce', which has no spare_workers and no factors: leave them out")
    if not is_whole(staleness) or staleness < 0:
        raise ValueError(f"staleness is {staleness!r}: give a number of rounds, 0 or more")
    if staleness and (sync != "ssp" or rules is None or not rules.may_be_stale):
        raise ValueError(
            f"staleness is {staleness}, which goes with sync='ssp' and schedule 'pipedream': leave it out"
        )


def _rules_of_planned(schedule: str) -> _core.ScheduleRules:
    """Returns the rules of a schedule whose stages and replicas may be chosen."""
    from pipedream import _core

    def is_planned(rules: _core.ScheduleRules) -> bool:
        return rules.has_stage_per_worker and not rules.has_one_stage

    rules = _core.find_schedule_rules(schedule)
    if rules is not None and is_planned(rules):
        return rules
    planned = [name for name in _core.schedule_names() if is_planned(rules_of(name))]
    raise ValueError(f"schedule is {schedule!r}: plans are made for {', '.join([AUTO, *planned])}")


def _check_delay_max(delay_max: Any, *, is_chosen: bool) -> None:
    if not is_number(delay_max) or not delay_max >= 0:
        raise ValueError(f"delay_max is {delay_max!r}: give updates, 0 or more")
    if delay_max != DELAY_MAX and not is_chosen:
        raise ValueError(
            f"delay_max is {delay_max!r}, which limits a choice alone: give schedule='auto' or"
            " microbatches='auto', or leave it out"
        )


def check_microbatches(microbatches: int | None, profile: Profile) -> None:
    """Refuses more than a minibatch has samples."""
    samples = profile.batch_size
    if microbatches is not None and samples is not None and microbatches > samples:
        raise ValueError(
            f"microbatches is {microbatches}, and the profile's minibatches have {samples} samples: give at"
            " most as many"
        )
