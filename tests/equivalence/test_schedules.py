"""Tests that every schedule, over separate processes and ZeroMQ, gives the oracle's numbers, with every
pair of values of the options in _FACTORS.

Each run must also read the right versions, and no memory term may exceed its prediction.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pipedream
import pytest
import torch
import torch.nn.functional as F
from covering import Row, covering_rows
from farm import Farm
from hypothesis import given, settings
from hypothesis import strategies as st
from models import BATCH, WIDTH
from oracle import assert_equals_reference, assert_memory_as_predicted, assert_same_numbers
from pipedream import Plan, RunResult, _core, reference
from pipedream.model.boundary import tensors_of
from torch import nn
from training import (
    OPTIMIZERS,
    CountingSGD,
    Overflowing,
    State,
    Training,
    assert_close_state,
    train_by_reference,
    train_in_pipeline,
)

DELAYED = ("pipedream", "vertical_sync", "unstashed", "2bw")
DRAINING = ("flush", "gpipe", "model_parallel", "interleaved")
SCHEDULES = (*DELAYED, *DRAINING)
_MODELS = ("mlp", "cnn", "transformer", "tied", "tied_apart", "dropout", "lstm", "frozen")
_AUTOCAST_MODELS = ("mlp", "cnn", "transformer", "tied", "tied_apart", "frozen")

# Interleaved has two workers in these tests, so the number of stages is even, or one.
_STAGE_COUNTS = {schedule: (1, 2, 4) if schedule == "interleaved" else (1, 2, 3, 4) for schedule in SCHEDULES}


def _microbatch_counts(schedule: str, num_stages: int) -> tuple[int, ...]:
    """Returns the numbers of microbatches to test. 2bw needs at least as many as are in flight. 6 samples in
    4 or 5 microbatches make 3 pieces, so 1 or 2 are empty.
    """
    return (num_stages, num_stages + 1, 6) if schedule == "2bw" else (1, 2, 4)


def _training(case_name: str, num_stages: int, schedule: str, microbatches: int, **options: Any) -> Training:
    # The last minibatch has half the samples, if they are enough for the microbatches.
    short_last = microbatches <= BATCH // 2
    given: dict[str, Any] = {
        "short_last": short_last,
        "schedule": schedule,
        "microbatches": microbatches,
    } | options
    return Training(case_name, num_stages, **given)


_ADAM = functools.partial(torch.optim.Adam, lr=0.01)
_NATIVE: dict[str, tuple[Any, Any]] = {
    "sgd": (OPTIMIZERS["sgd"], functools.partial(pipedream.optim.SGD, **OPTIMIZERS["sgd"].keywords)),  # type: ignore[attr-defined]
    "adam": (
        functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
        functools.partial(pipedream.optim.Adam, lr=0.01, amsgrad=True),
    ),
    "adamw": (OPTIMIZERS["adamw"], functools.partial(pipedream.optim.AdamW, lr=0.01)),
    "nadamw": (
        functools.partial(torch.optim.NAdam, lr=0.01, weight_decay=0.01, decoupled_weight_decay=True),
        functools.partial(pipedream.optim.NAdamW, lr=0.01),
    ),
}


def _optimizer_pairs() -> dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Any]]:
    """Returns the reference's and the pipeline's optimizer by name. None: the same as the reference's."""
    plain = {name: (optimizer, None) for name, optimizer in OPTIMIZERS.items()}
    return plain | {f"native {name}": pair for name, pair in _NATIVE.items()}


_STEP_LR = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
# Changes the momentum too.
_ONE_CYCLE = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20)
_LR_SCHEDULERS = {"constant": None, "StepLR": _STEP_LR, "OneCycleLR": _ONE_CYCLE}

# This is the tolerance with autocast. The oracle computes exactly the same bits, and a single wrong bit in
# autocast's precision would be a larger difference.
_SAME_BITS = 1e-6

