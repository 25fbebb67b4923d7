"""run(schedule="pipedream") over separate processes and ZeroMQ gives the oracle's numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pipedream
import pytest
import torch
from covering import parametrize_pairs
from farm import Farm
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CASES
from oracle import assert_equals_reference
from pipedream import RunResult, reference
from training import (
    OPTIMIZERS,
    State,
    Training,
    assert_close_losses,
    assert_close_state,
    train_by_reference,
    train_in_pipeline,
    train_plainly,
    weight_decay_by_name,
)


@parametrize_pairs(case_name=list(CASES), num_stages=(1, 2, 3, 4), dtype=(torch.float64, torch.float32))
def test_losses_weights_buffers_and_versions_equal_the_references(
    farm: Farm, case_name: str, dtype: torch.dtype, num_stages: int
) -> None:
    assert_equals_reference(farm, Training(case_name, num_stages, dtype))


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("case_name", ["mlp", "cnn", "transformer"])
def test_several_stages_do_not_train_as_a_plain_loop_does(
    farm: Farm, case_name: str, num_stages: int
) -> None:
    # The losses must differ from those of a plain loop. Otherwise a run that drains the pipeline at every
    # minibatch would pass the other tests, too.
    training = Training(case_name, num_stages)
    result, _ = farm.results(train_in_pipeline, training, num_ranks=num_stages)[0]
    plain_losses, _ = train_plainly(training)
    assert_close_losses(result.losses[:1], plain_losses[:1], 1e-9)
    with pytest.raises(AssertionError, match="minibatch"):
        assert_close_losses(result.losses, plain_losses, 1e-5)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", ["adam", "adamw", "adagrad", "by name"])
def test_any_torch_optimizer_gives_the_references_result(farm: Farm, name: str, num_stages: int) -> None:
    optimizer = {**OPTIMIZERS, "by name": weight_decay_by_name}[name]
    assert_equals_reference(farm, Training("cnn", num_stages, optimizer=optimizer))


_SGD_ARGUMENTS: list[dict[str, Any]] = [
    {"lr": 0.05},
    {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3},
    {"lr": 0.02, "momentum": 0.8, "nesterov": True},
    {"lr": 0.02, "momentum": 0.8, "dampening": 0.3, "maximize": True},
]


@pytest.mark.parametrize("arguments", _SGD_ARGUMENTS, ids=" ".join)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_native_sgd_gives_the_result_of_torchs(
    farm: Farm, dtype: torch.dtype, arguments: dict[str, Any]
) -> None:
    training = Training("cnn", 3, dtype, optimizer=functools.partial(torch.optim.SGD, **arguments))
    native = functools.partial(pipedream.optim.SGD, **arguments)
    assert_equals_reference(farm, training, native=native)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("case_name", ["mlp", "dropout"])
def test_a_shuffling_loader_over_several_epochs_with_a_short_batch_gives_the_references_result(
    farm: Farm, case_name: str, num_stages: int
) -> None:
    training = Training(case_name, num_stages, epochs=3, num_minibatches=4, shuffled=True)
    # All batches have the same size. A shuffle could put a short batch first, and the pipeline would drain
    # for the larger ones.
    training = replace(training, short_last=False)
    result, _ = assert_equals_reference(farm, training)
    epochs = [result.losses[first : first + 4] for first in (0, 4, 8)]
    assert result.epoch_losses == pytest.approx([sum(losses) / 4 for losses in epochs])
    assert sorted(epochs[0]) != sorted(epochs[1])  # it went on training


def test_the_pipeline_does_not_drain_between_epochs_and_short_batches_count_by_their_samples(
    farm: Farm,
) -> None:
    training = Training("cnn", 3, epochs=3, num_minibatches=3, short_last=True)
    result, _ = assert_equals_reference(farm, training)
    # Minibatch 3 is the first of epoch 1. If the pipeline drained between epochs, stage 0 would read version
    # 3.
    assert result.versions[0][3] == (1, 1)
    first, second, third = result.losses[:3]
    assert result.epoch_losses[0] == pytest.approx((6 * first + 6 * second + 3 * third) / 15)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_without_a_seed_the_run_goes_on_from_rank_0s_generators(farm: Farm, num_stages: int) -> None:
    training = Training("dropout", num_stages, seed=None, shuffled=True, short_last=False)
    result, state = farm.results(train_in_pipeline, training, num_ranks=num_stages)[0]
    model = training.model()
    torch.manual_seed(0)  # the farm's seed at rank 0; the other ranks have others
    expected = reference.run(model, training.plan, **training.options())
    assert_close_losses(result.losses, expected.losses, 1e-9)
    assert_close_state(state, model.state_dict(), 1e-9)
    torch.manual_seed(1)
    other = reference.run(training.model(), training.plan, **training.options())
    assert other.losses != expected.losses


class Unsized:
    """Minibatches that can be iterated again, but have no len()."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        yield from self._batches


def _train_on_unsized(training: Training, *, once: bool) -> tuple[RunResult, State]:
    data = Unsized(list(training.data()))
    return train_in_pipeline(training, data=iter(data) if once else data)


