"""Tests rehearsal.py: each worker runs its own stages once on its own device, and learns their boundaries and
the memory that they need.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from models import CASES
from pipedream import PipelineError, Plan, _core
from pipedream.budget import rehearsal
from pipedream.budget.footprint import Footprint, storage_bytes
from pipedream.budget.rehearsal import Handover, Rehearsal
from pipedream.splitting.splitter import split
from rehearsing import rehearse
from torch import nn

_KIB = 1024


@pytest.fixture(autouse=True)
def _same_threads(one_thread: Any) -> Iterator[None]:
    """Runs tests with one thread, because kernels on several threads may use other temporary memory."""
    yield


class _Known(torch.autograd.Function):
    """Saves `kept` bytes for the backward. While they run, the forward allocates `forward` further bytes and
    the backward `backward` bytes.
    """

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


class _Reused(nn.Module):
    """Calls a linear layer, and uses the layer's weight a second time without the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(value) + self.layer.weight.sum()
        return output


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


def _footprints(*layers: nn.Module, num_stages: int, **options: Any) -> list[Footprint]:
    stages = split(nn.Sequential(*layers), Plan.straight(len(layers), num_stages))
    given: dict[str, Any] = {"targets": torch.zeros(4), "loss_fn": _mean} | options
    return rehearse(stages, torch.zeros(4), **given)[1]


def _assert_about(measured: int, known: int) -> None:
    """Asserts that `measured` is `known`, or at most 256 bytes more for small tensors."""
    assert known <= measured <= known + 256


def test_what_is_kept_and_what_is_temporary_are_told_apart_stage_by_stage() -> None:
    first, second = _footprints(
        _KnownLayer(kept=64 * _KIB, forward=96 * _KIB, backward=8 * _KIB),
        _KnownLayer(kept=32 * _KIB, forward=4 * _KIB, backward=200 * _KIB),
        num_stages=2,
    )
    _assert_about(first.stash_bytes, 64 * _KIB)
    _assert_about(second.stash_bytes, 32 * _KIB)
    # The forward frees its temporary tensor only after it has made the kept one. So the whole temporary
    # tensor counts.
    _assert_about(first.transient_bytes, 96 * _KIB)
    _assert_about(second.transient_bytes, 200 * _KIB)
    assert first.is_measured
    assert (first.input_bytes, first.output_bytes, first.gradient_bytes) == (16, 16, 4)
    # The last stage also has the targets, and sends no outputs.
    assert (second.input_bytes, second.output_bytes) == (16 + 16, 0)


def test_a_rehearsal_without_a_loss_sees_the_forwards_alone() -> None:
    layers = [_KnownLayer(kept=64 * _KIB, backward=200 * _KIB) for _ in range(2)]
    for footprint in _footprints(*layers, num_stages=2, targets=None, loss_fn=None):
        _assert_about(footprint.stash_bytes, 64 * _KIB)
        assert footprint.transient_bytes < 64 * _KIB


def test_a_repeated_backward_sees_gradients_beside_those_that_are_there() -> None:
    wide = nn.Linear(256, 256, bias=False)  # its weight has 256 KiB
    stages = split(nn.Sequential(nn.Linear(256, 256), wide), Plan.straight(2, 2))
    arguments = (stages, torch.zeros(1, 256), torch.zeros(1, 256), F.mse_loss)
    once, again = (rehearse(*arguments, repeats=repeats)[1][1] for repeats in (False, True))
    assert once.transient_bytes < 16 * _KIB
    assert 250 * _KIB < again.transient_bytes - once.transient_bytes <= 256 * _KIB
    assert once.gradient_bytes == again.gradient_bytes == 256 * _KIB
    assert once.stash_bytes == again.stash_bytes


def test_a_loss_is_there_during_its_backward() -> None:
    layers = (nn.Linear(8, 8), nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 64))
    arguments = (split(nn.Sequential(*layers), Plan.straight(4, 2)), torch.zeros(64, 8), torch.zeros(64, 64))
    last = rehearse(*arguments, F.mse_loss)[1][1]
    # On the host the mean of squared errors keeps the squares, 16 KiB, until its backward has made the
    # gradient.
    assert last.transient_bytes > 32 * _KIB


