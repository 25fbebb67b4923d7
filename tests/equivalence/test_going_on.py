"""Tests a run that continues from the state of an earlier run. Both together must give exactly the numbers of
one run.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from models import Batch
from torch import Tensor
from training import (
    OPTIMIZERS,
    Overflowing,
    State,
    Training,
    assert_equal_state,
    is_rank_0,
    weight_decay_by_name,
)

_falling = functools.partial(
    torch.optim.lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=60, cycle_momentum=False
)


def _train_in_parts(
    training: Training, epochs: Sequence[int], **options: Any
) -> tuple[list[float], list[Any], State, list[dict[str, Tensor]]]:
    """Trains in several runs, each from the state of the run before. `epochs` has the number of epochs of
    each run.

    Returns losses, versions, weights with buffers, and the tensors of this rank's part of the last state.
    """
    model = training.model()
    if not is_rank_0():
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
    arguments = {**training.options(), "progress": False, **options}
    losses: list[float] = []
    versions: list[Any] = [[] for _ in training.plan.stages]
    state = None
    for count in epochs:
        result = pipedream.run(model, training.plan, **arguments | {"epochs": count, "state": state})
        state = result.state
        losses += result.losses
        versions = [before + more for before, more in zip(versions, result.microbatch_versions, strict=True)]
    assert state is not None
    snapshots = state.of_rank(int(os.environ.get("RANK", "0"))).snapshots
    return losses, versions, model.state_dict(), [snapshot.tensors() for snapshot in snapshots]


def _assert_parts_equal_the_whole(farm: Farm, training: Training, *epochs: int, **options: Any) -> None:
    num_ranks = training.num_workers
    run = functools.partial(farm.results, _train_in_parts, training, num_ranks=num_ranks, **options)
    parts, whole = run(epochs), run([sum(epochs)])
    assert parts[0][:2] == whole[0][:2], "losses and versions"
    assert_equal_state(parts[0][2], whole[0][2])
    for of_parts, of_whole in zip(parts, whole, strict=True):
        for mine, wanted in zip(of_parts[3], of_whole[3], strict=True):
            assert_equal_state(mine, wanted)


@pytest.mark.parametrize(
    ("case_name", "num_stages", "how"),
    [
        ("cnn", 3, {}),
        ("cnn", 3, {"schedule": "vertical_sync"}),
        ("cnn", 2, {"schedule": "2bw", "microbatches": 2}),
        ("transformer", 3, {"schedule": "flush", "microbatches": 3}),
        ("cnn", 2, {"schedule": "gpipe", "microbatches": 2}),
        ("lstm", 4, {"schedule": "interleaved", "microbatches": 2}),
        ("dropout", 3, {"shuffled": True}),
        ("frozen", 2, {"recompute": True, "in_flight": (4, 2)}),
        ("dropout", 1, {"shuffled": True, "seed": None}),
        ("cnn", 2, {"schedule": "unstashed", "recompute": True, "in_flight": (4, 2), "microbatches": 2}),
        ("mlp", 3, {"schedule": "unstashed", "in_flight": (5, 4, 3)}),
        ("tied_apart", 3, {}),
        ("cnn", 2, {"replicas": (1, 2), "schedule": "vertical_sync", "optimizer": OPTIMIZERS["adam"]}),
        ("dropout", 2, {"replicas": (2, 2), "schedule": "unstashed", "shuffled": True}),
        ("cnn", 2, {"replicas": (2, 1), "sync": "ssp", "staleness": 2}),
        ("cnn", 2, {"replicas": (2, 1), "sync_every": 2, "optimizer": OPTIMIZERS["adam"]}),
        ("mlp", 2, {"replicas": (2, 1), "spares": (1, 0), "optimizer": OPTIMIZERS["adam"]}),
        ("tied_apart", 2, {"replicas": (2, 1), "optimizer": OPTIMIZERS["adam"]}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_runs_one_after_the_other_are_one_run(
    farm: Farm, case_name: str, num_stages: int, how: dict[str, Any]
) -> None:
    training = Training(case_name, num_stages, num_minibatches=4, **how)
    _assert_parts_equal_the_whole(farm, training, 1, 1)


class _StopAt(pipedream.callbacks.Callback):
    every = 1

    def __init__(self, minibatch: int) -> None:
        self.minibatch = minibatch
        self.stopped_at = 0

    def on_minibatches(self, report: Any) -> Any:
        if self.stopped_at == 0 and report.takes_effect is not None and report.takes_effect >= self.minibatch:
            self.stopped_at = report.takes_effect
            return False
        return None


def _train_on_after_a_stop(training: Training) -> tuple[list[float], State, list[float], State]:
    """Trains twice: once with a stop and a second run on the rest of the data, and once in one run.

    Returns losses and weights of each.
    """
    found: list[Any] = []
    data = list(training.data())
    how = {**training.options(), "progress": False}
    for is_stopped in (True, False):
        model = training.model()
        callbacks = [_StopAt(4)] if is_stopped else []
        first = pipedream.run(model, training.plan, **how | {"data": data}, callbacks=callbacks)
        losses = list(first.losses)
        assert first.stopped_at == (len(losses) if is_stopped else None)
        if is_stopped:
            assert 4 <= len(losses) < len(data)
            rest = how | {"data": data[len(losses) :], "state": first.state}
            losses += pipedream.run(model, training.plan, **rest).losses
        found += [losses, model.state_dict()]
    return tuple(found)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("case_name", "num_stages", "how"),
    [
        ("cnn", 3, {}),
        ("dropout", 1, {}),
        ("dropout", 2, {"replicas": (2, 1), "schedule": "unstashed", "optimizer": OPTIMIZERS["adam"]}),
        ("transformer", 2, {"replicas": (1, 2), "schedule": "flush", "microbatches": 3}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_a_run_goes_on_from_one_that_was_stopped(
    farm: Farm, case_name: str, num_stages: int, how: dict[str, Any]
) -> None:
    training = Training(case_name, num_stages, num_minibatches=14, short_last=False, **how)
    outcome = farm.results(_train_on_after_a_stop, training, num_ranks=training.num_workers)
    losses, state, losses_of_one, state_of_one = outcome[0]
    assert losses == losses_of_one
    assert_equal_state(state, state_of_one)


def _shuffle_after_a_stop(training: Training) -> list[list[float]]:
    how = {**training.options(), "progress": False}
    found = []
    for _ in range(2):
        model = training.model()
        first = pipedream.run(model, training.plan, **how, callbacks=[_StopAt(2)])
        found.append(pipedream.run(model, training.plan, **how | {"seed": None}, state=first.state).losses)
    return found


def test_shuffles_after_a_stop_are_the_same_at_all_workers_each_time(farm: Farm) -> None:
    training = Training("mlp", 2, replicas=(2, 1), num_minibatches=12, shuffled=True)
    one, other = farm.results(_shuffle_after_a_stop, training, num_ranks=3)[0]
    assert len(one) == 12 and one == other


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(pipedream.optim.SGD, lr=0.05, momentum=0.9),
        functools.partial(pipedream.optim.NAdamW, lr=0.01),
        pipedream.optim.Muon,
        weight_decay_by_name,
    ],
    ids=["SGD", "NAdamW", "Muon", "groups"],
)
def test_optimizers_and_rates_go_on(farm: Farm, optimizer: Any) -> None:
    training = Training("transformer", 2, num_minibatches=3, optimizer=optimizer, lr_scheduler=_falling)
    _assert_parts_equal_the_whole(farm, training, 1, 1)


@pytest.mark.parametrize(
    ("replicas", "how"),
    [
        ((1, 1), {}),
        ((1, 1, 1), {"schedule": "vertical_sync", "max_grad_norm": 20.0, "in_flight": (4, 3, 2)}),
        ((1, 1), {"schedule": "flush", "microbatches": 2}),
        ((1, 2), {}),
        ((3, 2), {"max_grad_norm": 20.0}),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_the_loss_scale_and_what_has_overflowed_go_on(
    farm: Farm, replicas: tuple[int, ...], how: dict[str, Any]
) -> None:
    how = {"autocast": "float16", "dtype": torch.float32, "replicas": replicas, **how}
    training = Overflowing("mlp", len(replicas), num_minibatches=math.lcm(*replicas), **how)
    _assert_parts_equal_the_whole(farm, training, 1, 2, 3)


@pytest.mark.parametrize(
    ("case_name", "num_stages", "codec", "how"),
    [
        ("cnn", 3, {"activations": "topk:0.5", "gradients": "topk:0.1"}, {"schedule": "vertical_sync"}),
        ("mlp", 2, {"pushes": "topk:0.25"}, {"replicas": (2, 1)}),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_what_topk_has_left_out_goes_on(
    farm: Farm, case_name: str, num_stages: int, codec: Any, how: dict[str, Any]
) -> None:
    training = Training(case_name, num_stages, dtype=torch.float32, num_minibatches=4, **how)
    _assert_parts_equal_the_whole(farm, training, 1, 1, codec=codec)


class _Unsendable:
    """Shuffled minibatches that cannot be sent. So the caller of local workers iterates them."""

    def __init__(self, data: Iterable[Batch]) -> None:
        self._data = data
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._data)


@pytest.mark.slow
@pytest.mark.parametrize("is_forwarded", [False, True], ids=["read by workers", "forwarded"])
def test_local_workers_go_on_from_files(is_forwarded: bool, one_thread: None) -> None:
    training = Training("dropout", 2, num_minibatches=4, shuffled=True, short_last=False, seed=None)
    data = _Unsendable(training.data()) if is_forwarded else training.data()
    torch.manual_seed(5)
    parts = _train_in_parts(training, [1, 1], data=data)
    torch.manual_seed(5)
    whole = _train_in_parts(training, [2], data=data)
    assert parts[:2] == whole[:2]
    assert_equal_state(parts[2], whole[2])
    assert_equal_state(parts[3][0], whole[3][0])


def _go_on(how: dict[str, Any], change: float = 0.0) -> str:
    """Returns the error with which the second run is refused, or "" if it is not.

    `how` has further arguments of the second run. `change` is added to the model between the two runs.
    """
    training = Training("cnn", 2, num_minibatches=3)
    model, arguments = training.model(), training.options() | {"progress": False}
    state = pipedream.run(model, training.plan, **arguments).state
    with torch.no_grad():
        next(model.parameters())[0] += change
    try:
        pipedream.run(model, training.plan, **arguments | {"state": state} | how)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "change", "message"),
    [
        ({}, 1.0, "parameter '0.weight' of stage 0 was changed since the run that state is of"),
        (
            {"optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)},
            0.0,
            "state has other groups of parameters, or other options of them",
        ),
        ({"optimizer": OPTIMIZERS["adam"]}, 0.0, "optimizer is torch.optim.adam.Adam at stage "),
        ({"lr_scheduler": _falling}, 0.0, "lr_scheduler is torch.optim.lr_scheduler.OneCycleLR at stage "),
        ({"schedule": "unstashed"}, 0.0, "schedule is 'unstashed', and state is of a run with 'pipedream'"),
    ],
    ids=["weights", "rate", "optimizer", "scheduler", "schedule"],
)
def test_what_is_not_the_same_any_more_is_refused(
    farm: Farm, how: dict[str, Any], change: float, message: str
) -> None:
    for refusal in farm.results(_go_on, how, change, num_ranks=2):
        assert message in refusal
        assert "\n" not in refusal
