"""Tests that run(schedule="pipedream") over separate processes and ZeroMQ gives the oracle's numbers."""

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
from models import CASES
from oracle import assert_equals_reference
from pipedream import reference
from training import (
    OPTIMIZERS,
    State,
    Training,
    Unsized,
    assert_close_losses,
    assert_close_state,
    train_in_pipeline,
    weight_decay_by_name,
)


@parametrize_pairs(case_name=list(CASES), num_stages=(1, 2, 3, 4), dtype=(torch.float64, torch.float32))
def test_losses_weights_buffers_and_versions_equal_the_references(
    farm: Farm, case_name: str, dtype: torch.dtype, num_stages: int
) -> None:
    assert_equals_reference(farm, Training(case_name, num_stages, dtype))


def test_an_optimizer_that_asks_for_names_gives_the_references_result(farm: Farm) -> None:
    assert_equals_reference(farm, Training("cnn", 3, optimizer=weight_decay_by_name))


# The first has no state. The second has a momentum, which begins with the whole first gradient in spite of
# the dampening.
@pytest.mark.parametrize(
    "arguments",
    [{"lr": 0.05}, {"lr": 0.02, "momentum": 0.8, "dampening": 0.3, "maximize": True}],
    ids=" ".join,
)
def test_native_sgd_gives_the_result_of_torchs(farm: Farm, arguments: dict[str, Any]) -> None:
    training = Training("cnn", 3, optimizer=functools.partial(torch.optim.SGD, **arguments))
    native = functools.partial(pipedream.optim.SGD, **arguments)
    assert_equals_reference(farm, training, native=native)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_shuffling_loader_over_several_epochs_gives_the_references_result(
    farm: Farm, num_stages: int
) -> None:
    training = Training("dropout", num_stages, epochs=3, num_minibatches=4, shuffled=True)
    # All batches have the same size. A shuffle could put a short batch first, and the pipeline would drain
    # for the larger ones.
    training = replace(training, short_last=False)
    result, _ = assert_equals_reference(farm, training)
    epochs = [result.losses[first : first + 4] for first in (0, 4, 8)]
    assert result.epoch_losses == pytest.approx([sum(losses) / 4 for losses in epochs])
    assert sorted(epochs[0]) != sorted(epochs[1])  # the epochs differ, so training went on


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
    torch.manual_seed(0)  # the farm seeds rank 0 with 0, and the other ranks otherwise
    expected = reference.run(model, training.plan, **training.options())
    assert_close_losses(result.losses, expected.losses, 1e-9)
    assert_close_state(state, model.state_dict(), 1e-9)
    torch.manual_seed(1)
    other = reference.run(training.model(), training.plan, **training.options())
    assert other.losses != expected.losses


@pytest.mark.parametrize("num_minibatches", [1, 2, 6])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_epochs_of_unknown_length_train_to_their_end(
    farm: Farm, num_stages: int, num_minibatches: int
) -> None:
    training = Training("mlp", num_stages, num_minibatches=num_minibatches, epochs=2, short_last=False)
    result, _ = assert_equals_reference(farm, training, data=Unsized(list(training.data())))
    assert len(result.losses) == num_minibatches * 2


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
