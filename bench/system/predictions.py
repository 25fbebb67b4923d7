"""Compares predicted with measured times per minibatch, for models, plans, schedules and links.

    python bench/system/predictions.py [--rounds 1] [--seconds 4] [--tries 3] [--links] [--own-runs]

Each model is profiled and calibrated (pipedream.calibrate) once, with as many workers as the largest of its
combinations. Then the calibrated cost model predicts each combination before it is run. A prediction assumes
a core for each worker, so combinations with more workers than this machine has cores are left out. Prints per
combination:

    predicted, measured   milliseconds per minibatch
    error                 the prediction's error; the mean and the worst error follow below the table
    halves                the difference between the two halves of the run; no error can be expected to be
                          less
    others                the share of the cores' time that other processes took; with shaped links the other
                          ranks count, too

If other processes disturb a run, it is made again, up to --tries times in all, and the least disturbed run
counts. Runs over shaped links are made once. Use a quiet machine, because nobody can predict what other
processes take of the cores.

    --rounds     calibrates and runs everything in each round, and takes the median of each combination's
                 figures; also prints by how much runs of one combination differ between rounds
    --links      adds combinations whose workers have hosts of their own (namespaces) with shaped links, which
                 needs root; with --only bit/s only these combinations run
    --own-runs   predicts the runs from which a calibration is made; no time passes between calibration and
                 run, so the errors are the model's own
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pipedream
import torch
from foreign_load import ForeignLoad
from links import Link, can_make_links, run_ranks
from pipedream import Plan, Profile, Stage, _core
from pipedream.common.cpus import usable_cpus
from pipedream.common.document import write_value
from pipedream.launch.calibration import calibration_runs
from pipedream.launch.measured_costs import Runs, runtime_costs
from pipedream.planning.link_profile import LinkProfile
from pipedream.planning.prediction import predict_ms
from torch import nn

FOREIGN_SHARE_MAX = 0.03  # share of the cores' time that other processes may take in an undisturbed run
WARM_UP_SHARE = 0.2  # share of a run's updates that do not count

LOCAL_BYTES_PER_S = 1e15  # On one machine sending costs the sender time, but takes no time of a link.
LINK_SECONDS = 0.3  # at most, for each figure of a pair of hosts
PROFILE_SECONDS = 5.0
MINIBATCHES_MIN, MINIBATCHES_MAX = 60, 2000

Batches = list[tuple[torch.Tensor, torch.Tensor]]


def make_mlp(width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def make_cnn() -> nn.Sequential:
    """Makes a model like the digits classifier, for images (batch, 1, 8, 8)."""
    layers: list[nn.Module] = []
    channels = 1
    for number, wider in enumerate((32, 32, 64, 64)):
        layers += [nn.Conv2d(channels, wider, 3, padding=1, bias=False), nn.BatchNorm2d(wider), nn.ReLU()]
        if number == 1:
            layers.append(nn.MaxPool2d(2))
        channels = wider
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 16, 10))


@dataclass(frozen=True)
class Task:
    model: nn.Sequential
    batches: Batches
    optimizer: Any


def make_task(name: str) -> Task:
    torch.manual_seed(0)
    if name == "cnn":
        plain = functools.partial(torch.optim.SGD, lr=1e-3)
        return Task(make_cnn(), [(torch.randn(48, 1, 8, 8), torch.randn(48, 10)) for _ in range(8)], plain)
    width, batch = {"mlp-768": (768, 128), "mlp-256": (256, 64), "mlp-64": (64, 8)}[name]
    batches = [(torch.randn(batch, width), torch.randn(batch, width)) for _ in range(8)]
    optimizer = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    return Task(make_mlp(width), batches, optimizer)


@dataclass(frozen=True)
class Combination:
    model: str
    replicas: tuple[int, ...]
    schedule: str
    microbatches: int = 1
    bandwidth: str | None = None
    """Bandwidth of each worker's link, if each worker is a host of its own. None: all workers are processes
    of this host."""

    def __str__(self) -> str:
        name = f"{self.model}, {'-'.join(map(str, self.replicas))}, {self.schedule}"
        if self.microbatches > 1:
            name += f" m={self.microbatches}"
        return name if self.bandwidth is None else f"{name}, {self.bandwidth}"


LOCAL = [
    *(
        Combination(model, replicas, schedule, m)
        for model in ("mlp-768", "mlp-256", "cnn", "mlp-64")
        for replicas, schedule, m in (((1, 1), "pipedream", 1), ((1, 1), "flush", 4), ((1, 1), "2bw", 2))
    ),
    Combination("mlp-768", (1,), "pipedream"),
    Combination("mlp-768", (2, 1), "pipedream"),
    Combination("mlp-256", (1, 2), "pipedream"),
    Combination("mlp-256", (2,), "data_parallel"),
    Combination("cnn", (2, 1), "pipedream"),
    Combination("cnn", (1, 1), "gpipe", 4),
    Combination("mlp-64", (1, 1), "model_parallel"),
]
SHAPED = [
    Combination("mlp-256", (1, 1), "pipedream", bandwidth="200Mbit/s"),
    Combination("mlp-256", (1, 1), "flush", 4, bandwidth="1Gbit/s"),
    # With replicas the links also carry gradients and versions. The hosts share the machine's cores. At 1
    # Gbit/s the kernel's network code takes 20 to 45 % of 2 cores.
    *(
        Combination("mlp-256", replicas, schedule, bandwidth=bandwidth)
        for bandwidth in ("1Gbit/s", "200Mbit/s")
        for replicas, schedule in (((2, 1), "pipedream"), ((1, 2), "pipedream"), ((2,), "data_parallel"))
    ),
    Combination("mlp-768", (2, 1), "pipedream", bandwidth="1Gbit/s"),
    Combination("cnn", (2, 2), "pipedream", bandwidth="200Mbit/s"),
]


def stages_of(profile: Profile, combination: Combination) -> tuple[Stage, ...]:
    """Returns balanced stages with the combination's replicas."""
    counts = combination.replicas
    if len(counts) == 1:
        return (Stage(0, profile.num_layers - 1, counts[0]),)
    if counts == (1,) * len(counts):
        return pipedream.partition(profile, len(counts), 1e15, straight=True).stages
    shared = Plan.replicated(profile.num_layers, counts)
    return shared.stages


