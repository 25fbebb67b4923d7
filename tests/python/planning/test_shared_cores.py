"""Tests simulations of workers that share cores. They are compared with closed forms, and with simulate()
without shared cores.
"""

from __future__ import annotations

import pytest
from pipedream import _core
from pipedream.planning.simulator import Conditions, SharedHost, Simulation, simulate


def _programs(
    schedule: str, replicas: list[int], minibatches: int, m: int = 1
) -> list[list[_core.Instruction]]:
    options = _core.ScheduleOptions(
        schedule, _core.derive_in_flight(replicas), m, _core.Placement.in_order(replicas)
    )
    return [_core.make_program(options, rank, minibatches) for rank in range(options.num_workers)]


def _shared(
    programs: list[list[_core.Instruction]], times: _core.StageDurations, cores: int, alone_speed: float = 1.0
) -> Simulation:
    return simulate(programs, times, 0.0, Conditions(SharedHost(len(programs), cores, alone_speed)))


@pytest.mark.parametrize("schedule", ["pipedream", "flush", "gpipe", "2bw", "model_parallel"])
@pytest.mark.parametrize("replicas", [[1, 1, 1], [2, 1]])
def test_a_core_for_each_worker_changes_nothing(schedule: str, replicas: list[int]) -> None:
    programs = _programs(schedule, replicas, 24, 1 if schedule in ("pipedream", "model_parallel") else 4)
    times = _core.StageDurations(1.0, 2.0, 0.5, pull_ms=0.25)
    transfers = [_core.BoundaryDurations(0.125, 0.25, 0.0625)] * (len(replicas) - 1)
    shared = simulate(programs, times, transfers, Conditions(SharedHost(3, 3)))
    alone = simulate(programs, times, transfers)
    for mine, theirs in zip(shared.timeline, alone.timeline, strict=True):
        assert [step.instruction for step in mine] == [step.instruction for step in theirs]
        assert [step.end_ms for step in mine] == pytest.approx([step.end_ms for step in theirs])
    assert shared.ms_per_minibatch == pytest.approx(alone.ms_per_minibatch)


@pytest.mark.parametrize("cores", [1, 2])
def test_each_worker_counts_as_having_a_core(cores: int) -> None:
    simulation = _shared(_programs("pipedream", [1, 1, 1], 24), _core.StageDurations(1.0, 2.0), cores)
    assert simulation.ms_per_minibatch == pytest.approx(3.0)


def test_a_worker_is_faster_while_the_others_wait() -> None:
    programs = _programs("model_parallel", [1, 1], 16)
    together = _shared(programs, _core.StageDurations(1.0, 2.0), 2)
    faster = _shared(programs, _core.StageDurations(1.0, 2.0), 2, alone_speed=1.25)
    assert together.ms_per_minibatch == pytest.approx(6.0)
    assert faster.ms_per_minibatch == pytest.approx(6.0 / 1.25)
    busy = _shared(_programs("pipedream", [1, 1], 16), _core.StageDurations(1.0, 2.0), 2, alone_speed=1.25)
    assert busy.ms_per_minibatch == pytest.approx(3.0)


def test_each_other_worker_lengthens_an_item_equally() -> None:
    host = SharedHost(4, 4, alone_speed=1.75)
    lengths = [host.alone_speed / host.speed(at_work) for at_work in (1, 2, 3, 4)]
    assert lengths == pytest.approx([1.0, 1.25, 1.5, 1.75])


@pytest.mark.parametrize(("num_workers", "num_cores"), [(2, 2), (2, 4), (3, 4), (4, 4)])
def test_what_was_measured_with_so_many_workers_is_what_it_says_of_them(
    num_workers: int, num_cores: int
) -> None:
    host = SharedHost.measured(num_workers, num_cores, times_alone=3.0)
    assert host.speed(1) / host.speed(num_workers) == pytest.approx(3.0)


@pytest.mark.parametrize(("num_workers", "num_cores"), [(1, 2), (2, 1), (3, 2)])
def test_a_worker_is_never_slower_alone(num_workers: int, num_cores: int) -> None:
    assert SharedHost.measured(num_workers, num_cores, times_alone=1.0).alone_speed == 1.0


def test_workers_of_two_machines_do_not_share() -> None:
    programs = _programs("pipedream", [1, 1, 1, 1], 40)
    apart = simulate(programs, _core.StageDurations(1.0, 2.0), 0.0, Conditions(SharedHost(1, 2, 1.5)))
    assert apart.ms_per_minibatch == pytest.approx(3.0 / 1.5)
    pairs = simulate(programs, _core.StageDurations(1.0, 2.0), 0.0, Conditions(SharedHost(2, 2, 1.5)))
    # Not exact, because the window begins while a stage computes alone.
    assert pairs.ms_per_minibatch == pytest.approx(3.0, rel=0.01)


def test_lists_that_wait_for_each_other_are_refused() -> None:
    programs = _programs("flush", [1, 1], 2)
    with pytest.raises(ValueError, match="the lists deadlock: worker 0 at position"):
        _shared(
            [programs[0], [step for step in programs[1] if step.opcode != "SEND"]],
            _core.StageDurations(1, 2),
            2,
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_workers": 0}, "num_workers is 0"),
        ({"num_cores": 0}, "num_cores is 0"),
        ({"alone_speed": 0.5}, "alone_speed is 0.5: alone a worker is at least as fast"),
    ],
)
def test_machines_that_cannot_be_are_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SharedHost(**({"num_workers": 2, "num_cores": 2} | fields))  # type: ignore[arg-type]
