"""Tests that run(validation=...) measures what a plain loop would measure with the same weights, and does not
disturb the training.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from models import straight_plan
from pipedream import reference
from pipedream.callbacks import EvaluationReport
from pipedream.launch import forwarder
from torch import Tensor, nn
from training import Training, accumulate, assert_close_state, tolerance, train_in_pipeline

Results = list[tuple[int, dict[str, float]]]


def sum_of(outputs: Any, targets: Any) -> tuple[float, int]:
    return float(outputs.sum()), len(outputs)


def held_out(training: Training, every: str | int, **options: Any) -> pipedream.Validation:
    """Returns validation data with more minibatches than may be on their way between two stages. They are
    larger than the training's, and the last one is short.
    """
    batches = training.case.data(5, training.dtype, short_last=True)
    doubled = [tuple(torch.cat([part, part]) for part in batch) for batch in batches]
    return pipedream.Validation(doubled, {"sum": sum_of}, every=every, **options)


def evaluate_in_pipeline(training: Training, every: str | int) -> tuple[Results, list[float], Any, list[Any]]:
    result, state = train_in_pipeline(training, validation=held_out(training, every))
    figures = [(each.minibatch, {"loss": each.loss, **each.metrics}) for each in result.validation]
    return figures, result.losses, state, result.versions


def evaluate_in_oracle(training: Training, every: str | int) -> Results:
    model = training.model()
    result = reference.run(model, training.plan, **training.options(), validation=held_out(training, every))
    return result.validation


def assert_equal_figures(training: Training, figures: Results, expected: Results) -> None:
    """Asserts that the figures are equal: to the last bit, unless microbatches or replicas change the order
    of additions."""
    assert len(figures) > 0
    assert [boundary for boundary, _ in figures] == [boundary for boundary, _ in expected]
    is_exact = training.microbatches == 1 and not training.replicas
    for (_, found), (_, wanted) in zip(figures, expected, strict=True):
        assert found == (wanted if is_exact else pytest.approx(wanted, rel=tolerance(training.dtype)))


TRAININGS = [
    (Training("cnn", 3, num_minibatches=4, epochs=2), 3),
    (Training("cnn", 3, num_minibatches=4, epochs=2, microbatches=4), "epoch"),
    (Training("cnn", 2, schedule="flush", microbatches=2, num_minibatches=3, epochs=2), "epoch"),
    (Training("cnn", 3, schedule="unstashed", num_minibatches=5), 1),
    (Training("dropout", 3, schedule="2bw", microbatches=2, num_minibatches=5), 2),
    (Training("dropout", 4, schedule="interleaved", microbatches=2, num_minibatches=4), 2),
    (Training("dropout", 1, num_minibatches=4, epochs=2), "epoch"),
    (Training("tied_apart", 3, num_minibatches=6), 2),
    (Training("tied_apart", 3, schedule="flush", num_minibatches=4), 1),
    (Training("cnn", 2, replicas=(2, 1), num_minibatches=7), 3),
    (Training("cnn", 3, replicas=(1, 2, 1), num_minibatches=4, epochs=2), "epoch"),
    (Training("transformer", 2, schedule="vertical_sync", num_minibatches=5), 2),
    (Training("cnn", 1, replicas=(2,), schedule="data_parallel", num_minibatches=6), 2),
]


@pytest.mark.parametrize(("training", "every"), TRAININGS, ids=str)
def test_an_evaluation_is_that_of_a_plain_loop_and_the_training_does_not_notice(
    farm: Farm, training: Training, every: str | int
) -> None:
    figures, losses, state, versions = farm.results(
        evaluate_in_pipeline, training, every, num_ranks=training.num_workers
    )[0]
    result, plain_state = farm.results(train_in_pipeline, training, num_ranks=training.num_workers)[0]
    assert losses == result.losses
    assert versions == result.versions
    assert all(torch.equal(state[name], plain_state[name]) for name in state)
    assert_equal_figures(training, figures, evaluate_in_oracle(training, every))


class CentredLoss(nn.Module):
    """Keeps a centre of the outputs in a buffer, and the number of its calls in an attribute."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(()))
        self.num_calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = (outputs - targets).square().mean() * (1 + self.num_calls) + self.centre
        self.centre = (self.centre + outputs.detach().mean()) / 2
        self.num_calls += 1
        return loss


