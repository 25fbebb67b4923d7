"""Tests simulations of instruction lists. Lists written by hand are compared to the millisecond, and all
schedules with closed forms. A round is the minibatches of one update.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream import _core
from pipedream.planning.plan import Plan
from pipedream.planning.plan_stage import in_flight_in_phase
from pipedream.planning.simulator import (
    Conditions,
    Simulation,
    TimedInstruction,
    simulate,
    summarize,
)
from simulating import FORWARD_1_BACKWARD_2, simulate_schedule

Programs: TypeAlias = list[list[_core.Instruction]]


class Step(NamedTuple):
    opcode: str
    stage: int
    minibatch: int
    microbatch: int = 0
    edge: _core.Edge | None = None
    replica: int = 0

    def __str__(self) -> str:
        """Returns the step as a line of a program. All versions are 0, because simulations do not use
        them.
        """
        where = str(self.edge) if self.edge else f"stage {self.stage}"
        if self.replica and not self.edge:
            where += f" replica {self.replica}"
        line = f"{self.opcode} {where} minibatch {self.minibatch}"
        if self.opcode == "UPDATE":
            return f"{line} writes version 0"
        if self.edge and self.edge.kind not in ("activation", "gradient"):
            return line
        line += f" microbatch {self.microbatch}"
        return line if self.edge else f"{line} reads version 0"


def programs_of(rows: Sequence[Sequence[Step]]) -> Programs:
    """Returns one list of instructions per worker."""
    lines = [line for worker, row in enumerate(rows) for line in (f"worker {worker}", *map(str, row))]
    return _core.parse_programs("\n".join(lines))


OPCODES = {"F": "FORWARD", "R": "RECOMPUTE", "B": "BACKWARD", "U": "UPDATE"}


def steps(text: str) -> list[Step]:
    """Parses steps. "0F3.1" is the forward of minibatch 3, microbatch 1, at stage 0. "0U3" is the update of
    minibatch 3.
    """
    made = []
    for word in text.split():
        minibatch, _, microbatch = word[2:].partition(".")
        made.append(Step(OPCODES[word[1]], int(word[0]), int(minibatch), int(microbatch or 0)))
    return made


def transfer(opcode: str, kind: str, from_stage: int, to_stage: int, step: Step) -> Step:
    stage = from_stage if opcode == "SEND" else to_stage
    edge = _core.Edge(kind, from_stage, to_stage)
    return Step(opcode, stage, step.minibatch, step.microbatch, edge=edge)


def lists(*programs: str) -> Programs:
    """Returns one list per worker. Adds sends and receives between neighbouring stages, even if one worker
    has both.
    """
    computed = [steps(text) for text in programs]
    last = max(step.stage for program in computed for step in program)
    return programs_of(
        [[made for step in program for made in with_transfers(step, last)] for program in computed]
    )


def with_transfers(step: Step, last: int) -> list[Step]:
    stage = step.stage
    if step.opcode == "FORWARD":
        before = [transfer("RECV", "activation", stage - 1, stage, step)] if stage > 0 else []
        after = [transfer("SEND", "activation", stage, stage + 1, step)] if stage < last else []
        return [*before, step, *after]
    if step.opcode == "BACKWARD":
        before = [transfer("RECV", "gradient", stage + 1, stage, step)] if stage < last else []
        after = [transfer("SEND", "gradient", stage, stage - 1, step)] if stage > 0 else []
        return [*before, step, *after]
    return [step]


def times_of(simulation: Simulation) -> list[list[tuple[float, float]]]:
    """Returns the begin and the end of each computation, worker by worker."""
    return [
        [(begin_ms, end_ms) for step, begin_ms, end_ms in row if step.edge is None]
        for row in simulation.timeline
    ]


def test_instruction_begins_when_its_worker_is_free_and_its_input_has_arrived() -> None:
    simulation = simulate(
        lists("0F0 0F1 0B0 0U0 0B1 0U1", "1F0 1B0 1U0 1F1 1B1 1U1"),
        [_core.StageDurations(1, 2, 0.5), _core.StageDurations(3, 4, 0.25)],
        [_core.BoundaryDurations(activation_ms=10, gradient_ms=20)],
    )
    assert times_of(simulation) == [
        [(0, 1), (1, 2), (38, 40), (40, 40.5), (58, 60), (60, 60.5)],
        [(11, 14), (14, 18), (18, 18.25), (21, 24), (24, 28), (28, 28.25)],
    ]
    assert simulation.makespan_ms == 60.5
    assert simulation.bubble_share == pytest.approx(1 - (2 * 3.5 + 2 * 7.25) / (2 * 60.5))


def test_link_carries_one_message_at_a_time_in_each_direction_and_keeps_no_compute_waiting() -> None:
    simulation = simulate(lists("0F0 0F1 0F2 0B0", "1F0 1B0 1F1 1F2"), _core.StageDurations(1, 1), 5.0)
    carried = [(t.what, t.minibatch, t.from_worker, t.begin_ms, t.end_ms) for t in simulation.transfers]
    assert carried == [
        ("activation", 0, 0, 1, 6),
        ("activation", 1, 0, 6, 11),
        ("gradient", 0, 1, 8, 13),
        ("activation", 2, 0, 11, 16),
    ]
    assert times_of(simulation)[0] == [(0, 1), (1, 2), (2, 3), (13, 14)]


def test_boundaries_between_the_same_two_workers_share_their_link() -> None:
    # Worker 0 has stages 0 and 2, worker 1 has 1 and 3. So boundaries 0 and 2 both go from worker 0 to worker
    # 1.
    programs = lists("0F0 2F0 0F1", "1F0 3F0 1F1")
    simulation = simulate(
        programs,
        _core.StageDurations(1, 1),
        [_core.BoundaryDurations(1, 0), _core.BoundaryDurations(1, 0), _core.BoundaryDurations(8, 0)],
    )
    assert [(t.begin_ms, t.end_ms) for t in simulation.transfers if t.from_worker == 0] == [
        (1, 2),
        (5, 13),
        (13, 14),
    ]


def test_nothing_travels_between_stages_of_one_worker() -> None:
    simulation = simulate(lists("0F0 1F0 1B0 0B0"), _core.StageDurations(1, 2), 100.0)
    assert simulation.transfers == ()
    assert simulation.makespan_ms == 6
    assert simulation.bubble_share == 0


def test_other_transfers_than_those_of_a_boundary_take_the_link_without_time_unless_all_do() -> None:
    tied = _core.Edge("tied_version", 0, 1)
    programs = programs_of(
        [
            [Step("UPDATE", 0, 0), Step("SEND", 0, 0, edge=tied)],
            [Step("RECV", 1, 0, edge=tied), Step("UPDATE", 1, 0)],
        ]
    )
    simulation = simulate(programs, _core.StageDurations(1, 1, 2), [_core.BoundaryDurations(10, 10)])
    assert times_of(simulation) == [[(0, 2)], [(2, 4)]]
    assert [(t.what, t.begin_ms, t.end_ms) for t in simulation.transfers] == [("tied_version", 2, 2)]


def test_what_several_workers_send_one_comes_by_its_line_in_the_order_of_time() -> None:
    edges = [_core.Edge("activation", 0, 1, from_replica=replica) for replica in range(3)]
    work = ([0, 3], [1], [2])  # minibatches of each replica; replica 0 sends its first one last
    rows = [
        [
            *(Step("FORWARD", 0, minibatch, replica=replica) for minibatch in of_replica),
            Step("SEND", 0, of_replica[0], edge=edges[replica], replica=replica),
        ]
        for replica, of_replica in enumerate(work)
    ]
    rows.append([Step("RECV", 1, minibatch, edge=edges[minibatch]) for minibatch in (1, 2, 0)])
    programs = programs_of(rows)
    for one_link, ends in ((False, [5, 5, 6]), (True, [5, 9, 13])):
        simulation = simulate(
            programs,
            _core.StageDurations(1, 1),
            [_core.BoundaryDurations(4, 4)],
            Conditions(one_link=one_link),
        )
        assert [t.end_ms for t in simulation.transfers] == ends
        assert simulation.makespan_ms == ends[-1]


def test_tied_parameters_and_norms_of_a_schedule_are_simulated() -> None:
    options = _core.ScheduleOptions(
        "flush", [3, 2, 1], num_microbatches=2, ties=[(0, 2)], exchanges_norms=True
    )
    programs = [_core.make_program(options, rank, 2) for rank in range(3)]
    simulation = simulate(programs, FORWARD_1_BACKWARD_2)
    carried = [t.what for t in simulation.transfers]
    assert {what: carried.count(what) for what in set(carried)} == {
        "activation": 8,
        "gradient": 8,
        "tied_gradient": 2,
        "tied_version": 2,
        "norm": 8,
    }


def test_recompute_takes_a_forward_unless_its_time_is_given() -> None:
    program = programs_of([steps("0F0 0R0 0B0 0U0")])
    assert times_of(simulate(program, _core.StageDurations(2, 3)))[0][1] == (2, 4)
    assert times_of(simulate(program, _core.StageDurations(2, 3, recompute_ms=0.5)))[0][1:3] == [
        (2, 2.5),
        (2.5, 5.5),
    ]


def test_the_first_microbatch_of_a_minibatch_has_times_of_its_own() -> None:
    times = _core.StageDurations(2, 4, later_forward_ms=1, later_backward_ms=5)
    simulation = simulate(programs_of([steps("0F0.0 0F0.1 0B0.0 0B0.1 0F1.0")]), times)
    assert times_of(simulation) == [[(0, 2), (2, 3), (3, 7), (7, 12), (12, 14)]]


def test_items_that_vary_hold_their_mean_over_a_deck_and_are_the_same_every_time() -> None:
    spread = {"FORWARD": (0.5, 1.0, 1.5)}
    programs = programs_of([steps(" ".join(f"0F{i} 0B{i}" for i in range(6)))])
    first, second = (
        simulate(programs, _core.StageDurations(2, 1), conditions=Conditions(spread=spread)) for _ in range(2)
    )
    assert first == second
    forwards = [end - begin for begin, end in times_of(first)[0][::2]]
    assert sorted(forwards[:3]) == sorted(forwards[3:]) == [1, 2, 3]
    assert first.makespan_ms == 6 * (2 + 1)


def test_lists_without_instructions_take_no_time() -> None:
    simulation = simulate([[], []], _core.StageDurations(1, 1))
    assert (simulation.makespan_ms, simulation.bubble_share, simulation.num_minibatches) == (0, 0, 0)
    assert (simulation.steady_bubble_share, simulation.ms_per_minibatch) == (None, None)


@pytest.mark.parametrize(
    ("programs", "options", "message"),
    [
        (
            ["0F0 0B0 0F1", "1F0 1F1 1B0"],
            {},
            r"the lists deadlock: worker 0 at position 2 \(RECV .*minibatch 0 microbatch 0\) waits for stage"
            r" 1 at worker 1; worker 1 at position 2 \(RECV .*minibatch 1 microbatch 0\) waits for stage 0 at"
            r" worker 0$",
        ),
        (["0F0 0B1 0F1", "1F0 1B0 1F1"], {}, "^BACKWARD stage 0 minibatch 1 microbatch 0 comes before its"),
        (["0F0 0B0", "1F0"], {}, r"worker 0 at position 2 .* waits for stage 1 at worker 1$"),
        (["0F0 0F0"], {}, "^FORWARD stage 0 minibatch 0 microbatch 0 is in the lists twice$"),
        (["0F0 0U0 0U0"], {}, "^UPDATE stage 0 minibatch 0 is in the lists twice$"),
        (["0F0", "0F1"], {}, "stage 0 is at worker 0 and at worker 1"),
        (["0F0 2F0"], {}, "stage 1 has no instructions, but stage 2 has"),
        (
            ["0F0", "1F0"],
            {"stage_times": [_core.StageDurations(1, 1)]},
            "stage_times has 1 entries for 2 stages",
        ),
        (["0F0", "1F0"], {"transfer_ms": []}, "transfer_ms has 0 entries for 1 boundaries"),
        (["1F0"], {}, "stage 0 has no instructions, but stage 1 has"),
    ],
)
def test_lists_and_figures_that_do_not_fit_are_refused(
    programs: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(lists(*programs), **({"stage_times": _core.StageDurations(1, 1)} | options))


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        simulate(lists("0F0 0B0"), _core.StageDurations(1, 1))
        assert gc.isenabled() == is_enabled
        with pytest.raises(ValueError, match="twice"):
            simulate(lists("0F0 0F0"), _core.StageDurations(1, 1))
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("schedule", ["flush", "gpipe"])
@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"), [(1, 1), (2, 1), (2, 4), (4, 4), (4, 32), (5, 3)]
)
@pytest.mark.parametrize(
    "times", [_core.StageDurations(1, 1), _core.StageDurations(1, 2), _core.StageDurations(0.3, 0.5)]
)
def test_bubble_of_a_flushed_minibatch_is_one_microbatch_per_other_stage(
    schedule: str, num_stages: int, num_microbatches: int, times: _core.StageDurations
) -> None:
    # GPipe (NeurIPS'19), section 2.3, gives the bubble's share as (S - 1) / (m + S - 1).
    simulation = simulate_schedule(schedule, num_stages, 3, num_microbatches=num_microbatches, times=times)
    expected = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert simulation.bubble_share == pytest.approx(expected)
    assert simulation.steady_bubble_share == pytest.approx(expected)
    per_minibatch_ms = (num_microbatches + num_stages - 1) * (times.forward_ms + times.backward_ms)
    assert simulation.ms_per_minibatch == pytest.approx(per_minibatch_ms)
    assert simulation.makespan_ms == pytest.approx(3 * per_minibatch_ms)


@pytest.mark.parametrize(("num_workers", "num_chunks"), [(2, 2), (2, 3), (4, 2), (3, 4)])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_interleaving_divides_the_bubble_by_the_chunks(
    num_workers: int, num_chunks: int, groups: int
) -> None:
    # Megatron-LM (SC'21), section 2.2.2, gives the bubble's share as (W - 1) / (v m + W - 1), with v stages
    # per worker.
    num_microbatches = groups * num_workers
    simulation = simulate_schedule(
        *("interleaved", num_workers * num_chunks, 3),
        num_microbatches=num_microbatches,
        num_workers=num_workers,
    )
    expected = (num_workers - 1) / (num_chunks * num_microbatches + num_workers - 1)
    assert simulation.bubble_share == pytest.approx(expected)
    assert simulation.steady_bubble_share == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["pipedream", "vertical_sync", "naive", "2bw"])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize("num_microbatches", [1, 8])
def test_steady_state_of_an_asynchronous_schedule_has_no_bubble(
    schedule: str, num_stages: int, num_microbatches: int
) -> None:
    if schedule == "2bw" and num_microbatches < num_stages:
        num_microbatches = num_stages
    simulation = simulate_schedule(schedule, num_stages, 20, num_microbatches=num_microbatches)
    assert simulation.steady_bubble_share == 0
    assert simulation.ms_per_minibatch == 3 * num_microbatches
    # However long the run is, its bubble is one warm-up and one cool-down.
    assert simulation.makespan_ms == 3 * (20 * num_microbatches + num_stages - 1)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_model_parallelism_keeps_one_worker_busy(num_stages: int) -> None:
    simulation = simulate_schedule("model_parallel", num_stages, 3)
    assert simulation.bubble_share == pytest.approx(1 - 1 / num_stages)
    assert simulation.steady_bubble_share == pytest.approx(1 - 1 / num_stages)
    assert simulation.ms_per_minibatch == 3 * num_stages


def test_slow_link_is_hidden_by_as_many_minibatches_in_flight_as_its_round_trip_takes() -> None:
    # A link is hidden with n_s = 1 + n_{s+1} + 2 C_s / T minibatches in flight. C_s is its time one way, and
    # T a stage's time. Here C_s = T, so stage 0 needs two more than without the link.
    options: dict[str, Any] = {"times": _core.StageDurations(1, 2), "transfer_ms": 3.0}
    for in_flight, is_hidden in (([2, 1], False), ([3, 1], False), ([4, 1], True)):
        simulation = simulate_schedule("pipedream", 2, 40, in_flight=in_flight, **options)
        assert (simulation.steady_bubble_share == 0) == is_hidden


def test_steady_figures_need_a_whole_minibatch_after_warm_up_and_before_cool_down() -> None:
    assert simulate_schedule("pipedream", 4, 7).steady_bubble_share is None
    assert simulate_schedule("pipedream", 4, 8).steady_bubble_share == 0
    assert simulate_schedule("flush", 4, 1, num_microbatches=4).ms_per_minibatch is None
    assert simulate_schedule("flush", 4, 2, num_microbatches=4).ms_per_minibatch == 21


def test_slowest_stage_sets_the_pace_and_the_others_wait() -> None:
    times = [_core.StageDurations(1, 2), _core.StageDurations(2, 4), _core.StageDurations(0.5, 1)]
    simulation = simulate_schedule("pipedream", 3, 30, times=times)
    assert simulation.ms_per_minibatch == pytest.approx(6)
    assert simulation.steady_bubble_share == pytest.approx(1 - (3 + 6 + 1.5) / (3 * 6))


def simulate_replicas(
    num_replicas: Sequence[int],
    *,
    schedule: str = "pipedream",
    staleness: int = 0,
    in_flight: Sequence[int] | None = None,
    rounds: int = 40,
    shard_ms: float = 0.0,
) -> Simulation:
    """Simulates balanced stages. With r replicas a stage takes 3 r ms for a minibatch at one replica."""
    options = _core.ScheduleOptions(
        schedule,
        list(in_flight or _core.derive_in_flight(num_replicas)),
        placement=_core.Placement.in_order(num_replicas),
        staleness=staleness,
    )
    num_minibatches = rounds * math.lcm(*num_replicas)
    programs = [_core.make_program(options, w, num_minibatches) for w in range(options.num_workers)]
    return simulate(programs, [_core.StageDurations(r, 2 * r, pull_ms=shard_ms) for r in num_replicas])


@pytest.mark.parametrize(
    ("num_replicas", "slowdown"),
    [
        ((2, 1), 1.0),
        ((3, 1), 1.0),
        ((15, 1), 1.0),
        ((2, 2), 1.0),
        ((1, 2), 5 / 4),
        ((2, 3), 4 / 3),
        ((3, 2), 7 / 6),
        ((1, 2, 1), 5 / 4),
    ],
    ids=str,
)
def test_replicas_that_are_out_of_phase_wait_for_each_other_unless_more_is_in_flight_or_read_older(
    num_replicas: tuple[int, ...], slowdown: float
) -> None:
    bsp = simulate_replicas(num_replicas)
    # Not exact, because the times repeat after another number of minibatches than a round has.
    assert bsp.ms_per_minibatch == pytest.approx(3 * slowdown, rel=2e-3)
    plan = Plan.replicated(len(num_replicas), num_replicas)
    in_phase = in_flight_in_phase(plan.in_flight, plan.stages)
    roomier = simulate_replicas(num_replicas, in_flight=in_phase)
    assert roomier.ms_per_minibatch == pytest.approx(3)
    assert simulate_replicas(num_replicas, staleness=2).ms_per_minibatch == pytest.approx(3)


@pytest.mark.parametrize("num_replicas", list(itertools.product((1, 2, 3, 4), repeat=2)), ids=str)
def test_plans_whose_replicas_wait_are_those_that_say_so(num_replicas: tuple[int, ...]) -> None:
    plan = Plan.replicated(2, num_replicas)
    waits = simulate_replicas(num_replicas, rounds=24).ms_per_minibatch != pytest.approx(3)
    in_phase = in_flight_in_phase(plan.in_flight, plan.stages)
    assert waits == (in_phase != plan.in_flight)
    assert waits == ("replicas that take turns wait for each other" in str(plan))
    remedies: tuple[dict[str, Any], ...] = (
        {"staleness": 2},
        {"in_flight": in_flight_in_phase(plan.in_flight, plan.stages)},
    )
    for options in remedies:
        assert simulate_replicas(num_replicas, rounds=24, **options).ms_per_minibatch == pytest.approx(3)


def test_data_parallel_waits_for_pushes_and_pulls_of_all_but_its_own_shard() -> None:
    # In a round each of 4 replicas pushes 3 shards to the others. Then it sends its own new shard to each of
    # the 3.
    simulation = simulate_replicas((4,), schedule="data_parallel", shard_ms=2.0)
    assert simulation.ms_per_minibatch == pytest.approx((4 * 3 + 2 * 3 * 2.0) / 4)
    assert simulation.steady_bubble_share == pytest.approx(1 - 12 / 24)
    assert {transfer.what for transfer in simulation.transfers} == {"push", "pull"}


def test_steady_window_of_replicas_begins_and_ends_with_a_round() -> None:
    # With 3-2 replicas all stages begin an update together at every sixth minibatch. The steady window leaves
    # out 5 minibatches at each end.
    assert simulate_replicas((3, 2), rounds=2).ms_per_minibatch is None
    assert simulate_replicas((3, 2), rounds=3).ms_per_minibatch == pytest.approx(3 * 7 / 6)


def test_instructions_of_one_replica_at_two_workers_are_refused_by_name() -> None:
    programs = programs_of([[Step("FORWARD", 1, 0, replica=2)]] * 2)
    with pytest.raises(ValueError, match="stage 1 replica 2 is at worker 0 and at worker 1"):
        simulate(programs, _core.StageDurations(1, 1))


def test_a_timeline_of_other_times_is_looked_at_alike() -> None:
    simulation = simulate_schedule("flush", 3, 4, num_microbatches=4)
    assert summarize(simulation.timeline) == replace(simulation, transfers=())
    later = [[TimedInstruction(step, b + 1, e + 1) for step, b, e in row] for row in simulation.timeline]
    assert summarize(later).makespan_ms == simulation.makespan_ms + 1
    assert summarize(later).ms_per_minibatch == simulation.ms_per_minibatch


def _work_ms(times_ms: Sequence[float], opcode: str, microbatch: int) -> float:
    """Returns the time of a computation. times_ms has the first arguments of StageDurations."""
    forward_ms, backward_ms, update_ms, recompute_ms, _, later_forward_ms, later_backward_ms = times_ms
    by_opcode = {
        "FORWARD": (forward_ms, later_forward_ms),
        "RECOMPUTE": (recompute_ms, recompute_ms),
        "BACKWARD": (backward_ms, later_backward_ms),
        "UPDATE": (update_ms, update_ms),
    }
    return by_opcode[opcode][min(microbatch, 1)]


SCHEDULES = ["pipedream", "vertical_sync", "naive", "2bw", "flush", "gpipe", "interleaved", "model_parallel"]


@settings(max_examples=150)
@given(data=st.data())
def test_every_instruction_begins_as_early_as_it_may_and_no_earlier(data: st.DataObject) -> None:
    schedule = data.draw(st.sampled_from(SCHEDULES))
    num_workers = data.draw(st.integers(2 if schedule == "interleaved" else 1, 4))
    num_stages = num_workers * (data.draw(st.integers(1, 3)) if schedule == "interleaved" else 1)
    num_microbatches = data.draw(st.integers(num_stages if schedule == "2bw" else 1, 6))
    durations = st.integers(0, 9).map(float)  # whole numbers, so that sums are exact
    times_ms = [[data.draw(durations) for _ in range(7)] for _ in range(num_stages)]
    transfer_ms = data.draw(durations)
    simulation = simulate_schedule(
        *(schedule, num_stages, data.draw(st.integers(1, 4))),
        num_microbatches=num_microbatches,
        num_workers=num_workers,
        recompute=data.draw(st.booleans()),
        times=[_core.StageDurations(*of_stage) for of_stage in times_ms],
        transfer_ms=transfer_ms,
    )
    ends = {
        (step.opcode, step.stage, step.minibatch, step.microbatch): end_ms
        for row in simulation.timeline
        for step, _, end_ms in row
        if step.edge is None
    }
    arrivals = {
        (t.what, t.from_worker, t.to_worker, t.minibatch, t.microbatch, t.end_ms)
        for t in simulation.transfers
    }
    for row in simulation.timeline:
        free_ms = 0.0
        for step, begin_ms, end_ms in row:
            if step.edge is not None:
                continue
            assert end_ms - begin_ms == _work_ms(times_ms[step.stage], step.opcode, step.microbatch)
            where = (step.minibatch, step.microbatch)
            source = None
            if step.opcode == "FORWARD" and step.stage > 0:
                source = ("activation", step.stage - 1, ends[("FORWARD", step.stage - 1, *where)])
            elif step.opcode == "BACKWARD" and step.stage < num_stages - 1:
                source = ("gradient", step.stage + 1, ends[("BACKWARD", step.stage + 1, *where)])
            is_remote = source is not None and num_workers > 1
            if source is not None:
                assert begin_ms >= source[2] + (transfer_ms if is_remote else 0.0)
            route = (source[0], source[1] % num_workers, step.stage % num_workers, *where) if source else ()
            just_arrived = is_remote and (*route, begin_ms) in arrivals
            assert begin_ms == free_ms or (begin_ms > free_ms and just_arrived)
            free_ms = end_ms
    assert simulation.makespan_ms == max(ends.values())


def _asynchronous(options: _core.ScheduleOptions, num_minibatches: int) -> list[Any]:
    workers = range(options.num_workers)
    return [_core.make_program(options, worker, num_minibatches) for worker in workers]


def test_asynchronous_replicas_wait_for_the_answer_and_not_for_the_round() -> None:
    options = _core.ScheduleOptions(
        schedule="data_parallel", placement=_core.Placement.in_order([2]), asynchronous=True
    )
    programs = _asynchronous(options, 8)
    simulation = simulate(programs, _core.StageDurations(1.0, 2.0, update_ms=0.5, pull_ms=2.0))
    # A minibatch takes 7.5 ms: 3 for forward and backward, 2 for the push, 0.5 for the other owner's update
    # and 2 for the pull. The replica's own update runs meanwhile.
    assert simulation.makespan_ms == pytest.approx(4 * 7.5)
    assert sum(transfer.what == "pull" for transfer in simulation.transfers) == 8


def test_an_asynchronous_replica_ends_with_its_own_minibatches() -> None:
    options = _core.ScheduleOptions(
        schedule="data_parallel", placement=_core.Placement.in_order([2]), asynchronous=True
    )
    programs = _asynchronous(options, 9)
    first, second = simulate(programs, _core.StageDurations(1.0, 2.0, pull_ms=1.0)).timeline
    assert first[-1].end_ms == 5 * 5.0, "its fifth minibatch has no other beside it"
    assert second[-1].end_ms == 4 * 5.0