_FACTORS: dict[str, Sequence[Any]] = {
    "schedule": SCHEDULES,
    "num_stages": (1, 2, 3, 4),
    "count": (0, 1, 2),  # position in _microbatch_counts
    "case_name": _MODELS,
    "optimizer": tuple(_optimizer_pairs()),
    "precision": ("float64", "float32", "bfloat16", "float16"),
    "recompute": ("none", "all", "first"),
    "lr_scheduler": tuple(_LR_SCHEDULERS),
    "max_grad_norm": (None, 0.3),
    "transport": ("auto", "shm", "tcp"),
}


def _is_allowed(row: Row) -> bool:
    """Returns whether both sides can compute the row alike. Below float64 they must use the same operators in
    the same order.
    """
    if row.get("num_stages", 1) not in _STAGE_COUNTS[row.get("schedule", "pipedream")]:
        return False
    precision, optimizer = row.get("precision", "float64"), row.get("optimizer", "sgd")
    if precision == "float32" and optimizer not in ("sgd", "native sgd"):
        return False
    if precision in ("bfloat16", "float16") and (
        optimizer != "sgd" or row.get("case_name", "cnn") not in _AUTOCAST_MODELS
    ):
        return False
    if optimizer == "adagrad" and row.get("lr_scheduler") == "OneCycleLR":
        return False  # Adagrad has no momentum to change
    # Norms are summed in another order, and native optimizers round differently. Some gradients are only
    # rounding errors: that of a bias before a batch norm, and that of an attention's key. An optimizer that
    # divides by a gradient's size makes large steps of these.
    rounds_otherwise = row.get("max_grad_norm") is not None or optimizer.startswith("native")
    has_such_gradients = row.get("case_name") in ("cnn", "transformer")
    return not ("ada" in optimizer and rounds_otherwise and has_such_gradients)


def _rows() -> list[Row]:
    """Returns rows that have every schedule with every number of stages and microbatches, and every pair of
    values of all options."""
    shapes = [
        {"schedule": schedule, "num_stages": num_stages, "count": count}
        for schedule in SCHEDULES
        for num_stages in _STAGE_COUNTS[schedule]
        for count in _FACTORS["count"]
    ]
    return covering_rows(_FACTORS, _is_allowed, shapes)


def _name(row: Row) -> str:
    return "-".join(str(value) for value in row.values())


def test_the_schedules_here_are_all_that_there_are() -> None:
    # data_parallel has one stage.
    assert {*SCHEDULES, "data_parallel"} == set(_core.schedule_names())


@pytest.mark.parametrize("row", _rows(), ids=_name)
def test_every_pair_of_options_equals_the_reference(farm: Farm, row: Row) -> None:
    schedule, num_stages = row["schedule"], row["num_stages"]
    optimizer, native = _optimizer_pairs()[row["optimizer"]]
    is_autocast = row["precision"] in ("bfloat16", "float16")
    stages = {"none": (), "all": tuple(range(num_stages)), "first": (0,)}[row["recompute"]]
    training = _training(
        row["case_name"],
        num_stages,
        schedule,
        _microbatch_counts(schedule, num_stages)[row["count"]],
        dtype=torch.float64 if row["precision"] == "float64" else torch.float32,
        autocast=row["precision"] if is_autocast else None,
        optimizer=optimizer,
        recompute=stages or None,
        lr_scheduler=_LR_SCHEDULERS[row["lr_scheduler"]],
        max_grad_norm=row["max_grad_norm"],
    )
    relative = _SAME_BITS if is_autocast else None
    result, state = assert_equals_reference(
        farm, training, native=native, relative=relative, transport=row["transport"]
    )
    wanted = [stage in stages for stage in range(num_stages)]
    assert result.recompute == wanted
    kinds = {(span.stage, span.kind) for spans in result.spans for span in spans}
    assert [(stage, "RECOMPUTE") in kinds for stage in range(num_stages)] == wanted
    assert all(tensor.dtype == training.dtype for tensor in state.values() if tensor.is_floating_point())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "options",
    [
        {"lr_scheduler": _STEP_LR},
        {"lr_scheduler": _ONE_CYCLE},
        {"max_grad_norm": 0.3},
        {"autocast": "bfloat16"},
    ],
    ids=["StepLR", "OneCycleLR", "max_grad_norm", "autocast"],
)
def test_an_option_changes_what_the_reference_computes(options: dict[str, Any], schedule: str) -> None:
    # An option must change the result. Otherwise a pipeline that ignores the option would pass.
    training = _training("cnn", 2, schedule, 2, dtype=torch.float32)
    plain, _ = train_by_reference(training)
    assert train_by_reference(replace(training, **options))[0].losses[1:] != plain.losses[1:]


