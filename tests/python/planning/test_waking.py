"""Tests the costs that items have after a wait, by closed forms. Workers have a core each, or share cores."""

from __future__ import annotations

from typing import Any

import pytest
from pipedream import _core
from pipedream.common.document import read_value, write_value
from pipedream.planning.item_cost import Waking, waking_share
from pipedream.planning.simulator import Conditions, SharedHost, Simulation, simulate

_WAKING = Waking(2.0, {"FORWARD": 0.25})
_MINIBATCHES = 16


def _programs(schedule: str) -> list[list[_core.Instruction]]:
    options = _core.ScheduleOptions(schedule, [2, 1], 1, _core.Placement.in_order([1, 1]))
    return [_core.make_program(options, rank, _MINIBATCHES) for rank in range(2)]


def _simulations(
    schedule: str, wakings_ms: list[tuple[float, float, float]], *after_ms: float
) -> list[Simulation]:
    """Simulates the schedule with a core per worker and with shared cores. wakings_ms has the costs of a
    forward, a backward and an update after waits of after_ms.
    """
    programs, times = _programs(schedule), _core.StageDurations(1.0, 2.0, wakings_ms=wakings_ms)
    hosts = (None, SharedHost(2, 2))
    return [simulate(programs, times, 0.0, Conditions(host, waking_after_ms=after_ms)) for host in hosts]


def test_a_part_of_the_wait_costs_a_part() -> None:
    assert [_WAKING.part(waited_ms) for waited_ms in (0.0, 0.5, 2.0, 50.0)] == [0.0, 0.25, 1.0, 1.0]
    assert Waking().part(10.0) == 0.0


def test_workers_that_wait_for_each_other_in_turn_wake_for_each_item() -> None:
    # A minibatch has 6 ms of work. Each stage waits for 3 ms of these, so its forward and its backward both
    # cost more.
    for simulation in _simulations("model_parallel", [(0.25, 0.5, 0.0)], 2.0):
        assert simulation.ms_per_minibatch == pytest.approx(6.0 + 2 * 0.25 + 2 * 0.5)


def test_a_worker_that_never_waits_never_wakes() -> None:
    for simulation in _simulations("pipedream", [(0.25, 0.0, 0.0)], 2.0):
        # It wakes only once, after the warm-up.
        assert simulation.ms_per_minibatch == pytest.approx(3.0, rel=0.005)


def test_nobody_pays_for_a_wait_twice() -> None:
    programs = _programs("model_parallel")
    times = _core.StageDurations(1.0, 2.0, 0.5, wakings_ms=[(0.25, 0.5, 0.125)])
    kinds = {"FORWARD": 0.25, "BACKWARD": 0.5, "UPDATE": 0.125}
    alone_ms = {"FORWARD": 1.0, "BACKWARD": 2.0, "UPDATE": 0.5}
    simulation = simulate(programs, times, 0.0, Conditions(waking_after_ms=[2.0]))
    for row in simulation.timeline:
        extra: dict[str, list[float]] = {}
        for timed in row:
            if timed.instruction.edge is None:
                opcode = timed.instruction.opcode
                extra.setdefault(opcode, []).append(timed.end_ms - timed.begin_ms - alone_ms[opcode])
        # A wait is counted from the last item of the same kind, so the first item of each kind pays nothing.
        for opcode, more_ms in extra.items():
            assert more_ms == pytest.approx([0.0] + [kinds[opcode]] * (_MINIBATCHES - 1))


def test_without_figures_nothing_wakes() -> None:
    plain = _simulations("model_parallel", [])
    woken = _simulations("model_parallel", [(0.0, 0.0, 0.0)], 2.0)
    assert [one.makespan_ms for one in plain] == [one.makespan_ms for one in woken]


def test_it_is_the_same_from_its_file() -> None:
    both = (_WAKING, Waking(8.0, {"UPDATE": 0.5}))
    assert read_value("waking", write_value(both), tuple[Waking, ...]) == both


def test_what_is_lost_at_once_and_what_is_lost_slowly_add_up() -> None:
    wakings = [_WAKING, Waking(8.0, {"FORWARD": 0.5})]
    assert waking_share(wakings, "FORWARD", 4.0) == pytest.approx(0.25 + 0.25)
    assert waking_share(wakings, "BACKWARD", 4.0) == 0
    # A stage waits for 3 + x ms before each forward, and the forward takes x ms longer. From x = 1 + 2 (3 +
    # x) / 8 follows x = 7 / 3.
    for simulation in _simulations("model_parallel", [(1.0, 0.0, 0.0), (2.0, 0.0, 0.0)], 2.0, 8.0):
        assert simulation.ms_per_minibatch == pytest.approx(6 + 2 * 7 / 3, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"after_ms": -1.0, "shares": {}}, "waking.after_ms is -1.0"),
        ({"after_ms": 1.0, "shares": {"FORWARD": "much"}}, "waking.shares.FORWARD is 'much'"),
        (
            {"after_ms": 1.0, "shares": {"SEND": 1.0}},
            "waking.shares has 'SEND': known are FORWARD",
        ),
    ],
)
def test_figures_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_value("waking", fields, Waking)
