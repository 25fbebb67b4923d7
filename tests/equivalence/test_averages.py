"""Tests that callbacks.EMA keeps the averages that torch.optim.swa_utils.AveragedModel keeps in a plain
loop.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from pipedream.callbacks import EMA
from pipedream.checkpoint.checkpoint_folder import checkpoints_in, folder_of
from pipedream.checkpoint.whole_model import export_checkpoint
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import (
    OPTIMIZERS,
    State,
    Training,
    accumulate,
    assert_close_state,
    assert_equal_state,
    train_in_pipeline,
)

_DECAY = 0.9


def _sum_of(outputs: Any, targets: Any) -> tuple[float, int]:
    return float(outputs.sum()), len(outputs)


def _held_out(training: Training, *, ema: bool = True) -> pipedream.Validation:
    return pipedream.Validation(training.case.data(2, training.dtype), {"sum": _sum_of}, ema=ema)


def _train(training: Training, **options: Any) -> tuple[State, list[float], dict[str, Any]]:
    if options.pop("evaluates", False):
        options["validation"] = _held_out(training)
    result, _ = train_in_pipeline(training, callbacks=[EMA(_DECAY)], **options)
    found = {} if result.ema is None else result.ema
    return found, [each.metrics["sum"] for each in result.validation], result.memory[0]


def _train_plainly(training: Training) -> tuple[State, list[float]]:
    """Trains in a plain loop. Returns the averages, and the averaged model's metric after each epoch."""
    model = training.model()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(_DECAY))
    optimizer = training.optimizer(model.parameters())
    sums = []
    for _ in range(training.epochs):
        for inputs, targets in training.data():
            optimizer.zero_grad()
            accumulate(model, training, inputs, targets)
            optimizer.step()
            averaged.update_parameters(model)
        with torch.no_grad():
            pairs = [
                _sum_of(averaged.module(inputs), targets) for inputs, targets in _held_out(training).data
            ]
        sums.append(sum(total for total, _ in pairs) / sum(count for _, count in pairs))
    return dict(averaged.module.named_parameters()), sums


_FLUSH = Training("mlp", 2, schedule="flush", num_minibatches=4, epochs=2)


_native = functools.partial(pipedream.optim.SGD, lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    "training",
    [
        _FLUSH,
        replace(_FLUSH, optimizer=_native, dtype=torch.float32),
        replace(_FLUSH, num_stages=3, optimizer=OPTIMIZERS["adamw"], schedule="gpipe"),
        replace(_FLUSH, case_name="tied_apart", num_stages=3),
        replace(_FLUSH, case_name="lstm"),
        replace(_FLUSH, num_stages=1),
    ],
    ids=str,
)
def test_averages_equal_a_plain_loops_to_the_last_bit_where_the_schedule_drains(
    farm: Farm, training: Training
) -> None:
    how = {"evaluates": True, "num_ranks": training.num_workers}
    found, sums, memory = farm.results(_train, training, **how)[0]
    expected, expected_sums = _train_plainly(training)
    assert_equal_state(found, {name: expected[name].detach() for name in found})
    assert found.keys() == expected.keys()
    assert sums == expected_sums
    (term,) = [name for name in memory if name.startswith("averages of weights")]
    assert memory[term]["peak"] == memory[term]["predicted"] > 0


@pytest.mark.parametrize(
    "training",
    [
        replace(_FLUSH, replicas=(2, 1), microbatches=2),
        replace(_FLUSH, case_name="cnn", replicas=(1, 2), microbatches=2, optimizer=_native),
        replace(_FLUSH, replicas=(2, 1), microbatches=2, sync="allreduce"),
        replace(_FLUSH, num_stages=1, replicas=(2,), microbatches=2),  # with replicas of the whole model
        replace(_FLUSH, num_stages=4, schedule="interleaved", microbatches=2),
    ],
    ids=str,
)
def test_replicas_and_local_workers_have_the_averages_of_the_whole_model(
    farm: Farm, training: Training
) -> None:
    expected, _ = _train_plainly(training)
    parameters = {name: value.detach() for name, value in expected.items()}
    found, _, _ = farm.results(_train, training, num_ranks=training.num_workers)[0]
    assert_close_state(found, parameters, 1e-9)
    local, _, _ = _train(training)
    assert_close_state(local, parameters, 1e-9)


