"""Tests optimizer_memory.py: the state of optimizers, and the tensors that a step allocates and frees."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from pipedream import Plan
from pipedream.budget.footprint import SCALARS_BYTES, StepMeter, make_meter, storage_bytes
from pipedream.budget.optimizer_memory import native_step_bytes, predict_state_bytes, predict_step_bytes
from pipedream.optim import SGD, Adam, MasterWeights, Muon
from pipedream.splitting.splitter import split
from pipedream.update.stage_optimizer import StageOptimizer
from pipedream.update.weights import weight_layout
from torch import nn

_KIB = 1024

# Optimizer state.


def _parameters() -> list[nn.Parameter]:
    shapes = [(17, 5), (5,), (2, 3, 4, 4), ()]
    return [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in shapes]


def _in_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": parameters[:2], "momentum": 0.9}, {"params": parameters[2:]}]
    return torch.optim.SGD(groups, lr=0.1)


_OPTIMIZERS = [
    functools.partial(torch.optim.SGD, lr=0.1),
    functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    torch.optim.Adam,
    functools.partial(torch.optim.Adam, amsgrad=True),
    functools.partial(torch.optim.AdamW, foreach=False),
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.Rprop,
    torch.optim.Adafactor,
    _in_groups,
]


def _title(factory: Any) -> str:
    return "in groups" if factory is _in_groups else str(factory)


@pytest.mark.parametrize("factory", _OPTIMIZERS, ids=_title)
def test_the_predicted_state_is_what_the_optimizer_keeps_and_predicting_does_not_step(factory: Any) -> None:
    parameters = _parameters()
    optimizer = factory(parameters)
    state_before = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    predicted = predict_state_bytes(optimizer)
    assert {parameter: dict(state) for parameter, state in optimizer.state.items()} == state_before
    assert all(bool((parameter == 1).all()) and parameter.grad is None for parameter in parameters)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert predicted == storage_bytes([value for value in kept if isinstance(value, torch.Tensor)])


class _Own(torch.optim.Optimizer):
    """A user's optimizer. No prediction may call its step(), because that may do more than an update."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("nobody may call this to find out")


def test_an_optimizer_that_cannot_be_tried_counts_as_two_tensors_per_parameter() -> None:
    parameters = _parameters()
    assert predict_state_bytes(_Own(parameters)) == 2 * storage_bytes(parameters)
    assert predict_state_bytes(None) == 0


# Temporary memory of optimizers.

_STEPS = [
    *_OPTIMIZERS,
    functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    functools.partial(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    functools.partial(torch.optim.Adam, foreach=True),
    functools.partial(torch.optim.Adam, fused=True),
    torch.optim.Rprop,
    functools.partial(torch.optim.Rprop, foreach=True),
    torch.optim.ASGD,
    torch.optim.RAdam,  # needs more memory from the sixth step on, when it rectifies
    functools.partial(torch.optim.RAdam, betas=(0.9, 0.7)),  # needs more memory from the fourteenth step on
    functools.partial(torch.optim.RAdam, foreach=True),
]


_NUM_STEPS = 16


def _measured_step_bytes(optimizer: torch.optim.Optimizer) -> int:
    meter = StepMeter(make_meter(torch.device("cpu")))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, 0.5)
    for _ in range(_NUM_STEPS):
        with meter.step():
            optimizer.step()
    return meter.peak_bytes


@pytest.mark.parametrize("factory", _STEPS, ids=_title)
def test_a_step_makes_and_drops_no_more_than_predicted(factory: Any) -> None:
    assert _measured_step_bytes(factory(_parameters())) <= predict_step_bytes(factory(_parameters()), "cpu")


_WITH_MASTERS = [
    torch.optim.AdamW,
    torch.optim.Adagrad,
    functools.partial(torch.optim.Adam, foreach=True),
    Muon,
]


@pytest.mark.parametrize("make", _WITH_MASTERS, ids=str)
def test_masters_and_widened_gradients_are_predicted(make: Any) -> None:
    def made() -> torch.optim.Optimizer:
        named = [(f"{index}", nn.Parameter(p.detach().bfloat16())) for index, p in enumerate(_parameters())]
        return MasterWeights(make, named)

    optimizer, predicted = made(), predict_state_bytes(made())
    assert _measured_step_bytes(optimizer) <= predict_step_bytes(made(), "cpu")
    kept = [value for state in optimizer.state.values() for value in state.values()]
    kept_bytes = storage_bytes([value for value in kept if isinstance(value, torch.Tensor)])
    assert predicted == kept_bytes if make is not Muon else predicted >= kept_bytes


