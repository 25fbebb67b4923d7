"""calibrate() measures, with short runs of the user's model, the costs that a run adds to the profile of the
model's layers.

    runs                                         measure
    one worker                                   the runtime's own work, and an update in place
    one stage per worker, 1 microbatch           workers that share the cores, and copies of weight versions
    one stage per worker, one works at a time    how much faster a worker is alone; the latency of an item
    one works at a time, the last one pauses     how much slower a worker is after a long wait
    one stage per worker, 2 and 4 microbatches   the time of one microbatch of a minibatch (schedule flush)
    two replicas                                 an update that replicas share

measured_costs.py computes the costs from these runs. calibrate() runs in the caller's process and starts
workers. It leaves the model and the random generators unchanged.
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
from pipedream.common.document import write_value
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

_MICROBATCHES = (2, 4)  # numbers of microbatches; with more than 4 stages, 4 becomes their number
_BATCHES_MAX = 16  # batches that are taken from the user's data; a run repeats them
_FAST_BYTES_PER_S = 1e15  # with such fast links the plan balances compute times alone
_ROUNDS = 4  # repetitions of each kind of run
_MINIBATCHES_MIN, _MINIBATCHES_MAX = 30, 2000
# Seconds of the pause in each minibatch of a run with pauses, and the number of minibatches of such a run.
# After this pause caches are nearly as cold as after any longer pause.
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
    """Returns the profile with the costs of a run on this machine, for partition(...,
    cost_model="calibrated").

    Trains in short runs, each with new processes: half a minute or more in all.

    model, data, loss_fn, optimizer, transport, weights: see run(). If a minibatch has too few samples to be
        cut, a microbatch is assumed to cost its share of a minibatch.
    workers: the number of workers that share this machine's cores in training; at least 2.
    minibatches: the number of minibatches in each run. A run repeats the first minibatches of the data. It
        leaves out those of another size than the profile's, unless all have another size. None: as many as
        one worker trains in half a second, but 30 to 2000.
    progress: shows on stderr how many runs are done, if stderr is a terminal.

    Raises ValueError for fewer than 2 workers or 20 minibatches, under torchrun, and as run() does.
    """
    plan, runs = calibration_runs(**locals())
    return replace(profile, runtime=write_value(runtime_costs(profile, plan, runs, usable_cpus())))


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
    """Does the runs of calibrate(), which has the same arguments. Returns (the plan of the runs with several
    stages, the runs). bench/system/predictions.py compares its predictions with these runs."""
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
        # In every run a worker has as many threads as it has when all `workers` share the machine.
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

    # There are no more stages than cores, so that each worker has a core. With one core there are 2 stages.
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
        for _ in range(_ROUNDS):  # the kinds of runs take turns, because the machine's other load changes
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
    """Sorts the runs by speed and returns the middle half. The times of equal runs may differ by a tenth,
    because their memory has other addresses or because the machine was busy."""
    left_out = len(results) // 4
    return sorted(results, key=lambda result: result.measured_ms)[left_out : len(results) - left_out]


class _AfterPause:
    """A loss function that sleeps before it computes. So gradients come late, as over a slow link."""

    def __init__(self, loss_fn: Callable[[Any, Any], torch.Tensor]) -> None:
        self._loss_fn = loss_fn

    def __call__(self, output: Any, targets: Any) -> torch.Tensor:
        time.sleep(_PAUSE_SECONDS)
        return self._loss_fn(output, targets)


def _of_half_a_second(profile: Profile) -> int:
    return min(max(_MINIBATCHES_MIN, int(5e2 / max(profile.compute_ms, 1e-3))), _MINIBATCHES_MAX)


def _whole_ones(batches: list[Any], batch_size: int | None) -> list[Any]:
    """Returns the batches that have the profile's batch size. A short last batch is left out. Returns all
    batches if none has that size."""
    of_size = [
        batch
        for index, batch in enumerate(batches)
        if batch_size is None or batch_size_of(*parts_of(batch, index)) == batch_size
    ]
    return of_size or batches