class Averaging(nn.Module):
    """Averages its inputs in a frozen parameter and replaces a buffer, also in eval mode."""

    newest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.register_buffer("newest", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
            before, self.newest = self.newest, x.mean(0)
        return x + self.average.clone() + before


def train_with_averages(every: int | None, by: Any = pipedream.run) -> tuple[list[float], list[float], Any]:
    """Returns the losses, the losses of the evaluations, and the values that forwards have written."""
    torch.manual_seed(0)
    model, loss_fn = nn.Sequential(nn.Linear(8, 8), Averaging(), nn.Linear(8, 4)), CentredLoss()
    validation = None if every is None else pipedream.Validation(_batches(3, 4, 1), every=every)
    options = _OPTIONS | {"loss_fn": loss_fn, "data": _batches(5, 4, 0), "validation": validation}
    options |= {"progress": False} if by is pipedream.run else {}
    result = by(model, straight_plan(3, (1,)), **options)
    evaluated = [
        each[1]["loss"] if by is reference.run else each.loss for each in (result.validation if every else ())
    ]
    written = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    return result.losses, evaluated, (float(loss_fn.centre), loss_fn.num_calls, written)


def test_an_evaluation_reads_what_forwards_write_at_its_boundary_and_leaves_it_alone(farm: Farm) -> None:
    losses, evaluated, written = farm.results(train_with_averages, 2, num_ranks=2)[0]
    without, _, written_without = farm.results(train_with_averages, None, num_ranks=2)[0]
    assert (losses, written) == (without, written_without)
    assert evaluated == train_with_averages(2, reference.run)[1]


class WithAuxiliaryHead(nn.Module):
    """Has an auxiliary head, which eval mode leaves out. In training, its value crosses the cuts too."""

    def __init__(self, *, skips: bool = False) -> None:
        super().__init__()
        self.stem, self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm, self.auxiliary = nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.skips = skips

    def forward(self, x: Tensor) -> Any:
        x = self.norm(self.stem(x))
        auxiliary = self.auxiliary(x) if self.training else None
        if self.training or not self.skips:
            x = x + self.middle(x).tanh()
        return (self.head(x), auxiliary) if self.training else self.head(x)

    def plain_chain(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.norm(self.stem(x)))).tanh()


def auxiliary_loss(outputs: Any, targets: Tensor) -> Tensor:
    if isinstance(outputs, tuple):
        return nn.functional.mse_loss(outputs[0], targets) + nn.functional.mse_loss(outputs[1], targets)
    return nn.functional.mse_loss(outputs[:, :4], targets)


def _batches(number: int, size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 8, generator=generator), torch.randn(size, 4, generator=generator))
        for _ in range(number)
    ]


def _model(**options: Any) -> WithAuxiliaryHead:
    torch.manual_seed(0)
    return WithAuxiliaryHead(**options)


_CUT = replace(pipedream.Plan.straight(2, 2), cuts=("middle",))
_OPTIONS: dict[str, Any] = {
    "loss_fn": auxiliary_loss,
    "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
    "seed": 1,
}


def evaluate_module(**options: Any) -> tuple[Results, dict[str, int | None]]:
    validation = pipedream.Validation(_batches(3, 12, 1), {"sum": sum_of}, every=2, **options)
    result = pipedream.run(
        _model(), _CUT, data=_batches(5, 4, 0), validation=validation, progress=False, **_OPTIONS
    )
    figures = [(each.minibatch, {"loss": each.loss, **each.metrics}) for each in result.validation]
    return figures, result.memory[0]["evaluation"]


def plain_chain(model: Any, inputs: Tensor) -> Any:
    return model.plain_chain(inputs)


@pytest.mark.parametrize("forward", [None, plain_chain])
def test_the_eval_mode_forward_is_cut_by_itself_and_may_be_another_one(farm: Farm, forward: Any) -> None:
    figures, memory = farm.results(evaluate_module, forward=forward, num_ranks=2)[0]
    validation = pipedream.Validation(_batches(3, 12, 1), {"sum": sum_of}, every=2, forward=forward)
    expected = reference.run(_model(), _CUT, data=_batches(5, 4, 0), validation=validation, **_OPTIONS)
    assert figures == expected.validation
    assert [boundary for boundary, _ in figures] == [2, 4]
    assert memory["predicted"] > 0


