"""Checks the arguments of partition(). Each error is one line. Pure; any thread; needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipedream.common.checks import is_count, is_number, is_whole
from pipedream.planning.codec_choice import CodecChoice
from pipedream.planning.job import Job, Replication, ScheduleTraits, check_together, traits_where
from pipedream.planning.layer_profile import Profile
from pipedream.planning.link_profile import LinkProfile
from pipedream.planning.plan_stage import WORKERS_MAX
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
"""The ways in which a stage's replicas may synchronise."""
_COST_MODELS = ("paper", "calibrated")
AUTO = "auto"
"""The value of `schedule` or `microbatches` that lets partition() choose."""
CHOSEN_AMONG = ("flush", "pipedream", "unstashed")
"""The schedules to choose among. If two have the same delay and rate, the earlier one in this tuple wins."""
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
    codec: CodecChoice,
    sync: Any,
    staleness: Any,
) -> None:
    """Raises TypeError or ValueError for wrong arguments of partition(). links: the measured links, or
    None.
    """
    if not isinstance(profile, Profile):
        raise TypeError(
            f"profile is a {type(profile).__name__}: give a Profile, for example Profile.load(path)"
        )
    if not is_whole(num_workers):
        raise TypeError(f"num_workers is {num_workers!r}: give a whole number")
    if num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}: give at least 1")
    if num_workers > WORKERS_MAX:
        raise ValueError(f"num_workers is {num_workers}: plans are made for at most {WORKERS_MAX}")
    chooses_m = microbatches == AUTO
    given_m = None if chooses_m else microbatches
    for name, value in (("workers_per_host", workers_per_host), ("microbatches", given_m)):
        if value is not None and not is_count(value):
            raise ValueError(f"{name} is {value!r}: give at least 1, or leave it out")
    check_microbatches(given_m, profile)
    if not is_number(delay_max) or not delay_max >= 0:
        raise ValueError(f"delay_max is {delay_max!r}: give updates, 0 or more")
    if cost_model not in _COST_MODELS:
        raise ValueError(f"cost_model is {cost_model!r}: it is one of {', '.join(_COST_MODELS)}")
    rules = None if schedule == AUTO else _rules_of_planned(schedule)
    if links is not None and links.num_workers < num_workers:
        raise ValueError(
            f"bandwidth has the links of {links.num_workers} workers, but num_workers is {num_workers}:"
            " measure them with as many ranks"
        )
    if not is_count(spare_workers, at_least=0):
        raise ValueError(f"spare_workers is {spare_workers!r}: give a number of workers, 0 or more")
    if sync not in SYNCS:
        raise ValueError(f"sync is {sync!r}: it is one of {', '.join(SYNCS)}")
    if not is_count(staleness, at_least=0):
        raise ValueError(f"staleness is {staleness!r}: give a number of rounds, 0 or more")
    job = Job(
        schedule,
        ScheduleTraits() if rules is None else ScheduleTraits.of(rules.name),
        Replication(sync, staleness),
        spares=f"spare_workers is {spare_workers}" if spare_workers else None,
        codec=codec,
    )
    own: dict[str, tuple[bool, str | None]] = {
        "paper_costs": (cost_model == "paper", None),
        "calibrated_costs": (cost_model == "calibrated", None),
        "no_formulas": (rules is None or not rules.has_cost_formulas, f"schedule is {schedule!r}"),
        "measured_links": (links is not None, None),
        "speeds": (has_speeds, None),
        "workers_per_host": (workers_per_host is not None, f"workers_per_host is {workers_per_host}"),
        "delay_max": (delay_max != DELAY_MAX, f"delay_max is {delay_max!r}"),
        "nothing_chosen": (rules is not None and not chooses_m, None),
        "chosen_microbatches": (chooses_m, None),
        "fixed_schedule": (rules is not None and rules.name not in CHOSEN_AMONG, f"schedule is {schedule!r}"),
    }
    check_together(job.traits() | traits_where(own))


def _rules_of_planned(schedule: str) -> _core.ScheduleRules:
    """Returns the rules of a schedule for which partition() can choose stages and replicas. Raises ValueError
    for any other schedule.
    """
    from pipedream import _core

    def is_planned(rules: _core.ScheduleRules) -> bool:
        return rules.has_stage_per_worker and not rules.has_one_stage

    rules = _core.find_schedule_rules(schedule)
    if rules is not None and is_planned(rules):
        return rules
    planned = [name for name in _core.schedule_names() if is_planned(rules_of(name))]
    raise ValueError(f"schedule is {schedule!r}: plans are made for {', '.join([AUTO, *planned])}")


def check_microbatches(microbatches: int | None, profile: Profile) -> None:
    """Raises ValueError for more microbatches than a minibatch has samples."""
    samples = profile.batch_size
    if microbatches is not None and samples is not None and microbatches > samples:
        raise ValueError(
            f"microbatches is {microbatches}, and the profile's minibatches have {samples} samples: give at"
            " most as many"
        )