def test_a_step_of_the_users_own_is_not_tried_within_masters_either() -> None:
    parameters = [nn.Parameter(p.detach().bfloat16()) for p in _parameters()]
    optimizer = MasterWeights(_Own, parameters)
    assert predict_state_bytes(optimizer) == 3 * 2 * storage_bytes(parameters)
    assert predict_step_bytes(optimizer, "cpu") > 2 * storage_bytes(parameters)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RAdam, torch.optim.Rprop, torch.optim.NAdam])
@pytest.mark.parametrize("shapes", [[(64, 64)] * 3, [(64, 64), (64,)] * 3, [(8,), (64, 64), (64,), (64, 64)]])
def test_what_a_step_keeps_of_the_parameter_before_is_predicted(
    kind: type[torch.optim.Optimizer], shapes: list[tuple[int, ...]]
) -> None:
    """Adam's step has three temporary tensors at once when two neighbours have the same shape. A trial step
    with one parameter of each shape would show only two.
    """
    made = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in shapes]
    measured = _measured_step_bytes(kind(made))  # type: ignore[call-arg]
    predicted = predict_step_bytes(kind(made), "cpu")  # type: ignore[call-arg]
    assert measured <= predicted <= measured + SCALARS_BYTES


@pytest.mark.parametrize(
    ("factory", "num_temporaries"),
    [
        (functools.partial(torch.optim.SGD, lr=0.1), 0),
        (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1), 1),
        (torch.optim.Adam, 2),
        (torch.optim.RAdam, 5),
        (torch.optim.Rprop, 3),
    ],
    ids=str,
)
def test_a_step_on_one_large_parameter_is_predicted_to_the_byte(factory: Any, num_temporaries: int) -> None:
    large = [nn.Parameter(torch.ones(1 << 10, 1 << 10)), nn.Parameter(torch.ones(10))]
    assert _measured_step_bytes(factory(large)) == num_temporaries * (4 << 20)
    assert predict_step_bytes(factory(large), "cpu") == num_temporaries * (4 << 20) + SCALARS_BYTES


def test_predicting_a_step_takes_none_and_no_memory() -> None:
    parameter = nn.Parameter(torch.ones(1 << 10, 1 << 10))
    optimizer = torch.optim.Adam([parameter])
    with make_meter(torch.device("cpu")) as meter:
        predict_step_bytes(optimizer, "cpu")
        assert meter.peak_bytes < _KIB
    assert not optimizer.state
    assert parameter.grad is None and bool((parameter == 1).all())


def test_on_cuda_a_step_is_predicted_for_all_parameters_at_once() -> None:
    parameters = [nn.Parameter(torch.ones(100)) for _ in range(8)]
    one_by_one, at_once = (
        predict_step_bytes(torch.optim.Adam(parameters), device) for device in ("cpu", "cuda")
    )
    assert one_by_one < storage_bytes(parameters) <= at_once
    assert one_by_one == predict_step_bytes(torch.optim.Adam(parameters[:2]), "cpu")


def test_a_step_that_cannot_be_tried_counts_as_three_tensors_of_the_largest_parameter() -> None:
    largest = 2 * 3 * 4 * 4 * 8
    assert predict_step_bytes(_Own(_parameters()), "cpu") == 3 * largest + SCALARS_BYTES
    assert predict_step_bytes(None, "cpu") == 0


@pytest.mark.parametrize(
    ("factory", "sparse"),
    [
        (functools.partial(SGD, lr=0.1, momentum=0.9), True),
        (functools.partial(SGD, lr=0.1), False),
        (functools.partial(Adam, amsgrad=True), False),
    ],
    ids=str,
)
def test_a_native_step_makes_scalars_and_sparse_gradients_dense(factory: Any, sparse: bool) -> None:
    model = nn.Sequential(nn.Embedding(100, 8, sparse=sparse), nn.Linear(8, 4)).double()
    (stage,) = split(model, Plan.straight(2, 1))
    named = stage.trainable_parameters()
    parameters = [parameter for _, parameter in named]
    optimizer = StageOptimizer(factory, named)
    assert optimizer.is_native
    slot_bytes = weight_layout(named)[0]
    optimizer.place_state(
        [torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(optimizer.num_placed_states)]
    )
    meter = StepMeter(make_meter(torch.device("cpu")))
    for _ in range(3):
        model(torch.arange(20)).sum().backward()
        with meter.step():
            optimizer.step(parameters, parameters, [p.grad for p in parameters])
    dense_bytes = 100 * 8 * 8 if sparse else 0
    assert dense_bytes <= meter.peak_bytes <= native_step_bytes(stage, len(named))
    assert native_step_bytes(stage, len(named)) <= dense_bytes + _KIB
    assert optimizer.torch_state_bytes() == 0
