"""Tests cautions.py: warnings that run() gives before anything starts."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import Any

import pipedream
import pytest
import torch
from launches import Launched, note_launches
from pipedream import Plan, optim
from pipedream._core import Placement, ScheduleOptions, derive_in_flight
from pipedream.launch import launcher
from pipedream.planning.plan import Stage
from pipedream.splitting.cut_model import cut_model
from pipedream.worker.cautions import cautions_of, warn_if_late
from torch import nn


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 2))


def _plan(num_workers: int = 0) -> Plan:
    return Plan(Plan.straight(3, 2).stages, num_workers=num_workers)


def test_an_ordinary_run_gives_no_caution() -> None:
    assert list(cautions_of(_model(), _plan(), None)) == []
    assert list(cautions_of(_model(), _plan(), 2)) == []


def test_a_model_with_nothing_to_train_is_told() -> None:
    model = _model().requires_grad_(False)
    (caution,) = cautions_of(model, _plan(), None)
    assert caution.startswith("nothing is trained: no parameter of the model requires a gradient")
    model[2].bias.requires_grad_(True)
    assert list(cautions_of(model, _plan(), None)) == []


def test_a_model_in_eval_is_told_and_one_with_frozen_layers_is_not() -> None:
    model = _model()
    model[0].eval()
    assert list(cautions_of(model, _plan(), None)) == []
    for given in (model.eval(), list(model)):
        (caution,) = cautions_of(given, _plan(), None)
        assert caution.startswith("the model is in eval()")


def test_batch_norm_in_microbatches_is_told() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    (caution,) = cautions_of(model, _plan(), None, microbatches=4)
    assert caution.startswith("batch norm takes its statistics from each of a minibatch's 4 microbatches")
    assert list(cautions_of(model, _plan(), None)) == []
    assert list(cautions_of(model, _plan(), None, microbatches=4, in_microbatches=True)) == []
    replicated = Plan((Stage(0, 1, 2), Stage(2, 2)))
    (caution,) = cautions_of(model, replicated, None, microbatches=4, in_microbatches=True)
    assert caution.startswith("each replica of a stage steps batch norm's running statistics by its own")
    model[1].eval()  # in evaluation mode it does not change its statistics
    assert list(cautions_of(model, _plan(), None, microbatches=4)) == []


class _Calling(nn.Sequential):
    """A Sequential with a forward of its own. So run() cuts its forward, and does not take it as a list of
    layers.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = super().forward(inputs)
        return output * 1.0


@pytest.mark.parametrize("kind", [nn.Sequential, _Calling])
@pytest.mark.parametrize("in_microbatches", [True, False])
def test_a_run_tells_of_batch_norm_unless_data_yield_microbatches(
    monkeypatch: pytest.MonkeyPatch, kind: type[nn.Sequential], in_microbatches: bool
) -> None:
    note_launches(monkeypatch)
    pair = (torch.rand(4, 2), torch.rand(4, 2))
    with warnings.catch_warnings(record=True) as caught, pytest.raises(Launched):
        warnings.simplefilter("always")
        pipedream.run(
            kind(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)),
            Plan.straight(3, 2),
            data=[pipedream.Microbatches([pair, pair]) if in_microbatches else pair],
            loss_fn=nn.functional.mse_loss,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            schedule="flush",
            microbatches=2,
        )
    told = [str(warning.message) for warning in caught if "batch norm" in str(warning.message)]
    assert len(told) == (0 if in_microbatches else 1)


@pytest.mark.parametrize(
    ("asked", "world_size", "words"),
    [(4, None, "2 of the 4 workers"), (4, 4, "2 of the 4 workers"), (0, 3, "2 of 3 ranks")],
)
def test_workers_without_work_are_told(asked: int, world_size: int | None, words: str) -> None:
    (caution,) = cautions_of(_model(), _plan(asked), world_size)
    assert words in caution


def test_a_plan_that_was_given_is_not_said_to_be_the_fastest() -> None:
    plan = replace(_plan(4), predicted={"given": ["replicas"]})
    (caution,) = cautions_of(_model(), plan, None)
    assert caution.endswith(
        "2 of the 4 workers it was made for: replicas were given to partition(), and the search kept to them"
    )


