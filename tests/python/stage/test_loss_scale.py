"""LossScaling: what a stage says of overflows, and the scale that the last one takes."""

from __future__ import annotations

from pipedream.model.precision import LossScaler
from pipedream.stage.loss_scale import LossScaling


def test_the_last_stage_halves_the_scale_of_the_minibatch_that_tells_of_an_overflow() -> None:
    scaling = LossScaling(LossScaler(1))
    scales = []
    for overflowed in (False, True, False):
        scaling.begin_minibatch(overflowed=overflowed)
        scales.append(scaling.scale)
    assert scales == [65536.0, 32768.0, 32768.0]


def test_a_stage_upstream_scales_nothing() -> None:
    scaling = LossScaling(None)
    scaling.begin_minibatch(overflowed=True)
    assert scaling.scale == 1.0
