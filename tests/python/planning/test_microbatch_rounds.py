"""Tests that the programs of any plan read and keep the weight versions of docs/schedules.md.

The tests compute the rule a second time, and the validator checks the programs.
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream import _core

_SCHEDULES = ("pipedream", "unstashed", "vertical_sync", "2bw", "flush", "gpipe", "model_parallel")
_DRAINING = ("flush", "gpipe", "model_parallel")


@st.composite
def _options(draw: st.DrawFn) -> tuple[_core.ScheduleOptions, list[int]]:
    replicas = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    m = draw(st.integers(1, 8))
    schedule = draw(st.sampled_from(_SCHEDULES))
    in_flight = _core.derive_in_flight(replicas)
    if schedule == "2bw":
        m = next(
            more
            for more in range(m, 100)
            if all(math.lcm(more, r) // r >= n - 1 for n, r in zip(in_flight, replicas, strict=True))
        )
    how: dict[str, Any] = {}
    if schedule == "pipedream" and max(replicas) > 1:
        how = draw(st.sampled_from([{}, {"staleness": 2}, {"asynchronous": True}, {"uses_allreduce": True}]))
    if len(replicas) > 1 and "asynchronous" not in how:
        how["ties"] = draw(st.sampled_from([[], [(0, len(replicas) - 1)]]))
    placement = _core.Placement.in_order(replicas)
    return _core.ScheduleOptions(schedule, in_flight, m, placement, **how), replicas


@settings(max_examples=60, deadline=None)
@given(given_options=_options(), num_minibatches=st.integers(0, 9))
def test_programs_of_any_plan_read_what_the_rule_says_and_do_not_deadlock(
    given_options: tuple[_core.ScheduleOptions, list[int]], num_minibatches: int
) -> None:
    options, replicas = given_options
    report = _core.replay(options, num_minibatches)
    assert report["ok"], report["error"]
    for stage in range(len(replicas)):
        _check_stage(options, replicas, stage, num_minibatches)


def _check_stage(
    options: _core.ScheduleOptions, replicas: list[int], stage: int, num_minibatches: int
) -> None:
    m, schedule, in_flight = options.num_microbatches, options.schedule, options.in_flight
    drains = schedule in _DRAINING
    rounds = [math.lcm(m, *(replicas if drains else [r])) // m for r in replicas]
    own = [count * m // r for count, r in zip(rounds, replicas, strict=True)]
    for k in range(num_minibatches * m):
        newest = k // m // rounds[stage]
        read = newest
        if schedule in ("pipedream", "unstashed"):
            read = (k // replicas[stage] - in_flight[stage] + 1) // own[stage] - options.staleness
        elif schedule == "vertical_sync":
            seen = max(0, (k // replicas[0] - in_flight[0] + 1) // own[0])
            read = seen * rounds[0] // rounds[stage]
        elif schedule == "2bw":
            read = newest - 1
        assert _core.forward_version(options, stage, *divmod(k, m)) == max(0, read)
        backward = newest if schedule == "unstashed" else max(0, read)
        assert _core.backward_version(options, stage, *divmod(k, m)) == backward
    kept = {
        "pipedream": 1 + math.ceil((in_flight[stage] - 1) / own[stage]) + options.staleness,
        "vertical_sync": 1 + math.ceil(_between(rounds, replicas, in_flight, m, stage) / (rounds[stage] * m)),
        "2bw": 2,
    }
    assert _core.num_versions_kept(options, stage) == kept.get(schedule, 1)


def _between(rounds: list[int], replicas: list[int], in_flight: list[int], m: int, stage: int) -> int:
    of_input, here = rounds[0] * m, rounds[stage] * m
    return (in_flight[0] - 1) * replicas[0] + of_input - math.gcd(of_input, here)
