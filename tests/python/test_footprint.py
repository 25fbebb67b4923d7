"""footprint.py: bytes that a stage's forward and backward make, counted in a dry run and while training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CASES
from pipedream import Plan
from pipedream.footprint import (
    DryRun,
    Footprint,
    StepMeter,
    WorkMeter,
    dry_run,
    make_meter,
    storage_bytes,
)
from pipedream.splitter import split
from torch import nn

_CPU = torch.device("cpu")
_KIB = 1024


@pytest.fixture(autouse=True)
def _same_threads(one_thread: Any) -> Iterator[None]:
    """The kernels of several threads may use other temporary memory."""
    yield


class _Known(torch.autograd.Function):
    """Saves `kept` bytes, and needs further ones while it runs, forward and backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, kept: int, forward: int, backward: int) -> torch.Tensor:
        temporary = torch.zeros(forward, dtype=torch.uint8)
        ctx.save_for_backward(torch.zeros(kept, dtype=torch.uint8))
        ctx.backward_bytes = backward
        del temporary
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        torch.zeros(ctx.backward_bytes, dtype=torch.uint8)
        return gradients[0].clone(), None, None, None


class _KnownLayer(nn.Module):
    def __init__(self, kept: int = 0, forward: int = 0, backward: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self._bytes = (kept, forward, backward)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Known.apply(value + self.weight, *self._bytes)  # type: ignore[no-untyped-call]
        return output


def _mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


def _dry_run(*layers: nn.Module, num_stages: int, **options: Any) -> DryRun:
    stages = split(nn.Sequential(*layers), Plan.straight(len(layers), num_stages))
    given: dict[str, Any] = {"targets": torch.zeros(4), "loss_fn": _mean} | options
    return dry_run(stages, torch.zeros(4), **given)


def _assert_about(measured: int, known: int) -> None:
    """Small tensors, the values that flow, come on top."""
    assert known <= measured <= known + 256


def test_what_is_kept_and_what_is_temporary_are_told_apart_stage_by_stage() -> None:
    first, second = _dry_run(
        _KnownLayer(kept=64 * _KIB, forward=96 * _KIB, backward=8 * _KIB),
        _KnownLayer(kept=32 * _KIB, forward=4 * _KIB, backward=200 * _KIB),
        num_stages=2,
    ).footprints
    _assert_about(first.stash_bytes, 64 * _KIB)
    _assert_about(second.stash_bytes, 32 * _KIB)
    # The forward's temporary is there before what is kept is made.
    _assert_about(first.transient_bytes, 96 * _KIB)
    _assert_about(second.transient_bytes, 200 * _KIB)
    assert first.is_measured
    assert (first.input_bytes, first.output_bytes, first.gradient_bytes) == (16, 16, 4)
    # The last stage has the targets too, and its loss goes nowhere.
    assert (second.input_bytes, second.output_bytes) == (16 + 16, 0)


def test_a_dry_run_without_a_loss_sees_the_forwards_alone() -> None:
    layers = [_KnownLayer(kept=64 * _KIB, backward=200 * _KIB) for _ in range(2)]
    for footprint in _dry_run(*layers, num_stages=2, targets=None, loss_fn=None).footprints:
        _assert_about(footprint.stash_bytes, 64 * _KIB)
        assert footprint.transient_bytes < 64 * _KIB


def test_a_repeated_backward_sees_gradients_beside_those_that_are_there() -> None:
    wide = nn.Linear(256, 256, bias=False)  # 256 KiB
    stages = split(nn.Sequential(nn.Linear(256, 256), wide), Plan.straight(2, 2))
    arguments = (stages, torch.zeros(1, 256), torch.zeros(1, 256), F.mse_loss)
    once, again = (dry_run(*arguments, repeats=repeats).footprints[1] for repeats in (False, True))
    assert once.transient_bytes < 16 * _KIB
    assert 250 * _KIB < again.transient_bytes - once.transient_bytes <= 256 * _KIB
    assert once.gradient_bytes == again.gradient_bytes == 256 * _KIB
    assert once.stash_bytes == again.stash_bytes


@pytest.mark.parametrize("case_name", CASES)
def test_a_larger_minibatch_keeps_more_and_the_gradients_are_the_parameters(case_name: str) -> None:
    case = CASES[case_name]
    ((inputs, targets),) = case.data(1)
    stages = split(case.model(), case.plan(4))
    whole = dry_run(stages, inputs, targets, case.loss_fn).footprints
    half = dry_run(stages, inputs[:3], targets[:3], case.loss_fn).footprints
    for stage, larger, smaller in zip(stages, whole, half, strict=True):
        assert larger.is_measured and smaller.is_measured
        assert larger.input_bytes > smaller.input_bytes
        assert larger.stash_bytes >= smaller.stash_bytes
        trained = [parameter for _, parameter in stage.trainable_parameters()]
        assert larger.gradient_bytes == smaller.gradient_bytes == storage_bytes(trained)
    assert sum(f.stash_bytes for f in whole) > sum(f.stash_bytes for f in half)


def test_autocast_halves_what_is_kept_and_makes_the_boundary_narrow() -> None:
    stages = split(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), Plan.straight(3, 2))
    arguments = (stages, torch.zeros(64, 64), torch.zeros(64, 64), F.mse_loss)
    plain, cast = (dry_run(*arguments, autocast=dtype) for dtype in (None, torch.bfloat16))
    assert plain.boundaries[0].tensors[0].dtype == torch.float32
    assert cast.boundaries[0].tensors[0].dtype == torch.bfloat16
    assert cast.footprints[1].input_bytes < plain.footprints[1].input_bytes


