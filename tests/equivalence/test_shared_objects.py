"""Tests that model, loss and data may hold parts of each other. They also share these parts in a worker. The
state of a loss comes back to the caller, as in a plain loop.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from pipedream import Plan
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

_SGD = functools.partial(torch.optim.SGD, lr=0.1)
_NUM_MINIBATCHES = 6


class _Centred(nn.Module):
    """A loss that reads a buffer of the model, and keeps a centre, a count and a queue."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2, dtype=torch.float64))
        self.mean = norm.running_mean
        self.queue = torch.zeros(3, 2, dtype=torch.float64)
        self.steps = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = (outputs - targets - self.centre - self.queue.mean(0) / (1 + self.steps)).square().mean()
        self.queue[self.steps % 3] = outputs.detach()[0]
        self.steps += 1
        self.centre.mul_(0.9).add_(outputs.detach().mean(0), alpha=0.1)
        assert self.mean is not None
        return loss + self.mean.sum()


def _model_and_loss() -> tuple[nn.Sequential, _Centred]:
    torch.manual_seed(7)
    norm = nn.BatchNorm1d(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), norm).double(), _Centred(norm.double())


def _batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    make = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return [(make(4, 3), make(4, 2)) for _ in range(_NUM_MINIBATCHES)]


def _kept(loss_fn: _Centred) -> tuple[list[float], list[list[float]], int]:
    return loss_fn.centre.tolist(), loss_fn.queue.tolist(), loss_fn.steps


def _train(num_stages: int, **options: Any) -> tuple[list[float], Any]:
    """Trains twice in succession with the same model and loss."""
    model, loss_fn = _model_and_loss()
    losses = []
    for _ in range(2):
        result = pipedream.run(
            model,
            Plan.straight(4, num_stages),
            data=_batches(),
            loss_fn=loss_fn,
            optimizer=_SGD,
            schedule="flush",
            progress=False,
            **options,
        )
        losses += result.losses
    return losses, _kept(loss_fn)


def _train_plainly() -> tuple[list[float], Any]:
    model, loss_fn = _model_and_loss()
    losses = []
    for _ in range(2):
        optimizer = _SGD(model.parameters())
        for inputs, targets in _batches():
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            optimizer.step()
    return losses, _kept(loss_fn)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_loss_sees_the_models_buffer_and_its_own_state_comes_back(num_stages: int) -> None:
    # The loss must see the current mean of the batch norm. Each run must begin with the centre that the run
    # before has left.
    assert _train(num_stages) == _train_plainly()


@pytest.mark.parametrize("gather", ["rank0", "all"])
def test_ranks_bring_the_state_of_the_loss_to_where_the_weights_go(farm: Farm, gather: str) -> None:
    outcomes = farm.results(_train_once, gather, num_ranks=3)
    expected = _train_once("rank0", plainly=True)
    of_ranks = [kept == expected for kept in outcomes]
    # The last rank computes the loss, so it has the state anyway.
    assert of_ranks == ([True] * 3 if gather == "all" else [True, False, True])


def _train_once(gather: str, *, plainly: bool = False) -> Any:
    model, loss_fn = _model_and_loss()
    if plainly:
        optimizer = _SGD(model.parameters())
        for inputs, targets in _batches():
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
    else:
        options: dict[str, Any] = {"schedule": "flush", "progress": False, "gather": gather}
        plan = Plan.straight(4, 3)
        pipedream.run(model, plan, data=_batches(), loss_fn=loss_fn, optimizer=_SGD, **options)
    return _kept(loss_fn)


class _Asking(Sampler[int]):
    """Chooses a sample by the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __iter__(self) -> Iterator[int]:
        for _ in range(_NUM_MINIBATCHES):
            yield int(abs(next(self.model.parameters()).sum().item()) * 1000) % 16

    def __len__(self) -> int:
        return _NUM_MINIBATCHES


def _asking_loader(model: nn.Module) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(16, 3, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :2]), sampler=_Asking(model))


def _small() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def test_a_sampler_asks_the_model_of_the_only_worker_as_in_a_plain_loop() -> None:
    # The sampler must ask the trained model, not a copy with the initial weights.
    model, plain = _small(), _small()
    result = pipedream.run(
        model,
        Plan.straight(2, 1),
        data=_asking_loader(model),
        loss_fn=nn.functional.mse_loss,
        optimizer=_SGD,
        progress=False,
    )
    optimizer, losses = _SGD(plain.parameters()), []
    for inputs, targets in _asking_loader(plain):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(plain(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        optimizer.step()
    assert result.losses == losses


def _asking_generator(model: nn.Module) -> Iterator[Any]:
    yield from _asking_loader(model)


class _AskingData:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __iter__(self) -> Iterator[Any]:
        return iter(_asking_loader(self.model))


def _run_on_two(data: Any, model: nn.Module) -> None:
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "optimizer": _SGD, "progress": False}
    pipedream.run(model, Plan.straight(2, 2), data=data, **options)


def test_a_sampler_that_asks_a_model_of_several_stages_is_refused_by_name() -> None:
    model = _small()
    with pytest.raises(ValueError, match=r"data\.sampler\.model is a part of the model"):
        _run_on_two(_asking_loader(model), model)


@pytest.mark.parametrize("make", [_asking_generator, _AskingData])
def test_other_data_that_hold_a_model_of_several_stages_are_warned_of(
    make: Callable[[nn.Module], Any],
) -> None:
    """Each worker iterates such data itself, so the workers may read different minibatches."""
    model = _small()
    with (
        pytest.warns(UserWarning, match=r"data holds a part of the model \(data.*model\)"),
        contextlib.suppress(pipedream.DataMismatch),
    ):
        _run_on_two(make(model), model)
