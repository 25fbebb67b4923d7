"""Compares native optimizers and MasterWeights with the same steps written out by hand. Parameters are
bfloat16 with float32 masters.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipedream import optim
from torch import Tensor, nn

_NARROW = torch.bfloat16
_MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": functools.partial(optim.SGD, momentum=0.9, weight_decay=0.1),
    "Adam": functools.partial(optim.Adam, amsgrad=True),
    "AdamW": optim.AdamW,
    "NAdamW": optim.NAdamW,
    # Has state before its first step.
    "torch's Adagrad": functools.partial(optim.MasterWeights, torch.optim.Adagrad),
    "torch's RMSprop": functools.partial(optim.MasterWeights, torch.optim.RMSprop, momentum=0.9),
    "torch's AdamW, fused": functools.partial(optim.MasterWeights, torch.optim.AdamW, fused=True),
}


def _parameters(dtype: torch.dtype = _NARROW) -> list[nn.Parameter]:
    """Returns parameters. One of them is channels_last, and one is always float32."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator).to(_NARROW) for shape in ((1000,), (7,), (4, 3, 2, 2))]
    drawn[2] = drawn[2].contiguous(memory_format=torch.channels_last)
    return [*(nn.Parameter(values.to(dtype)) for values in drawn), nn.Parameter(torch.ones(3))]


