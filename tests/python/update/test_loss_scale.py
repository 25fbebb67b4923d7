"""Tests LossScaling: how stages report overflows, and which scale the last stage uses."""

from __future__ import annotations

from pipedream import _core
from pipedream.update.loss_scale import LossScaling


def _schedule(schedule: str, num_replicas: list[int]) -> _core.ScheduleOptions:
    placement = _core.Placement.in_order(num_replicas)
    return _core.ScheduleOptions(schedule, _core.derive_in_flight(num_replicas), 1, placement)


def test_the_last_stage_halves_the_scale_of_the_minibatch_that_tells_of_an_overflow() -> None:
    for how in ("overflowed", "told"):
        scaling = LossScaling(_schedule("pipedream", [1]), 0)
        scales = []
        for minibatch in range(3):
            scaling.begin_forward(minibatch, **{"overflowed": False, "told": False} | {how: minibatch == 1})
            scales.append(scaling.scale)
        assert scales == [65536.0, 32768.0, 32768.0]


def test_a_stage_upstream_scales_nothing() -> None:
    scaling = LossScaling(_schedule("pipedream", [1, 1]), 0)
    scaling.begin_forward(0, overflowed=True, told=True)
    assert scaling.scale == 1.0


def test_where_rounds_drain_their_minibatches_have_one_scale() -> None:
    scaling = LossScaling(_schedule("flush", [2, 1]), 1)
    scales = []
    for minibatch in range(6):  # the first update, of minibatches 0 and 1, overflows
        scaling.begin_forward(minibatch, overflowed=minibatch == 2, told=minibatch in (2, 3))
        scales.append(scaling.scale)
    assert scales == [65536.0] * 2 + [32768.0] * 4


def test_replicas_of_the_last_stage_take_the_scale_from_what_all_of_them_have_heard() -> None:
    replicas = [LossScaling(_schedule("pipedream", [1, 2]), 1) for _ in range(2)]
    scales = []
    for round_index in range(4):
        for replica, scaling in enumerate(replicas):
            minibatch = 2 * round_index + replica
            told = minibatch == 3  # only the second replica's activation tells of the overflow
            if told:
                scaling.note_told(minibatch)
            scaling.begin_forward(minibatch, overflowed=False, told=told)
            scales.append(scaling.scale)
        heard = [scaling.take_told(2 * round_index) for scaling in replicas]
        assert heard == [False, round_index == 1]
        for scaling in replicas:
            scaling.hear(round_index, overflowed=any(heard))
    assert scales == [65536.0] * 4 + [32768.0] * 4
    assert not replicas[1].take_told(2), "it is told once, and kept no longer"
