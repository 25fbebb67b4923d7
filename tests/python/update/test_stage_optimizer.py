"""Tests stage_optimizer.py: any optimizer writes the next version of a stage's weights."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pipedream import optim
from pipedream.model.stage_module import StageModule
from pipedream.update.stage_optimizer import StageOptimizer
from pipedream.update.weights import WeightVersions
from stage_weights import slots_for, stage_of, versions_of
from torch import Tensor, nn

_SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def _make(
    factory: Any, num_slots: int, lr_scheduler: Any = None
) -> tuple[StageModule, WeightVersions, StageOptimizer]:
    torch.manual_seed(3)
    stage = stage_of(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    named = stage.trainable_parameters()
    optimizer = StageOptimizer(factory, named, lr_scheduler)
    optimizer.place_state(slots_for(named, optimizer.num_placed_states))
    return stage, versions_of(stage, num_slots), optimizer


def _gradients(leaves: Sequence[Tensor], step: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for leaf in leaves]


_STEP_LR = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
_FACTORIES: dict[str, tuple[Any, Any]] = {
    "torch SGD": (_SGD, _SGD),
    "torch AdamW": (functools.partial(torch.optim.AdamW, lr=0.1),) * 2,
    "torch Adagrad": (functools.partial(torch.optim.Adagrad, lr=0.1),) * 2,
    "native SGD": (functools.partial(optim.SGD, lr=0.1, momentum=0.9), _SGD),
    "native Adam": (functools.partial(optim.Adam, lr=0.1), functools.partial(torch.optim.Adam, lr=0.1)),
}


@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("lr_scheduler", [None, _STEP_LR], ids=["", "StepLR"])
@pytest.mark.parametrize("name", _FACTORIES)
def test_versions_follow_the_optimizer_and_its_scheduler_slot_after_slot(
    name: str, lr_scheduler: Any, scale: float, num_slots: int
) -> None:
    factory, plain_factory = _FACTORIES[name]
    stage, versions, stage_optimizer = _make(factory, num_slots, lr_scheduler)
    plain = [nn.Parameter(p.detach().clone()) for _, p in stage.trainable_parameters()]
    optimizer = plain_factory(plain)
    scheduler = lr_scheduler(optimizer) if lr_scheduler else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's scheduler warns if it believes that no step was made
        for step in range(6):
            read, write = (versions.leaves((step + after) % num_slots) for after in (0, 1))
            before = [leaf.detach().clone() for leaf in read]
            stage_optimizer.step(read, write, _gradients(read, step), scale)
            for parameter, gradient in zip(plain, _gradients(plain, step), strict=True):
                assert gradient is not None
                parameter.grad = gradient * scale
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            for leaf, parameter in zip(write, plain, strict=True):
                torch.testing.assert_close(leaf.detach(), parameter.detach(), rtol=1e-12, atol=0)
            if num_slots > 1:
                assert all(torch.equal(leaf, kept) for leaf, kept in zip(read, before, strict=True))


@pytest.mark.parametrize(
    ("factory", "num_states"),
    [
        (functools.partial(optim.SGD, lr=0.1), 0),
        (functools.partial(optim.SGD, lr=0.1, momentum=0.9), 1),
        (optim.AdamW, 2),
        (functools.partial(optim.Adam, amsgrad=True), 3),
        (torch.optim.Adam, 0),
    ],
)
def test_the_state_of_native_optimizers_is_placed_and_counted_once(factory: Any, num_states: int) -> None:
    stage = stage_of(nn.Linear(3, 3))
    named = stage.trainable_parameters()
    optimizer = StageOptimizer(factory, named)
    assert optimizer.num_placed_states == num_states
    # A pool may have filled the memory with 0xFF, which floats read as NaN.
    slots = [slot.fill_(0xFF) for slot in slots_for(named, num_states)]
    optimizer.place_state(slots)
    versions = versions_of(stage, 1)
    for step in range(2):
        leaves = versions.leaves(0)
        optimizer.step(leaves, leaves, _gradients(leaves, step))
    assert all(torch.isfinite(leaf).all() for leaf in versions.leaves(0))
    assert all(slot.any() for slot in slots)
    if num_states > 0:
        assert optimizer.torch_state_bytes() == 0
    else:
        state = [v for of_one in optimizer.optimizer.state.values() for v in of_one.values()]  # type: ignore[union-attr]
        assert optimizer.torch_state_bytes() == sum(v.numel() * v.element_size() for v in state)


@pytest.mark.parametrize("name", _FACTORIES)
def test_an_optimizer_goes_from_slots_to_others_with_its_state(name: str) -> None:
    factory, plain_factory = _FACTORIES[name]
    stage, versions, stage_optimizer = _make(factory, 2)
    named = stage.trainable_parameters()
    plain = [nn.Parameter(p.detach().clone()) for _, p in named]
    optimizer = plain_factory(plain)
    for step in range(6):
        if step in (2, 3):
            versions.restore(step % 2)
            stage_optimizer.leave_slots()
            for slot in versions.slots:
                slot.fill_(0xFF)  # the slot belongs to another user by now
            stage_optimizer.place_state(slots_for(named, stage_optimizer.num_placed_states))
            versions = versions_of(stage, 2)
            versions.copy_version(0, step % 2)
        read, write = versions.leaves(step % 2), versions.leaves((step + 1) % 2)
        stage_optimizer.step(read, write, _gradients(read, step))
        for parameter, gradient in zip(plain, _gradients(plain, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        for leaf, parameter in zip(write, plain, strict=True):
            torch.testing.assert_close(leaf.detach(), parameter.detach(), rtol=1e-12, atol=0)


def test_a_stage_without_parameters_has_no_optimizer_and_its_steps_do_nothing() -> None:
    optimizer = StageOptimizer(_SGD, [], _STEP_LR)
    assert optimizer.optimizer is None
    assert (optimizer.num_placed_states, optimizer.torch_state_bytes()) == (0, 0)
    optimizer.place_state([])
    optimizer.step([], [], [])


def test_the_factory_gets_names_if_it_asks_for_them_and_parameters_that_keep_their_marks() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.no_weight_decay = True  # type: ignore[attr-defined]
    seen: list[Any] = []

    def factory(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        seen.extend(named_parameters)
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)

    StageOptimizer(factory, stage_of(layer).trainable_parameters())
    assert [name for name, _ in seen] == ["0.weight", "0.bias"]
    assert seen[0][1].no_weight_decay


class _Own(optim.SGD):
    """A subclass, which may have a step() of its own."""


def _reversed_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return optim.SGD([{"params": [p]} for p in reversed(parameters)], lr=0.1, momentum=0.9)


def _hooked(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = optim.SGD(parameters, lr=0.1, momentum=0.9)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    "factory", [functools.partial(_Own, lr=0.1, momentum=0.9), _reversed_groups, _hooked]
)
def test_a_native_optimizer_that_is_not_quite_one_goes_through_its_own_step(factory: Any) -> None:
    stage, versions, optimizer = _make(factory, 2)
    assert optimizer.num_placed_states == 0
    plain = [nn.Parameter(p.detach().clone()) for _, p in stage.trainable_parameters()]
    plain_optimizer = torch.optim.SGD(plain, lr=0.1, momentum=0.9)
    for step in range(3):
        read, write = versions.leaves(step % 2), versions.leaves((step + 1) % 2)
        optimizer.step(read, write, _gradients(read, step))
        for parameter, gradient in zip(plain, _gradients(plain, step), strict=True):
            parameter.grad = gradient
        plain_optimizer.step()
    for leaf, parameter in zip(write, plain, strict=True):
        torch.testing.assert_close(leaf.detach(), parameter.detach(), rtol=1e-12, atol=0)


def _foreign(_: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def _plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize(
    ("factory", "lr_scheduler", "kind", "message"),
    [
        (lambda _: "sgd", None, TypeError, "optimizer returned str: it must return a torch.optim.Optimizer"),
        (torch.optim.LBFGS, None, ValueError, "optimizer is LBFGS, .* closure"),
        (_foreign, None, ValueError, "optimizer was made of other parameters"),
        (_SGD, _plateau, ValueError, "ReduceLROnPlateau, .*: use callbacks=.*, or a scheduler that counts"),
        (_SGD, lambda _: 0.1, TypeError, "lr_scheduler returned float: it must return"),
    ],
)
def test_what_cannot_update_a_stage_is_refused_in_one_line(
    factory: Any, lr_scheduler: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        StageOptimizer(factory, stage_of(nn.Linear(2, 2)).trainable_parameters(), lr_scheduler)
    assert "\n" not in str(caught.value)


def _slower_when_late(parameters: list[nn.Parameter], delay: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1 / (1 + delay))


def test_a_state_of_other_options_is_refused_also_under_another_plan() -> None:
    named = stage_of(nn.Linear(2, 1)).trainable_parameters()
    before = StageOptimizer(functools.partial(torch.optim.SGD, lr=0.1), named).state()
    StageOptimizer(functools.partial(torch.optim.SGD, lr=0.1), named).go_on_from_parts([before])
    with pytest.raises(ValueError, match="other options of them, than the optimizer of the stage"):
        StageOptimizer(functools.partial(torch.optim.SGD, lr=0.2), named).go_on_from_parts([before])
    # An option may differ if it follows from the plan.
    StageOptimizer(functools.partial(_slower_when_late, delay=1.0), named).go_on_from_parts([before])


def test_a_rate_factor_scales_the_whole_cycle_of_a_cyclic_rate() -> None:
    named = stage_of(nn.Linear(2, 1)).trainable_parameters()
    cyclic = functools.partial(
        torch.optim.lr_scheduler.CyclicLR, base_lr=0.1, max_lr=1.0, step_size_up=2, cycle_momentum=False
    )
    factory = functools.partial(torch.optim.SGD, lr=0.1)
    whole, halved = (StageOptimizer(factory, named, cyclic) for _ in range(2))
    halved.scale_rates(0.5)
    for _ in range(5):
        assert halved.rates() == pytest.approx([rate / 2 for rate in whole.rates()])
        whole.end_step()
        halved.end_step()
