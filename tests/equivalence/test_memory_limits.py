"""Tests run(memory=...): runs that fit, runs that fit only with recompute, and runs that are refused.

Peaks are compared with predictions in models whose memory is mostly activations, not constants.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace
from typing import Any

import pipedream
import pytest
import torch
import torch.nn.functional as F
from covering import parametrize_pairs
from farm import Farm
from oracle import assert_memory_as_predicted
from pipedream import Plan, RunResult
from torch import nn

_SAMPLES = 768
_WIDTHS = (16, 64, 256, 64, 16, 64, 256, 64, 16)


def _model() -> nn.Sequential:
    """Returns a model with activations of 48 to 768 KiB and weights of 4 or 64 KiB. Some cuts are narrow and
    some are wide, so some stages have large inputs and others large outputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        pairs = itertools.pairwise(_WIDTHS)
        return nn.Sequential(*(layer for a, b in pairs for layer in (nn.Linear(a, b), nn.Tanh())))


def _data(num_minibatches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    shape = (num_minibatches, _SAMPLES, _WIDTHS[0])
    return list(zip(*(torch.randn(shape, generator=generator) for _ in range(2)), strict=True))


_OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "native adamw": functools.partial(pipedream.optim.AdamW, lr=0.01),
}


def _train(num_stages: int, num_workers: int, **options: Any) -> RunResult:
    plan = Plan.straight(16, num_stages, num_workers=num_workers)
    defaults: dict[str, Any] = {
        "optimizer": _OPTIMIZERS["sgd"],
        "data": _data(9),
        "loss_fn": F.mse_loss,
        "seed": 1,
    }
    return pipedream.run(_model(), plan, progress=False, **(defaults | options))


_SCHEDULES = ("pipedream", "vertical_sync", "naive", "2bw", "flush", "gpipe", "model_parallel", "interleaved")


@parametrize_pairs(schedule=_SCHEDULES, recompute=(None, True, (1,)), microbatches=(1, 4))
def test_large_activations_stay_within_their_prediction(
    farm: Farm, schedule: str, microbatches: int, recompute: Any
) -> None:
    if schedule == "2bw":
        microbatches = max(microbatches, 4)
    num_workers = 2 if schedule == "interleaved" else 4
    options = {"schedule": schedule, "microbatches": microbatches, "recompute": recompute}
    result = farm.results(_train, 4, num_workers, num_ranks=num_workers, **options)[0]
    assert_memory_as_predicted(result)


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
def test_versions_and_state_take_what_was_predicted(farm: Farm, optimizer: str) -> None:
    result = farm.results(_train, 4, 4, num_ranks=4, optimizer=_OPTIMIZERS[optimizer])[0]
    assert_memory_as_predicted(result)
    for stage, terms in enumerate(result.memory):
        versions = terms[f"weight versions of stage {stage}"]
        assert versions["predicted"] == versions["peak"]
        where = f"optimizer state of stage {stage}" if "native" in optimizer else "optimizer state of torch"
        assert terms[where]["predicted"] == terms[where]["peak"]


def _train_wide(optimizer: str) -> RunResult:
    """Trains a model with weights of 256 KiB and small activations."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2)))
        data = list(zip(*(torch.randn(6, 2, 256) for _ in range(2)), strict=True))
    arguments: dict[str, Any] = {"data": data, "loss_fn": F.mse_loss, "optimizer": _OPTIMIZERS[optimizer]}
    return pipedream.run(model, Plan.straight(2, 2), progress=False, **arguments)


# Adam makes two temporary tensors: a square root, and the denominator that is made from it.
@pytest.mark.parametrize(
    ("optimizer", "num_temporaries"), [("sgd", 0), ("adam", 2), ("native adamw", 0)], ids=str
)
def test_what_an_update_makes_and_drops_is_within_the_largest_transient(
    farm: Farm, optimizer: str, num_temporaries: int
) -> None:
    result = farm.results(_train_wide, optimizer, num_ranks=2)[0]
    assert_memory_as_predicted(result)
    for terms in result.memory:
        predicted, peak = terms["largest transient"]["predicted"], terms["largest transient"]["peak"]
        assert predicted is not None and peak is not None
        assert num_temporaries * (256 << 10) <= peak <= predicted < (num_temporaries * 256 + 32) << 10


@pytest.mark.parametrize("replicas", [(2, 1), (3, 2)], ids=str)
def test_a_round_of_several_minibatches_stays_within_its_prediction(
    farm: Farm, replicas: tuple[int, ...]
) -> None:
    """Here an update needs several minibatches. Their gradients are added to the first one's."""
    stages = zip(Plan.straight(16, 2).stages, replicas, strict=True)
    plan = Plan(tuple(replace(stage, num_replicas=count) for stage, count in stages))
    for result in farm.results(_train_plan, plan, num_ranks=sum(replicas), schedule="flush"):
        assert_memory_as_predicted(result)


def _needed_bytes(result: RunResult) -> list[int]:
    """Returns each worker's predicted bytes, summed over its memory terms."""
    return [sum(figures["predicted"] or 0 for figures in terms.values()) for terms in result.memory]


