"""Tests memory.py: the memory terms of a worker, and the savings that it chooses to fit into a limit."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from pipedream import Plan, _core
from pipedream.budget.footprint import Footprint
from pipedream.budget.memory import (
    GRADIENTS,
    MODEL,
    OPTIMIZER_STATE,
    STASH,
    TIED_VERSIONS,
    TORCH_OPTIMIZER_STATE,
    TRANSIENT,
    WEIGHT_VERSIONS,
    MemoryPlan,
    StageBytes,
    choose_savings,
    describe_memory,
    model_bytes,
)
from pipedream.links.channels import RunChannel
from pipedream.planning.plan import Stage
from pipedream.splitting.splitter import split
from torch import nn

_KIB = 1024
_GENERATORS = 8192


def _footprint(*, stash: int = 100, inputs: int = 10, outputs: int = 20, transient: int = 7) -> Footprint:
    """KiB."""
    return Footprint(
        input_bytes=inputs * _KIB,
        stash_bytes=stash * _KIB,
        transient_bytes=transient * _KIB,
        gradient_bytes=4 * _KIB,
        is_measured=True,
        output_bytes=outputs * _KIB,
    )


_STAGE = StageBytes(weights=3 * _KIB)


def _memory(
    schedule: str = "pipedream", *, rank: int = 0, microbatches: int = 1, num_workers: int = 4, **given: Any
) -> MemoryPlan:
    """Returns the memory plan of one rank in a pipeline of four stages. `given` replaces fields that are set
    here.
    """
    plan = Plan.straight(4, 4, num_workers=num_workers)
    options = _core.ScheduleOptions(schedule, plan.in_flight, microbatches, plan.placement)
    fields: dict[str, Any] = {
        "footprints": {stage: _footprint() for stage in range(4)},
        "channels": [],
        "stages": dict.fromkeys(range(4), _STAGE),
        "model_bytes": 0,
    }
    return MemoryPlan(plan, rank, options, **(fields | given))


def _kib(memory: MemoryPlan) -> dict[str, float]:
    return {name: num_bytes / _KIB for name, num_bytes in memory.terms().items()}


# Maps (schedule, microbatches) to (versions kept, microbatches in flight) at stage 1 of 4.
_TABLE = {
    ("pipedream", 1): (3, 3),
    ("vertical_sync", 1): (4, 3),
    ("naive", 1): (1, 3),
    ("2bw", 4): (2, 3),
    ("flush", 4): (1, 3),
    ("gpipe", 4): (1, 4),
    ("model_parallel", 4): (1, 1),
}


def _waiting(memory: MemoryPlan, kind: str, from_stage: int, to_stage: int) -> int:
    """Returns the most items that can wait on the edge at once."""
    edges = dict(_core.replay(memory.schedule, 10)["edges"])
    return int(edges[_core.Edge(kind, from_stage, to_stage)])


def _gradients_beside(memory: MemoryPlan, stage: int) -> int:
    """Returns how many gradients a stage may hold besides the stashes of all its microbatches in flight.

    They are the gradients of microbatches that only the stage upstream still has in flight, and one that is
    released late.
    """
    here, upstream = (_core.num_microbatches_in_flight(memory.schedule, s) for s in (stage, stage - 1))
    return min(_waiting(memory, "gradient", stage, stage - 1), upstream - here) + 1


@pytest.mark.parametrize(("schedule", "microbatches"), _TABLE)
def test_versions_and_stash_are_as_many_as_the_schedule_keeps(schedule: str, microbatches: int) -> None:
    versions, in_flight = _TABLE[schedule, microbatches]
    memory = _memory(schedule, rank=1, microbatches=microbatches)
    gradients_waiting = _gradients_beside(memory, 1)
    assert _kib(memory) == {
        WEIGHT_VERSIONS: versions * 3,
        STASH: in_flight * 100 + gradients_waiting * 10,
        GRADIENTS: 4,
        TRANSIENT: 7,
    }


def test_gradients_that_are_larger_than_what_is_kept_wait_in_its_place() -> None:
    footprints = {stage: _footprint(stash=1, inputs=10) for stage in range(4)}
    memory = _memory("flush", rank=1, microbatches=4, footprints=footprints)
    # Stage 0 has four microbatches in flight, and nothing is kept here.
    assert _waiting(memory, "gradient", 1, 0) == 4
    assert _kib(memory)[STASH] == 4 * 10 + 10


def _most_held(
    options: _core.ScheduleOptions, stage: int, kept: int, gradient: int, count: int | None = None
) -> int:
    """Returns the most bytes that replica 0 of the stage has at once, by executing the workers' lists.

    The replica has `kept` bytes for each microbatch between forward and backward, and `gradient` bytes for
    each gradient that no worker has received. Other workers do only what this replica waits for. `count` is
    the number of minibatches. With None the result is the largest for several numbers, because a run may end
    between two updates.
    """
    placement = options.placement
    if count is None:
        replicas = [placement.num_replicas(index) for index in range(options.num_stages)]
        least = (2 * max(options.in_flight) + 2) * max(replicas)
        counts = range(least, least + math.lcm(*replicas))
        return max(_most_held(options, stage, kept, gradient, count) for count in counts)
    programs = [_core.make_program(options, rank, count) for rank in range(options.num_workers)]
    positions, waiting = [0] * len(programs), dict.fromkeys(map(str, _core.edges_of(options)), 0)

    def step(rank: int) -> _core.Instruction:
        instruction = programs[rank][positions[rank]]
        edge = instruction.edge
        if edge is not None and instruction.opcode == "RECV":
            while not waiting[str(edge)]:
                step(placement.rank_of(edge.from_stage, edge.from_replica))
        if edge is not None:
            waiting[str(edge)] += 1 if instruction.opcode == "SEND" else -1
        positions[rank] += 1
        return instruction

    target = placement.rank_of(stage)
    outgoing = [
        str(edge)
        for edge in _core.edges_of(options)
        if edge.kind == "gradient" and (edge.from_stage, edge.from_replica) == (stage, 0)
    ]
    here = most = 0
    while positions[target] < len(programs[target]):
        here += {"FORWARD": 1, "BACKWARD": -1}.get(step(target).opcode, 0)
        most = max(most, here * kept + sum(waiting[edge] for edge in outgoing) * gradient)
    return most


def _most_held_of_all_orders(
    options: _core.ScheduleOptions, stage: int, kept: int, gradient: int, count: int
) -> int:
    """Returns the same bytes as _most_held(), but the largest over all orders in which the workers may
    execute their lists.
    """
    placement = options.placement
    programs = [_core.make_program(options, rank, count) for rank in range(options.num_workers)]
    # For each worker and each number of executed instructions: the items sent and received over each edge,
    # and the microbatches between forward and backward.
    done: list[list[dict[str, int]]] = []
    for program in programs:
        sums = [dict.fromkeys(["here", *map(str, _core.edges_of(options))], 0)]
        for instruction in program:
            after = dict(sums[-1])
            if instruction.edge is not None:
                after[str(instruction.edge)] += 1
            elif instruction.opcode in ("FORWARD", "BACKWARD"):
                after["here"] += 1 if instruction.opcode == "FORWARD" else -1
            sums.append(after)
        done.append(sums)
    target = placement.rank_of(stage)
    receivers = {
        str(edge): placement.rank_of(edge.to_stage, edge.to_replica)
        for edge in _core.edges_of(options)
        if edge.kind == "gradient" and (edge.from_stage, edge.from_replica) == (stage, 0)
    }
    start = (0,) * len(programs)
    seen, open_ = {start}, [start]
    most = 0
    while open_:
        positions = open_.pop()
        mine = done[target][positions[target]]
        waiting = sum(mine[edge] - done[rank][positions[rank]][edge] for edge, rank in receivers.items())
        most = max(most, mine["here"] * kept + waiting * gradient)
        for rank, program in enumerate(programs):
            if positions[rank] == len(program):
                continue
            instruction = program[positions[rank]]
            edge = instruction.edge
            if edge is not None and instruction.opcode == "RECV":
                sender = placement.rank_of(edge.from_stage, edge.from_replica)
                if done[sender][positions[sender]][str(edge)] == done[rank][positions[rank]][str(edge)]:
                    continue  # has not been sent
            after = (*positions[:rank], positions[rank] + 1, *positions[rank + 1 :])
            if after not in seen:
                seen.add(after)
                open_.append(after)
    return most


@pytest.mark.parametrize(
    ("replicas", "in_flight"),
    [((1, 1), (2, 1)), ((1, 1), (4, 1)), ((2, 1), (2, 1)), ((1, 2), (3, 1)), ((1, 1, 1), (3, 2, 1))],
    ids=str,
)
@pytest.mark.parametrize(("kept", "gradient"), [(100, 10), (1, 10)])
def test_no_order_has_more_than_others_that_do_only_what_is_needed(
    replicas: tuple[int, ...], in_flight: tuple[int, ...], kept: int, gradient: int
) -> None:
    plan = Plan.replicated(len(replicas), replicas)
    options = _core.ScheduleOptions("pipedream", list(in_flight), 1, plan.placement)
    count = 2 * max(n * r for n, r in zip(in_flight, replicas, strict=True))
    for stage in range(1, len(replicas)):
        held = _most_held_of_all_orders(options, stage, kept, gradient, count)
        assert held == _most_held(options, stage, kept, gradient, count)


_STRAIGHT = [("pipedream", 1), ("flush", 4), ("gpipe", 2), ("2bw", 4)]


def _assert_stash_is_what_the_lists_allow(plan: Plan, options: _core.ScheduleOptions) -> None:
    for stage, (kept, gradient) in itertools.product(range(1, plan.num_stages), [(100, 10), (1, 10)]):
        footprint = replace(_footprint(stash=0, inputs=0), stash_bytes=kept, input_bytes=gradient)
        rank = plan.placement.rank_of(stage)
        memory = MemoryPlan(plan, rank, options, {stage: footprint}, [], {stage: StageBytes(0)}, 0)
        # The prediction counts one gradient more, because a gradient is released late.
        assert memory.terms()[STASH] == _most_held(options, stage, kept, gradient) + gradient, stage


@pytest.mark.parametrize(
    ("replicas", "schedule", "microbatches"),
    [
        *(((1, 1, 1), *how) for how in _STRAIGHT),
        *(
            (r, how, 1)
            for r in ((2, 1), (4, 1), (1, 2), (1, 3), (2, 2), (4, 2))
            for how in ("pipedream", "flush")
        ),
        *((r, "flush", 2) for r in ((2, 1), (1, 2))),
    ],
    ids=str,
)
def test_what_is_kept_and_the_gradients_that_wait_are_what_the_lists_allow(
    replicas: tuple[int, ...], schedule: str, microbatches: int
) -> None:
    plan = Plan.replicated(len(replicas), replicas)
    options = _core.ScheduleOptions(schedule, plan.in_flight, microbatches, plan.placement)
    _assert_stash_is_what_the_lists_allow(plan, options)


@pytest.mark.parametrize("more", [0, 1, 6], ids="{} more in flight".format)
@pytest.mark.parametrize(
    "replicas",
    [(2, 1), (3, 1), (1, 3), (3, 2), (2, 3), (4, 3), (3, 3), (2, 1, 2), (1, 2, 1), (3, 2, 1), (1, 2, 3)],
    ids=str,
)
def test_replicas_upstream_may_leave_gradients_of_all_that_they_have_in_flight(
    replicas: tuple[int, ...], more: int
) -> None:
    """Gradients collect at a stage only if its link is slow for gradients and fast for activations. Tests on
    fast links do not show this.
    """
    plan = Plan.replicated(len(replicas), replicas)
    in_flight = [plan.in_flight[0] + more, *plan.in_flight[1:]]
    options = _core.ScheduleOptions("pipedream", in_flight, 1, plan.placement)
    _assert_stash_is_what_the_lists_allow(plan, options)


def _minibatches_of(in_flight: int, microbatches: int) -> int:
    """Returns the largest number of minibatches to which in_flight consecutive microbatches belong.
    `microbatches` is their number in each minibatch.
    """
    return max(len({(first + i) // microbatches for i in range(in_flight)}) for first in range(microbatches))


@pytest.mark.parametrize(("schedule", "microbatches"), [*_TABLE, ("2bw", 5), ("pipedream", 3)])
def test_the_first_stage_keeps_the_inputs_of_whole_minibatches(schedule: str, microbatches: int) -> None:
    memory = _memory(schedule, rank=0, microbatches=microbatches)
    in_flight = _core.num_microbatches_in_flight(memory.schedule, 0)
    inputs = _minibatches_of(in_flight, microbatches) * microbatches
    assert _kib(memory)[STASH] == in_flight * 100 + inputs * 10


@pytest.mark.parametrize(("microbatches", "minibatches"), [(1, 3), (2, 3), (4, 2)])
def test_a_replica_with_one_microbatch_of_each_minibatch_keeps_the_inputs_of_all(
    microbatches: int, minibatches: int
) -> None:
    """Each of two replicas has every second microbatch. The three microbatches that a replica has in flight
    belong to `minibatches` different minibatches.
    """
    plan = Plan((Stage(0, 0, 2), Stage(1, 1, 3)))
    assert plan.in_flight == (3, 1)
    options = _core.ScheduleOptions("pipedream", plan.in_flight, microbatches, plan.placement)
    memory = replace(_memory(), plan=plan, schedule=options)
    assert _kib(memory)[STASH] == 3 * 100 + minibatches * microbatches * 10


def test_tied_parameters_state_and_the_model_have_terms_of_their_own() -> None:
    tied = {0: _KIB, 1: _KIB}
    stage = StageBytes(3 * _KIB, tied, state_slot=_KIB, num_states=2, torch_state=2 * _KIB)
    terms = _kib(_memory(rank=3, stages={3: stage}, model_bytes=50 * _KIB))
    assert terms[TIED_VERSIONS] == 4 * 2  # every stage has as many versions as stage 0 keeps: 4
    assert terms[OPTIMIZER_STATE] == terms[TORCH_OPTIMIZER_STATE] == 2
    assert terms[MODEL] == 50


def test_a_received_item_lies_in_a_slot_of_the_channel() -> None:
    tensors = [("float32", 2, 100), ("int64", 1, 8)]
    channels = [
        RunChannel(
            "to me", 0, 1, 0, tensors, num_slots=3, num_unsent_max=9, num_microbatches=1, on_device=True
        ),
        RunChannel(
            "from me", 1, 0, 1, tensors, num_slots=3, num_unsent_max=9, num_microbatches=1, on_device=True
        ),
    ]
    terms = _memory(channels=channels).terms()
    assert terms["to me"] == 3 * 256  # 100 and 8 bytes, each rounded up to 64, in slots of 256
    assert "from me" not in terms


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "topk:0.1"])
@pytest.mark.parametrize("rank", [0, 1], ids=["sender", "receiver"])
def test_the_terms_of_a_channel_are_what_the_core_takes_for_it(rank: int, codec: str) -> None:
    tensors = [("float32", 2, 4000), ("int64", 1, 72), ("float64", 1, 8000), ("bfloat16", 1, 3000)]
    channel = RunChannel("a", 0, 0, 1, tensors, 3, 9, 1, True, codec)
    core = _core.Worker(transport="inproc")
    channel.add_to(core, rank, Plan.straight(4, 4).describe_worker)
    core.seal()
    taken = {name: planned for name, planned, _ in core.memory()}
    core.close(0.0)
    terms = _memory(rank=rank, channels=[channel]).terms()
    assert {name: terms[name] for name in terms if name in taken or name.endswith("a")} == taken
    assert bool(taken) == (rank == 1 or codec != "none")


def test_a_worker_of_several_stages_adds_them_up_but_has_one_transient_at_a_time() -> None:
    footprints = {stage: _footprint(transient=transient) for stage, transient in enumerate((7, 9, 30, 9))}
    memory = _memory("interleaved", num_workers=2, microbatches=2, footprints=footprints)
    terms = _kib(memory)
    in_flight = [_core.num_microbatches_in_flight(memory.schedule, stage) for stage in (0, 2)]
    waiting = _gradients_beside(memory, 2)
    assert terms[STASH] == sum(in_flight) * 100 + _minibatches_of(in_flight[0], 2) * 2 * 10 + waiting * 10
    assert (terms[WEIGHT_VERSIONS], terms[GRADIENTS], terms[TRANSIENT]) == (2 * 3, 2 * 4, 30)


def test_an_optimizers_step_comes_at_another_time_than_forwards_and_backwards() -> None:
    for step, transient in ((5 * _KIB, 7), (9 * _KIB, 9)):
        assert _kib(_memory(rank=1, stages={1: replace(_STAGE, step=step)}))[TRANSIENT] == transient


def test_a_recompute_keeps_outputs_until_they_are_sent_and_has_one_stash_at_a_time() -> None:
    memory = _memory(rank=1).with_recompute([False, True, False, False])
    outputs = _waiting(memory, "activation", 1, 2) + 1
    gradients = _waiting(memory, "gradient", 1, 0)
    # The gradients that can wait here are larger than the random states of three microbatches in flight and
    # one gradient.
    assert gradients * 10 > 3 * _GENERATORS / _KIB + 10
    terms = _kib(memory)
    assert terms[STASH] == outputs * 20 + (gradients + 1) * 10
    assert terms[TRANSIENT] == 7 + 100 + 10


# Limits.


def test_without_a_limit_recompute_is_as_given() -> None:
    assert list(choose_savings(_memory(), None, None).schedule.recompute) == [False] * 4
    given = [True, False, False, True]
    assert list(choose_savings(_memory(), given, None).schedule.recompute) == given


def test_with_room_nothing_is_recomputed_and_with_a_byte_less_it_is() -> None:
    memory = _memory()
    needed = memory.counted_bytes()
    assert not any(choose_savings(memory, None, needed).schedule.recompute)
    chosen = choose_savings(memory, None, needed - 1)
    # Each worker decides for its own stage.
    assert list(chosen.schedule.recompute) == [True, False, False, False]
    assert chosen.counted_bytes() < needed


@pytest.mark.parametrize("largest", [0, 2])
def test_the_stage_that_saves_most_is_recomputed_first(largest: int) -> None:
    footprints = {stage: _footprint(stash=2000 if stage == largest else 200) for stage in range(4)}
    memory = _memory("interleaved", num_workers=2, microbatches=4, footprints=footprints)
    needed = memory.counted_bytes()
    chosen = choose_savings(memory, None, needed - 1)
    assert list(chosen.schedule.recompute) == [stage == largest for stage in range(4)]
    both = memory.with_recompute([True, False, True, False]).counted_bytes()
    assert both < chosen.counted_bytes()
    assert list(choose_savings(memory, None, both).schedule.recompute) == [True, False, True, False]


def test_a_recompute_that_saves_nothing_is_not_chosen() -> None:
    # The last stage has one microbatch in flight. Its stash takes as much memory as recomputing it does.
    memory = _memory(rank=3)
    with pytest.raises(ValueError) as caught:
        choose_savings(memory, None, memory.counted_bytes() - 1)
    assert "stage 3 (rank 3)" in str(caught.value)


def test_a_worker_that_does_not_fit_is_refused_term_by_term() -> None:
    memory = _memory(rank=1)
    recomputed = memory.with_recompute([False, True, False, False])
    with pytest.raises(ValueError) as caught:
        choose_savings(memory, None, 100 * _KIB)
    said = str(caught.value)
    assert "\n" not in said
    total = recomputed.counted_bytes() / _KIB
    assert said.startswith(
        f"memory is 100.00 KiB, but stage 1 (rank 1) needs {total:.2f} KiB, {total - 100:.2f} KiB more"
    )
    sizes = recomputed.counted_terms()
    named = ", ".join(
        f"{name} {sizes[name] / _KIB:.2f} KiB" for name in sorted(sizes, key=lambda n: -sizes[n])
    )
    assert f"({named})" in said
    assert "'2bw' or 'flush'" in said


# The model, and the table.


def test_the_model_counts_each_tensor_once_buffers_and_frozen_parameters_too() -> None:
    first, second, norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    stages = split(nn.Sequential(first, norm, second), Plan.straight(3, 3))
    weights = 16 + 4 + 4  # one weight, two biases
    statistics = 4 + 4 + 4 + 4
    assert model_bytes(stages) == 4 * (weights + statistics) + 8


def test_the_table_has_a_row_per_term_and_a_sum_per_worker() -> None:
    rows = describe_memory(
        ["stage 0 (rank 0)", "stage 1 (rank 1)"],
        [
            {"small": {"predicted": 1024, "peak": 512}, "large": {"predicted": 4096, "peak": None}},
            {"small": {"predicted": 2048, "peak": 2048}},
        ],
    ).splitlines()
    cells = [line.split() for line in rows]
    assert any(
        line[:3] == ["stage", "0", "(rank"] and "large" in line and "measured" in line for line in cells
    )
    assert ["sum", "5.00", "KiB", "512", "bytes"] in cells or ["sum", "5.00", "KiB", "512", "B"] in cells
    assert ["sum", "2.00", "KiB", "2.00", "KiB"] in cells