def plan_of(
    profile: Profile, combination: Combination, bandwidth: float | LinkProfile = LOCAL_BYTES_PER_S
) -> Plan:
    stages = stages_of(profile, combination)
    num_workers = sum(combination.replicas)
    return pipedream.partition(
        profile,
        num_workers,
        bandwidth,
        cost_model="calibrated",
        workers_per_host=num_workers,  # namespaces share this machine's cores, too
        boundaries=[stage.last_layer for stage in stages[:-1]],
        replicas=combination.replicas,
        hides_links=False,
        progress=False,
    )


def schedule_of(plan: Plan, combination: Combination) -> _core.ScheduleOptions:
    return _core.ScheduleOptions(
        combination.schedule, list(plan.in_flight), combination.microbatches, plan.placement
    )


def half_times_ms(result: pipedream.RunResult) -> tuple[float, float]:
    """Returns milliseconds per minibatch in the first and in the second half of a run's updates. The updates
    of the warm-up do not count."""
    updates = [span for span in result.spans[-1] if span.kind == "UPDATE"]
    steady = updates[int(len(updates) * WARM_UP_SHARE) :]
    ends = steady[0], steady[len(steady) // 2], steady[-1]
    first, second = (
        (end.completed_ns - begin.completed_ns) / 1e6 / (end.minibatch - begin.minibatch)
        for begin, end in itertools.pairwise(ends)
    )
    return first, second


def run_plan(combination: Combination, plan: Plan, seconds: float) -> dict[str, float]:
    """Returns predicted and measured milliseconds per minibatch, and figures that show how reliable they
    are."""
    task = make_task(combination.model)
    predicted_ms = predict_ms(plan, schedule_of(plan, combination))
    assert predicted_ms is not None
    count = min(max(int(seconds * 1e3 / predicted_ms), MINIBATCHES_MIN), MINIBATCHES_MAX)
    with ForeignLoad() as others:
        result = run_once(combination, plan, task, count)
    halves_ms = half_times_ms(result) if result.spans else (1.0, 1.0)  # only rank 0 has spans
    return {
        "predicted_ms": predicted_ms,
        "measured_ms": result.measured_ms,
        "halves_differ": abs(halves_ms[1] / halves_ms[0] - 1),
        "foreign_share": others.share,
    }


def run_once(combination: Combination, plan: Plan, task: Task, count: int) -> pipedream.RunResult:
    return pipedream.run(
        task.model,
        plan,
        data=[task.batches[i % len(task.batches)] for i in range(count)],
        loss_fn=nn.functional.mse_loss,
        optimizer=task.optimizer,
        schedule=combination.schedule,
        microbatches=combination.microbatches,
        progress=False,
        insecure=combination.bandwidth is not None,
        transport="auto" if combination.bandwidth is None else "tcp",
    )


def run_undisturbed(combination: Combination, plan: Plan, seconds: float, tries: int) -> dict[str, float]:
    """Runs the plan up to `tries` times, until a run is undisturbed. Returns the least disturbed run."""
    rows: list[dict[str, float]] = []
    while len(rows) < tries and not any(row["foreign_share"] <= FOREIGN_SHARE_MAX for row in rows):
        rows.append(run_plan(combination, plan, seconds))
    return min(rows, key=lambda row: row["foreign_share"])


def calibrated(model: str, workers: int, transport: str = "auto") -> tuple[Profile, Runs]:
    task = make_task(model)
    profile = pipedream.profile(task.model, task.batches, nn.functional.mse_loss, seconds=PROFILE_SECONDS)
    plan, runs = calibration_runs(
        profile,
        task.model,
        task.batches,
        nn.functional.mse_loss,
        optimizer=task.optimizer,
        workers=workers,
        minibatches=None,
        transport=transport,
    )
    return replace(profile, runtime=write_value(runtime_costs(profile, plan, runs, usable_cpus()))), runs


def predict_own_runs(model: str) -> list[float]:
    """Calibrates, and predicts the runs from which the calibration was made. Returns the errors of the
    predictions."""
    profile, runs = calibrated(model, 2)
    errors = []
    for combination, results in (
        (Combination(model, (1,), "pipedream"), runs.one),
        (Combination(model, (1, 1), "pipedream"), runs.straight),
        (Combination(model, (1, 1), "model_parallel"), runs.in_turn),
        *((Combination(model, (1, 1), "flush", m), results) for m, results in runs.cut.items()),
        (Combination(model, (2,), "data_parallel"), runs.shared),
    ):
        plan = plan_of(profile, combination)
        predicted_ms = predict_ms(plan, schedule_of(plan, combination))
        assert predicted_ms is not None
        measured_ms = statistics.fmean(result.measured_ms for result in results)
        errors.append(predicted_ms / measured_ms - 1)
        print(
            f"{combination!s:44}{predicted_ms:11.3f}{measured_ms:11.3f}{100 * errors[-1]:+9.1f} %", flush=True
        )
    return errors


def workers_by_model(combinations: Sequence[Combination]) -> dict[str, int]:
    """Returns for each model the most workers of its combinations. It is at least two, because a calibration
    needs two.
    """
    counts: dict[str, int] = {}
    for combination in combinations:
        counts[combination.model] = max(counts.get(combination.model, 2), sum(combination.replicas))
    return counts


def run_round(combinations: Sequence[Combination], seconds: float, tries: int) -> dict[str, dict[str, float]]:
    rows = {}
    for model, workers in workers_by_model(combinations).items():
        profile, _ = calibrated(model, workers)
        for combination in combinations:
            if combination.model == model:
                plan = plan_of(profile, combination)
                rows[str(combination)] = run_undisturbed(combination, plan, seconds, tries)
                print_row(str(combination), rows[str(combination)])
    return rows


def run_shaped(combinations: Sequence[Combination], seconds: float) -> dict[str, dict[str, float]]:
    rows = {}
    for model, workers in workers_by_model(combinations).items():
        profile, _ = calibrated(model, workers, "tcp")
        for combination in combinations:
            if combination.model != model or combination.bandwidth is None:
                continue
            fields = [SHAPED.index(combination), profile.to_dict(), seconds]
            with Link(combination.bandwidth, num_hosts=sum(combination.replicas)) as link:
                rows[str(combination)] = run_ranks(link, __file__, fields)
            print_row(str(combination), rows[str(combination)])
    return rows


def rank(arguments: str) -> None:
    index, profile, seconds, path = json.loads(arguments)
    links = pipedream.profile_links(transport="tcp", insecure=True, seconds=LINK_SECONDS, progress=False)
    plan = plan_of(Profile.from_dict(profile), SHAPED[index], links)
    row = run_plan(SHAPED[index], plan, seconds)
    if os.environ["RANK"] == "0":
        with open(path, "w", encoding="utf-8") as file:
            json.dump(row, file)


def error_of(row: dict[str, float]) -> float:
    return row["predicted_ms"] / row["measured_ms"] - 1


def repeats_differ(rounds: Sequence[dict[str, dict[str, float]]]) -> float:
    """Returns by how much the measured times of neighbouring rounds differ, as a mean over combinations."""
    return statistics.fmean(
        abs(later[name]["measured_ms"] / earlier[name]["measured_ms"] - 1)
        for earlier, later in itertools.pairwise(rounds)
        for name in earlier
    )


def print_row(name: str, row: dict[str, float]) -> None:
    shares = (error_of(row), row["halves_differ"], row["foreign_share"])
    numbers = f"{row['predicted_ms']:10.3f} {row['measured_ms']:10.3f} {100 * shares[0]:+8.1f} %"
    print(f"{name:44} {numbers} {100 * shares[1]:8.1f} % {100 * shares[2]:8.1f} %", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run, about")
    parser.add_argument("--tries", type=int, default=3, help="of a run that others disturb")
    parser.add_argument("--only", help="combinations whose name has this in it")
    parser.add_argument("--links", action="store_true", help="also over shaped links; needs root")
    parser.add_argument("--own-runs", action="store_true", help="predict a calibration's own runs")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    _core.keep_freed_memory()
    if options.rank_of:
        rank(options.rank_of)
        return
    if options.links and (missing := can_make_links()):
        parser.error(missing)
    print(f"machine: {platform.machine()}, {usable_cpus()} cores, torch {torch.__version__}")
    if options.own_runs:
        models = dict.fromkeys(combination.model for combination in LOCAL)
        errors = [
            error for _ in range(options.rounds) for model in models for error in predict_own_runs(model)
        ]
        print(f"{len(errors)} runs: mean error {statistics.fmean(map(abs, errors)):.1%}")
        return
    columns = (f"{name:>10}" for name in ("predicted", "measured", "error", "halves", "others"))
    print(f"{'ms per minibatch':44}", *columns)
    local, shaped = (
        [c for c in among if (options.only or "") in str(c) and sum(c.replicas) <= usable_cpus()]
        for among in (LOCAL, SHAPED)
    )
    rounds = []
    for _ in range(options.rounds):
        rows = run_round(local, options.seconds, options.tries)
        if options.links:
            rows |= run_shaped(shaped, options.seconds)
        rounds.append(rows)
    of_rounds = {name: abs(statistics.median(error_of(rows[name]) for rows in rounds)) for name in rounds[0]}
    worst = max(of_rounds, key=lambda name: of_rounds[name])
    mean = statistics.fmean(of_rounds.values())
    halves = statistics.fmean(row["halves_differ"] for rows in rounds for row in rows.values())
    others = statistics.fmean(row["foreign_share"] for rows in rounds for row in rows.values())
    print(f"\n{len(of_rounds)} combinations: mean error {mean:.1%}, worst {of_rounds[worst]:.1%} ({worst})")
    print(f"two halves of a run differ by {halves:.1%}; others took {others:.1%} of the cores")
    if options.rounds > 1:
        print(f"a run and the same one a round later differ by {repeats_differ(rounds):.1%}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"rounds": rounds, "errors": of_rounds, "worst": worst}, file, indent=1)


if __name__ == "__main__":
    main()
