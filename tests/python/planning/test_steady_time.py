"""Tests that steady_ms() gives the same time as simulate() for the same lists, to the bit, for every
schedule.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pipedream import _core
from pipedream.planning.item_cost import StageWaking, Waking
from pipedream.planning.simulator import (
    SharedHost,
    StageTimes,
    TransferTimes,
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
    except ValueError:  # what schedules do not have together
        assume(False)
        raise


def _drawn_times(data: st.DataObject, num_stages: int) -> tuple[list[StageTimes], list[TransferTimes]]:
    def drawn(count: int) -> list[float]:
        return [data.draw(_DURATION) for _ in range(count)]

    def chunks() -> dict[str, Any]:
        leads_ms = [sorted(drawn(2), reverse=True) for _ in range(data.draw(st.sampled_from((0, 3))))]
        return {
            "num_chunks": data.draw(st.integers(1, 3)),
            "push_leads_ms": [(first, last) for first, last in leads_ms],
            "updates_whole": data.draw(st.booleans()),
        }

    stage_times = [StageTimes(*drawn(9), **chunks()) for _ in range(num_stages)]
    return stage_times, [TransferTimes(*drawn(3)) for _ in range(num_stages - 1)]


def _drawn_waking(data: st.DataObject, num_stages: int) -> StageWaking:
    kinds = data.draw(st.sets(st.sampled_from(("FORWARD", "BACKWARD", "UPDATE"))))
    wakings = [Waking(data.draw(_DURATION)) for _ in range(data.draw(st.integers(0, 2)))]
    by_stage_ms = [
        [{kind: data.draw(_DURATION) for kind in kinds} for _ in wakings] for _ in range(num_stages)
    ]
    return StageWaking(wakings, by_stage_ms)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_it_is_what_the_simulation_of_the_lists_says_to_the_bit(data: st.DataObject) -> None:
    options = _drawn_options(data)
    times = _drawn_times(data, options.num_stages)
    num_minibatches = data.draw(st.integers(1, 20))
    hosts = [None, SharedHost(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)), 1.25)]
    how: dict[str, Any] = {
        "waking": _drawn_waking(data, options.num_stages),
        "one_link": data.draw(st.booleans()),
        "host": data.draw(st.sampled_from(hosts)),
        "spread": data.draw(st.sampled_from([{}, {"FORWARD": (0.5, 1.5)}])),
    }
    simulation = simulate(_programs(options, num_minibatches), *times, **how)
    assert steady_ms(options, num_minibatches, *times, **how) == ms_per_minibatch(simulation)


def test_durations_of_another_plan_are_refused() -> None:
    options = _core.ScheduleOptions(in_flight=[2, 1])
    times, boundary = StageTimes(1.0, 2.0), TransferTimes(1.0, 1.0)
    with pytest.raises(ValueError, match="stage_times has 1 entries for 2 stages: give one per stage"):
        steady_ms(options, 4, [times], [boundary])
    with pytest.raises(ValueError, match="transfer_ms has 0 entries for 1 boundaries: give one per boundary"):
        steady_ms(options, 4, [times] * 2, [])
    how: dict[str, Any] = {"one_link": False, "factors": {}, "shuffled": None}
    durations, crossing = times.durations(), boundary.durations()
    with pytest.raises(ValueError, match="stage 0 has 0 wakings for 1 times: give one for each"):
        _core.steady_ms(options, 4, [durations] * 2, [crossing], host=None, waking_after_ms=[1.0], **how)
    with pytest.raises(ValueError, match="machines have 0 workers and 1 cores: give at least 1"):
        _core.steady_ms(options, 4, [durations] * 2, [crossing], host=(0, [1.0]), waking_after_ms=[], **how)
    empty = _core.StageDurations(
        forward_ms=1, later_forward_ms=1, backward_ms=1, later_backward_ms=1, num_chunks=0
    )
    with pytest.raises(ValueError, match=r"stage 0 has shards of 0\.0+ chunks: give at least 1"):
        _core.steady_ms(options, 4, [empty] * 2, [crossing], host=None, waking_after_ms=[], **how)


def test_norms_between_replicas_take_no_time_of_their_links() -> None:
    """An exchange of norms once took as long as that of a shard. So runs with max_grad_norm and replicas were
    predicted too slow.
    """
    placement = _core.Placement.in_order([3])
    without, norms = (
        _core.ScheduleOptions(in_flight=[1], placement=placement, exchanges_norms=exchanged)
        for exchanged in (False, True)
    )
    times = [StageTimes(1.0, 2.0, shard_ms=5.0)]
    assert any(step.edge and step.edge.kind == "norm" for step in _core.make_program(norms, 0, 3))
    assert steady_ms(norms, 12, times, []) == steady_ms(without, 12, times, [])