def _tied_chunks(how: str) -> nn.Sequential:
    """Returns four layers. The first and the third share a weight, or are the same layer.

    With "weight of both workers" the last layer, which belongs to the other worker, shares the weight too.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(4)]
    if how == "layer":
        layers[2] = layers[0]
    else:
        layers[2].weight = layers[0].weight
    if how == "weight of both workers":
        layers[3].weight = layers[0].weight
    return nn.Sequential(*layers)


def _tied_chunks_options() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(8)
    shape = (5, BATCH, WIDTH)
    pairs = zip(*(torch.randn(shape, generator=generator).double() for _ in range(2)), strict=True)
    return {
        "data": list(pairs),
        "loss_fn": F.mse_loss,
        "optimizer": OPTIMIZERS["sgd"],
        "schedule": "interleaved",
        "microbatches": 3,
    }


def _train_tied_chunks(how: str, **options: Any) -> tuple[RunResult, State]:
    model, plan = _tied_chunks(how), Plan.straight(4, 4, num_workers=2)
    result = pipedream.run(model, plan, progress=False, **_tied_chunks_options() | options)
    return result, model.state_dict()


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("how", ["weight", "layer", "weight of both workers"])
def test_two_stages_of_one_worker_may_share_parameters(farm: Farm, how: str, options: dict[str, Any]) -> None:
    result, state = farm.results(_train_tied_chunks, how, num_ranks=2, **options)[0]
    model = _tied_chunks(how)
    arguments = _tied_chunks_options() | options
    expected = reference.run(model, Plan.straight(4, 4, num_workers=2), **arguments)
    assert_same_numbers(result.losses, state, expected.losses, model.state_dict(), 1e-9)
    assert_memory_as_predicted(result)


# Options.


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_updates_that_overflow_float16_are_skipped_as_by_the_reference(
    farm: Farm, num_stages: int, schedule: str
) -> None:
    training = Overflowing(
        "mlp",
        num_stages,
        torch.float32,
        # 1/16 makes up for the factor of the loss.
        functools.partial(CountingSGD, lr=0.05 / 16, momentum=0.9),
        loss_factor=16.0,
        num_minibatches=12,
        schedule=schedule,
        microbatches=2,
        autocast="float16",
        lr_scheduler=_STEP_LR,
        max_grad_norm=20.0,
    )
    CountingSGD.num_steps = 0
    reference.run(training.model(), training.plan, **training.options())
    assert 0 < CountingSGD.num_steps < 12 * num_stages, "no update was skipped, or all were"
    assert_equals_reference(farm, training, relative=_SAME_BITS)


class _Spoil(torch.autograd.Function):
    """Returns its input. The weight's gradient is 1, or infinite in the backwards that `at` names."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.layer = layer
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        layer = ctx.layer
        is_spoilt = layer.num_backwards in layer.at
        layer.num_backwards += 1
        # Both cases use the same operators, because memory is predicted from a normal backward.
        slope = gradients[0].sum().reshape(1) * (float("inf") if is_spoilt else 1.0)
        return gradients[0], slope, None