_WEIGHT = torch.ones(2)


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (nn.MSELoss(reduction="sum"), "reduction='sum'"),
        (functools.partial(nn.functional.mse_loss, reduction="sum"), "reduction='sum'"),
        (nn.CrossEntropyLoss(weight=_WEIGHT), "class weights or ignore_index"),
        (nn.NLLLoss(ignore_index=0), "class weights or ignore_index"),
        (functools.partial(nn.functional.cross_entropy, weight=_WEIGHT), "class weights or ignore_index"),
        (functools.partial(nn.functional.nll_loss, ignore_index=0), "class weights or ignore_index"),
    ],
)
def test_a_loss_that_is_no_mean_over_samples_is_told_under_microbatches_alone(
    loss_fn: Any, words: str
) -> None:
    (caution,) = cautions_of(_model(), _plan(), None, loss_fn, 2)
    assert words in caution
    assert list(cautions_of(_model(), _plan(), None, loss_fn, 1)) == []


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(),
        nn.BCEWithLogitsLoss(weight=_WEIGHT),  # divides by the number of samples in spite of its weights
        nn.functional.cross_entropy,
        functools.partial(nn.functional.cross_entropy, label_smoothing=0.1),
        lambda outputs, targets: outputs.mean(),
    ],
)
def test_a_loss_that_is_a_mean_over_samples_is_not_told(loss_fn: Any) -> None:
    assert list(cautions_of(_model(), _plan(), None, loss_fn, 4)) == []


@pytest.mark.usefixtures("launched")
def test_run_warns_at_the_callers_line_before_any_process_starts() -> None:
    pair = (torch.ones(2, 2), torch.ones(2, 2))
    with pytest.warns(UserWarning, match=r"eval\(\)") as caught, pytest.raises(Launched):
        pipedream.run(
            _model().eval(),
            _plan(),
            data=[pair],
            loss_fn=nn.functional.mse_loss,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        )
    assert [warning.filename for warning in caught] == [__file__]