class _Remembering(nn.Linear):
    """Keeps its latest output until the next forward replaces it."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.latest = super().forward(value).detach()
        return torch.tanh(self.latest.sum(-1, keepdim=True) * self.weight.sum())


@pytest.mark.parametrize("repeats", [False, True])
def test_what_a_layer_holds_of_one_microbatch_is_there_in_the_forward_of_the_next(repeats: bool) -> None:
    stages = split(nn.Sequential(_Remembering(256, 256)), Plan.straight(1, 1))
    inputs, targets = torch.zeros(64, 256), torch.zeros(64, 1)
    _, (footprint,) = rehearse(stages, inputs, targets, F.mse_loss, repeats=repeats)
    assert 64 * _KIB <= footprint.transient_bytes < 66 * _KIB


@pytest.mark.parametrize("case_name", CASES)
def test_a_larger_minibatch_keeps_more_and_the_gradients_are_the_parameters(case_name: str) -> None:
    case = CASES[case_name]
    ((inputs, targets),) = case.data(1)
    stages = split(case.model(), case.plan(4))
    whole = rehearse(stages, inputs, targets, case.loss_fn)[1]
    half = rehearse(stages, inputs[:3], targets[:3], case.loss_fn)[1]
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
    plain, cast = (rehearse(*arguments, autocast=dtype) for dtype in (None, torch.bfloat16))
    assert plain[0][0].tensors[0].dtype == torch.float32
    assert cast[0][0].tensors[0].dtype == torch.bfloat16
    assert cast[1][1].input_bytes < plain[1][1].input_bytes


def test_a_stage_that_is_compiled_is_not_measured() -> None:
    layers = [_KnownLayer(kept=64 * _KIB) for _ in range(2)]
    layers[1]._compiled_call_impl = layers[1]._call_impl  # Module.compile() sets this attribute
    first, second = _footprints(*layers, num_stages=2)
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
    footprints = _footprints(_KnownLayer(), _Fails(), _KnownLayer(), num_stages=3)
    assert [footprint.is_measured for footprint in footprints] == [True, False, True]
    _footprints(_KnownLayer(), _KnownLayer(), num_stages=2, loss_fn=_fail)


# ---- The device on which a rehearsal runs ----


class _NotesItsDevice(nn.Module):
    """Notes the device of its input, and the device of the autocast under which it runs."""

    seen: ClassVar[list[tuple[str, str]]] = []
    autocast: ClassVar[list[str]] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        (device_type,) = self.autocast
        self.seen.append((value.device.type, device_type))
        return value


@pytest.mark.parametrize("device_type", ["cpu", "meta"])
def test_a_stage_without_parameters_runs_on_the_workers_device_too(
    device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This stage has no parameter that would name its device. It must still run with the worker's autocast
    # lists, not with the CPU's.
    @contextlib.contextmanager
    def region(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
        assert dtype is torch.bfloat16
        _NotesItsDevice.autocast.append(device_type)
        yield
        _NotesItsDevice.autocast.pop()

    monkeypatch.setattr("pipedream.model.stage_calls.autocast_region", region)
    stages = split(nn.Sequential(_NotesItsDevice(), _NotesItsDevice()), Plan.straight(2, 2))
    rehearsal = Rehearsal(
        Handover(None, _core.Placement.at_ranks([0, 0])), torch.device(device_type), autocast=torch.bfloat16
    )
    _NotesItsDevice.seen.clear()
    rehearsal.run(stages, torch.zeros(3, 2), None)
    assert _NotesItsDevice.seen == [(device_type, device_type)] * 2


class _ReadsItsIndices(nn.Module):
    """Checks that its indices and shares are valid. On a GPU an invalid index makes the device unusable."""

    def forward(self, value: Any) -> torch.Tensor:
        rows, indices, shares = value
        assert set(indices.tolist()) == {0, 2}
        assert torch.all((shares >= 0) & (shares <= 1))
        return rows[indices] * shares


class _MakesIndices(nn.Module):
    def forward(self, value: torch.Tensor) -> Any:
        indices = torch.tensor([2, 0, 2, 0])
        return value, indices, torch.sigmoid(value[indices])


def test_a_stage_is_given_what_the_stage_before_made() -> None:
    # The second stage fails if its indices or shares are made up. So it must get those of the first stage.
    stages = split(nn.Sequential(_MakesIndices(), _ReadsItsIndices(), nn.Identity()), Plan.straight(3, 3))
    boundaries, _ = rehearse(stages, torch.randn(3, 1, requires_grad=True), torch.zeros(4, 1), F.mse_loss)
    assert [spec.dtype for spec in boundaries[0].tensors] == [torch.float32, torch.int64, torch.float32]
    assert [spec.requires_grad for spec in boundaries[0].tensors] == [False, False, False]
    assert boundaries[1].tensors[0].shape == (4, 1)


def test_a_layer_that_fails_is_told_with_its_stage_and_rank() -> None:
    class Refuses(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such value")

    layers = [nn.Identity(), Refuses(), nn.Identity()]
    with pytest.raises(PipelineError) as caught:
        rehearse(
            split(nn.Sequential(*layers), Plan.straight(3, 3)),
            torch.zeros(2),
            describe="stage {} (rank 7)".format,
        )
    assert str(caught.value) == (
        "the first minibatch does not pass stage 1 (rank 7): ValueError: no such value"
    )


def test_an_error_of_the_device_at_the_last_stage_is_told_with_stage_and_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Imitates a GPU on which a label was out of range. From then on every use of the device fails, even
    # restoring the buffers.
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(4))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            monkeypatch.setattr(rehearsal, "_wait_for", _device_has_failed)
            self.state.resize_(0)
            return value

    stages = split(nn.Sequential(nn.Linear(4, 4), Fails()), Plan.straight(2, 2))
    with pytest.raises(PipelineError) as caught:
        rehearse(stages, torch.zeros(2, 4), torch.zeros(2, 4), _mean, describe="stage {} (rank 7)".format)
    assert str(caught.value) == (
        "the first minibatch does not pass stage 1 (rank 7): RuntimeError: device-side assert triggered"
    )


def _device_has_failed(_: torch.device) -> None:
    raise RuntimeError("device-side assert triggered")


def test_a_loss_that_needs_no_targets_is_rehearsed() -> None:
    # Without targets the last stage must still be rehearsed from the loss. The backward of other stages
    # begins at the outputs.
    plan = Plan.straight(2, 2)
    stages = split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), plan)
    _, (_, last) = rehearse(stages, torch.zeros(2, 4), None, lambda outputs, _: outputs.mean())
    assert last.output_bytes == 0
    assert last.is_measured


class _Counts(nn.Module):
    """A loss that counts its calls, in a buffer and in an attribute."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.number = 0
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.number += 1
        return self.frozen(outputs).mean() * self.calls