def _train_with_checkpoints(training: Training, path: Path, **options: Any) -> tuple[State, list[float]]:
    ema = not any(count > 1 for count in training.replicas)
    how = {"checkpoints": pipedream.Checkpoints(path, every=3, keep=9), "evaluates": ema, **options}
    found, sums, _ = _train(training, **how)
    return found, sums


@pytest.mark.parametrize(
    "training",
    [
        Training("mlp", 3, num_minibatches=5, epochs=2),
        Training("tied_apart", 3, num_minibatches=5, epochs=2, optimizer=OPTIMIZERS["adam"]),
        Training("mlp", 2, replicas=(2, 1), num_minibatches=6, epochs=2, optimizer=_native),
        Training("mlp", 1, replicas=(2,), num_minibatches=6, epochs=2),
    ],
    ids=str,
)
def test_a_run_that_continues_has_the_averages_of_the_whole_run(
    farm: Farm, tmp_path: Path, training: Training
) -> None:
    ranks = training.num_workers
    whole, sums = farm.results(_train_with_checkpoints, training, tmp_path, num_ranks=ranks)[0]
    minibatches = [int(path.name.split("-")[1]) for path in checkpoints_in(tmp_path)]
    resume = folder_of(tmp_path, minibatches[1])
    export_checkpoint(resume, tmp_path / "averages.safetensors", ema=True)
    exported = load_file(tmp_path / "averages.safetensors")
    assert any(not torch.equal(exported[name], whole[name]) for name in whole)
    again = pipedream.Checkpoints(tmp_path / "again", every=100, resume=resume)
    found, sums_after = farm.results(
        _train_with_checkpoints, training, tmp_path, checkpoints=again, num_ranks=ranks
    )[0]
    assert_equal_state(found, whole)
    assert sums_after == sums[len(sums) - len(sums_after) :]
    one = replace(training, num_stages=1, replicas=())
    other = pipedream.Checkpoints(tmp_path / "other", every=100, resume=resume)
    found, _ = farm.results(_train_with_checkpoints, one, tmp_path, checkpoints=other, num_ranks=1)[0]
    begun, _, _ = farm.results(_train, one, num_ranks=1)[0]
    assert any(not torch.equal(found[name], begun[name]) for name in begun)


def _train_in_parts(training: Training) -> State:
    state: Any = None
    model = training.model()
    for _ in range(2):
        how = {**training.options(), "epochs": 1, "progress": False, "callbacks": [EMA(_DECAY)]}
        result = pipedream.run(model, training.plan, state=state, **how)
        state = result.state
    return result.ema or {}


def test_runs_that_go_on_where_another_ended_go_on_with_its_averages(farm: Farm) -> None:
    training = Training("tied_apart", 3, num_minibatches=5, epochs=2)
    whole, _, _ = farm.results(_train, training, num_ranks=3)[0]
    assert_equal_state(farm.results(_train_in_parts, training, num_ranks=3)[0], whole)


@pytest.mark.parametrize(
    ("replicas", "callbacks", "options", "text"),
    [
        ((1, 1), [], {}, "no callback is an EMA"),
        ((2, 1), [EMA()], {}, "stage 0.s 2 replicas has a shard: each replica averages its own part"),
        ((2, 1), [EMA()], {"sync": "asp"}, "sync is 'asp'"),
        ((1, 1), [EMA(), EMA()], {}, "callbacks has 2 EMAs"),
    ],
)
def test_averages_that_nobody_has_are_refused(
    replicas: tuple[int, ...], callbacks: list[Any], options: dict[str, Any], text: str
) -> None:
    training = replace(_FLUSH, replicas=replicas, schedule="pipedream")
    with pytest.raises(ValueError, match=text):
        train_in_pipeline(training, validation=_held_out(training), callbacks=callbacks, **options)


def test_averages_of_ties_are_not_evaluated_with_a_loss_scale() -> None:
    training = replace(_FLUSH, case_name="tied_apart", num_stages=3, dtype=torch.float32)
    held_out = _held_out(training)
    with pytest.raises(ValueError, match=r"stages 0 and 2 share a parameter: .* an overflow skips"):
        train_in_pipeline(training, validation=held_out, callbacks=[EMA()], autocast="float16")


def test_a_decay_is_between_0_and_1() -> None:
    with pytest.raises(ValueError, match=r"decay of EMA is 1.0: use a number between 0 and 1"):
        EMA(1.0)