@pytest.mark.parametrize("num_minibatches", [1, 2, 6])
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("once", [True, False], ids=["generator", "iterable"])
def test_data_of_unknown_length_train_to_their_end(
    farm: Farm, num_stages: int, num_minibatches: int, once: bool
) -> None:
    epochs = 1 if once else 2
    training = Training("mlp", num_stages, num_minibatches=num_minibatches, epochs=epochs, short_last=False)
    result, state = farm.results(_train_on_unsized, training, once=once, num_ranks=num_stages)[0]
    expected, expected_state = train_by_reference(training)
    assert len(result.losses) == num_minibatches * epochs
    assert_close_losses(result.losses, expected.losses, 1e-9)
    assert_close_state(state, expected_state, 1e-9)
    assert result.versions == expected.versions


class Join(torch.nn.Module):
    """Maps {"a": x, "pair": (y, scale)} to x + scale y, and passes y on to a later stage."""

    def forward(self, value: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        y, scale = value["pair"]
        return value["a"] + scale * y, y


class OnFirst(torch.nn.Module):
    """Applies a layer to the first of two tensors, and passes the second tensor on unchanged."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = value
        return self.layer(first), second


class Meet(torch.nn.Module):
    """Uses both tensors, also returns integers, and has a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        first, second = value
        return {"sum": self.scale * first + second, "argmax": second.argmax(dim=1)}


class Out(torch.nn.Module):
    def forward(self, value: dict[str, torch.Tensor]) -> torch.Tensor:
        return value["sum"] * (1 + value["argmax"].unsqueeze(1))


def _weighted_error(outputs: torch.Tensor, targets: dict[str, torch.Tensor]) -> torch.Tensor:
    return (targets["weight"] * (outputs - targets["wanted"]) ** 2).mean()


def _nested() -> tuple[torch.nn.Sequential, list[Any]]:
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = torch.nn.Sequential(Join(), OnFirst(torch.nn.Linear(4, 4)), Meet(), Out()).double()
    data = [
        (
            {"a": normal(n, 4), "pair": (normal(n, 4), 0.5)},
            {"wanted": normal(n, 4), "weight": normal(n, 1) ** 2},
        )
        for n in (5, 5, 3, 5, 2)
    ]
    return model, data


def _train_nested(num_stages: int) -> tuple[list[float], State]:
    model, data = _nested()
    result = pipedream.run(
        model,
        pipedream.Plan.straight(4, num_stages),
        data=data,
        loss_fn=_weighted_error,
        optimizer=OPTIMIZERS["adam"],
        progress=False,
    )
    return result.losses, model.state_dict()


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_nested_inputs_targets_and_boundaries_with_integers_and_unused_parameters(
    farm: Farm, num_stages: int
) -> None:
    losses, state = farm.results(_train_nested, num_stages, num_ranks=num_stages)[0]
    model, data = _nested()
    plan = pipedream.Plan.straight(4, num_stages)
    expected = reference.run(model, plan, data=data, loss_fn=_weighted_error, optimizer=OPTIMIZERS["adam"])
    assert_close_losses(losses, expected.losses, 1e-9)
    assert_close_state(state, model.state_dict(), 1e-9)


def _sparse(optimizer: Callable[[Any], torch.optim.Optimizer], num_stages: int) -> Any:
    case = CASES["tied"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = torch.nn.Sequential(
            torch.nn.Embedding(13, 8, sparse=True), torch.nn.Tanh(), torch.nn.Linear(8, 13)
        ).double()
    plan = pipedream.Plan.straight(3, num_stages)
    return model, plan, {"data": case.data(6), "loss_fn": case.loss_fn, "optimizer": optimizer}


def _train_sparse(optimizer: Callable[[Any], torch.optim.Optimizer], num_stages: int) -> Any:
    model, plan, options = _sparse(optimizer, num_stages)
    return pipedream.run(model, plan, progress=False, **options).losses, model.state_dict()


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_sparse_gradients_of_an_embedding_are_applied(farm: Farm, native: bool) -> None:
    optimizer = functools.partial(pipedream.optim.SGD if native else torch.optim.SGD, lr=0.5)
    losses, state = farm.results(_train_sparse, optimizer, 2, num_ranks=2)[0]
    model, plan, options = _sparse(functools.partial(torch.optim.SGD, lr=0.5), 2)
    expected = reference.run(model, plan, **options)
    assert_close_losses(losses, expected.losses, 1e-9)
    assert_close_state(state, model.state_dict(), 1e-9)


@st.composite
def _trainings(draw: st.DrawFn) -> Training:
    in_flight = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    return Training(
        draw(st.sampled_from(["mlp", "cnn", "dropout"])),
        num_stages=len(in_flight),
        in_flight=tuple(sorted(in_flight, reverse=True)),  # one that rises downstream is refused
        num_minibatches=draw(st.integers(1, 9)),
        epochs=draw(st.integers(1, 2)),
        short_last=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )


@pytest.mark.slow
@settings(max_examples=25, derandomize=True)
@given(training=_trainings())
def test_any_depth_length_and_number_in_flight_equals_the_reference(farm: Farm, training: Training) -> None:
    if training.num_minibatches == 1 and training.epochs == 2:
        training = replace(training, short_last=False)
    assert_equals_reference(farm, training)
