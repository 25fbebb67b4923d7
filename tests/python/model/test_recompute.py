"""Tests recompute.py: the second forward draws the same random numbers as the first, and changes no
buffer."""

from __future__ import annotations

import pytest
import torch
from pipedream.model.recompute import BufferMemory, buffers_replayed
from pipedream.model.seeding import TorchState
from torch import nn


def test_a_replay_draws_what_came_after_the_capture_and_then_goes_on_as_before() -> None:
    torch.manual_seed(3)
    torch.rand(5)
    state = TorchState.capture()
    first = torch.rand(4)
    between = torch.get_rng_state()
    for _ in range(2):  # a replay can be repeated
        with state.replayed():
            assert torch.equal(torch.rand(4), first)
            torch.rand(100)
        assert torch.equal(torch.get_rng_state(), between)


def test_dropout_drops_the_same_elements_again() -> None:
    layer = nn.Dropout(0.5)
    values = torch.ones(64)
    state = TorchState.capture()
    first = layer(values)
    assert not torch.equal(layer(values), first)
    with state.replayed():
        assert torch.equal(layer(values), first)


def test_generators_go_on_also_after_an_error() -> None:
    state = TorchState.capture()
    torch.rand(3)
    before = torch.get_rng_state()
    with pytest.raises(KeyError), state.replayed():
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)


class _Counts(nn.Module):
    """Changes one buffer in place, replaces another, registers a third, and clears a fourth."""

    in_place: torch.Tensor
    replaced: torch.Tensor
    cleared: torch.Tensor | None
    missing: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("in_place", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("cleared", torch.zeros(2))
        self.register_buffer("missing", None)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.in_place += 1
        self.replaced = self.replaced + 1
        self.cleared = None
        self.missing = torch.ones(1)
        output: torch.Tensor = value + self.in_place.sum()
        return output


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_buffers_are_afterwards_the_very_tensors_that_they_were_untouched(fails: bool) -> None:
    layer = _Counts()
    before = dict(layer._buffers)
    # The repeated forward starts from the buffers' earlier contents, so it computes the same again.
    try:
        with buffers_replayed(nn.Sequential(nn.Identity(), layer), []):
            assert layer(torch.zeros(1)).item() == 2
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert layer._buffers.keys() == before.keys()
    assert all(layer._buffers[name] is tensor for name, tensor in before.items())
    assert all(tensor is None or not tensor.any() for tensor in before.values())


def test_running_statistics_step_once_though_the_forward_runs_twice() -> None:
    norm, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    values = torch.randn(8, 3)
    first = norm(values)
    with buffers_replayed(norm, []):
        assert torch.equal(norm(values), first)
    plain(values)
    for name, buffer in plain.named_buffers():
        assert torch.equal(dict(norm.named_buffers())[name], buffer), name


def test_a_forward_done_again_reads_the_buffers_that_the_first_one_read() -> None:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)).double()
    stage = nn.Sequential(layer, nn.BatchNorm1d(6).double())
    memory = BufferMemory(stage)
    inputs = [torch.randn(4, 6, dtype=torch.float64) for _ in range(3)]
    firsts, kept = [], []
    for value in inputs:
        with memory.forward() as buffers, torch.no_grad():
            firsts.append(stage(value))
        kept.append(buffers)
    assert all({name for _, name, _ in buffers} == {"_u", "_v"} for buffers in kept)
    after = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    for value, first, buffers in zip(inputs, firsts, kept, strict=True):
        with buffers_replayed(stage, buffers):
            assert torch.equal(stage(value), first)
        with buffers_replayed(stage, []):  # with the buffers' present contents the function is another one
            assert not torch.equal(stage(value), first) or value is inputs[-1]
    for name, buffer in stage.named_buffers():
        assert torch.equal(buffer, after[name])


class _ChangesLate(nn.Module):
    """Reads a buffer in each forward, and changes it from its third forward on."""

    scale: torch.Tensor

    def __init__(self, size: int, *, replaces: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(size))
        self._replaces = replaces
        self._num_forwards = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = value * self.scale.sum()
        self._num_forwards += 1
        if self._num_forwards == 3:
            self.scale = self.scale * 2 if self._replaces else self.scale.mul_(2)
        return output


@pytest.mark.parametrize("replaces", [False, True])
def test_a_buffer_that_only_a_later_forward_changes_is_read_as_it_was(replaces: bool) -> None:
    stage = nn.Sequential(_ChangesLate(8, replaces=replaces))
    memory = BufferMemory(stage)
    for _ in range(5):
        with memory.forward() as buffers:
            first = stage(torch.ones(2))
        with buffers_replayed(stage, buffers):
            assert torch.equal(stage[0].scale.sum() * torch.ones(2), first)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_large_buffer_that_only_a_later_forward_changes_is_refused_by_name(replaces: bool) -> None:
    stage = nn.Sequential(_ChangesLate(1 << 16, replaces=replaces))
    memory = BufferMemory(stage)
    for _ in range(2):
        with memory.forward() as buffers:
            stage(torch.ones(2))
        assert buffers == []
    with pytest.raises(ValueError, match="buffer 'scale' of _ChangesLate changes"), memory.forward():
        stage(torch.ones(2))