def _counts_in_a_closure() -> tuple[Any, _Counts]:
    counts = _Counts()

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return counts(outputs, targets)

    return loss_fn, counts


def _counts_itself() -> tuple[Any, _Counts]:
    counts = _Counts()
    return counts, counts


@pytest.mark.parametrize("make", [_counts_itself, _counts_in_a_closure])
def test_a_loss_that_counts_goes_on_as_if_it_had_not_been_rehearsed(make: Any) -> None:
    loss_fn, counts = make()
    stages = split(nn.Sequential(nn.Linear(4, 4)), Plan.straight(1, 1))
    _, (footprint,) = rehearse(stages, torch.zeros(2, 4), torch.zeros(2, 4), loss_fn, repeats=True)
    assert footprint.is_measured
    assert counts.calls == 0
    assert counts.number == 0 or make is _counts_in_a_closure


def test_a_loss_that_cannot_be_copied_is_rehearsed_itself() -> None:
    lock = threading.Lock()
    stages = split(nn.Sequential(nn.Linear(4, 4)), Plan.straight(1, 1))
    loss_fn = functools.partial(_mean_under, lock=lock)
    _, (footprint,) = rehearse(stages, torch.zeros(2, 4), torch.zeros(2, 4), loss_fn)
    assert footprint.is_measured


def _mean_under(outputs: torch.Tensor, targets: torch.Tensor, *, lock: Any) -> torch.Tensor:
    with lock:
        return outputs.mean()


def _factor_rows(*layers: nn.Module, **options: Any) -> dict[str, int]:
    stages = split(nn.Sequential(*layers), Plan.straight(len(layers), 1))
    inputs = torch.randn(3, 5, 4)
    (footprint,) = rehearse(stages, inputs, inputs, F.mse_loss, **options)[1]
    return dict(footprint.factor_rows)


def test_the_rows_of_factors_are_those_of_all_uses_in_a_microbatch() -> None:
    twice = nn.Linear(4, 4)
    model = (twice, nn.Tanh(), nn.Linear(4, 4), twice)
    assert _factor_rows(*model, for_factors=[0]) == {"0.weight": 30, "2.weight": 15}
    assert _factor_rows(*model, for_factors=[0], repeats=True) == {"0.weight": 30, "2.weight": 15}
    assert _factor_rows(*model) == {}


def test_a_weight_with_another_use_besides_its_layer_has_no_factors() -> None:
    assert _factor_rows(_Reused(), nn.Linear(4, 4), for_factors=[0]) == {"1.weight": 15}


class _Unchosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.expert(x[:0]).sum()


def test_a_weight_that_is_given_no_rows_has_no_factors() -> None:
    assert _factor_rows(_Unchosen(), nn.Linear(4, 4), for_factors=[0]) == {"1.weight": 15}