class _SpoiltLayer(nn.Module):
    def __init__(self, at: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.at = at
        self.num_backwards = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        # The weight is also a factor of the output, so the losses show which updates were made.
        output: torch.Tensor = _Spoil.apply(value, self.weight, self)  # type: ignore[no-untyped-call]
        return output * (1 - 1e-6 * self.weight.detach())


def _mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.float().mean()


def _spoilt(at: list[tuple[int, ...]], schedule: str) -> tuple[Any, Any, dict[str, Any]]:
    """Returns model, plan and arguments. There is one stage for each layer, and two microbatches in each
    minibatch.

    `at` names for each layer the backwards to spoil, counted by microbatches. A rehearsal does not change the
    count.
    """
    model = nn.Sequential(*(_SpoiltLayer(of_layer) for of_layer in at))
    options = {
        "data": [(torch.ones(2, 1), torch.ones(2, 1))] * 10,
        "loss_fn": _mean,
        "optimizer": functools.partial(torch.optim.SGD, lr=1.0),
        "schedule": schedule,
        "microbatches": 2,
        "autocast": "float16",
        "lr_scheduler": _STEP_LR,
    }
    num_workers = 2 if schedule == "interleaved" else len(model)
    return model, Plan.straight(len(model), len(model), num_workers=num_workers), options


def _train_spoilt(at: list[tuple[int, ...]], schedule: str) -> tuple[RunResult, State]:
    model, plan, options = _spoilt(at, schedule)
    return pipedream.run(model, plan, progress=False, **options), model.state_dict()


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "interleaved"])
@pytest.mark.parametrize(
    "at", [[(5,), ()], [(), (5,)], [(4, 5, 6), (7,)]], ids=["first stage", "last stage", "both"]
)
def test_an_overflow_of_one_stage_skips_what_the_reference_skips(
    farm: Farm, at: list[tuple[int, ...]], schedule: str
) -> None:
    _assert_skips_as_the_reference(farm, at, schedule)


# The first worker has stages 0 and 2, and the second has stages 1 and 3.
@pytest.mark.parametrize("stages", [(0,), (2,), (3,), (0, 2), (1, 2)], ids=str)
def test_an_overflow_of_one_of_a_workers_stages_skips_what_the_reference_skips(
    farm: Farm, stages: tuple[int, ...]
) -> None:
    at = [(5, 8) if stage in stages else () for stage in range(4)]
    _assert_skips_as_the_reference(farm, at, "interleaved")


def _assert_skips_as_the_reference(farm: Farm, at: list[tuple[int, ...]], schedule: str) -> None:
    result, state = farm.results(_train_spoilt, at, schedule, num_ranks=2)[0]
    model, plan, options = _spoilt(at, schedule)
    expected = reference.run(model, plan, **options)
    assert_same_numbers(result.losses, state, expected.losses, model.state_dict(), _SAME_BITS)
    assert_memory_as_predicted(result)
    model, plan, options = _spoilt([()] * len(at), schedule)
    reference.run(model, plan, **options)
    with pytest.raises(AssertionError):
        assert_close_state(state, model.state_dict(), _SAME_BITS)  # nothing is skipped in that run


# Data.


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case_name", ["cnn", "dropout"])
def test_microbatches_are_torchs_chunks_and_count_by_their_samples(
    farm: Farm, case_name: str, schedule: str
) -> None:
    # In 4 microbatches, 5 samples are cut into 2, 2, 1 and 0. 4 samples are cut into 1 each, and 6 samples
    # into 2, 2, 2 and 0.
    training = _training(case_name, 2, schedule, 4)
    data = [
        (inputs[:size], targets[:size])
        for size, (inputs, targets) in zip((6, 5, 5, 4, 6, 5, 4), training.data(), strict=True)
    ]
    assert_equals_reference(farm, training, data=data)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_epochs_go_on_and_short_batches_count_by_their_samples(farm: Farm, schedule: str) -> None:
    training = _training("cnn", 2, schedule, 3, num_minibatches=3, epochs=3)
    result, _ = assert_equals_reference(farm, training)
    first, second, third = result.losses[:3]
    assert result.epoch_losses[0] == pytest.approx((6 * first + 6 * second + 3 * third) / 15)


def _train_on_iterator(training: Training, **options: Any) -> tuple[RunResult, State]:
    return train_in_pipeline(training, data=iter(training.data()), **options)


