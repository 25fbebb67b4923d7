"""calibrate(): short runs of the user's own model that tell what a run adds to a profile's layers.

    one worker                 the model by itself, its optimizer in place
    a stage per worker, m = 1  workers that share the machine; versions that are copied
    the same, one at a time    how much faster each is alone; how long what is sent is on its way
    and with a pause in it     what a long wait costs, as slow links make it
    the same, flush, m = 2, 4  what a microbatch takes of a minibatch
    two replicas               what an update costs that they share

measured_costs.py makes the costs of them. Runs in the caller's process; the model and the random generators
stay as they were.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from pipedream.common.checks import check_count
from pipedream.common.cpus import usable_cpus
from pipedream.common.guard import check_main_guard
from pipedream.common.own_rank import under_torchrun
from pipedream.common.progress_bar import progress_bar
from pipedream.launch.measured_costs import Runs, runtime_costs
from pipedream.launch.runner import run
from pipedream.model.batches import own_loss, parts_of
from pipedream.model.initial_weights import WeightSource
from pipedream.model.layers import Model
from pipedream.model.microbatch import batch_size_of
from pipedream.model.seeding import generators_kept
from pipedream.planning.layer_profile import Profile
from pipedream.planning.partitioner import partition
from pipedream.planning.plan import Plan, Stage
from pipedream.report.result import RunResult

__all__ = ["calibrate", "calibration_runs"]

_MICROBATCHES = (2, 4)  # the second one: at least as many as stages
_BATCHES_MAX = 16  # of the user's data, used in turn
_FAST_BYTES_PER_S = 1e15  # the cut is to balance the stages, whatever crosses it
_ROUNDS = 4
_MINIBATCHES_MIN, _MINIBATCHES_MAX = 30, 2000
# Of the runs with pauses. After so long caches are as cold as after any longer one, nearly.
_PAUSE_SECONDS, _PAUSED_MINIBATCHES = 0.004, 150


def calibrate(
    profile: Profile,
    model: Model,
    data: Iterable[Any],
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    *,
    optimizer: Callable[..., torch.optim.Optimizer],
    workers: int = 2,
    minibatches: int | None = None,
    transport: str = "auto",
    weights: WeightSource = None,
    progress: bool = True,
) -> Profile:
    """The profile with what a run on this machine adds to it, for partition(..., cost_model="calibrated").

    model, data, loss_fn, optimizer, transport and weights: as of run(). workers: so many share this machine's
    cores, as they will in training; from 2. minibatches: of each of these runs, the data's first ones, again
    and again, but those of another size than the profile's; None: as many as one worker does in half a
    second, but at least 30. Where a minibatch has too few samples to be cut, microbatches are taken to cost
    their share. progress: show on stderr how many runs are done, where that is a terminal. Their processes
    start anew each time: half a minute and more in all.

    Raises ValueError for fewer than 2 workers or 20 minibatches, under torchrun, and as run().
    """
    plan, runs = calibration_runs(
        profile,
        model,
        data,
        loss_fn,
        optimizer=optimizer,
        workers=workers,
        minibatches=minibatches,
        transport=transport,
        weights=weights,
        progress=progress,
    )
    return replace(profile, runtime=runtime_costs(profile, plan, runs, usable_cpus()).to_dict())


def calibration_runs(
    profile: Profile,
    model: Model,
    data: Iterable[Any],
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
    *,
    optimizer: Callable[..., torch.optim.Optimizer],
    workers: int,
    minibatches: int | None,
    transport: str,
    weights: WeightSource = None,
    progress: bool = True,
) -> tuple[Plan, Runs]:
    """Does the runs that calibrate(), whose arguments these are, makes the costs of. The plan is that of the
    runs with several stages. bench/system/predictions.py predicts these runs themselves."""
    check_main_guard()
    if under_torchrun():
        raise ValueError(
            "calibrate starts workers of its own, and this is a rank of torchrun: call it in a plain script,"
            " or `pipedream profile TARGET --calibrate N --output FILE`, and load the profile here"
        )
    check_count("workers", workers)
    if minibatches is None:
        minibatches = _of_half_a_second(profile)
    check_count("minibatches", minibatches)
    if workers < 2:
        raise ValueError(f"workers is {workers}: it takes 2 to see what they do to each other")
    if minibatches < 20:
        raise ValueError(f"minibatches is {minibatches}: give at least 20")
    batches = _whole_ones(list(itertools.islice(iter(data), _BATCHES_MAX)), profile.batch_size)
    repeated = list(itertools.islice(itertools.cycle(batches), minibatches))
    threads, cores = torch.get_num_threads(), usable_cpus()

    def measure(plan: Plan, data: list[Any] = repeated, **options: Any) -> RunResult:
        # Of every run the workers have as many threads as where all are at work.
        torch.set_num_threads(max(1, min(threads, cores // workers)))
        try:
            return run(
                copy.deepcopy(model),
                plan,
                data=data,
                optimizer=optimizer,
                transport=transport,
                weights=weights,
                gather="none",
                progress=False,
                **{"loss_fn": loss_fn, **options},
            )
        finally:
            torch.set_num_threads(threads)
            advance(1)

    # What items take is seen where each worker has a core, if there are two.
    stages = min(workers, max(cores, 2), profile.num_layers)
    straight = partition(profile, stages, _FAST_BYTES_PER_S, straight=True)
    last = profile.num_layers - 1
    whole = Plan((Stage(0, last),), max_shapes=straight.max_shapes, cuts=straight.cuts)
    two_replicas = replace(whole, stages=(Stage(0, last, 2),), num_workers=2, in_flight=())
    counts = {_MICROBATCHES[0], max(_MICROBATCHES[1], stages)}
    cut: dict[int, list[RunResult]] = {
        m: [] for m in sorted(counts) if stages > 1 and (profile.batch_size or 0) >= m
    }
    rested: list[RunResult] = []
    runs = Runs([], [], [], cut, [], rested)
    num_runs = _ROUNDS * (2 + 3 * (stages > 1) + len(cut))
    with generators_kept(), progress_bar("calibrating", num_runs, "runs", is_shown=progress) as advance:
        for _ in range(_ROUNDS):  # in turn, as what else the machine does changes
            runs.one.append(measure(whole))
            runs.straight.append(measure(straight))
            if stages > 1:
                runs.in_turn.append(measure(straight, schedule="model_parallel"))
                few, late = repeated[:_PAUSED_MINIBATCHES], _AfterPause(loss_fn or own_loss)
                rested.append(measure(straight, few, schedule="model_parallel", loss_fn=late))
            for m, results in runs.cut.items():
                results.append(measure(straight, schedule="flush", microbatches=m))
            runs.shared.append(measure(two_replicas))
    return straight, _typical_of(runs)


def _typical_of(runs: Runs) -> Runs:
    return Runs(
        one=_typical(runs.one),
        straight=_typical(runs.straight),
        in_turn=_typical(runs.in_turn),
        cut={m: _typical(results) for m, results in runs.cut.items()},
        shared=_typical(runs.shared),
        rested=_typical(runs.rested),
    )


def _typical(results: Sequence[RunResult]) -> list[RunResult]:
    """The middle half. A whole run may be a tenth slower than the same one a second later, by where its
    memory came to lie or what else the machine did."""
    left_out = len(results) // 4
    return sorted(results, key=lambda result: result.measured_ms)[left_out : len(results) - left_out]


class _AfterPause:
    """A loss that is late, as what comes over a slow link is."""

    def __init__(self, loss_fn: Callable[[Any, Any], torch.Tensor]) -> None:
        self._loss_fn = loss_fn

    def __call__(self, output: Any, targets: Any) -> torch.Tensor:
        time.sleep(_PAUSE_SECONDS)
        return self._loss_fn(output, targets)


def _of_half_a_second(profile: Profile) -> int:
    return min(max(_MINIBATCHES_MIN, int(5e2 / max(profile.compute_ms, 1e-3))), _MINIBATCHES_MAX)


def _whole_ones(batches: list[Any], batch_size: int | None) -> list[Any]:
    """The batches of the profile's size, or all where there are none: a short last one may be too short to be
    cut."""
    of_size = [
        batch
        for index, batch in enumerate(batches)
        if batch_size is None or batch_size_of(*parts_of(batch, index)) == batch_size
    ]
    return of_size or batches