def _late_warnings(options: ScheduleOptions, *made: torch.optim.Optimizer) -> list[str]:
    plan = Plan(tuple(Stage(i, i, options.placement.num_replicas(i)) for i in range(options.num_stages)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_late(plan, options, made)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


_WEIGHTS = [nn.Parameter(torch.ones(2, 2))]
_MOMENTUM = torch.optim.SGD(_WEIGHTS, lr=0.1, momentum=0.9)


def test_gradients_more_than_one_update_late_are_told_with_what_would_not_be() -> None:
    (told,) = _late_warnings(ScheduleOptions("pipedream", [4, 3, 2, 1]), _MOMENTUM, _MOMENTUM)
    assert told == (
        "gradients are 3 updates late in the mean (schedule 'pipedream' with microbatches=1), which with the"
        " momentum of SGD costs minibatches: schedule='pipedream' with microbatches=3 is at most one"
        " late, 'flush' not at all"
    )
    assert not _late_warnings(ScheduleOptions("pipedream", [4, 3, 2, 1], 3), _MOMENTUM)
    replicas = [2, 1, 1, 1]
    in_flight, placement = derive_in_flight(replicas), Placement.in_order(replicas, [0] * 4)
    # Each of two replicas has every second microbatch. With three microbatches per minibatch, three
    # consecutive ones at a replica belong to two minibatches.
    told_of = [
        _late_warnings(ScheduleOptions("unstashed", in_flight, m, placement), _MOMENTUM) for m in range(1, 5)
    ]
    assert [len(told) for told in told_of] == [1, 1, 0, 0]
    assert "schedule='unstashed' with microbatches=3 is" in told_of[1][0]


def test_what_vertical_sync_is_told_to_use_is_at_most_one_update_late() -> None:
    """With unequal numbers of replicas, the updates of the input stage come after other microbatches than
    those of other stages.
    """
    replicas = [2, 1]
    placement = Placement.in_order(replicas, [0] * 2)
    late, in_time = (ScheduleOptions("vertical_sync", [2, 1], m, placement) for m in (1, 2))
    assert "microbatches=2 is at most one late" in _late_warnings(late, _MOMENTUM)[0]
    assert not _late_warnings(in_time, _MOMENTUM)


def test_gradients_that_are_late_by_staleness_are_told_to_be_without() -> None:
    stale = ScheduleOptions("pipedream", [4, 3, 2, 1], 3, staleness=1)
    (told,) = _late_warnings(stale, _MOMENTUM)
    assert "schedule='pipedream' with microbatches=3 and staleness=0 is at most one late" in told


@pytest.mark.parametrize(
    ("options", "is_told"),
    [
        (ScheduleOptions("vertical_sync", [3, 2, 1], 1), True),
        (ScheduleOptions("2bw", [3, 2, 1], 2), False),
        (ScheduleOptions("flush", [3, 2, 1], 1), False),
        (ScheduleOptions("pipedream", [2, 1], 1), False),
    ],
)
def test_a_schedule_that_is_at_most_one_update_late_is_not_told(
    options: ScheduleOptions, is_told: bool
) -> None:
    assert bool(_late_warnings(options, _MOMENTUM)) == is_told


@pytest.mark.parametrize(
    ("made", "is_told"),
    [
        (torch.optim.SGD(_WEIGHTS, lr=0.1), False),
        (torch.optim.SGD([{"params": _WEIGHTS, "momentum": 0.5}], lr=0.1), True),
        (torch.optim.Adagrad(_WEIGHTS), False),
        (torch.optim.RMSprop(_WEIGHTS, momentum=0.1), True),
        (torch.optim.AdamW(_WEIGHTS, betas=(0.0, 0.99)), True),
        (optim.SGD(_WEIGHTS, lr=0.1), False),
        (optim.SGD(_WEIGHTS, lr=0.1, momentum=0.9), True),
        (optim.NAdamW(_WEIGHTS), True),
        (optim.Muon([("w", _WEIGHTS[0])]), True),
    ],
)
def test_late_gradients_are_told_to_optimizers_with_momentum_alone(
    made: torch.optim.Optimizer, is_told: bool
) -> None:
    assert bool(_late_warnings(ScheduleOptions("pipedream", [3, 2, 1]), made)) == is_told


def test_a_run_tells_its_caller_of_late_gradients_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: Any) -> None:
        raise Launched

    monkeypatch.setattr(launcher, "_launch", launch)
    pair = (torch.ones(2, 2), torch.ones(2, 2))
    with pytest.warns(UserWarning, match="2 updates late") as caught, pytest.raises(Launched):
        pipedream.run(
            nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))),
            Plan.straight(3, 3),
            data=[pair],
            loss_fn=nn.functional.mse_loss,
            optimizer=functools.partial(torch.optim.Adam, lr=0.1),
        )
    assert [warning.filename for warning in caught] == [__file__]


def test_a_scheduler_that_steps_at_different_rates_is_told() -> None:
    uneven = Plan((Stage(0, 0, 2), Stage(1, 1)))
    (caution,) = cautions_of(_model(), uneven, None, rates_by_update=True)
    assert "a stage of 2 replicas makes once in 2 minibatches and one of 1 once in 1" in caution
    assert list(cautions_of(_model(), uneven, None)) == []
    even = Plan((Stage(0, 0, 2), Stage(1, 1, 2)))
    assert list(cautions_of(_model(), even, None, rates_by_update=True)) == []


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.width, self.num_forwards = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        result: torch.Tensor = self.layers(inputs) / self.num_forwards
        return result


def test_a_number_that_several_stages_of_a_worker_would_count_is_told() -> None:
    """With schedule="interleaved" a worker has several stages, which all count. The losses then differ from a
    plain loop's, so there must be a warning.
    """
    model = _Counting()
    cut = cut_model(model, torch.ones(2, 2), torch.ones(2, 2), nn.functional.mse_loss)
    assert cut.counts == ("num_forwards",) and model.num_forwards == 0
    (caution,) = cautions_of(cut, Plan.straight(2, 2, num_workers=1), None)
    assert caution.startswith("the forward changes num_forwards, and workers of this plan have several")
    assert list(cautions_of(cut, Plan.straight(2, 2), None)) == []
