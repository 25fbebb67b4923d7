"""How many microbatches a replica of each stage may have begun and not finished. Pure; any thread."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipedream.common.document import check_whole
from pipedream.planning.plan_stage import Stage

__all__ = ["check_in_flight", "derive_in_flight", "in_flight_in_phase"]


def derive_in_flight(stages: Sequence[Stage]) -> tuple[int, ...]:
    """Returns the default of a plan: n_{S-1} = 1, n_s = 1 + ceil(n_{s+1} r_{s+1} / r_s)."""
    from pipedream import _core

    return tuple(_core.derive_in_flight([stage.num_replicas for stage in stages]))


def check_in_flight(in_flight: Sequence[int], stages: Sequence[Stage]) -> None:
    """Raises ValueError naming the stage for numbers that do not fit the stages or make them deadlock."""
    if len(in_flight) != len(stages):
        raise ValueError(
            f"in_flight has {len(in_flight)} numbers for {len(stages)} stages: it needs one per stage"
        )
    for stage_index, count in enumerate(in_flight):
        check_whole(f"in_flight[{stage_index}]", count, at_least=1)
    # A replica of stage s starts (n_s - 1) r_s microbatches before it must see the first one come back;
    # where a downstream stage waits for more than upstream ever admits, both wait for ever.
    admitted = [(count - 1) * stage.num_replicas for count, stage in zip(in_flight, stages, strict=True)]
    for stage_index in range(1, len(stages)):
        if admitted[stage_index] > admitted[stage_index - 1]:
            raise ValueError(
                f"in_flight[{stage_index}] is {in_flight[stage_index]}: it deadlocks, as (in_flight - 1) * "
                f"num_replicas rises from {admitted[stage_index - 1]} to {admitted[stage_index]} downstream"
            )


def in_flight_in_phase(in_flight: Sequence[int], stages: Sequence[Stage]) -> tuple[int, ...]:
    """Returns how many in flight let replicas that take turns wait for each other's gradients without
    losing time in a balanced plan: n_s = 1 + ceil((n_{s+1} r_{s+1} + r_s + r_{s+1} -
    2 gcd(r_s, r_{s+1})) / r_s), and at least what is in flight. Found by simulating all small plans."""
    in_phase = [in_flight[-1]]
    for stage_index in range(len(stages) - 2, -1, -1):
        here, below = (stages[index].num_replicas for index in (stage_index, stage_index + 1))
        held = in_phase[0] * below + here + below - 2 * math.gcd(here, below)
        in_phase.insert(0, max(in_flight[stage_index], 1 - -held // here))
    return tuple(in_phase)
