"""Tests that a program that a user has written trains with the oracle's numbers, whatever its order and
versions.
"""

from __future__ import annotations

import functools
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pipedream
import pytest
import torch
from covering import parametrize_pairs
from farm import Farm
from models import CASES, Batch
from oracle import assert_memory_as_predicted, assert_same_numbers
from pipedream import Program, RunResult, _core, reference
from pipedream.planning.plan_schedule import mean_delays
from pipedream.reference.versions import WrittenVersions
from programs import BY_PAIRS, DRAINS_AFTER_THREE, drawn_program
from torch import nn
from training import (
    CountingSGD,
    Overflowing,
    Training,
    model_of_oracle,
    state_of,
    tolerance,
    train_by_reference,
    train_in_pipeline,
)

_WRITTEN = {"by pairs": BY_PAIRS, "drains after three": DRAINS_AFTER_THREE}
_NAMED = ("pipedream", "vertical_sync", "unstashed", "2bw", "flush", "gpipe", "model_parallel")


def _assert_equals_reference(
    farm: Farm, training: Training, *, relative: float | None = None, **options: Any
) -> RunResult:
    program = training.schedule
    assert isinstance(program, Program)
    result, state = farm.results(train_in_pipeline, training, num_ranks=program.num_workers, **options)[0]
    expected, expected_state = train_by_reference(training)
    relative = relative or tolerance(training.dtype)
    assert_same_numbers(result.losses, state, expected.losses, expected_state, relative)
    assert result.microbatch_versions == expected.microbatch_versions
    assert_memory_as_predicted(result)
    return result


@parametrize_pairs(
    name=tuple(_WRITTEN),
    case_name=("cnn", "transformer", "dropout", "lstm", "tied"),
    how=({"recompute": True}, {"recompute": (1,)}, {"max_grad_norm": 0.5}),
    num_minibatches=(1, 5, 12),
)
def test_a_written_program_gives_the_references_result(
    farm: Farm, name: str, case_name: str, how: dict[str, Any], num_minibatches: int
) -> None:
    training = Training(case_name, 3, schedule=_WRITTEN[name], num_minibatches=num_minibatches, **how)
    _assert_equals_reference(farm, training)


@pytest.mark.parametrize("seed", range(6))
def test_a_drawn_program_gives_the_references_result(farm: Farm, seed: int) -> None:
    program = drawn_program(seed)
    training = Training("mlp", program.num_stages, schedule=program, num_minibatches=9)
    _assert_equals_reference(farm, training)


@pytest.mark.parametrize(
    ("seed", "replicas"), [(0, (2, 1)), (1, (1, 2)), (1, (3, 2)), (0, (2, 1, 2)), (1, (1, 3, 1))]
)
def test_a_drawn_program_of_replicas_gives_the_references_result(
    farm: Farm, seed: int, replicas: tuple[int, ...]
) -> None:
    program = drawn_program(seed, replicas)
    training = Training("tied_apart", len(replicas), schedule=program, num_minibatches=9)
    _assert_equals_reference(farm, training)


@pytest.mark.parametrize("seed", range(4))
def test_a_drawn_program_of_several_stages_at_a_worker_gives_the_references_result(
    farm: Farm, seed: int
) -> None:
    program = drawn_program(seed, (1, 1, 1, 1), workers=2)
    clipped = 0.05 if seed % 2 else None
    training = Training("tied_apart", 4, schedule=program, num_minibatches=9, max_grad_norm=clipped)
    assert _assert_equals_reference(farm, training).versions


@pytest.mark.parametrize("seed", range(4))
def test_a_drawn_program_reads_shared_parameters_as_the_reference_does(farm: Farm, seed: int) -> None:
    program = drawn_program(seed, (1, 1, 1))
    _assert_equals_reference(farm, Training("tied_apart", 3, schedule=program, num_minibatches=9))


@parametrize_pairs(
    name=_NAMED,
    case_name=("cnn", "tied_apart"),
    replicas=((1, 1), (2, 1), (1, 2)),
    how=({"max_grad_norm": 0.1}, {"sync": "allreduce"}, {"recompute": True}),
)
def test_the_program_of_a_name_trains_as_the_name_does(
    farm: Farm, name: str, case_name: str, replicas: tuple[int, ...], how: dict[str, Any]
) -> None:
    m = 6 if name == "2bw" else 3
    program = Program.of(name, microbatches=m, replicas=replicas)
    assert Program(str(program)) == program
    training = Training(case_name, 2, schedule=program, num_minibatches=5, replicas=replicas, **how)
    result = _assert_equals_reference(farm, training)
    how = how | {"microbatches": m, "num_minibatches": 5, "replicas": replicas}
    by_name, _ = train_by_reference(Training(case_name, 2, schedule=name, **how))
    assert result.losses == pytest.approx(by_name.losses, rel=1e-12)
    assert result.microbatch_versions == by_name.microbatch_versions


