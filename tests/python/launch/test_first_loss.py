"""Tests first_loss.py: a caller notices that its workers train another model than its own, and raises no
false alarm.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pipedream
import pytest
import torch
from pipedream import Plan, Stage
from pipedream.launch import launcher
from pipedream.launch.first_loss import FirstLoss
from torch import Tensor, nn
from twins import cross_entropy

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Shift(nn.Module):
    """Adds a number, but not in the caller's process."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size

    def forward(self, value: Tensor) -> Tensor:
        return value + self.size * (multiprocessing.parent_process() is not None)


class _Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (1 + (multiprocessing.parent_process() is not None))


class Doubling(nn.Module):
    """Doubles its gradient in every process but the caller's."""

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = _Doubling.apply(value)  # type: ignore[no-untyped-call]
        return result


class InFloat32(nn.Module):
    """Computes in float32 inside a float64 model, as a rotary embedding does."""

    def forward(self, value: Tensor) -> Tensor:
        return value * value.float().cos().to(value.dtype)


class Normalised(nn.Module):
    """A module with batch norm that is cut along its forward."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.between = nn.Sequential(*between)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.last(self.between(torch.relu(self.norm(self.first(value)))))
        return result


def layers(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), *between, nn.Linear(8, 3))


def _batches(dtype: torch.dtype = torch.float32, num_minibatches: int = 3) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(6, 4, dtype=dtype), torch.randint(3, (6,))) for _ in range(num_minibatches)]


def _run(model: nn.Module, *, dtype: torch.dtype = torch.float32, **options: Any) -> pipedream.RunResult:
    model.to(dtype)
    num_layers = len(model) if isinstance(model, nn.Sequential) else None
    data = options.pop("data", _batches(dtype))
    if num_layers is None:
        num_layers = len(pipedream.profile(model, _batches(dtype), cross_entropy, minibatches=1).layers)
    given = {"data": data, "loss_fn": cross_entropy, "optimizer": SGD, "progress": False, "schedule": "flush"}
    plan = options.pop("plan", None) or Plan.straight(num_layers, 2)
    return pipedream.run(model, plan, **(given | options))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[FirstLoss]:
    """Returns the comparison of each run, which here compares gradients too."""
    found: list[FirstLoss] = []

    class Kept(FirstLoss):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            found.append(self)

    monkeypatch.setattr(launcher, "FirstLoss", Kept)
    monkeypatch.setenv("PIPEDREAM_CHECK", "1")
    return found


@pytest.mark.parametrize("make", [layers, Normalised])
def test_workers_that_have_another_loss_end_the_run(make: Callable[..., nn.Module]) -> None:
    model = make(Shift(0.5))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"the loss of minibatch 0 is \S+ in the workers and \S+ here"):
        _run(model, microbatches=2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_with_a_variable_gradients_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(_run(layers(Doubling())).losses) == 3
    monkeypatch.setenv("PIPEDREAM_CHECK", "1")
    with pytest.raises(ValueError, match=r"norm of the gradients of minibatch 0 at stage 0 is .* here"):
        _run(layers(Doubling()))


def test_with_a_variable_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEDREAM_CHECK", "0")
    assert len(_run(layers(Shift(0.5))).losses) == 3
    monkeypatch.setenv("PIPEDREAM_CHECK", "yes")
    with pytest.raises(ValueError, match="PIPEDREAM_CHECK is 'yes': 1 compares gradients too, 0 compares"):
        _run(layers())


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (layers, {"microbatches": 2}),
        (layers, {"microbatches": 2, "plan": Plan((Stage(0, 2), Stage(3, 3, 2)))}),
        (Normalised, {"microbatches": 3, "schedule": "pipedream"}),
        (lambda: Normalised(InFloat32()), {"dtype": torch.float64, "data": iter(_batches(torch.float64))}),
        (layers, {"autocast": "bfloat16", "microbatches": 2, "weight_fn": len}),
        (lambda: Normalised(nn.Tanh()), {"autocast": "bfloat16", "recompute": True}),
    ],
    ids=["norms", "replicas", "cut", "float32 inside", "autocast", "recompute"],
)
def test_what_only_rounds_in_another_way_is_no_difference(
    compared: list[FirstLoss], make: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    result = _run(make(), **options)
    assert len(result.losses) == 3
    (first,) = compared
    assert first.outcome == "equal"


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (layers(nn.Dropout()), {}),
        (Normalised(nn.Dropout()), {}),
        (layers(), {"codec": {"activations": "int8"}}),
    ],
    ids=["dropout", "dropout in a cut model", "codec"],
)
def test_what_may_differ_is_not_compared(
    compared: list[FirstLoss], model: nn.Module, options: dict[str, Any]
) -> None:
    _run(model, **options)
    (first,) = compared
    assert first.outcome == "incomparable"


class ReadElsewhere:
    """Data that differ in another process."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        factor = 1 + (multiprocessing.parent_process() is not None)
        return iter([(inputs * factor, targets) for inputs, targets in _batches()])


def test_another_minibatch_is_not_compared(compared: list[FirstLoss]) -> None:
    _run(layers(), data=ReadElsewhere())
    (first,) = compared
    assert first.outcome == "incomparable"
