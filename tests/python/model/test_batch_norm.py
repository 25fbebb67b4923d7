"""Tests batch_norm.py: the forward normalises by the microbatch, and the running statistics make one step per
minibatch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipedream.model.batch_norm import MinibatchStatistics
from torch import nn
from torch.utils.checkpoint import checkpoint

_CHANNELS = 3


def _norm(**options: Any) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(_CHANNELS, **options).double()
    if norm.running_mean is not None and norm.running_var is not None:
        norm.running_mean.fill_(0.3)
        norm.running_var.fill_(2.0)
    return norm


def _images(*sizes: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, _CHANNELS, 2, 2, generator=generator, dtype=torch.float64) + 5 for n in sizes]


def _buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def _train(module: nn.Module, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Trains on the microbatches of one minibatch, and returns their outputs."""
    statistics = MinibatchStatistics(module)
    outputs = []
    for piece in pieces:
        with statistics.microbatch():
            outputs.append(module(piece))
    statistics.update()
    return outputs


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=6), seed=st.integers(0, 5))
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_the_running_statistics_are_those_of_torch_over_the_whole_minibatch(
    momentum: float | None, sizes: list[int], seed: int
) -> None:
    norm, plain = _norm(momentum=momentum), _norm(momentum=momentum)
    for step in range(2):  # a cumulative average weighs its second step differently
        pieces = [piece for piece in _images(*sizes, 2, seed=seed + step) if len(piece)]
        _train(norm, pieces)
        plain(torch.cat(pieces))
    for name, wanted in _buffers(plain).items():
        torch.testing.assert_close(_buffers(norm)[name], wanted, rtol=1e-12, atol=1e-12)


def test_far_from_zero_the_variance_loses_no_digits() -> None:
    # In float32 E[x^2] - E[x]^2 would have no correct digit left.
    norm = nn.BatchNorm1d(_CHANNELS, momentum=1.0)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(24, _CHANNELS, generator=generator) + 4096
    _train(norm, list(torch.chunk(values, 6)))
    assert norm.running_var is not None
    torch.testing.assert_close(norm.running_var, values.double().var(dim=0).float(), rtol=1e-3, atol=0)


def test_each_microbatch_is_normalised_by_its_own_statistics() -> None:
    norm = _norm()
    pieces = _images(3, 2)
    for piece, output in zip(pieces, _train(norm, pieces), strict=True):
        expected = torch.nn.functional.batch_norm(piece, None, None, norm.weight, norm.bias, training=True)
        assert torch.equal(output, expected)


class _Switching(nn.Module):
    """Sets the mode of its norm in each forward, as a frozen backbone does. Before the first forward the norm
    has the other mode."""

    def __init__(self, *, trains: bool) -> None:
        super().__init__()
        self.norm = _norm().train(not trains)
        self._trains = trains

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm.train(self._trains)(value)
        return output


def test_a_norm_that_the_forward_switches_steps_once_or_never() -> None:
    evaluated, before = _Switching(trains=False), _buffers(_norm())
    outputs = _train(evaluated, _images(2, 3))
    for name, buffer in before.items():
        assert torch.equal(_buffers(evaluated.norm)[name], buffer), name
    wanted = [_norm().eval()(piece) for piece in _images(2, 3)]
    assert all(map(torch.equal, outputs, wanted))
    trained, plain = _Switching(trains=True), _norm()
    _train(trained, _images(2, 3))
    _train(plain, _images(2, 3))
    for name, buffer in _buffers(plain).items():
        assert torch.equal(_buffers(trained.norm)[name], buffer), name


def test_the_buffers_stay_as_they_are_until_the_minibatch_is_complete() -> None:
    norm = _norm()
    before = _buffers(norm)
    statistics = MinibatchStatistics(norm)
    with statistics.microbatch():
        norm(_images(4)[0])
    for name, buffer in _buffers(norm).items():
        assert torch.equal(buffer, before[name]), name
    statistics.update()
    assert not torch.equal(_buffers(norm)["running_mean"], before["running_mean"])
    assert int(_buffers(norm)["num_batches_tracked"]) == 1
    after = _buffers(norm)
    statistics.update()  # nothing was collected since the last update
    for name, buffer in _buffers(norm).items():
        assert torch.equal(buffer, after[name]), name


def test_a_recomputed_forward_counts_nothing_and_gives_the_same_output() -> None:
    norm = _norm()
    statistics = MinibatchStatistics(norm)
    (piece,) = _images(4)
    with statistics.microbatch():
        first = norm(piece)
    before = _buffers(norm)
    with statistics.recomputation():
        assert torch.equal(norm(piece), first)
    for name, buffer in _buffers(norm).items():
        assert torch.equal(buffer, before[name]), name
    statistics.update()
    plain = _norm()
    plain(piece)
    torch.testing.assert_close(_buffers(norm), _buffers(plain), rtol=1e-12, atol=1e-12)


def test_a_norm_that_is_used_twice_in_a_forward_counts_both_inputs() -> None:
    norm, plain = _norm(), _norm()
    first, second = _images(3, 2)
    statistics = MinibatchStatistics(norm)
    with statistics.microbatch():
        norm(first)
        norm(second)
    statistics.update()
    plain(torch.cat([first, second]))
    torch.testing.assert_close(_buffers(norm), _buffers(plain), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "norm", [_norm().eval(), _norm(track_running_stats=False)], ids=["eval", "not tracking"]
)
def test_a_norm_that_does_not_count_in_plain_training_does_not_here(norm: nn.Module) -> None:
    before, expected = _buffers(norm), copy.deepcopy(norm)
    pieces = _images(4, 3)
    for piece, output in zip(pieces, _train(norm, pieces), strict=True):
        assert torch.equal(output, expected(piece))
    for name, buffer in _buffers(norm).items():
        assert torch.equal(buffer, before[name]), name


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_norm_takes_no_second_step_in_the_backward(use_reentrant: bool) -> None:
    # Each minibatch counts once in num_batches_tracked. The forwards that the checkpoint repeats must not
    # count.
    plain, checkpointed = _norm(), _norm()
    statistics = [MinibatchStatistics(norm) for norm in (plain, checkpointed)]
    for piece in _images(4, 3):
        piece.requires_grad_()
        with statistics[0].microbatch():
            plain(piece)
        with statistics[1].microbatch():
            output = checkpoint(checkpointed, piece, use_reentrant=use_reentrant)
        with statistics[1].recomputation():
            output.square().sum().backward()
    for some in statistics:
        some.update()
    assert checkpointed.num_batches_tracked == 1
    for name, buffer in _buffers(plain).items():
        torch.testing.assert_close(_buffers(checkpointed)[name], buffer, rtol=0, atol=0)


def test_the_norm_tracks_again_afterwards_also_after_an_error() -> None:
    model = nn.Sequential(_norm(), nn.Flatten())
    statistics = MinibatchStatistics(model)
    with pytest.raises(ValueError, match="4D"), statistics.microbatch():
        model(torch.zeros(2, 2))
    norm = model[0]
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.track_running_stats
    assert not norm._forward_pre_hooks
