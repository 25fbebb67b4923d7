"""Tests EvaluatedNorms: a batch norm that a hook switches between training and evaluation while minibatches
are in flight is refused."""

from __future__ import annotations

import pytest
import torch
from pipedream.model.batch_norm import EvaluatedNorms, Item
from pipedream.model.stage_module import StageModule
from torch import nn

_IMAGES = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))


def _watched(norm: nn.Module) -> EvaluatedNorms:
    return EvaluatedNorms(StageModule(1, 3, [("norm", "3.", norm)]))


def _forward(
    norms: EvaluatedNorms, norm: nn.Module, item: Item, in_flight: set[Item], *, trains: bool
) -> None:
    norm.train(trains)
    norm(_IMAGES)
    norms.check(item, in_flight | {item})


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_training_moves_what_the_backward_of_an_evaluation_in_flight_reads(kind: type[nn.Module]) -> None:
    norm = kind(3, track_running_stats=True)
    norms = _watched(norm)
    assert norms
    _forward(norms, norm, (0, 0), set(), trains=True)
    _forward(norms, norm, (1, 0), {(0, 0)}, trains=False)
    _forward(norms, norm, (2, 0), {(1, 0)}, trains=False)
    with pytest.raises(ValueError, match=r"^stage 1: layer 3 was evaluated in minibatch 2 and trained in"):
        _forward(norms, norm, (3, 0), {(2, 0)}, trains=True)


def test_one_mode_and_evaluations_that_are_backwarded_are_fine() -> None:
    norm = nn.BatchNorm1d(3)
    norms = _watched(norm)
    for minibatch in range(4):
        _forward(norms, norm, (minibatch, 0), {(minibatch - 1, 0)}, trains=True)
    _forward(norms, norm, (4, 0), {(3, 0)}, trains=False)
    _forward(norms, norm, (5, 0), set(), trains=True)  # the backward of minibatch 4 is done
    _forward(norms, norm, (6, 0), {(5, 0)}, trains=False)
    _forward(norms, norm, (7, 0), {(6, 0)}, trains=False)


def test_a_norm_that_trains_for_one_call_and_is_left_evaluating_is_seen() -> None:
    norm = nn.BatchNorm1d(3)
    norms = _watched(norm)
    _forward(norms, norm, (0, 0), set(), trains=False)
    norm.train()
    norm(_IMAGES)
    norm.eval()
    with pytest.raises(ValueError, match="trained in minibatch 1, before the backward of minibatch 0"):
        norms.check((1, 0), {(0, 0), (1, 0)})


def test_norms_without_running_statistics_are_not_watched() -> None:
    assert not _watched(nn.BatchNorm1d(3, track_running_stats=False))
    assert not _watched(nn.InstanceNorm1d(3))
    assert not _watched(nn.LayerNorm(3))
