"""Workers that share cores: who runs, whose turn it is, and which core idles beside whom."""

from __future__ import annotations

import math

import pytest
from pipedream.planning.run_queues import TICK_MS, RunQueues


def _entered(num_workers: int, num_cores: int) -> RunQueues:
    queues = RunQueues(num_workers, num_cores)
    for worker in range(num_workers):
        queues.enter(worker)
    return queues


def test_with_a_core_for_each_all_run_and_nothing_changes_by_itself() -> None:
    queues = _entered(3, 3)
    assert sorted(queues.running()) == [0, 1, 2]
    assert queues.next_change_ms(0.0) == math.inf


@pytest.mark.parametrize(("num_cores", "turn_ms"), [(1, 0.7), (2, 1.4), (4, 2.1), (64, 2.8)])
def test_those_of_one_core_take_turns(num_cores: int, turn_ms: float) -> None:
    queues = _entered(num_cores + 1, num_cores)
    assert num_cores not in queues.running()
    assert queues.next_change_ms(0.0) == pytest.approx(turn_ms)
    queues.pass_time(0.0, queues.next_change_ms(0.0))
    assert num_cores in queues.running()
    assert 0 not in queues.running()


def test_who_comes_back_goes_to_its_own_core_or_to_an_idle_one() -> None:
    queues = _entered(2, 2)
    queues.leave(0)
    queues.enter(0)
    queues.leave(1)
    queues.enter(1)
    assert queues.running() == [0, 1]
    queues = RunQueues(3, 2)
    queues.enter(0)
    queues.enter(2)  # of core 0, too, which is busy
    assert queues.running() == [0, 2]


def test_an_idle_core_takes_a_waiting_worker_at_the_next_tick_and_not_before() -> None:
    queues = RunQueues(3, 2)
    for worker in (0, 1, 2):
        queues.enter(worker)
    queues.leave(1)
    assert queues.running() == [0]
    now_ms = 0.25
    while now_ms < TICK_MS:
        passing_ms = queues.next_change_ms(now_ms)
        queues.pass_time(now_ms, passing_ms)
        now_ms += passing_ms
        assert len(queues.running()) == (1 if now_ms < TICK_MS else 2)
    assert now_ms == pytest.approx(TICK_MS)
    assert sorted(queues.running()) == [0, 2]


def test_who_leaves_ends_its_turn() -> None:
    queues = RunQueues(2, 1)
    queues.enter(0)
    queues.enter(1)
    queues.pass_time(0.0, 0.5)
    queues.leave(0)
    queues.enter(0)
    assert queues.running() == [1]
    assert queues.next_change_ms(0.5) == pytest.approx(0.7)