def encoder_layers() -> nn.Module:
    """Returns layers that torch computes by one fused kernel in eval mode."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
            self.layers = nn.ModuleList(layers)

        def forward(self, x: Tensor) -> Tensor:
            x = x[:, None]
            for layer in self.layers:
                x = layer(x)
            return x[:, 0, :4]

    torch.manual_seed(0)
    return Encoder()


def evaluate_encoder() -> list[float]:
    plan = replace(pipedream.Plan.straight(2, 2), cuts=("layers.0.linear1",))
    validation = pipedream.Validation(_batches(3, 12, 1), every=2)
    model = encoder_layers()
    result = pipedream.run(
        model, plan, data=_batches(4, 4, 0), validation=validation, progress=False, **_OPTIONS
    )
    return [each.loss for each in result.validation]


def test_an_encoder_layer_of_torch_is_evaluated_where_it_is_cut_inside(farm: Farm) -> None:
    losses = farm.results(evaluate_encoder, num_ranks=2)[0]
    assert len(losses) == 2
    assert losses[1] != losses[0]


def sum_of_all(outputs: list[Tensor], targets: list[Tensor]) -> tuple[float, int]:
    return float(torch.cat(outputs).sum()), len(torch.cat(targets))


def rows_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.sum(1)


def figures_of_rows(rows: list[Tensor], targets: list[Tensor]) -> dict[str, float]:
    together = torch.cat(rows)
    assert together.dim() == 1 and len(together) == len(torch.cat(targets))
    return {"sum": float(together.mean()), "rows": float(len(together))}


def evaluate_with_all_outputs(parts: bool) -> list[float]:
    data = _batches(3, 12, 1)
    validation = pipedream.Validation(data, {"sum": sum_of_all}, every=2, outputs=True)
    if parts:
        validation = pipedream.Validation(data, {"all": figures_of_rows}, every=2, outputs=rows_of)
    result = pipedream.run(
        _model(), _CUT, data=_batches(5, 4, 0), validation=validation, progress=False, **_OPTIONS
    )
    if parts:
        assert all(each.metrics.keys() == {"sum", "rows"} for each in result.validation)
    return [each.metrics["sum"] for each in result.validation]


@pytest.mark.parametrize("parts", [False, True])
def test_a_metric_may_have_all_outputs_at_once_or_a_part_of_each(farm: Farm, parts: bool) -> None:
    figures, _ = farm.results(evaluate_module, num_ranks=2)[0]
    sums = farm.results(evaluate_with_all_outputs, parts, num_ranks=2)[0]
    assert sums == pytest.approx([of_each["sum"] for _, of_each in figures], rel=1e-6)


def refused(what: str) -> None:
    model, validation = _model(skips=what == "cut"), pipedream.Validation(_batches(3, 12, 1))
    if what == "larger":
        unknown_sizes = torch.utils.data.DataLoader(_batches(1, 4, 1) + _batches(1, 5, 1), batch_size=None)  # type: ignore[arg-type]
        validation = pipedream.Validation(unknown_sizes)
    if what == "figure":
        validation = pipedream.Validation(
            _batches(2, 4, 1), {"all": lambda outputs, targets: {"loss": 1.0}}, outputs=True
        )
    if what == "metric":
        validation = pipedream.Validation(_batches(2, 4, 1), {"wrong": lambda outputs, targets: 1.0})
    pipedream.run(model, _CUT, data=_batches(5, 4, 0), validation=validation, progress=False, **_OPTIONS)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("cut", "validation: in eval mode the model cannot be cut after 'middle'"),
        ("larger", "put the largest first"),
        ("metric", "metric 'wrong' returned a float: return (sum, count)"),
        ("figure", "metric 'all' returned 'loss', which is another figure: give it a name of its own"),
    ],
)
def test_what_cannot_be_evaluated_is_told(farm: Farm, what: str, text: str) -> None:
    outcomes = farm.run(refused, what, num_ranks=2)
    assert any(text in str(outcome.error) for outcome in outcomes), [outcome.error for outcome in outcomes]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"data": iter([])}, "data is an iterator"),
        ({"data": [], "every": "hour"}, "every is 'hour': use 'epoch' or a number of minibatches"),
        ({"data": [], "metrics": {"loss": len}}, "a metric is called 'loss'"),
    ],
)
def test_a_mistaken_validation_is_told_at_once(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pipedream.Validation(**arguments)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync": "asp"}, "sync is 'asp'"),
        ({"sync": "ssp", "staleness": 1}, "staleness is 1"),
        ({"sync_every": 2}, "sync_every is 2"),
    ],
)
def test_replicas_without_a_common_version_are_not_evaluated(options: dict[str, Any], text: str) -> None:
    replicas = pipedream.Plan((pipedream.Stage(0, 0, num_replicas=2), pipedream.Stage(1, 1)))
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
    validation = pipedream.Validation(_batches(1, 4, 1))
    with pytest.raises(ValueError, match=f"validation is given, and {text}"):
        pipedream.run(model, replicas, data=_batches(2, 4, 0), validation=validation, **_OPTIONS, **options)


class Noting(pipedream.callbacks.Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_epoch(self, report: Any) -> None:
        self.seen.append(dict(report.metrics))


def evaluate_for_callbacks(training: Training) -> tuple[list[dict[str, float]], Results]:
    noting = Noting()
    result, _ = train_in_pipeline(training, validation=held_out(training, "epoch"), callbacks=[noting])
    figures = [(each.minibatch, {"loss": each.loss, **each.metrics}) for each in result.validation]
    return noting.seen, figures


@pytest.mark.parametrize("schedule", ["pipedream", "flush"])
def test_callbacks_are_told_of_the_evaluation_of_the_same_epoch(farm: Farm, schedule: str) -> None:
    training = Training("cnn", 2, schedule=schedule, num_minibatches=6, epochs=3)
    seen, figures = farm.results(evaluate_for_callbacks, training, num_ranks=2)[0]
    assert seen == [of_each for _, of_each in figures]


STEERED = [
    Training("mlp", 2, schedule="flush", microbatches=2, num_minibatches=5, epochs=6),
    Training("mlp", 4, schedule="interleaved", microbatches=2, num_minibatches=4, epochs=6),
    Training("tied_apart", 3, schedule="flush", num_minibatches=4, epochs=6),
    Training("mlp", 2, replicas=(2, 1), schedule="flush", microbatches=2, num_minibatches=5, epochs=6),
    Training("mlp", 2, replicas=(1, 2), schedule="flush", microbatches=2, num_minibatches=4, epochs=6),
]
_PLATEAU = {"factor": 0.5, "patience": 0}
_STOP = {"patience": 1, "mode": "max"}


def train_steered(training: Training) -> tuple[Any, list[float], Results]:
    callbacks = [
        pipedream.callbacks.ReduceLROnPlateau("sum", **_PLATEAU),  # type: ignore[arg-type]
        pipedream.callbacks.EarlyStopping("sum", **_STOP),  # type: ignore[arg-type]
        Noting(),
    ]
    result, state = train_in_pipeline(training, validation=held_out(training, "epoch"), callbacks=callbacks)
    return state, result.losses, [(each.minibatch, each.metrics) for each in result.validation]


def train_steered_plainly(training: Training) -> tuple[Any, list[float], Results]:
    """Trains with torch's own scheduler, in a loop that stops."""
    model = training.model()
    optimizer = training.optimizer(model.parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=0.0, threshold_mode="abs"
    )
    losses: list[float] = []
    found: Results = []
    for _ in range(training.epochs):
        for inputs, targets in training.data():
            optimizer.zero_grad()
            losses.append(accumulate(model, training, inputs, targets))
            optimizer.step()
        model.eval()
        with torch.no_grad():
            pairs = [sum_of(model(inputs), targets) for inputs, targets in held_out(training, 1).data]
        model.train()
        value = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
        found.append((len(losses), {"sum": value}))
        plateau.step(value)
        values = [metrics["sum"] for _, metrics in found]
        if len(values) - 1 - values.index(max(values)) > 1:
            break
    return model.state_dict(), losses, found