def test_a_stage_that_is_compiled_is_not_measured() -> None:
    layers = [_KnownLayer(kept=64 * _KIB) for _ in range(2)]
    layers[1]._compiled_call_impl = layers[1]._call_impl  # what Module.compile() sets
    first, second = _dry_run(*layers, num_stages=2).footprints
    assert first.is_measured
    assert not second.is_measured


class _Fails(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output = value.clone()
        output.register_hook(_fail)  # type: ignore[no-untyped-call]
        return output


def _fail(*_: Any) -> torch.Tensor:
    raise OSError


def test_a_backward_or_loss_that_fails_is_left_to_the_first_minibatch() -> None:
    footprints = _dry_run(_KnownLayer(), _Fails(), _KnownLayer(), num_stages=3).footprints
    assert [footprint.is_measured for footprint in footprints] == [True, False, True]
    _dry_run(_KnownLayer(), _KnownLayer(), num_stages=2, loss_fn=_fail)


def test_a_footprint_travels_as_a_dict() -> None:
    footprint = Footprint(1, 2, 3, 4, True, 5, 6)
    assert Footprint(**footprint.to_dict()) == footprint


# Meters.


def test_the_host_meter_counts_each_memory_once_and_until_it_is_gone() -> None:
    outside = torch.zeros(1000)
    with make_meter(_CPU) as meter:
        made = torch.zeros(256)  # 1 KiB
        assert meter.live_bytes == _KIB
        view = made[:10]
        made += 1
        outside.mul_(2)
        assert meter.live_bytes == _KIB  # views and what is done in place make nothing
        del made
        assert meter.live_bytes == _KIB  # the view holds it
        del view
        assert meter.live_bytes == 0
        assert meter.peak_bytes == _KIB
        meter.reset_peak()
        assert meter.peak_bytes == 0


def test_the_host_meter_sees_nothing_outside_but_frees_what_it_saw() -> None:
    meter = make_meter(_CPU)
    with meter:
        made = torch.zeros(256)
    torch.zeros(5000)
    assert (meter.live_bytes, meter.peak_bytes) == (_KIB, _KIB)
    del made
    assert meter.live_bytes == 0


def _meter(gradients: list[torch.Tensor]) -> WorkMeter:
    return WorkMeter(make_meter(_CPU), lambda: storage_bytes(gradients))


def _bytes(num_kib: int) -> torch.Tensor:
    return torch.zeros(num_kib * _KIB, dtype=torch.uint8)


def test_the_terms_of_work_items_add_up_to_the_peak() -> None:
    gradients: list[torch.Tensor] = []
    meter = _meter(gradients)
    with meter.forward():
        first = [_bytes(10), _bytes(30)]
        first.pop()
    assert (meter.stash_peak_bytes, meter.transient_peak_bytes) == (10 * _KIB, 30 * _KIB)
    with meter.forward():
        second = [_bytes(10)]
    assert meter.stash_peak_bytes == 20 * _KIB
    with meter.backward():
        gradients.append(_bytes(5))
        temporary = _bytes(40)
        first.clear()
        del temporary
    assert meter.gradient_peak_bytes == 5 * _KIB
    assert (meter.stash_peak_bytes, meter.transient_peak_bytes) == (20 * _KIB, 40 * _KIB)
    assert second


def test_a_smaller_microbatchs_backward_counts_from_the_most_that_was_kept() -> None:
    # It keeps less, and needs as much beside: together that is less, and no term may say more.
    meter = _meter([])
    for kept, beside in ((20, 50), (4, 60)):
        with meter.forward():
            stash = [_bytes(kept)]
        with meter.backward():
            temporary = _bytes(beside)
            del temporary
            stash.clear()
    assert (meter.stash_peak_bytes, meter.transient_peak_bytes) == (20 * _KIB, 50 * _KIB)


def test_gradients_on_their_way_upstream_are_kept_and_a_recompute_is_transient() -> None:
    meter = _meter([])
    with meter.forward():
        _bytes(3)
    with meter.recompute():
        stash = [_bytes(30)]
    with meter.backward():
        upstream = _bytes(12)
        stash.clear()
    assert (meter.stash_peak_bytes, meter.transient_peak_bytes) == (12 * _KIB, 30 * _KIB)
    with meter.forward():
        output = _bytes(1)
    assert meter.stash_peak_bytes == 13 * _KIB
    assert upstream.numel() + output.numel() == 13 * _KIB


def test_a_step_counts_what_it_drops_and_not_what_it_keeps() -> None:
    meter = StepMeter(make_meter(_CPU))
    state: list[torch.Tensor] = []
    for temporary, kept in ((10, 100), (30, 0), (20, 0)):
        gradient = _bytes(50)
        with meter.step():
            made = _bytes(temporary)
            del made, gradient
            state.append(_bytes(kept))
    assert meter.peak_bytes == 30 * _KIB


def test_the_meter_of_meta_tensors_counts_the_memory_that_they_do_not_have() -> None:
    with make_meter(torch.device("meta")) as meter:
        torch.zeros(256)
        made = torch.zeros(256, device="meta")
        view = made.view(16, 16)
        del made
        assert meter.live_bytes == meter.peak_bytes == _KIB
        del view
        assert meter.live_bytes == 0