@pytest.mark.parametrize("how", [{}, {"max_grad_norm": 0.05}], ids=["plain", "clipped"])
def test_the_program_of_interleaved_stages_trains_as_it_does(farm: Farm, how: dict[str, Any]) -> None:
    program = Program.of("interleaved", 4, workers=2, microbatches=3)
    training = Training("tied_apart", 4, schedule=program, num_minibatches=5, **how)
    result = _assert_equals_reference(farm, training)
    named = Training("tied_apart", 4, schedule="interleaved", microbatches=3, num_minibatches=5, **how)
    assert result.losses == pytest.approx(train_by_reference(named)[0].losses, rel=1e-12)


@pytest.mark.parametrize(
    "program",
    [
        BY_PAIRS,
        DRAINS_AFTER_THREE,
        drawn_program(1, (2, 1, 2)),
        drawn_program(3, (1, 1, 1, 1), workers=2),
        Program.of("flush", 3, microbatches=2),
        Program.of("pipedream", replicas=[1, 2, 1]),
    ],
    ids=["pairs", "drains", "replicas", "dealt", "flush", "pipedream"],
)
def test_a_program_scales_losses_of_float16_as_the_reference_does(farm: Farm, program: Program) -> None:
    """The order of a stage's list decides when the stage learns of an overflow."""
    training = Overflowing(
        "mlp",
        program.num_stages,
        torch.float32,
        functools.partial(CountingSGD, lr=1e-3),
        schedule=program,
        autocast="float16",
        num_minibatches=24,
    )
    CountingSGD.num_steps = 0
    train_by_reference(training)
    updates = sum(-(-24 // rounds) for rounds in _rounds_of(program))
    assert 0 < CountingSGD.num_steps < updates, "no update was skipped, or all were"
    _assert_equals_reference(farm, training, relative=1e-5)


def _rounds_of(program: Program) -> list[int]:
    options = _core.ScheduleOptions(
        "program", program.in_flight, program.microbatches, program.listed.placement, program=program.listed
    )
    return [_core.rounds_of(options, stage).minibatches_per_round for stage in range(program.num_stages)]


class _Growing:
    """Minibatches, of which the fifth and the last are twice as large. They are not a list, so run() cannot
    look at them before the training.
    """

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(0)
        for size in (4, 4, 4, 4, 8, 4, 4, 8):
            yield CASES["mlp"].make_batch(generator, torch.float64, size)


def test_where_the_pipeline_drains_for_a_larger_minibatch_the_program_begins_anew(farm: Farm) -> None:
    training = Training("mlp", 3, schedule=DRAINS_AFTER_THREE)
    result, state = farm.results(train_in_pipeline, training, num_ranks=3, data=_Growing())[0]
    assert result.drained_at == [4]
    model = model_of_oracle(training)
    options = training.options() | {"data": _Growing(), "drained_at": result.drained_at}
    expected = reference.run(model, training.plan, **options)
    assert_same_numbers(result.losses, state, expected.losses, state_of(model), tolerance(training.dtype))
    assert result.microbatch_versions == expected.microbatch_versions


def test_its_versions_are_those_that_it_lists(farm: Farm) -> None:
    training = Training("mlp", 3, schedule=BY_PAIRS, num_minibatches=4)
    result = _assert_equals_reference(farm, training)
    assert result.versions == [[(0, 0), (0, 0), (2, 2), (2, 2)]] * 3


def test_a_plan_of_other_stages_or_with_replicas_is_refused() -> None:
    training = Training("mlp", 2)
    with pytest.raises(ValueError, match="a program of stages 1-1-1 on 3 workers, and the plan has 1-1 on 2"):
        pipedream.run(training.model(), training.plan, **training.options(), schedule=BY_PAIRS)
    replicated = Training("mlp", 3, replicas=(2, 1, 1))
    with pytest.raises(ValueError, match="and the plan has 2-1-1 on 4"):
        pipedream.run(replicated.model(), replicated.plan, **replicated.options(), schedule=BY_PAIRS)
    with pytest.raises(ValueError, match=r"of replicas \[1, 1, 1\], and the plan has \[2, 1, 1\]"):
        reference.run(replicated.model(), replicated.plan, **replicated.options(), schedule=BY_PAIRS)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"microbatches": 4}, "microbatches is 4, and the program of schedule has 1"),
        ({"sync": "ssp", "staleness": 1}, "staleness is 1"),
    ],
)
def test_what_does_not_go_with_a_program_is_refused(how: dict[str, Any], said: str) -> None:
    training = Training("mlp", 3)
    with pytest.raises(ValueError, match=said):
        pipedream.run(training.model(), training.plan, **training.options() | how, schedule=BY_PAIRS)


