"""Tests that offloading weight versions and activations changes no number. The device then holds no more than
offloading promises.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from models import CASES
from pipedream import RunResult, reference
from pipedream.budget import offload
from pipedream.budget.memory import (
    OFFLOADED_ACTIVATIONS,
    OFFLOADED_VERSIONS,
    STASH,
    TRANSIENT,
    WEIGHT_VERSIONS,
)
from pipedream.budget.offload import Offload
from pipedream.planning.plan import Plan, Stage
from pipedream.stage.stage_runner import StageRunner
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import (
    OPTIMIZERS,
    State,
    Training,
    assert_close_losses,
    assert_close_state,
    assert_equal_state,
    expected_versions,
    tolerance,
    train_by_reference,
    train_in_pipeline,
)


@contextmanager
def _offloading(words: str, small_bytes: int = 0) -> Iterator[None]:
    """Sets PIPEDREAM_OFFLOAD at this rank, and the size below which tensors stay on the device."""
    before = offload.SMALL_BYTES
    os.environ["PIPEDREAM_OFFLOAD"] = words
    offload.SMALL_BYTES = small_bytes
    try:
        yield
    finally:
        offload.SMALL_BYTES = before
        del os.environ["PIPEDREAM_OFFLOAD"]


def _train_offloaded(
    training: Training, words: str = "activations,versions", **options: Any
) -> tuple[RunResult, State]:
    with _offloading(words):
        return train_in_pipeline(training, **options)


def _assert_equals_reference(
    farm: Farm,
    training: Training,
    offloaded: list[list[str]],
    words: str = "activations,versions",
    **options: Any,
) -> RunResult:
    outcome = farm.results(_train_offloaded, training, words, num_ranks=training.num_workers, **options)[0]
    result, state = outcome
    expected, expected_state = train_by_reference(training)
    relative = tolerance(training.dtype)
    assert_close_losses(result.losses, expected.losses, relative)
    assert_close_state(state, expected_state, relative)
    num_minibatches = len(expected.losses)
    how: dict[str, Any] = {"schedule": training.schedule, "microbatches": training.microbatches}
    assert result.versions == expected_versions(training.plan, num_minibatches, **how)
    assert result.offload == offloaded
    return result


_BOTH, _NOTHING = ["versions", "activations"], list[str]()

# For each schedule: the number of microbatches, the stages (of 4) with several microbatches in flight, and
# the stages that keep more than three versions.
_SCHEDULES: dict[str, tuple[int, set[int], set[int]]] = {
    "pipedream": (1, {0, 1, 2}, {0}),
    "vertical_sync": (1, {0, 1, 2}, {0, 1, 2, 3}),
    "naive": (1, {0, 1, 2}, set()),
    "2bw": (4, {0, 1, 2}, set()),
    "flush": (4, {0, 1, 2}, set()),
    "gpipe": (3, {0, 1, 2, 3}, set()),
    "interleaved": (4, {0, 1, 2}, set()),
}
# For each model: the stages whose graphs save tensors that can be offloaded, and the stages whose weights can
# be. An embedding saves only its input, and an in-place ReLU only the tensor that it received. These are not
# offloaded, and neither is a tied weight.
_CASES: dict[str, tuple[set[int], set[int]]] = {
    "cnn": ({0, 2, 3}, {0, 2, 3}),
    "transformer": ({1, 2, 3}, {0, 1, 2, 3}),
    "dropout": ({1, 3}, {0, 2, 3}),
    "tied_apart": ({2, 3}, {1, 2}),
}


# Each schedule is tested with two models only, and each model with three or four schedules.
_PAIRS = [
    (list(_CASES)[(i + shift) % len(_CASES)], schedule)
    for i, schedule in enumerate(_SCHEDULES)
    for shift in (0, 1)
]


@pytest.mark.parametrize(("case_name", "schedule"), _PAIRS)
def test_every_schedule_gives_the_references_result(farm: Farm, case_name: str, schedule: str) -> None:
    microbatches, waiting, versioned = _SCHEDULES[schedule]
    saving, weighted = _CASES[case_name]
    training = Training(
        case_name, 4, schedule=schedule, microbatches=microbatches, short_last=False, num_minibatches=9
    )
    offloaded = [
        Offload(stage in versioned & weighted, stage in waiting & saving).names() for stage in range(4)
    ]
    _assert_equals_reference(farm, training, offloaded)


@pytest.mark.parametrize("schedule", ["pipedream", "vertical_sync"])
@pytest.mark.parametrize("case_name", _CASES)
def test_recompute_reads_versions_that_came_back_and_leaves_no_activations(
    farm: Farm, case_name: str, schedule: str
) -> None:
    _, _, versioned = _SCHEDULES[schedule]
    _, weighted = _CASES[case_name]
    training = Training(case_name, 4, schedule=schedule, num_minibatches=9, recompute=True)
    offloaded = [Offload(stage in versioned & weighted).names() for stage in range(4)]
    _assert_equals_reference(farm, training, offloaded)


@pytest.mark.parametrize("in_flight", [(6, 1), (5, 4), (7, 5)])
@pytest.mark.parametrize("schedule", ["pipedream", "vertical_sync"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_versions_that_are_away_for_long_come_back(
    farm: Farm, microbatches: int, schedule: str, in_flight: tuple[int, ...]
) -> None:
    training = Training(
        "cnn",
        2,
        schedule=schedule,
        microbatches=microbatches,
        in_flight=in_flight,
        num_minibatches=13,
        short_last=False,
    )
    counted = in_flight if schedule == "pipedream" else in_flight[:1] * 2
    kept = [1 + -(-(count - 1) // microbatches) for count in counted]
    offloaded = [["versions"] if num_versions > 3 else [] for num_versions in kept]
    result = _assert_equals_reference(farm, training, offloaded, "versions")
    for worker, num_versions in zip(result.memory, kept, strict=True):
        slot_bytes = _planned(worker, WEIGHT_VERSIONS) // min(num_versions, 3)
        assert _planned(worker, OFFLOADED_VERSIONS) == (num_versions * slot_bytes if num_versions > 3 else 0)


def _planned(worker: dict[str, dict[str, int | None]], term: str) -> int:
    """Returns the predicted bytes of a term, summed over the worker's stages."""
    return sum(figures["predicted"] or 0 for name, figures in worker.items() if name.startswith(f"{term} of"))