@pytest.mark.parametrize("training", STEERED, ids=str)
def test_stopping_and_plateaus_equal_those_of_a_plain_loop_where_the_schedule_drains(
    farm: Farm, training: Training
) -> None:
    state, losses, found = farm.results(train_steered, training, num_ranks=training.num_workers)[0]
    plain_state, plain_losses, plain_found = train_steered_plainly(training)
    assert [minibatch for minibatch, _ in found] == [minibatch for minibatch, _ in plain_found]
    assert losses == pytest.approx(plain_losses, rel=1e-9)
    for (_, figures), (_, wanted) in zip(found, plain_found, strict=True):
        assert figures == pytest.approx(wanted, rel=1e-9)
    assert_close_state(dict(state), dict(plain_state), 1e-9)


class Unsendable:
    """Validation data that draw random numbers, and that hold an object that cannot be sent to another
    process."""

    def __init__(self, *, fails_at: int = -1) -> None:
        self.lock = threading.Lock()
        self.fails_at = fails_at
        self.num_read = 0

    def __iter__(self) -> Iterator[Any]:
        with self.lock:
            for index in torch.randperm(7).tolist():  # more minibatches than are handed over at once
                if self.num_read == self.fails_at:
                    raise OSError("the disk of the validation data is gone")
                self.num_read += 1
                yield _batches(7, 12, 1)[index]