def test_a_limit_that_fits_changes_nothing(farm: Farm) -> None:
    free = farm.results(_train, 4, 4, num_ranks=4)[0]
    limited = farm.results(_train, 4, 4, num_ranks=4, memory=max(_needed_bytes(free)))[0]
    assert limited.recompute == free.recompute == [False] * 4
    assert limited.losses == free.losses
    assert _needed_bytes(limited) == _needed_bytes(free)


def _train_plan(plan: Plan, **options: Any) -> RunResult:
    data, optimizer = _data(9), _OPTIMIZERS["sgd"]
    arguments: dict[str, Any] = {"data": data, "loss_fn": F.mse_loss, "optimizer": optimizer, "seed": 1}
    return pipedream.run(_model(), plan, progress=False, **(arguments | options))


# The cuts are given, because the best cuts by measured times would differ from run to run.
@pytest.mark.parametrize(
    ("replicas", "boundaries"),
    [((1, 1), (7,)), ((1, 1, 1), (4, 9)), ((2, 1), (8,)), ((1, 2), (8,)), ((3, 1), (9,))],
    ids=str,
)
def test_a_plan_made_within_memory_runs_within_the_same(
    farm: Farm, replicas: tuple[int, ...], boundaries: tuple[int, ...]
) -> None:
    profile = pipedream.profile(_model(), _data(2), F.mse_loss, minibatches=1)
    asked: dict[str, Any] = {"replicas": replicas, "boundaries": boundaries, "recompute": False}
    enough, too_little = 1 << 30, 1 << 20
    while enough - too_little > 1 << 10:  # finds the least memory for which partition() makes a plan
        middle = (enough + too_little) // 2
        try:
            plan = pipedream.partition(profile, sum(replicas), 1e15, memory=middle, **asked)
            enough = middle
        except ValueError:
            too_little = middle
    plan = pipedream.partition(profile, sum(replicas), 1e15, memory=enough, **asked)
    result = farm.results(_train_plan, plan, num_ranks=sum(replicas), memory=enough)[0]
    assert result.recompute == [False] * len(replicas)
    assert_memory_as_predicted(result)
    ranks = iter(_needed_bytes(result))
    for planned, count in zip(plan.predicted["stage_memory_bytes"], replicas, strict=True):
        needed = max(next(ranks) for _ in range(count))
        assert needed <= planned <= 1.1 * needed, result.describe_memory()


def test_a_worker_that_needs_more_recomputes_and_keeps_the_limit_and_the_numbers(farm: Farm) -> None:
    # The two stages have a narrow cut. A recompute keeps outputs until they are sent, so a wide cut would
    # save nothing.
    free = farm.results(_train, 2, 2, num_ranks=2)[0]
    needed = _needed_bytes(free)
    limit = needed[0] - 1
    assert needed[1] <= limit  # the last stage has one minibatch in flight, so it fits
    limited = farm.results(_train, 2, 2, num_ranks=2, memory=limit)[0]
    assert limited.recompute == [True, False]
    assert limited.losses == free.losses
    assert _needed_bytes(limited)[0] <= limit
    assert_memory_as_predicted(limited)


def test_a_worker_that_does_not_fit_is_named_with_its_terms_and_the_excess(farm: Farm) -> None:
    for outcome in farm.run(_train, 4, 4, num_ranks=4, memory="1MiB"):
        assert isinstance(outcome.error, ValueError), outcome
        said = str(outcome.error)
        assert "\n" not in said
        # Any stage may be the first to report this. The channels alone need more than 1 MiB.
        assert re.match(
            r"memory is 1\.00 MiB, but stage \d \(rank \d\) needs [\d.]+ MiB, [\d.]+ MiB more", said
        )
        assert "weight versions" in said
        assert "give more memory" in said


def test_a_given_recompute_is_not_changed_to_fit(farm: Farm) -> None:
    free = farm.results(_train, 4, 4, num_ranks=4)[0]
    limit = max(_needed_bytes(free)) - 1
    for outcome in farm.run(_train, 4, 4, num_ranks=4, memory=limit, recompute=False):
        assert isinstance(outcome.error, ValueError), outcome
        assert "stage 0 (rank 0) needs" in str(outcome.error)


def _train_with_a_compiled_stage() -> RunResult:
    model = _model()
    for layer in model[8:]:  # the layers of stage 1
        layer._compiled_call_impl = layer._call_impl  # Module.compile() sets this attribute
    arguments: dict[str, Any] = {"data": _data(4), "loss_fn": F.mse_loss, "optimizer": _OPTIMIZERS["adam"]}
    return pipedream.run(model, Plan.straight(16, 2), progress=False, **arguments)


def test_a_compiled_stages_report_says_what_is_neither_predicted_nor_measured(farm: Farm) -> None:
    result = farm.results(_train_with_a_compiled_stage, num_ranks=2)[0]
    blank = {"stashed activations", "largest transient", "parameter gradients"}
    assert_memory_as_predicted(result, {1: blank})
    assert result.describe_memory().count("not measured") == 2 * len(blank)


def test_the_report_has_every_worker_and_term(farm: Farm) -> None:
    result = farm.results(_train, 4, 2, num_ranks=2, schedule="interleaved", microbatches=2)[0]
    table = result.describe_memory()
    for rank, terms in enumerate(result.memory):
        assert result.worker_names[rank] in table
        assert {"stashed activations", "largest transient", "parameter gradients"} <= terms.keys()
        for term in terms:
            assert term in table
