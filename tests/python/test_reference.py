"""reference.py: the oracle is plain training with one stage, and the stated versions with more."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from models import CASES, Case, squared_error, straight_plan
from pipedream import reference
from pipedream.plan import Plan, Stage
from torch import nn
from torch.utils.data import DataLoader

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.05),
}


def _train_plainly(
    model: nn.Module,
    data: Iterable[Any],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    epochs: int = 1,
) -> list[float]:
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for _ in range(epochs):
        for inputs, targets in data:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def _assert_equal_state(model: nn.Module, expected: nn.Module) -> None:
    state, expected_state = model.state_dict(), expected.state_dict()
    assert state.keys() == expected_state.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected_state[name]), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_one_stage_equals_a_plain_loop_bit_for_bit(
    case: Case, dtype: torch.dtype, optimizer: Callable[[Any], torch.optim.Optimizer]
) -> None:
    data = case.data(4, dtype, short_last=True)
    plain, model = case.model(dtype), case.model(dtype)
    torch.manual_seed(3)
    plain_losses = _train_plainly(plain, data, case.loss_fn, optimizer, epochs=2)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    result = reference.run(
        model, case.plan(1), data=data, loss_fn=case.loss_fn, optimizer=optimizer, epochs=2
    )
    assert result.losses == plain_losses
    assert result.versions == [[(i, i) for i in range(8)]]
    _assert_equal_state(model, plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_one_stage_equals_a_plain_loop_also_with_a_seed_and_a_shuffling_loader() -> None:
    case = CASES["dropout"]
    loader = DataLoader(case.data(6), batch_size=None, shuffle=True)
    options = {"data": loader, "loss_fn": case.loss_fn, "optimizer": OPTIMIZERS["sgd"], "epochs": 2}
    first = reference.run(case.model(), case.plan(1), seed=12, **options).losses
    torch.manual_seed(99)
    assert reference.run(case.model(), case.plan(1), seed=12, **options).losses == first
    torch.manual_seed(12)
    assert _train_plainly(case.model(), loader, case.loss_fn, OPTIMIZERS["sgd"], epochs=2) == first
    assert reference.run(case.model(), case.plan(1), seed=13, **options).losses != first


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_several_stages_read_delayed_versions(case: Case, num_stages: int) -> None:
    num_minibatches = 8
    data = case.data(num_minibatches)
    plain, model = case.model(), case.model()
    plain_losses = _train_plainly(plain, data, case.loss_fn, OPTIMIZERS["sgd"])
    result = reference.run(
        model, case.plan(num_stages), data=data, loss_fn=case.loss_fn, optimizer=OPTIMIZERS["sgd"], seed=1
    )
    for stage_index in range(num_stages):
        lag = num_stages - stage_index - 1
        expected = [(max(0, i - lag),) * 2 for i in range(num_minibatches)]
        assert result.versions[stage_index] == expected
    assert len(result.losses) == num_minibatches
    if case.draws:
        return
    # Nothing is delayed at the first minibatch; afterwards, wherever a delayed stage has parameters,
    # the weights are others than plain training's.
    assert result.losses[0] == plain_losses[0]
    delayed_trains = any(
        p.requires_grad for layer in list(model)[: case.cuts[num_stages][-1]] for p in layer.parameters()
    )
    assert (result.losses[1:] != plain_losses[1:]) == delayed_trains


def _scale(weight: float) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(layer.weight, weight)
    return layer


def test_weights_follow_the_recursion_worked_out_by_hand() -> None:
    # loss_i = (c b a x_i - y_i)^2 of three stages a, b, c; a is read two versions old, b one, c new.
    rate = 0.05
    samples = [(0.5, 1.0), (-1.0, 0.3), (0.8, -0.2), (1.2, 0.7), (0.1, 0.1), (-0.4, 0.9)]
    a, b, c = [0.7], [-0.4], [1.1]
    losses = []
    for i, (x, y) in enumerate(samples):
        a_read, b_read, c_read = a[max(0, i - 2)], b[max(0, i - 1)], c[i]
        error = c_read * b_read * a_read * x - y
        losses.append(error**2)
        a.append(a[i] - rate * 2 * error * c_read * b_read * x)
        b.append(b[i] - rate * 2 * error * c_read * a_read * x)
        c.append(c[i] - rate * 2 * error * b_read * a_read * x)

    model = nn.Sequential(_scale(a[0]), _scale(b[0]), _scale(c[0]))
    data = [tuple(torch.tensor([[value]], dtype=torch.float64) for value in sample) for sample in samples]
    result = reference.run(
        model,
        straight_plan(3, (1, 2)),
        data=data,
        loss_fn=squared_error,
        optimizer=functools.partial(torch.optim.SGD, lr=rate),
    )
    assert result.losses == pytest.approx(losses, rel=1e-9)
    assert [layer.weight.item() for layer in model] == pytest.approx([a[-1], b[-1], c[-1]], rel=1e-9)


def test_versions_follow_the_plans_in_flight() -> None:
    case = CASES["mlp"]
    plan = Plan((Stage(0, 1), Stage(2, 4)), in_flight=(5, 3))
    result = reference.run(
        case.model(), plan, data=case.data(7), loss_fn=case.loss_fn, optimizer=OPTIMIZERS["sgd"]
    )
    assert [read for read, _ in result.versions[0]] == [0, 0, 0, 0, 0, 1, 2]
    assert [read for read, _ in result.versions[1]] == [0, 0, 0, 1, 2, 3, 4]


def test_buffers_are_updated_in_the_order_of_the_minibatches() -> None:
    # With a rate of zero every version is the same, so the statistics must be plain training's.
    case = CASES["cnn"]
    plain, model = case.model(), case.model()
    still = functools.partial(torch.optim.SGD, lr=0.0)
    losses = _train_plainly(plain, case.data(5), case.loss_fn, still)
    result = reference.run(model, case.plan(4), data=case.data(5), loss_fn=case.loss_fn, optimizer=still)
    assert result.losses == losses
    _assert_equal_state(model, plain)
    assert int(model[1].num_batches_tracked) == 5


def test_several_stages_repeat_with_a_seed_and_leave_the_global_generators_alone() -> None:
    case = CASES["dropout"]
    loader = DataLoader(case.data(6), batch_size=None, shuffle=True)

    def losses(seed: int | None) -> list[float]:
        return reference.run(
            case.model(),
            case.plan(3),
            data=loader,
            loss_fn=case.loss_fn,
            optimizer=OPTIMIZERS["adam"],
            epochs=2,
            seed=seed,
        ).losses

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = losses(5)
    assert torch.equal(torch.get_rng_state(), before)
    unseeded = losses(None)
    torch.rand(1)
    assert losses(5) == first
    assert losses(None) != unseeded  # the global state has moved on
    torch.manual_seed(1)
    assert losses(None) == unseeded
    assert losses(6) != first


def test_a_stage_draws_the_same_numbers_wherever_else_the_model_is_cut() -> None:
    # Dropout is in the first of two stages; cutting the rest once more must not shift its draws.
    layers = [nn.Linear(8, 8).double(), nn.Dropout(0.5), nn.Linear(8, 8).double(), nn.Linear(8, 4).double()]
    data, still = CASES["mlp"].data(4), functools.partial(torch.optim.SGD, lr=0.0)
    results = [
        reference.run(
            nn.Sequential(*copy.deepcopy(layers)),
            straight_plan(4, cuts),
            data=data,
            loss_fn=squared_error,
            optimizer=still,
            seed=3,
        ).losses
        for cuts in ((2,), (2, 3))
    ]
    assert results[0] == results[1]


def test_the_optimizer_is_called_once_per_stage_with_names_if_it_asks_for_them() -> None:
    case = CASES["tied"]
    seen: list[Any] = []

    def by_name(named_parameters: Any) -> torch.optim.Optimizer:
        seen.append([name for name, _ in named_parameters])
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)

    def by_parameter(parameters: Any) -> torch.optim.Optimizer:
        seen.append(parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    model = case.model()
    options = {"data": case.data(2), "loss_fn": case.loss_fn}
    reference.run(model, case.plan(3), optimizer=by_name, **options)
    # The second stage is one linear layer, the third begins with a Tanh.
    assert seen == [["0.weight", "1.weight", "1.bias"], ["3.weight", "3.bias"], ["5.weight", "5.bias"]]
    seen.clear()
    reference.run(model, case.plan(2), optimizer=by_parameter, **options)
    assert [p for stage in seen for p in stage] == list(model.parameters())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"schedule": "gpipe"}, ValueError, "schedule is 'gpipe'"),
        ({"plan": straight_plan(3, (1,))}, ValueError, "covers 3 layers but the model has 5"),
        ({"plan": Plan((Stage(0, 4, 2),), in_flight=(1,))}, ValueError, "replicated stages"),
        ({"data": []}, ValueError, "nothing in epoch 0"),
        ({"data": iter(CASES["mlp"].data(1)), "epochs": 2}, ValueError, "nothing in epoch 1"),
        ({"data": [torch.zeros(3)]}, TypeError, "minibatch 0 of the data is a Tensor"),
        ({"loss_fn": lambda outputs, targets: 1.0}, TypeError, "loss_fn returned a float"),
        ({"optimizer": "sgd"}, TypeError, "optimizer is a str"),
        ({"optimizer": lambda parameters: None}, TypeError, "optimizer returned a NoneType"),
    ],
)
def test_unusable_arguments_are_refused_in_one_line(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    case = CASES["mlp"]
    arguments = {
        "plan": case.plan(2),
        "data": case.data(1),
        "loss_fn": case.loss_fn,
        "optimizer": OPTIMIZERS["sgd"],
    } | options
    with pytest.raises(error, match=message) as caught:
        reference.run(case.model(), **arguments)
    assert "\n" not in str(caught.value)