_NATIVE = functools.partial(pipedream.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3)
_NATIVE_ADAM = functools.partial(pipedream.optim.Adam, lr=0.01)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("adam", torch.float64),
        ("adagrad", torch.float32),
        ("native sgd", torch.float32),
        ("native adam", torch.float64),
    ],
    ids=str,
)
def test_every_kind_of_optimizer_writes_the_version_that_goes_home(
    farm: Farm, name: str, dtype: torch.dtype
) -> None:
    natives = {"native sgd": _NATIVE, "native adam": _NATIVE_ADAM}
    optimizer = natives.get(name) or OPTIMIZERS[name]
    training = Training("transformer", 2, dtype, optimizer=optimizer, in_flight=(5, 1), num_minibatches=9)
    _assert_equals_without(farm, training, [_BOTH, _NOTHING])


def _assert_equals_without(
    farm: Farm, training: Training, offloaded: list[list[str]], **options: Any
) -> None:
    """Asserts that a run with offloading gives the same bits as one without."""
    result, state = farm.results(_train_offloaded, training, num_ranks=2, **options)[0]
    plain, plain_state = farm.results(train_in_pipeline, training, num_ranks=2, **options)[0]
    assert result.losses == plain.losses
    assert_equal_state(state, plain_state)
    assert (result.offload, plain.offload) == (offloaded, [_NOTHING, _NOTHING])


def _train_poisoned(training: Training) -> tuple[RunResult, State]:
    os.environ["PIPEDREAM_POISON"] = "1"
    try:
        return _train_offloaded(training)
    finally:
        del os.environ["PIPEDREAM_POISON"]


@pytest.mark.parametrize("schedule", ["pipedream", "vertical_sync"])
def test_nothing_reads_a_version_after_its_last_backward(farm: Farm, schedule: str) -> None:
    training = Training("cnn", 2, schedule=schedule, in_flight=(5, 2), num_minibatches=11)
    result, state = farm.results(_train_poisoned, training, num_ranks=2)[0]
    expected, expected_state = train_by_reference(training)
    assert_close_losses(result.losses, expected.losses, 1e-9)
    assert_close_state(state, expected_state, 1e-9)


@pytest.mark.parametrize("autocast", ["bfloat16", "float16"])
def test_autocast_clipping_schedulers_and_uneven_microbatches_change_nothing(
    farm: Farm, autocast: str
) -> None:
    training = Training(
        "transformer",
        2,
        torch.float32,
        in_flight=(13, 1),
        microbatches=4,
        num_minibatches=7,
        short_last=False,
        autocast=autocast,
        max_grad_norm=0.5,
        lr_scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2),
    )
    # Six samples are cut into microbatches of 2, 2, 2 and 0.
    _assert_equals_without(farm, training, [_BOTH, _NOTHING])


def test_a_skipped_update_sends_the_same_weights_home_as_another_version(farm: Farm) -> None:
    training = Training("mlp", 2, torch.float32, in_flight=(5, 1), num_minibatches=20, autocast="float16")
    _assert_equals_without(farm, training, [_BOTH, _NOTHING], loss_fn=_huge_error)


def _huge_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient overflows float16 at the first loss scales, and not at later ones."""
    return 16.0 * nn.functional.mse_loss(outputs.float(), targets)


class Checkpointed(nn.Module):
    """A layer with torch's activation checkpointing, which runs the layer again in the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.layer, value, use_reentrant=False)
        return result


