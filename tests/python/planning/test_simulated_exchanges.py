"""Tests that simulated exchanges between replicas take the times that closed forms give. A round is the
minibatches of one update, one at each replica.

tests/cpp/planner/lanes_test.cc tests how the chunks of several transfers share one direction of a worker's
link.
"""

from __future__ import annotations

import pytest
from pipedream import _core
from pipedream.planning.simulator import Conditions, Simulation, Transfer, simulate, steady_ms

_REPLICATED = _core.ScheduleOptions(
    schedule="data_parallel", in_flight=[1], placement=_core.Placement.in_order([2])
)


def _simulated(options: _core.ScheduleOptions, times: _core.StageDurations, minibatches: int) -> Simulation:
    programs = [_core.make_program(options, rank, minibatches) for rank in range(options.num_workers)]
    boundaries = [_core.BoundaryDurations(3.0, 3.0)] * (options.num_stages - 1)
    return simulate(
        programs,
        [_core.StageDurations(1.0, 2.0)] * len(boundaries) + [times],
        boundaries,
        Conditions(one_link=True),
    )


def _carried(simulation: Simulation, what: str, from_worker: int, minibatch: int) -> Transfer:
    return next(
        transfer
        for transfer in simulation.transfers
        if (transfer.what, transfer.from_worker, transfer.minibatch) == (what, from_worker, minibatch)
    )


@pytest.mark.parametrize(("num_chunks", "round_ms"), [(1, 21.0), (2, 19.0), (4, 19.0)])
def test_chunks_are_updated_and_leave_while_others_come(num_chunks: int, round_ms: float) -> None:
    """With 2 chunks, the first one arrives after 4 of 8 ms, and is updated while the second one arrives. So
    its new version is ready before the link has sent all gradients.
    """
    times = _core.StageDurations(1.0, 2.0, 2.0, pull_ms=8.0, num_chunks=num_chunks)
    assert steady_ms(_REPLICATED, 20, [times], [], Conditions(one_link=True)) == pytest.approx(round_ms / 2)


def test_chunks_to_several_others_come_as_the_line_is_shared() -> None:
    """Each of three replicas pushes for 8 ms and pulls for 8 ms over its line. The first chunks arrive after
    4 ms, and are updated while the second ones arrive. So the line never idles, and exchanges take 16 ms
    of a round.
    """
    replicated = _core.ScheduleOptions(
        schedule="data_parallel", in_flight=[1], placement=_core.Placement.in_order([3])
    )
    times = _core.StageDurations(1.0, 2.0, 2.0, pull_ms=4.0, num_chunks=2)
    assert steady_ms(replicated, 30, [times], [], Conditions(one_link=True)) == pytest.approx((3 + 16) / 3)
    assert _carried(_simulated(replicated, times, 3), "pull", 0, 0).begin_ms == pytest.approx(3 + 8)


def test_an_update_that_waits_for_all_gradients_hides_nothing() -> None:
    times = _core.StageDurations(1.0, 2.0, 2.0, pull_ms=8.0, num_chunks=2, updates_whole=True)
    assert steady_ms(_REPLICATED, 20, [times], [], Conditions(one_link=True)) == pytest.approx(21 / 2)


def test_a_shard_s_version_waits_for_its_last_chunk() -> None:
    """Chunks arrive faster than they are updated, so the updates follow one another. The pull ends when the
    last chunk has been updated and sent.
    """
    times = _core.StageDurations(1.0, 2.0, 4.0, pull_ms=0.5, num_chunks=4)
    simulation = _simulated(_REPLICATED, times, 2)
    pull = _carried(simulation, "pull", 0, 0)
    assert pull.begin_ms == pytest.approx(3 + 0.5 / 4 + 1)
    assert pull.end_ms == pytest.approx(3 + 0.5 / 4 + 4 + 0.5 / 4)


def test_pushes_leave_during_the_backward_as_its_layers_are_done() -> None:
    leads_ms = [(1.0, 0.0), (1.5, 0.5)]  # for each owner, the leads of its two chunks
    times = _core.StageDurations(1.0, 2.0, 1.0, pull_ms=2.0, num_chunks=2, push_leads_ms=leads_ms)
    simulation = _simulated(_REPLICATED, times, 2)
    assert _carried(simulation, "push", 0, 0)[-2:] == pytest.approx((1.5, 3.5))
    assert _carried(simulation, "push", 1, 1)[-2:] == pytest.approx((2.0, 4.0))
    times = _core.StageDurations(1.0, 2.0, 1.0, pull_ms=0.2, num_chunks=2, push_leads_ms=leads_ms)
    assert _carried(_simulated(_REPLICATED, times, 2), "push", 0, 0).end_ms == pytest.approx(3 - 0.5 + 0.1)


def test_a_push_and_the_gradient_upstream_share_the_line() -> None:
    options = _core.ScheduleOptions(in_flight=[3, 1], placement=_core.Placement.in_order([1, 2]))
    simulation = _simulated(options, _core.StageDurations(1.0, 2.0, 1.0, pull_ms=5.0), 8)
    ends_ms = [_carried(simulation, what, 1, 0).end_ms for what in ("gradient", "push")]
    assert ends_ms == pytest.approx([1 + 3 + 3 + 6, 1 + 3 + 3 + 8])


def test_leads_that_cannot_be_are_refused() -> None:
    few = _core.StageDurations(1.0, 2.0, push_leads_ms=[(0.0, 0.0)])
    with pytest.raises(ValueError, match="stage 0 has 1 push leads and an owner 1: give one for each"):
        _simulated(_REPLICATED, few, 2)