class UnsendableTraining:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        yield from [_batches(5, 4, 0)[index] for index in torch.randperm(5).tolist()]


def test_validation_data_that_cannot_be_sent_are_handed_over_by_the_caller() -> None:
    stages = (replace(_CUT.stages[0], num_replicas=2), _CUT.stages[1])
    plan = replace(pipedream.Plan(stages), cuts=_CUT.cuts)
    how: dict[str, Any] = {
        "data": UnsendableTraining(),
        "epochs": 2,
        "progress": False,
        "microbatches": 2,
        **_OPTIONS,
    }
    sendable = pipedream.Validation(_batches(7, 12, 1), {"sum": sum_of}, every=2)
    expected = pipedream.run(_model(), plan, **how, validation=sendable)
    validation = replace(sendable, data=Unsendable())
    result = pipedream.run(_model(), plan, **how, validation=validation)
    assert result.losses == expected.losses
    assert [each.minibatch for each in result.validation] == [2, 4, 6, 8, 10]
    for found, wanted in zip(result.validation, expected.validation, strict=True):
        assert found.samples == wanted.samples == 84
        assert found.loss == pytest.approx(wanted.loss, rel=1e-6)  # the losses are added in another order
        assert found.metrics["sum"] == pytest.approx(wanted.metrics["sum"], rel=1e-5)


class _WaitingForCallback(pipedream.callbacks.Callback):
    """Training data that are also a callback. Before they give minibatch 4, they wait until the callback has
    the figures of the evaluation before minibatch 2.
    """

    decides = False

    def __init__(self) -> None:
        self._is_evaluated = threading.Event()

    def on_evaluation(self, report: EvaluationReport) -> None:
        self._is_evaluated.set()

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(_batches(5, 4, 0)):
            if index == 4:
                self._is_evaluated.wait()
            yield batch


@pytest.mark.slow
def test_training_data_may_wait_for_what_a_callback_is_told_of_validation_data(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forwarder, "_TURN_S", 0.1)
    waiting = _WaitingForCallback()
    how: dict[str, Any] = {"progress": False, **_OPTIONS, "callbacks": [waiting]}
    validation = pipedream.Validation(Unsendable(), every=2)
    result = pipedream.run(_model(), _CUT, data=waiting, validation=validation, **how)
    assert [each.minibatch for each in result.validation] == [2, 4]
    assert len(result.losses) == 5
    assert "the training data have yielded nothing for 0.1 s" in caplog.text


def test_an_error_of_forwarded_validation_data_is_the_users_own() -> None:
    validation = pipedream.Validation(Unsendable(fails_at=5))
    with pytest.raises(OSError, match="the disk of the validation data is gone"):
        pipedream.run(
            _model(), _CUT, data=_batches(5, 4, 0), validation=validation, progress=False, **_OPTIONS
        )
