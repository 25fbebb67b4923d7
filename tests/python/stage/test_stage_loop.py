"""Tests the parts of the stage loop that need no run."""

from __future__ import annotations

import types
from typing import Any, cast

from pipedream.stage.stage_loop import LossDisplay


class _Progress:
    is_shown = True

    def __init__(self) -> None:
        self.samples: list[int] = []

    def advance(self, minibatch: int, epoch: int, loss: float, samples: int) -> None:
        self.samples.append(samples)


def test_a_replica_counts_each_minibatch_once_however_far_apart_its_own_are() -> None:
    # Three replicas share two microbatches per minibatch. So the first replica has none in minibatches 2 and
    # 5.
    source = types.SimpleNamespace(first_minibatch=6, samples=[1, 10, 100, 1000, 10000], epochs=[0] * 5)
    progress = _Progress()
    show = LossDisplay(cast("Any", progress), cast("Any", source), None, 0)
    for minibatch in (6, 7, 9, 10):
        show(minibatch, 0.5, 0.5)
    assert progress.samples == [1, 10, 1100, 10000]