def _train_checkpointed(words: str) -> tuple[list[float], State]:
    case = CASES["mlp"]
    plain = case.model()
    model = nn.Sequential(plain[0], Checkpointed(nn.Sequential(*plain[1:4])), plain[4])
    plan = Plan((Stage(0, 1), Stage(2, 2)), in_flight=(5, 1))
    with _offloading(words):
        result = pipedream.run(
            model, plan, data=case.data(9), loss_fn=case.loss_fn, optimizer=OPTIMIZERS["sgd"], progress=False
        )
    return result.losses, model.state_dict()


@pytest.mark.parametrize("words", ["", "versions", "activations,versions"], ids=["none", "versions", "both"])
def test_a_layer_that_checkpoints_itself_runs_again_on_the_version_of_its_forward(
    farm: Farm, words: str
) -> None:
    losses, state = farm.results(_train_checkpointed, words, num_ranks=2)[0]
    case = CASES["mlp"]
    model, plan = case.model(), Plan((Stage(0, 3), Stage(4, 4)), in_flight=(5, 1))
    expected = reference.run(
        model, plan, data=case.data(9), loss_fn=case.loss_fn, optimizer=OPTIMIZERS["sgd"]
    )
    assert_close_losses(losses, expected.losses, 1e-9)
    renamed = dict(zip(model.state_dict(), state.values(), strict=True))
    assert_close_state(renamed, model.state_dict(), 1e-9)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "in_flight"), [("pipedream", 1, (6, 1)), ("gpipe", 6, ())]
)
def test_the_device_keeps_two_microbatches_and_no_more_than_is_predicted(
    farm: Farm, schedule: str, microbatches: int, in_flight: tuple[int, ...]
) -> None:
    training = Training(
        "cnn",
        2,
        schedule=schedule,
        microbatches=microbatches,
        in_flight=in_flight,
        num_minibatches=14,
        short_last=False,
    )
    offloaded, _ = farm.results(_train_offloaded, training, "activations", num_ranks=2)[0]
    plain, _ = farm.results(train_in_pipeline, training, num_ranks=2)[0]
    here, there = offloaded.memory[0], plain.memory[0]
    for term in (STASH, TRANSIENT):
        assert here[term]["peak"] <= here[term]["predicted"], term
    # Six microbatches are in flight. The device holds the activations of the one whose backward is next and
    # of one that is being moved, and outputs that wait to be sent.
    sums = [sum(memory[term]["peak"] for term in (STASH, TRANSIENT)) for memory in (here, there)]
    assert 0 < sums[0] < 0.6 * sums[1]
    assert _planned(here, OFFLOADED_ACTIVATIONS) > 0
    assert not any(name.startswith(OFFLOADED_ACTIVATIONS) for name in there)


def _train_and_watch_outputs(training: Training) -> list[int]:
    """Trains. For each backward of this rank, returns the bytes of the first output that its graph still
    holds.
    """
    found: list[int] = []
    backward = StageRunner.backward

    def watched(runner: StageRunner, work: Any) -> list[torch.Tensor]:
        stashed = runner._in_flight[work.minibatch, work.microbatch]
        found.append(stashed.outputs[0].untyped_storage().nbytes())
        return backward(runner, work)

    StageRunner.backward = watched  # type: ignore[method-assign]
    try:
        _train_offloaded(training)
    finally:
        StageRunner.backward = backward  # type: ignore[method-assign]
    return found


def test_an_output_is_kept_for_its_send_only(farm: Farm) -> None:
    training = Training("mlp", 2, in_flight=(4, 1), num_minibatches=6, short_last=False)
    first, _ = farm.results(_train_and_watch_outputs, training, num_ranks=2)
    # The first microbatch's backward is the stage's next one, so its tensors stay on the device. Its output
    # has six samples of 16 numbers. The other outputs have been reduced to one element.
    assert first == [6 * 16 * 8] + [8] * 5


def test_small_tensors_stay_on_the_device(farm: Farm) -> None:
    training = Training("cnn", 2, in_flight=(4, 1))
    result, _ = farm.results(_train_with_threshold, training, 1 << 30, num_ranks=2)[0]
    assert result.offload == [_NOTHING, _NOTHING]


def _train_with_threshold(training: Training, small_bytes: int) -> tuple[RunResult, State]:
    with _offloading("activations", small_bytes):
        return train_in_pipeline(training)


def test_an_unknown_word_is_refused(farm: Farm) -> None:
    outcome = farm.run(_train_offloaded, Training("mlp", 1), "weights", num_ranks=1)[0]
    assert isinstance(outcome.error, ValueError)
    assert "PIPEDREAM_OFFLOAD has 'weights': use activations, versions or both" in str(outcome.error)