def _give_gradients(step: int, parameters: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        drawn = torch.randn(parameter.shape, generator=generator).to(_NARROW)
        parameter.grad = torch.empty_like(parameter).copy_(drawn)


def _steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        _give_gradients(step, parameters)
        optimizer.step()


def _master(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    master: Tensor = optimizer.state[parameter]["master"]
    return master


@pytest.mark.parametrize("name", _MAKERS)
def test_a_step_is_that_of_float32_copies_rounded(name: str) -> None:
    parameters, by_hand = _parameters(), _parameters(torch.float32)
    optimizer, of_copies = _MAKERS[name](parameters, lr=0.05), _MAKERS[name](by_hand, lr=0.05)
    schedulers = [torch.optim.lr_scheduler.StepLR(made, 3, 0.5) for made in (optimizer, of_copies)]
    for step in range(8):
        _steps(optimizer, parameters, range(step, step + 1))
        _steps(of_copies, by_hand, range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()
    for parameter, copied in zip(parameters, by_hand, strict=True):
        assert torch.equal(parameter, copied.to(parameter.dtype))
        if parameter.dtype == _NARROW:
            assert torch.equal(_master(optimizer, parameter), copied)
        else:
            assert "master" not in optimizer.state[parameter]


@pytest.mark.parametrize("name", _MAKERS)
def test_saved_state_goes_on_to_the_last_bit(name: str) -> None:
    """Masters and moments stay float32. torch's own load_state_dict would round them to bfloat16."""
    parameters = _parameters()
    optimizer = _MAKERS[name](parameters, lr=0.05)
    _steps(optimizer, parameters, range(5))
    others = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    restored = _MAKERS[name](others, lr=0.05)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for made, trained in ((optimizer, parameters), (restored, others)):
        _steps(made, trained, range(5, 8))
    for parameter, other in zip(parameters, others, strict=True):
        assert torch.equal(parameter, other)
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, restored.state[other][key]), key


@pytest.mark.parametrize("name", _MAKERS)
def test_a_copied_optimizer_steps_alone(name: str) -> None:
    parameters = _parameters()
    optimizer = _MAKERS[name](parameters, lr=0.05)
    _steps(optimizer, parameters, range(2))
    copied = copy.deepcopy(optimizer)
    before = [parameter.detach().clone() for parameter in parameters]
    others = [parameter for group in copied.param_groups for parameter in group["params"]]
    _steps(copied, others, range(2, 3))
    assert all(torch.equal(one, other) for one, other in zip(parameters, before, strict=True))
    _steps(optimizer, parameters, range(2, 3))
    assert all(torch.equal(one, other) for one, other in zip(parameters, others, strict=True))


def test_a_parameter_without_gradient_stays() -> None:
    for make in _MAKERS.values():
        parameters = _parameters()
        optimizer = make(parameters, lr=0.05)
        _give_gradients(0, parameters)
        parameters[1].grad = None
        before = parameters[1].detach().clone()
        optimizer.step()
        assert torch.equal(parameters[1], before)
        assert "master" not in optimizer.state[parameters[1]]


def test_small_steps_add_up_in_the_master_alone() -> None:
    """A step of 1e-4 does not change a weight of 1 in bfloat16."""
    weights = [nn.Parameter(torch.ones(1, dtype=_NARROW)) for _ in range(3)]
    optimizers: list[torch.optim.Optimizer] = [
        optim.SGD(weights[:1], lr=1e-4),
        optim.MasterWeights(torch.optim.SGD, weights[1:2], lr=1e-4),
        torch.optim.SGD(weights[2:], lr=1e-4),
    ]
    for _ in range(200):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    assert [round(weight.item(), 3) for weight in weights] == [0.98, 0.98, 1.0]


def test_groups_and_names_go_to_the_other_optimizer() -> None:
    first, second = (nn.Parameter(torch.ones(4, 4, dtype=_NARROW)) for _ in range(2))
    groups = [{"params": [("a", first)], "weight_decay": 0.0}, {"params": [("b", second)]}]
    optimizer = optim.MasterWeights(torch.optim.AdamW, groups, lr=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.01]
    assert optimizer.param_groups[1]["param_names"] == ["b"]
    muon = optim.MasterWeights(optim.Muon, [("hidden", first), ("embedding", second)], lr=0.1)
    for parameter in (first, second):
        parameter.grad = torch.randn(4, 4, dtype=_NARROW)
    muon.step()
    assert isinstance(muon.inner, optim.Muon)
    assert muon.inner.describe() == "Muon trains hidden; NAdamW trains embedding"
    assert all(_master(muon, parameter).dtype == torch.float32 for parameter in (first, second))


def test_making_one_takes_no_memory_for_masters() -> None:
    """run() tries the optimizers of all stages in the caller's process, where masters would need too much
    memory.
    """
    parameter = nn.Parameter(torch.ones(1, dtype=_NARROW).expand(1 << 40))
    optimizer = optim.MasterWeights(torch.optim.AdamW, [parameter], lr=0.1)
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"][0] is parameter


def test_masters_lie_where_they_are_placed() -> None:
    parameters = _parameters()[:3]
    optimizer = optim.SGD(parameters, lr=0.05, momentum=0.9)
    placed = [[torch.empty_like(p, dtype=torch.float32).zero_() for _ in range(2)] for p in parameters]

    def make(index: int, parameter: Tensor) -> list[Tensor]:
        return placed[index]

    optimizer.place_state(make)
    _steps(optimizer, parameters, range(2))
    for parameter, (momentum, master) in zip(parameters, placed, strict=True):
        assert optimizer.state[parameter]["momentum_buffer"] is momentum
        assert _master(optimizer, parameter) is master
        assert torch.equal(parameter, master.to(_NARROW))
    optimizer.displace_state()
    assert all(_master(optimizer, p) is not placed[i][1] for i, p in enumerate(parameters))
    with pytest.raises(ValueError, match=r"must return 2 tensors .* dtype torch\.float32"):
        optimizer.place_state(lambda index, parameter: [torch.zeros_like(parameter)] * 2)


def _options_of(made: Any) -> dict[str, Any]:
    return {key: value for key, value in made.param_groups[0].items() if key != "params"}


def test_groups_have_the_options_of_the_other_optimizer() -> None:
    wrapped = optim.MasterWeights(torch.optim.AdamW, _parameters(), lr=0.2, betas=(0.8, 0.9))
    assert _options_of(wrapped) == _options_of(torch.optim.AdamW(_parameters(), lr=0.2, betas=(0.8, 0.9)))
