"""The rules that a schedule's name stands for: its row of csrc/schedule/schedule_rules.h. Pure; any thread;
needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipedream import _core

__all__ = ["rules_of", "schedule_name"]


def rules_of(schedule: str) -> _core.ScheduleRules:
    """Raises ValueError for a name that no schedule has."""
    from pipedream import _core

    rules = _core.find_schedule_rules(schedule)
    if rules is None:
        raise ValueError(f"schedule is {schedule!r}: it is one of {', '.join(_core.schedule_names())}")
    return rules


def schedule_name(name: str) -> str:
    """The name by which a schedule goes here, where this is an old one of it; else the name itself."""
    from pipedream import _core

    rules = _core.find_schedule_rules(name)
    return name if rules is None else rules.name
