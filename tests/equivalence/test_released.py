"""Tests that a run that has ended keeps no object alive, even before a garbage collection. Its pool may be
most of a GPU's memory.
"""

from __future__ import annotations

import functools
import gc
import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from pipedream import Plan
from pipedream.stage import spare_loop, stage_loop, stage_runner
from pipedream.update import stage_optimizer, weights
from pipedream.worker.worker_links import WorkerLinks
from torch import Tensor, nn

_WIDTH = 8
_KINDS: tuple[type, ...] = (
    stage_loop.WorkerLoop,
    stage_runner.StageRunner,
    stage_runner.UserCode,
    weights.WeightVersions,
    stage_optimizer.StageOptimizer,
    spare_loop.SpareLoop,
)


class _Layer(nn.Module):
    """A layer that stores its weight in another attribute in its forward, as user code may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self.norm = nn.BatchNorm1d(_WIDTH)
        self.kept: Tensor | None = None

    def forward(self, value: Tensor) -> Tensor:
        self.kept = self.linear.weight
        normed: Tensor = self.norm(self.linear(value))
        return normed


def _fails_at_minibatch_3(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets[0, 0] == 3:
        raise ZeroDivisionError("of the user")
    return nn.functional.mse_loss(outputs, targets)


def _what_is_left(loss_fn: Any, **options: Any) -> tuple[str, list[str]]:
    """Trains twice. Returns how the second run ended, and which of its objects are still alive.

    The first run is not checked. torch imports modules in it, which keep its frames alive until a garbage
    collection.
    """
    _what_is_left_of_one(nn.functional.mse_loss, **options)
    return _what_is_left_of_one(loss_fn, **options)


def _what_is_left_of_one(loss_fn: Any, **options: Any) -> tuple[str, list[str]]:
    """Returns how the run ended, and which of its objects are alive afterwards."""
    torch.manual_seed(1)
    model = nn.Sequential(_Layer(), nn.LSTM(_WIDTH, _WIDTH), _Last(), _Layer())
    data = [(torch.rand(4, _WIDTH), torch.full((4, _WIDTH), float(i))) for i in range(6)]
    alive: list[tuple[str, Any]] = []
    num_stages = options.pop("num_stages", 2)
    plan = _plan(len(model), options.pop("replicas", [1] * num_stages))
    plan = plan.with_spare_shards(options.pop("spares", [0] * plan.num_stages))
    make_core = WorkerLinks.make_core

    def recorded_core(*args: Any) -> Any:
        core = make_core(*args)
        alive.append(("the core", weakref.ref(core)))
        return core

    WorkerLinks.make_core = recorded_core  # type: ignore[method-assign]
    originals = [kind.__init__ for kind in _KINDS]  # type: ignore[misc]
    for kind, original in zip(_KINDS, originals, strict=True):

        def recorded(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> None:
            _original(self, *args, **kwargs)
            alive.append((type(self).__name__, weakref.ref(self)))
            if isinstance(self, weights.WeightVersions):
                alive.extend(("a slot", weakref.ref(slot)) for slot in self._slots)

        kind.__init__ = recorded  # type: ignore[misc]
    gc.collect()
    gc.disable()
    end = "done"
    try:
        pipedream.run(
            model,
            plan,
            data=data,
            loss_fn=loss_fn,
            optimizer=options.pop("optimizer", functools.partial(torch.optim.SGD, lr=0.01)),
            lr_scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2),
            progress=False,
            **options,
        )
    except pipedream.PipelineError as error:
        end = str(error)
    finally:
        WorkerLinks.make_core = make_core  # type: ignore[method-assign]
        for kind, original in zip(_KINDS, originals, strict=True):
            kind.__init__ = original  # type: ignore[misc]
    is_spare = plan.spare_stage_of(int(os.environ["RANK"])) is not None
    not_made = {"WorkerLoop", "StageRunner"} if is_spare else {"SpareLoop"}
    made = {kind.__name__ for kind in _KINDS} - not_made
    assert {name for name, _ in alive} == made | {"a slot", "the core"}
    left = [name for name, reference in alive if reference() is not None]
    gc.enable()
    return end, left


def _plan(num_layers: int, replicas: Sequence[int]) -> Plan:
    stages = zip(Plan.straight(num_layers, len(replicas)).stages, replicas, strict=True)
    return Plan(tuple(replace(stage, num_replicas=count) for stage, count in stages))


class _Last(nn.Module):
    def forward(self, value: Any) -> Any:
        return value[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"microbatches": 2, "recompute": True, "schedule": "flush", "max_grad_norm": 1.0},
        {"autocast": "float16"},
    ],
    ids=str,
)
def test_nothing_is_left_of_a_run_that_has_ended(farm: Farm, options: dict[str, Any]) -> None:
    # Runners must not hold their own bound methods. The reference cycles would keep the weights in memory
    # after the run.
    for end, left in farm.results(_what_is_left, nn.functional.mse_loss, num_ranks=2, **options):
        assert (end, left) == ("done", [])


@pytest.mark.parametrize(
    ("replicas", "options"),
    [((2,), {"schedule": "data_parallel"}), ((2, 1), {}), ((2,), {"sync": "asp"})],
    ids=str,
)
def test_nothing_is_left_of_a_run_with_replicas_that_has_ended(
    farm: Farm, replicas: tuple[int, ...], options: dict[str, Any]
) -> None:
    # Hooks of leaf tensors must not lead back to these tensors. Otherwise the whole core of each run would
    # stay, with its threads.
    options = {"replicas": replicas, **options}
    for end, left in farm.results(_what_is_left, nn.functional.mse_loss, num_ranks=sum(replicas), **options):
        assert (end, left) == ("done", [])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, pipedream.optim.SGD])
def test_nothing_is_left_of_a_run_with_a_spare_that_has_ended(farm: Farm, optimizer: Any) -> None:
    options = {"replicas": (2, 1), "spares": (1, 0), "optimizer": functools.partial(optimizer, lr=0.01)}
    for end, left in farm.results(_what_is_left, nn.functional.mse_loss, num_ranks=4, **options):
        assert (end, left) == ("done", [])


def test_nothing_is_left_of_a_run_that_has_failed(farm: Farm) -> None:
    for end, left in farm.results(_what_is_left, _fails_at_minibatch_3, num_ranks=2):
        assert "failed at minibatch 3 in loss_fn: ZeroDivisionError: of the user" in end
        assert left == []


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def _growth_of_runs() -> int:
    """Trains three times. Returns by how many resident bytes the second and the third run have grown the
    process.
    """
    model = nn.Sequential(nn.Linear(2048, 2048, bias=False))  # its weight has 16 MiB
    plan = Plan(Plan.straight(1, 1).stages, in_flight=(4,))
    data = [(torch.rand(1, 2048), torch.rand(1, 2048))]
    optimizer = functools.partial(pipedream.optim.SGD, lr=0.01)
    loss_fn = nn.functional.mse_loss
    gc.disable()
    resident = []
    for _ in range(3):
        pipedream.run(model, plan, data=data, loss_fn=loss_fn, optimizer=optimizer, progress=False)
        resident.append(_resident_bytes())
    gc.enable()
    return resident[2] - resident[0]


def test_the_next_run_has_the_memory_of_the_one_before(farm: Farm) -> None:
    (growth,) = farm.results(_growth_of_runs, num_ranks=1)
    assert growth < 64 << 20  # two later runs with four versions each would add 128 MiB
