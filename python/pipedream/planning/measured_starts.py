"""Where a search over measured links begins: the formulas know one bandwidth alone. Pure; any thread;
torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from pipedream.planning.limits import NothingFitsError
from pipedream.planning.link_profile import LinkProfile
from pipedream.planning.plan import Stage

__all__ = ["measured_starts"]

_SPEEDS_SOLVED_MAX = 8

Stages = tuple[Stage, ...]


def measured_starts(
    links: LinkProfile,
    num_workers: int,
    optimum_at: Callable[[float, int, bool], Stages],
    *,
    straight: bool,
) -> list[Stages]:
    """The optima for some of the links' bandwidths, each exact for its own alone; and plans with as many
    replicas at every stage, which fit machines of equal size.

    optimum_at: (bytes per second, workers, one replica per stage) -> the formulas' optimum. Raises what it
    raises where nothing fits at all.
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
    """The slowest, the fastest, and what is evenly between in their order."""
    last, count = len(ascending) - 1, min(len(ascending), _SPEEDS_SOLVED_MAX)
    return [ascending[index * last // max(count - 1, 1)] for index in range(count)]