def test_the_program_of_the_documents_runs() -> None:
    documents = Path(__file__).resolve().parents[2] / "docs" / "schedules.md"
    (block,) = re.findall(r"```text\n(worker 0\n.*?)```", documents.read_text(encoding="utf-8"), re.DOTALL)
    assert Program(block).in_flight == [2, 1]


def test_a_program_is_a_value(tmp_path: Any) -> None:
    path = tmp_path / "mine.txt"
    BY_PAIRS.save(path)
    assert Program.load(path) == BY_PAIRS == pickle.loads(pickle.dumps(BY_PAIRS))
    assert BY_PAIRS != DRAINS_AFTER_THREE and hash(Program(str(BY_PAIRS))) == hash(BY_PAIRS)
    assert (BY_PAIRS.num_stages, BY_PAIRS.microbatches, BY_PAIRS.in_flight) == (3, 1, [2, 2, 2])
    assert (BY_PAIRS.versions_kept, DRAINS_AFTER_THREE.versions_kept) == ([2, 2, 2], [3, 2, 1])
    path.write_text("worker 0\nbody every 1 minibatch\nFORWARD stage 0\n")
    with pytest.raises(pipedream.FileFormatError, match=r"mine\.txt: line 3"):
        Program.load(path)


def test_what_makes_no_program_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="num_stages says 3, in_flight says 2"):
        Program.of("pipedream", 3, in_flight=[2, 1])
    with pytest.raises(ValueError, match="num_stages says 0: give num_stages, 1 or more"):
        Program.of("pipedream", 0)
    with pytest.raises(TypeError, match="text is a NoneType"):
        Program(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Program\.load\(\) reads"):
        Program("mine.txt")
    training = Training("mlp", 3)
    with pytest.raises(ValueError, match=r"give pipedream\.Program\.load of it"):
        pipedream.run(training.model(), training.plan, **training.options(), schedule="mine.txt")


def test_a_delay_is_that_behind_a_long_warm_up() -> None:
    lines = ["worker 0", "warm-up"]
    for i in range(12):
        lines += [f"FORWARD stage 0 minibatch {i} microbatch 0 reads version {i}"]
        lines += [f"BACKWARD stage 0 minibatch {i} microbatch 0 reads version {i}"]
        lines += [f"UPDATE stage 0 minibatch {i} writes version {i + 1}"]
    lines += ["FORWARD stage 0 minibatch 12 microbatch 0 reads version 12"]
    lines += ["FORWARD stage 0 minibatch 13 microbatch 0 reads version 12"]
    lines += ["BACKWARD stage 0 minibatch 12 microbatch 0 reads version 12"]
    lines += ["UPDATE stage 0 minibatch 12 writes version 13", "body every 1 minibatch"]
    lines += ["FORWARD stage 0 minibatch 14 microbatch 0 reads version 13"]
    lines += ["BACKWARD stage 0 minibatch 13 microbatch 0 reads version 12"]
    lines += [
        "UPDATE stage 0 minibatch 13 writes version 14",
        str(Program.of("flush", 2)).split("worker 0")[1],
    ]
    lines[-1] = "worker 1" + lines[-1].partition("worker 1")[2]
    program = Program("\n".join(lines))
    options = _core.ScheduleOptions("program", program.in_flight, program=program.listed)
    assert mean_delays(options) == [1.0, 0.0]
    assert [WrittenVersions(str(program), [1, 1]).mean_delay(stage) for stage in range(2)] == [1.0, 0.0]


def test_an_optimizer_is_told_the_mean_delay_over_a_body() -> None:
    told: list[float] = []

    def optimizer(parameters: Any, delay: float) -> torch.optim.Optimizer:
        told.append(delay)
        return torch.optim.SGD(parameters, lr=0.01)

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    plan = pipedream.Plan(tuple(pipedream.Stage(i, i, 1) for i in range(3)))
    data = [(torch.randn(2, 4), torch.randn(2, 4))]
    arguments: dict[str, Any] = {"data": data, "loss_fn": nn.functional.mse_loss, "optimizer": optimizer}
    reference.run(model, plan, **arguments, schedule=DRAINS_AFTER_THREE)
    assert told == pytest.approx([1.0, 2 / 3, 0.0])
