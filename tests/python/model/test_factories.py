"""Tests factories.py: the user's optimizer and lr_scheduler are called for each stage, and are tried before a
run."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pipedream
import pytest
import torch
from pipedream import PipelineError, Plan
from pipedream.launch import launcher
from pipedream.model.factories import build_optimizer, build_scheduler, make_masters, try_factories
from pipedream.update.weights import WeightVersions
from torch import nn

_SGD = functools.partial(torch.optim.SGD, lr=0.1)


def _named(module: nn.Module | None = None) -> list[tuple[str, nn.Parameter]]:
    return list((module or nn.Linear(3, 2)).named_parameters())


def _raise(error: Exception) -> Callable[..., Any]:
    def factory(_: Any) -> Any:
        raise error

    return factory


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (TypeError("got momentm"), TypeError, "TypeError: got momentm"),
        (ValueError("lr is\n-1"), ValueError, "ValueError: lr is -1"),
        (UnicodeDecodeError("ascii", b"\xff", 0, 1, "no"), ValueError, "UnicodeDecodeError: 'ascii' codec"),
        (KeyError("no_decay"), PipelineError, "KeyError: 'no_decay'"),
    ],
)
def test_what_a_factory_raises_names_the_argument_and_the_stage_and_is_the_cause(
    error: Exception, kind: type[Exception], text: str
) -> None:
    names, masters = [name for name, _ in _named()], make_masters(_named())
    for argument, build in [
        ("optimizer", lambda: build_optimizer(_raise(error), names, masters, "stage 1")),
        ("lr_scheduler", lambda: build_scheduler(_raise(error), _SGD(masters), "stage 1")),
    ]:
        with pytest.raises(kind) as caught:
            build()
        assert type(caught.value) is kind
        assert str(caught.value).startswith(f"{argument}(...) of stage 1 raised {text}")
        assert "\n" not in str(caught.value)
        assert caught.value.__cause__ is error


def test_a_factory_that_asks_for_it_is_given_the_delay_of_its_stage() -> None:
    seen: list[float] = []

    def factory(parameters: list[nn.Parameter], delay: float = 7.0) -> torch.optim.Optimizer:
        seen.append(delay)
        return _SGD(parameters)

    stages = [_named(nn.Linear(3, 2)), _named(nn.Linear(2, 2))]
    try_factories(stages, factory, None, "cpu", [1.5, 0.0])
    try_factories(stages, functools.partial(factory, delay=3.0), None, "cpu", [1.5, 0.0])
    assert seen == [1.5, 0.0, 3.0, 3.0]
    try_factories(stages, _SGD, None, "cpu", [1.5, 0.0])  # this factory does not ask for the delay


def test_a_trial_gives_every_stage_with_parameters_its_own_under_their_names() -> None:
    first, last = nn.Linear(3, 2), nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last)
    first.weight.no_weight_decay = True  # type: ignore[attr-defined]
    seen: list[list[tuple[str, nn.Parameter]]] = []

    def factory(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        seen.append(named_parameters)
        return _SGD([parameter for _, parameter in named_parameters])

    try_factories([_named(first), [], _named(last)], factory, None, "cpu")
    assert [[name for name, _ in stage] for stage in seen] == [["weight", "bias"]] * 2
    for given, (_, own) in zip([*seen[0], *seen[1]], [*_named(first), *_named(last)], strict=True):
        assert given[1] is not own
        # The copies share the parameters' memory, so the trial takes no memory even for a large model.
        assert given[1].data_ptr() == own.data_ptr()
        assert given[1].stride() == own.stride()
    assert seen[0][0][1].no_weight_decay


@pytest.mark.parametrize(
    "factory",
    [
        functools.partial(kind, lr=0.1)
        for kind in (
            *(torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Rprop),
            *(torch.optim.Adafactor, pipedream.optim.SGD, pipedream.optim.Adam, pipedream.optim.AdamW),
        )
    ]
    + [functools.partial(torch.optim.AdamW, fused=True), functools.partial(torch.optim.SGD, foreach=True)],
    ids=str,
)
def test_a_trial_accepts_what_trains(factory: Any) -> None:
    step_lr = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    layer = nn.Linear(3, 2)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    try_factories([_named(layer)], factory, step_lr, "cpu")
    for parameter, value in zip(layer.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is None


def test_a_trial_draws_no_random_numbers() -> None:
    def factory(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=random.random() + torch.rand(()).item())

    named = _named()
    state, torch_state = random.getstate(), torch.get_rng_state()
    try_factories([named], factory, None, "cpu")
    assert random.getstate() == state
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_a_trial_says_nothing_where_the_parameters_are_not_yet_on_the_workers_device() -> None:
    wrong = _raise(RuntimeError("fused=True needs CUDA tensors"))
    try_factories([_named()], wrong, None, "cuda")
    with pytest.raises(PipelineError, match="of stage 0 raised RuntimeError: fused=True needs"):
        try_factories([_named()], wrong, None, "cpu")


# ---- The next tests call run() as users do. Their functions are at the top level, so that they can be sent
# to workers ----


class _Counting:
    """A factory that counts its calls, and raises an error for the second stage. The count stays 0, because
    run() tries a copy.
    """

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        self.num_calls += 1
        if self.num_calls == 2:
            raise KeyError("decay")
        return _SGD(parameters)


def _lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"optimizer": functools.partial(torch.optim.SGD, momentm=0.9)},
            TypeError,
            r"^optimizer\(\.\.\.\) of stage 0 raised TypeError: .*'momentm'",
        ),
        (
            {"optimizer": _Counting()},
            PipelineError,
            r"^optimizer\(\.\.\.\) of stage 1 raised KeyError: 'decay'$",
        ),
        ({"optimizer": _lbfgs}, ValueError, r"^optimizer is LBFGS, .* closure.*: .*; use another"),
        (
            {"lr_scheduler": torch.optim.lr_scheduler.StepLR},
            TypeError,
            r"^lr_scheduler\(\.\.\.\) of stage 0 raised TypeError: .*'step_size'",
        ),
    ],
    ids=["optimizer", "second stage", "LBFGS", "lr_scheduler"],
)
def test_a_run_refuses_a_factory_before_any_process_starts(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    def launch(*_: Any) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr(launcher, "_launch", launch)
    monkeypatch.delenv("RANK", raising=False)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    data = [(torch.ones(2, 3), torch.ones(2, 3))]
    options = {"optimizer": _SGD} | options
    with pytest.raises(kind, match=message) as caught:
        pipedream.run(model, Plan.straight(2, 2), data=data, loss_fn=nn.functional.mse_loss, **options)
    assert type(caught.value) is kind
    assert getattr(options["optimizer"], "num_calls", 0) == 0


class _NotDecayed(nn.Parameter):
    pass


def test_parameter_groups_may_be_made_by_classes_and_marks_of_parameters() -> None:
    """The optimizer must get parameters of the user's class. The user's code would otherwise apply weight
    decay to this bias.
    """
    layer = nn.Linear(3, 2)
    layer.bias = _NotDecayed(torch.zeros(2))
    layer.weight.rank = 1
    weight, bias = make_masters(_named(layer))
    assert type(weight) is nn.Parameter and type(bias) is _NotDecayed
    assert weight.rank == 1 and bias.requires_grad and bias.data_ptr() == layer.bias.data_ptr()
    versions = WeightVersions(layer, _named(layer), [torch.zeros(1024, dtype=torch.uint8)])
    assert [type(leaf) for leaf in versions.leaves(0)] == [nn.Parameter, _NotDecayed]
    assert torch.equal(versions.leaves(0)[0], layer.weight)
