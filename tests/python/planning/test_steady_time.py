"""Tests that steady_ms() gives the same time as simulate() for the same lists, to the bit, for every
schedule.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pipedream import _core
from pipedream.planning.simulator import (
    Conditions,
    SharedHost,
    ms_per_minibatch,
    simulate,
    steady_ms,
)

_SCHEDULES = ("pipedream", "vertical_sync", "naive", "2bw", "flush", "gpipe", "interleaved", "model_parallel")
_DURATION = st.floats(0, 9).map(lambda ms: round(ms, 3))


def _programs(options: _core.ScheduleOptions, num_minibatches: int) -> list[list[_core.Instruction]]:
    return [_core.make_program(options, rank, num_minibatches) for rank in range(options.num_workers)]


def _drawn_options(data: st.DataObject) -> _core.ScheduleOptions:
    schedule = data.draw(st.sampled_from(_SCHEDULES))
    if schedule == "interleaved":
        replicas = [1] * (2 * data.draw(st.integers(1, 3)))
        placement = _core.Placement.at_ranks([stage % 2 for stage in range(len(replicas))])
    else:
        replicas = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
        replicas = replicas[:1] * len(replicas) if schedule == "2bw" else replicas
        placement = _core.Placement.in_order(replicas)
    in_flight = _core.derive_in_flight(replicas)
    least = max(n * r for n, r in zip(in_flight, replicas, strict=True)) if schedule == "2bw" else 1
    has_ties = len(replicas) > 1 and data.draw(st.booleans())
    try:
        return _core.ScheduleOptions(
            schedule,
            in_flight,
            least + data.draw(st.integers(0, 3)),
            placement,
            recompute=[data.draw(st.booleans()) for _ in replicas],
            ties=[(0, len(replicas) - 1)] if has_ties else [],
            exchanges_norms=data.draw(st.booleans()),
            staleness=data.draw(st.integers(0, 2)) if schedule == "pipedream" else 0,
            uses_allreduce=max(replicas) > 1 and data.draw(st.booleans()),
        )
    except ValueError:  # the schedule does not allow these options together
        assume(False)
        raise


def _drawn_times(
    data: st.DataObject, num_stages: int, num_wakings: int
) -> tuple[list[_core.StageDurations], list[_core.BoundaryDurations]]:
    def drawn(count: int) -> list[float]:
        return [data.draw(_DURATION) for _ in range(count)]

    def chunks() -> dict[str, Any]:
        leads_ms = [sorted(drawn(2), reverse=True) for _ in range(data.draw(st.sampled_from((0, 3))))]
        return {
            "num_chunks": data.draw(st.integers(1, 3)),
            "push_leads_ms": [(first, last) for first, last in leads_ms],
            "updates_whole": data.draw(st.booleans()),
            "wakings_ms": [drawn(3) for _ in range(num_wakings)],
        }

    stage_times = [_core.StageDurations(*drawn(9), **chunks()) for _ in range(num_stages)]
    return stage_times, [_core.BoundaryDurations(*drawn(3)) for _ in range(num_stages - 1)]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_it_is_what_the_simulation_of_the_lists_says_to_the_bit(data: st.DataObject) -> None:
    options = _drawn_options(data)
    waking_after_ms = [data.draw(_DURATION) for _ in range(data.draw(st.integers(0, 2)))]
    times = _drawn_times(data, options.num_stages, len(waking_after_ms))
    num_minibatches = data.draw(st.integers(1, 20))
    hosts = [None, SharedHost(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)), 1.25)]
    how = Conditions(
        data.draw(st.sampled_from(hosts)),
        data.draw(st.sampled_from([{}, {"FORWARD": (0.5, 1.5)}])),
        waking_after_ms,
        data.draw(st.booleans()),
    )
    simulation = simulate(_programs(options, num_minibatches), *times, how)
    assert steady_ms(options, num_minibatches, *times, how) == ms_per_minibatch(simulation)


def test_durations_of_another_plan_are_refused() -> None:
    options = _core.ScheduleOptions(in_flight=[2, 1])
    times, boundary = _core.StageDurations(1.0, 2.0), _core.BoundaryDurations(1.0, 1.0)
    with pytest.raises(ValueError, match="stage_times has 1 entries for 2 stages: give one per stage"):
        steady_ms(options, 4, [times], [boundary], Conditions())
    with pytest.raises(ValueError, match="transfer_ms has 0 entries for 1 boundaries: give one per boundary"):
        steady_ms(options, 4, [times] * 2, [], Conditions())
    how: dict[str, Any] = {"one_link": False, "factors": {}, "shuffled": None}
    with pytest.raises(ValueError, match="stage 0 has 0 wakings for 1 times: give one for each"):
        _core.steady_ms(options, 4, [times] * 2, [boundary], host=None, waking_after_ms=[1.0], **how)
    with pytest.raises(ValueError, match="machines have 0 workers and 1 cores: give at least 1"):
        _core.steady_ms(options, 4, [times] * 2, [boundary], host=(0, [1.0]), waking_after_ms=[], **how)
    empty = _core.StageDurations(1.0, 1.0, num_chunks=0)
    with pytest.raises(ValueError, match=r"stage 0 has shards of 0\.0+ chunks: give at least 1"):
        _core.steady_ms(options, 4, [empty] * 2, [boundary], host=None, waking_after_ms=[], **how)


def test_norms_between_replicas_take_no_time_of_their_links() -> None:
    """Norms are small. If their exchange took as long as that of a shard, runs with max_grad_norm and
    replicas would be predicted too slow.
    """
    placement = _core.Placement.in_order([3])
    without, norms = (
        _core.ScheduleOptions(in_flight=[1], placement=placement, exchanges_norms=exchanged)
        for exchanged in (False, True)
    )
    times = [_core.StageDurations(1.0, 2.0, pull_ms=5.0)]
    assert any(step.edge and step.edge.kind == "norm" for step in _core.make_program(norms, 0, 3))
    assert steady_ms(norms, 12, times, [], Conditions()) == steady_ms(without, 12, times, [], Conditions())
