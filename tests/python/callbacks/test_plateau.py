"""Tests EarlyStopping and ReduceLROnPlateau: their decisions after each epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from pipedream.callbacks import Callback, Decision, EarlyStopping, EpochReport, ReduceLROnPlateau, StartReport
from pipedream.callbacks.callback import decision_of
from pipedream.callbacks.steering import CallPoints, Evaluated, History, Question, Steering


def _decisions(callback: Callback, values: Sequence[float], metric: str = "loss") -> list[Decision]:
    callback.on_start(StartReport(None, len(values), 2, "flush", 0))
    reports = [
        EpochReport(epoch, [loss], [1], [0.1], epoch + 1, 1.0, epoch=epoch, metrics={metric: value})
        for epoch, value in enumerate(values)
        for loss in [1.0 if metric != "loss" else value]
    ]
    return [decision_of(callback, callback.on_epoch(report)) for report in reports]


def test_early_stopping_stops_after_more_epochs_than_its_patience_without_a_better_value() -> None:
    stops = [d.stop for d in _decisions(EarlyStopping(patience=1), [3.0, 2.0, 2.0, 1.0, 1.5, 1.0])]
    assert stops == [False, False, False, False, False, True]


def test_early_stopping_watches_a_metric_that_is_to_grow() -> None:
    callback = EarlyStopping("accuracy", patience=0, min_delta=0.1, mode="max")
    stops = [d.stop for d in _decisions(callback, [0.5, 0.7, 0.75], "accuracy")]
    assert stops == [False, False, True]


def test_a_plateau_reduces_the_rate_each_time_its_patience_is_over_up_to_a_number_of_times() -> None:
    callback = ReduceLROnPlateau(factor=0.5, patience=0, max_reductions=2)
    factors = [d.rate_factor for d in _decisions(callback, [1.0, 1.0, 0.5, 0.5, 0.5])]
    assert factors == [1.0, 0.5, 1.0, 0.5, 1.0]


def test_a_metric_that_no_evaluation_has_is_named() -> None:
    with pytest.raises(ValueError, match=r"'f1'.*it has 'loss', 'accuracy'"):
        _decisions(EarlyStopping("f1"), [1.0], "accuracy")


def test_a_figure_that_a_metric_returns_beside_others_is_not_known_before_an_evaluation() -> None:
    callback = EarlyStopping("f1", patience=0)
    callback.on_start(StartReport(None, 1, 2, "flush", 0))
    unknown = {"loss": math.nan, "all": math.nan}
    report = EpochReport(0, [1.0], [1], [0.1], 1, 1.0, epoch=0, metrics=unknown)
    assert callback.on_epoch(report) is None


def test_a_continued_run_ends_with_its_newest_evaluation() -> None:
    told: dict[int, float] = {}

    class Watching(Callback):
        def on_epoch(self, report: EpochReport) -> None:
            told[report.epoch] = report.metrics["loss"]

    steering = Steering([Watching()], ["loss"])
    figures = {minibatch: {"loss": float(minibatch)} for minibatch in (3, 6, 9, 12, 15)}
    before = [Evaluated(minibatch, 1, figures[minibatch]) for minibatch in (3, 6, 9, 12)]
    epochs = [minibatch // 4 for minibatch in range(13)]
    history = History([0.0] * 12, [1] * 12, epochs, before, False, 1)
    steering.start(StartReport(16, 4, 1, "flush", 0), first_minibatch=12, before=history)
    results = [
        SimpleNamespace(minibatch=minibatch, samples=1, loss=each["loss"], metrics={})
        for minibatch, each in figures.items()
    ]
    steering.end_with(SimpleNamespace(losses=[0.0] * 16, epoch_sizes=[4] * 4, validation=results))
    assert steering.error is None
    assert told[3] == 15.0


def test_what_is_no_decision_is_refused() -> None:
    class Watching(Callback):
        decides = False

    assert decision_of(Callback(), True) == decision_of(Callback(), None) == Decision()
    assert decision_of(Callback(), False) == Decision(stop=True)
    with pytest.raises(TypeError, match="Callback returned 3"):
        decision_of(Callback(), 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="its `decides` is False"):
        decision_of(Watching(), False)
    with pytest.raises(ValueError, match="rate_factor is 0"):
        decision_of(Callback(), Decision(rate_factor=0.0))


class _Every(Callback):
    def __init__(self, every: int) -> None:
        self.every = every
        self.ranges: list[tuple[int, int]] = []

    def on_minibatches(self, report: Any) -> None:
        self.ranges.append((report.first, report.end))


def test_each_callback_is_told_at_its_own_number_of_minibatches_rounded_up_to_a_boundary() -> None:
    callbacks = [_Every(3), _Every(4)]
    steering = Steering(callbacks)
    assert steering.points == CallPoints(everys=(3, 4), at_epochs=True, decides=True)
    for boundary in range(2, 13, 2):
        if steering.points.is_due(boundary - 2, boundary, has_ended_epoch=False):
            samples = [1] * 2
            steering.tell(Question(boundary, boundary, [], samples, []), [0.0] * boundary)
    assert steering.error is None
    assert callbacks[0].ranges == [(0, 4), (4, 6), (6, 10), (10, 12)]
    assert callbacks[1].ranges == [(0, 4), (4, 8), (8, 12)]


def test_a_rate_that_cannot_change_is_refused_with_the_reason() -> None:
    class Halving(Callback):
        def on_epoch(self, report: EpochReport) -> Decision:
            return Decision(rate_factor=0.5)

    steering = Steering([Halving()])
    steering.why_rates_are_fixed = "the plan has spare shards"
    decision = steering.tell(Question(1, 1, [(0, 1)], [1], []), [0.0])
    assert decision == Decision(stop=True)
    assert (
        str(steering.error) == "a callback wants its learning rates times 0.5, and the plan has spare shards"
    )


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        (Decision(evaluate=True), "a callback wants an evaluation, and run has no validation"),
        (Decision(checkpoint=True), "a callback wants a checkpoint, and run has no checkpoints"),
    ],
)
def test_a_wish_that_the_run_cannot_fulfil_is_refused_with_the_remedy(wish: Decision, text: str) -> None:
    class Wishing(Callback):
        def on_epoch(self, report: EpochReport) -> Decision:
            return wish

    steering = Steering([Wishing()])
    assert steering.tell(Question(1, 1, [(0, 1)], [1], []), [0.0]) == Decision(stop=True)
    assert text in str(steering.error)
