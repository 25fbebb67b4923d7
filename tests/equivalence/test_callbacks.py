"""Tests callbacks that steer a run at fixed minibatches. The numbers are those of a run whose options contain
the callbacks' decisions from the start.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from pipedream.callbacks import (
    Callback,
    CheckpointReport,
    Decision,
    EndReport,
    EpochReport,
    EvaluationReport,
    MinibatchReport,
    StartReport,
)
from pipedream.callbacks.steering import Steering
from pipedream.checkpoint.checkpoint_folder import checkpoints_in, folder_of, is_complete, is_pinned
from training import Training, accumulate, assert_equal_state, train_by_reference, train_in_pipeline

_TRAINING = Training("mlp", 2, epochs=4, num_minibatches=6)  # the last minibatch of an epoch is short


class _Recorder(Callback):
    def __init__(self, every: int | None = None, answers: dict[int, Any] | None = None) -> None:
        self.every = every
        self.answers = answers or {}  # the answer to each epoch's report
        self.started: list[StartReport] = []
        self.told: list[MinibatchReport] = []
        self.epochs: list[EpochReport] = []
        self.ended: list[EndReport] = []

    def on_start(self, report: StartReport) -> None:
        self.started.append(report)

    def on_minibatches(self, report: MinibatchReport) -> None:
        self.told.append(report)

    def on_epoch(self, report: EpochReport) -> Any:
        self.epochs.append(report)
        return self.answers.get(report.epoch)

    def on_end(self, report: EndReport) -> None:
        self.ended.append(report)


def _run(training: Training, **options: Any) -> tuple[pipedream.RunResult, dict[str, torch.Tensor]]:
    model = training.model()
    result = pipedream.run(model, training.plan, **training.options(), progress=False, **options)
    return result, dict(model.state_dict())


@pytest.mark.parametrize(
    ("replicas", "schedule", "lead"),
    [((1, 1), "flush", 0), ((1, 1), "pipedream", 2), ((2, 1), "pipedream", 4)],
    ids=["flush", "pipedream", "2-1"],
)
def test_false_at_an_epochs_end_stops_all_stages_at_a_stated_minibatch(
    replicas: tuple[int, ...], schedule: str, lead: int
) -> None:
    training = replace(_TRAINING, replicas=replicas, schedule=schedule)
    reports: list[EpochReport] = []

    def stop_after_two(report: EpochReport) -> bool:
        reports.append(report)
        return report.epoch < 1

    recorder = _Recorder(every=5)
    result, _ = _run(training, on_epoch_end=stop_after_two, callbacks=[recorder])
    assert recorder.started[0].decision_lead == lead
    assert result.stopped_at == 12 + lead == reports[1].takes_effect and not result.is_interrupted
    assert [report.epoch for report in reports] == ([0, 1] if lead == 0 else [0, 1, 2])
    for report in reports:
        assert report.first == 6 * report.epoch
        assert list(report.losses) == result.losses[report.first :][: len(report.losses)]
        assert report.loss == pytest.approx(result.epoch_losses[report.epoch], rel=1e-12)
    assert [loss for report in recorder.told for loss in report.losses] == result.losses
    assert recorder.ended[0].result is result
    expected, _ = train_by_reference(replace(training, epochs=4))
    torch.testing.assert_close(result.losses, expected.losses[: 12 + lead], rtol=1e-9, atol=1e-12)


def _train_recorded(training: Training, answers: dict[int, Any], every: int | None) -> tuple[Any, ...]:
    recorder = _Recorder(every, answers)
    result, state = train_in_pipeline(training, callbacks=[recorder])
    return result, state, recorder.epochs, recorder.told


@pytest.mark.parametrize(
    ("replicas", "how", "lead"),
    [
        ((1, 1), {"schedule": "flush", "microbatches": 2}, 0),
        ((1, 1, 1), {}, 3),
        ((2, 1), {}, 4),
        ((1,), {}, 1),
    ],
    ids=["flush", "straight", "2-1", "one stage"],
)
def test_rank_0_of_torchrun_decides_for_all_ranks(
    farm: Farm, replicas: tuple[int, ...], how: dict[str, Any], lead: int
) -> None:
    training = replace(_TRAINING, num_stages=len(replicas), replicas=replicas, **how)
    answers = {0: Decision(rate_factor=1.0), 1: False}
    outcomes = farm.results(_train_recorded, training, answers, 5, num_ranks=training.num_workers)
    result, _, epochs, told = outcomes[0]
    assert {other[0].stopped_at for other in outcomes} == {12 + lead}
    assert not any(other[2] for other in outcomes[1:])
    expected, _ = train_by_reference(training)
    torch.testing.assert_close(result.losses, expected.losses[: 12 + lead], rtol=1e-9, atol=1e-12)
    for report in epochs:
        own = result.losses[report.first : report.end]
        torch.testing.assert_close(list(report.losses), own, rtol=1e-12, atol=1e-15)
    losses = [loss for report in told for loss in report.losses]
    torch.testing.assert_close(losses, result.losses, rtol=1e-12, atol=1e-15)


def test_a_rate_that_rank_0_halves_falls_at_all_ranks(farm: Farm) -> None:
    training = replace(_TRAINING, schedule="flush", lr_scheduler=_decaying)
    answers = {0: Decision(rate_factor=0.5)}
    result, state, _, _ = farm.results(_train_recorded, training, answers, None, num_ranks=2)[0]
    expected, expected_state = train_by_reference(replace(training, lr_scheduler=_decaying_and_halved(6)))
    torch.testing.assert_close(result.losses, expected.losses, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(dict(state), expected_state, rtol=1e-9, atol=1e-12)


_DECAY = 0.9


def _decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=_DECAY)


def _decaying_and_halved(halved_at: int) -> Callable[[torch.optim.Optimizer], Any]:
    def factor(num_updates: int) -> float:
        return float(_DECAY ** (num_updates // 3)) * (0.5 if num_updates >= halved_at else 1.0)

    return functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=factor)


@pytest.mark.parametrize(("schedule", "lead"), [("flush", 0), ("pipedream", 2)])
def test_a_rate_that_a_callback_halves_falls_at_all_stages_at_the_same_update(
    schedule: str, lead: int
) -> None:
    training = replace(_TRAINING, schedule=schedule, lr_scheduler=_decaying)
    recorder = _Recorder(answers={0: Decision(rate_factor=0.5)})
    result, state = _run(training, callbacks=[recorder])
    assert result.stopped_at is None and len(recorder.epochs) == 4
    plain = replace(training, lr_scheduler=_decaying_and_halved(6 + lead))
    expected, expected_state = train_by_reference(plain)
    torch.testing.assert_close(result.losses, expected.losses, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(state, expected_state, rtol=1e-9, atol=1e-12)
    rates = [report.rates[0] for report in recorder.epochs]
    assert rates[0] > 2 * rates[1]


class _Watching(Callback):
    """Answers the report of each epoch with its decision in `wishes`. Records the reports of minibatches and
    evaluations, and pins the first checkpoint."""

    wants_gradient_norms = True

    def __init__(self, every: int | None, wishes: dict[int, Decision]) -> None:
        self.every = every
        self.wishes = wishes
        self.told: list[MinibatchReport] = []
        self.evaluations: list[EvaluationReport] = []
        self.pinned: list[int] = []

    def on_minibatches(self, report: MinibatchReport) -> None:
        self.told.append(report)

    def on_epoch(self, report: EpochReport) -> Any:
        return self.wishes.get(report.epoch)

    def on_evaluation(self, report: EvaluationReport) -> None:
        self.evaluations.append(report)

    def on_checkpoint(self, report: CheckpointReport) -> None:
        if not self.pinned:
            report.pin()
            self.pinned.append(report.minibatch)


def _mean_output(outputs: Any, targets: Any) -> tuple[float, int]:
    return float(outputs.sum()), len(targets)


def _train_watched(
    training: Training, wishes: dict[int, Decision], **options: Any
) -> tuple[pipedream.RunResult, _Watching]:
    watching = _Watching(3, wishes)
    held_out = pipedream.Validation(training.case.data(2, training.dtype), {"mean": _mean_output}, every=5)
    result, _ = train_in_pipeline(training, validation=held_out, callbacks=[watching], **options)
    return result, watching


_REPLICATED = replace(_TRAINING, replicas=(2, 1))
_WATCHED = [
    (replace(_TRAINING, schedule="flush", max_grad_norm=0.3), 0, True),
    (_TRAINING, 2, False),
    (_REPLICATED, 4, True),
    (_REPLICATED, 4, False),
    (replace(_TRAINING, num_stages=3, schedule="flush", replicas=(2, 1, 1), microbatches=2), 0, False),
]


@pytest.mark.parametrize(("training", "lead", "is_local"), _WATCHED, ids=str)
def test_callbacks_ask_for_evaluations_and_checkpoints_at_a_stated_minibatch(
    farm: Farm, tmp_path: Path, training: Training, lead: int, is_local: bool
) -> None:
    wishes = {0: Decision(evaluate=True), 1: Decision(checkpoint=True, evaluate=True)}
    # Only the decision and the end make checkpoints.
    checkpoints = pipedream.Checkpoints(tmp_path, every=100, keep=2)
    if is_local:
        result, watching = _train_watched(training, wishes, checkpoints=checkpoints)
    else:
        how = {"checkpoints": checkpoints, "num_ranks": training.num_workers}
        result, watching = farm.results(_train_watched, training, wishes, **how)[0]
    rounds = 2 if training.replicas == (2, 1) else 1
    planned = {-(-minibatch // rounds) * rounds for minibatch in (5, 10, 15, 20)}
    asked = {6 + lead, 12 + lead}
    evaluated = [each.minibatch for each in result.validation]
    assert evaluated == sorted(planned | asked)
    assert [
        (report.minibatch, report.loss, report.metrics["mean"], report.samples)
        for report in watching.evaluations
    ] == [(each.minibatch, each.loss, each.metrics["mean"], each.samples) for each in result.validation]
    # An evaluation that a decision asked for is reported at the boundary after the evaluation.
    for report in watching.evaluations:
        due = report.minibatch + lead + (rounds if report.minibatch in asked - planned else 0)
        assert report.takes_effect == due or (due >= 24 and report.takes_effect is None)
    assert watching.pinned == [12 + lead]
    pinned = folder_of(tmp_path, 12 + lead)
    assert is_pinned(pinned) and is_complete(pinned)
    assert [report.version for report in watching.told] == [-(-r.end // rounds) for r in watching.told]
    norms = [norm for report in watching.told for norm in report.gradient_norms]
    assert len(norms) == -(-24 // rounds) and all(norm > 0 for norm in norms)
    if training.schedule == "flush":
        assert norms == pytest.approx(_plain_norms(training), rel=1e-9)


_PAGE = Path(__file__).resolve().parents[2] / "docs" / "callbacks.md"


def _rising(outputs: Any, targets: Any) -> tuple[float, int]:
    """Returns a metric that is larger at each evaluation."""
    _rising.calls += 1  # type: ignore[attr-defined]
    return float(_rising.calls * len(targets)), len(targets)  # type: ignore[attr-defined]


def _train_keeping_best(training: Training, **options: Any) -> float:
    code = "class KeepBest(" + _PAGE.read_text().partition("class KeepBest(")[2].partition("```")[0]
    names: dict[str, Any] = {"pipedream": pipedream}
    exec(code, names)
    _rising.calls = 0  # type: ignore[attr-defined]
    held_out = pipedream.Validation(training.case.data(2, training.dtype), {"accuracy": _rising})
    best = names["KeepBest"]()
    train_in_pipeline(training, validation=held_out, callbacks=[best], **options)
    return float(best.best)


@pytest.mark.parametrize("schedule", ["flush", "pipedream"])
def test_keep_best_of_the_docs_pins_the_best_though_it_is_the_last(
    farm: Farm, tmp_path: Path, schedule: str
) -> None:
    training = replace(_TRAINING, schedule=schedule, epochs=2)
    checkpoints = pipedream.Checkpoints(tmp_path, every=100)
    best = farm.results(_train_keeping_best, training, checkpoints=checkpoints, num_ranks=2)[0]
    assert best > 2
    assert is_pinned(folder_of(tmp_path, 12))


def _plain_norms(training: Training) -> list[float]:
    norms = []
    model = training.model()
    optimizer = training.optimizer(model.parameters())
    for inputs, targets in [*training.data()] * training.epochs:
        optimizer.zero_grad()
        accumulate(model, training, inputs, targets)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm or 1e9)
        norms.append(float(norm))
        optimizer.step()
    return norms


def test_a_run_without_callbacks_measures_no_norms_for_them() -> None:
    assert not Steering([]).points.gradient_norms
    assert not Steering([_Recorder(every=1)]).points.gradient_norms
    assert not Steering([_Recorder(every=1)]).points.at_evaluations
    assert Steering([_Watching(1, {})]).points.gradient_norms


def test_an_error_of_a_callback_stops_the_run_and_reaches_the_caller_with_the_model_trained() -> None:
    class Failing(Callback):
        decides = False

        def on_epoch(self, report: EpochReport) -> None:
            raise ZeroDivisionError(f"epoch {report.epoch}")

    training = replace(_TRAINING, schedule="flush", epochs=50)
    model = training.model()
    with pytest.raises(ZeroDivisionError, match="epoch 0") as caught:
        how = {**training.options(), "progress": False, "callbacks": [Failing()]}
        pipedream.run(model, training.plan, **how)
    losses = caught.value.losses  # type: ignore[attr-defined]
    assert 6 <= len(losses) < 300
    untrained = training.model().state_dict()
    assert any(not torch.equal(value, untrained[name]) for name, value in model.state_dict().items())


def test_tensorboards_files_have_the_losses_of_all_minibatches(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    training = replace(_TRAINING, schedule="flush")
    board = pipedream.callbacks.TensorBoard(tmp_path / "runs", every=5)
    result, _ = _run(training, callbacks=[board])
    events = accumulator.EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    scalars = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }
    assert [value for _, value in scalars["loss"]] == pytest.approx(result.losses, rel=1e-6)
    assert [step for step, _ in scalars["loss"]] == list(range(24))
    assert [value for _, value in scalars["epoch/loss"]] == pytest.approx(result.epoch_losses, rel=1e-6)
    assert {"rate", "samples_per_s", "bubble_share", "bytes_sent"} <= {*scalars}
    assert any(tag.startswith("delay/stage") for tag in scalars)


class _Counting(Callback):
    """Records all reports. Its rate factors depend on the number of reports so far, so a lost or repeated
    report would change the training."""

    every = 2

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_minibatches(self, report: MinibatchReport) -> Any:
        self.seen.append((report.first, report.end, list(report.losses), report.version))

    def on_epoch(self, report: EpochReport) -> Any:
        self.seen.append((report.epoch, report.first, report.loss, dict(report.metrics)))
        return Decision(rate_factor=0.5 + 0.1 * len(self.seen) % 0.4, stop=report.epoch == 3)

    def on_evaluation(self, report: EvaluationReport) -> Any:
        self.seen.append((report.minibatch, report.loss, report.samples))


def _train_saved(
    training: Training, path: Path, resume: Path | bool, every: int = 2
) -> tuple[Any, list[Any], Any]:
    counting = _Counting()
    held_out = pipedream.Validation(training.case.data(2, training.dtype), {"mean": _mean_output})
    checkpoints = pipedream.Checkpoints(path, every=every, keep=99, resume=resume)
    result, state = train_in_pipeline(
        training, validation=held_out, callbacks=[counting], checkpoints=checkpoints
    )
    return (result.losses, result.validation, result.stopped_at), counting.seen, state


@pytest.mark.parametrize(
    "training",
    [
        replace(_TRAINING, epochs=6, num_minibatches=4),
        replace(_TRAINING, epochs=6, num_minibatches=4, schedule="flush"),
        replace(_TRAINING, epochs=6, num_minibatches=4, replicas=(2, 1)),
    ],
    ids=["pipedream", "flush", "2-1"],
)
def test_a_run_that_continues_tells_its_callbacks_of_all_before_and_decides_alike(
    farm: Farm, tmp_path: Path, training: Training
) -> None:
    train = functools.partial(farm.results, _train_saved, training, num_ranks=training.num_workers)
    whole, seen, state = train(tmp_path / "whole", True)[0]
    saved = checkpoints_in(tmp_path / "whole")
    assert whole[2] is not None
    for number in (1, 4):
        found, seen_again, state_again = train(tmp_path / f"{number}", saved[number])[0]
        assert found == whole
        assert seen_again == seen
        assert_equal_state(dict(state_again), dict(state))
    assert train(tmp_path / "end", saved[-1])[0][0] == whole
    if training.replicas:
        found, seen_again, _ = _train_saved(training, tmp_path / "local", saved[4])
        assert (found, seen_again[:15]) == (whole, seen[:15])


@pytest.mark.parametrize(
    "training",
    [
        replace(_TRAINING, epochs=4, num_minibatches=4),
        replace(_TRAINING, epochs=4, num_minibatches=4, schedule="flush"),
        replace(_TRAINING, epochs=4, num_minibatches=4, schedule="flush", replicas=(2, 1), microbatches=2),
    ],
    ids=["pipedream", "flush", "flush 2-1"],
)
def test_a_finished_run_of_more_epochs_decides_by_the_evaluation_of_the_last_one(
    farm: Farm, tmp_path: Path, training: Training
) -> None:
    """The weights at the end of the run are evaluated, and the answer changes the rate of the next epoch."""
    num_ranks = training.num_workers
    whole, seen, state = farm.results(_train_saved, training, tmp_path / "whole", True, num_ranks=num_ranks)[
        0
    ]
    farm.results(_train_saved, replace(training, epochs=2), tmp_path / "more", True, num_ranks=num_ranks)
    found, seen_again, state_again = farm.results(
        _train_saved, training, tmp_path / "more", True, num_ranks=num_ranks
    )[0]
    assert found == whole
    assert seen_again == seen
    assert_equal_state(dict(state_again), dict(state))


class _AlwaysEvaluating(Callback):
    """Asks for evaluations and checkpoints, and lowers the rate after each evaluation."""

    every = 2

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_minibatches(self, report: MinibatchReport) -> Any:
        self.seen.append((report.first, report.takes_effect))
        return Decision(evaluate=True, checkpoint=True)

    def on_evaluation(self, report: EvaluationReport) -> Any:
        self.seen.append((report.minibatch, report.loss, report.takes_effect))
        return Decision(rate_factor=0.9)


def _train_evaluated(training: Training, path: Path, resume: Path | bool) -> Any:
    held_out = pipedream.Validation(training.case.data(2, training.dtype), {"mean": _mean_output}, every=99)
    checkpoints = pipedream.Checkpoints(path, every=99, keep=99, resume=resume)
    callback = _AlwaysEvaluating()
    result, _ = train_in_pipeline(
        training, validation=held_out, callbacks=[callback], checkpoints=checkpoints
    )
    return result.losses, result.validation, callback.seen


@pytest.mark.parametrize("schedule", ["unstashed", "pipedream", "flush"])
def test_a_run_goes_on_from_a_checkpoint_at_which_an_evaluation_was_asked_for(
    farm: Farm, tmp_path: Path, schedule: str
) -> None:
    # Without stashing, the first forwards after the checkpoint read older versions in the only slot.
    training = replace(_TRAINING, epochs=3, num_minibatches=4, schedule=schedule)
    train = functools.partial(farm.results, _train_evaluated, training, num_ranks=training.num_workers)
    whole = train(tmp_path / "whole", True)[0]
    for number in (1, 2):
        saved = checkpoints_in(tmp_path / "whole")[number]
        losses, validation, seen = train(tmp_path / f"{number}", saved)[0]
        assert (losses, validation) == whole[:2]
        assert seen[:6] == whole[2][:6]  # the later reports come at the end of the run, all at once