@pytest.mark.parametrize("num_minibatches", [1, 2, 5])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_data_of_unknown_length_train_to_their_end(farm: Farm, schedule: str, num_minibatches: int) -> None:
    num_stages = 4 if schedule == "interleaved" else 3
    training = _training("mlp", num_stages, schedule, 3, num_minibatches=num_minibatches, short_last=False)
    result, _ = assert_equals_reference(farm, training, train=_train_on_iterator)
    assert len(result.losses) == num_minibatches


@pytest.mark.parametrize("in_flight", [(1, 1, 1), (2, 1, 1), (3, 3, 3), (5, 4, 2)], ids=str)
@pytest.mark.parametrize("schedule", [*DELAYED, "flush"])
def test_any_number_in_flight_equals_the_reference(
    farm: Farm, schedule: str, in_flight: tuple[int, ...]
) -> None:
    assert_equals_reference(farm, _training("tied_apart", 3, schedule, 5, in_flight=in_flight))


# Anything at once.


class _Sleep:
    """A forward hook that sleeps up to longest_ms milliseconds in the forward, and again in the backward."""

    def __init__(self, longest_ms: float, seed: str) -> None:
        self._random = random.Random(seed)  # not torch's generator, whose draws are part of the result
        self._longest_s = longest_ms / 1e3

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._sleep()
        for tensor in tensors_of(outputs):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._sleep())  # type: ignore[no-untyped-call]

    def _sleep(self) -> None:
        time.sleep(self._random.uniform(0, self._longest_s))


@dataclass(frozen=True)
class _Jittery(Training):
    longest_ms: float = 0.0

    def model(self) -> nn.Sequential:
        model = super().model()
        for i, layer in enumerate(model):
            layer.register_forward_hook(_Sleep(self.longest_ms, f"{i} {os.environ['RANK']}"))
        return model


def _train_with_jitter(training: Training, longest_ms: float, **options: Any) -> tuple[RunResult, State]:
    given = {field.name: getattr(training, field.name) for field in dataclasses.fields(training)}
    return train_in_pipeline(_Jittery(**given, longest_ms=longest_ms), **options)


@st.composite
def _trainings(draw: st.DrawFn) -> tuple[Training, Any]:
    schedule = draw(st.sampled_from(SCHEDULES))
    num_stages = draw(st.sampled_from(_STAGE_COUNTS[schedule]))
    in_flight: tuple[int, ...] = ()
    if schedule != "interleaved" and draw(st.booleans()):
        sizes = st.lists(st.integers(1, 5), min_size=num_stages, max_size=num_stages)
        # A number that rises downstream would be refused.
        in_flight = tuple(sorted(draw(sizes), reverse=True))
    fewest = (in_flight or (num_stages,))[0] if schedule == "2bw" else 1
    microbatches = draw(st.integers(fewest, BATCH))
    optimizer, native = _optimizer_pairs()[draw(st.sampled_from(sorted(_optimizer_pairs())))]
    stages = st.sets(st.integers(0, num_stages - 1)).map(lambda chosen: tuple(sorted(chosen)))
    training = _training(
        draw(st.sampled_from(_MODELS)),
        num_stages,
        schedule,
        microbatches,
        optimizer=optimizer,
        num_minibatches=draw(st.integers(1, 8)),
        epochs=draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 3)),
        in_flight=in_flight,
        recompute=draw(st.none() | st.just(True) | stages),
        lr_scheduler=draw(st.sampled_from([None, _STEP_LR])),
        max_grad_norm=draw(st.sampled_from([None, 0.3])),
    )
    if training.num_minibatches == 1:
        training = replace(training, short_last=False)  # the first minibatch must be the largest
    return training, native


@pytest.mark.slow
@settings(max_examples=40, derandomize=True)
@given(drawn=_trainings(), longest_ms=st.sampled_from([0.0, 1.0, 3.0]))
def test_any_combination_equals_the_reference(
    farm: Farm, drawn: tuple[Training, Any], longest_ms: float
) -> None:
    training, native = drawn
    train = functools.partial(_train_with_jitter, longest_ms=longest_ms)
    assert_equals_reference(farm, training, native=native, train=train)
