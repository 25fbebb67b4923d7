"""The sweep: which runs the study makes, and each run's result, kept in a file so that it can go on later.

A run is one training of a task with the reference, in this process and thread.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pipedream
import torch
from pipedream import reference
from tasks import Characters, Digits, Task
from torch import Tensor

_FORMAT = "pipedream.study/1"

NUM_LAYERS = 8
DEPTHS = (4, 8)
SEEDS = (1, 2, 3)
NUM_MINIBATCHES_PER_POINT = 10
"""The losses of so many minibatches are kept as their mean."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "SGD, momentum 0.9": functools.partial(torch.optim.SGD, momentum=0.9),
    "Adam": torch.optim.Adam,
}
RATES: dict[tuple[str, str], tuple[float, ...]] = {
    ("digits", "SGD"): (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    ("digits", "SGD, momentum 0.9"): (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    ("characters", "SGD"): (0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    ("characters", "SGD, momentum 0.9"): (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    ("characters", "Adam"): (0.0003, 0.001, 0.003, 0.01, 0.03),
}
# Each stage of these sees a delay of its own; of the others only the microbatches matter.
_BY_DEPTH = ("pipedream", "vertical_sync", "naive")


@dataclass(frozen=True)
class Setting:
    """A schedule as it is run: with the fewest stages and microbatches that give its numbers."""

    schedule: str
    num_stages: int
    microbatches: int = 1


@dataclass(frozen=True)
class Run:
    task: str
    optimizer: str
    setting: Setting
    rate: float
    seed: int


@dataclass(frozen=True)
class Outcome:
    held_out: float | None
    """None: the loss stopped being finite."""
    losses: tuple[float, ...]
    """Means over NUM_MINIBATCHES_PER_POINT minibatches each, as far as they are finite."""


class Diverged(Exception):  # noqa: N818 (an outcome, not an error)
    pass


def make_tasks() -> dict[str, Task]:
    return {task.name: task for task in (Digits(), Characters())}


def settings(task: Task) -> list[Setting]:
    """Every schedule at both depths. Flush needs no depth: it is plain training, of microbatches or not."""
    chosen = [Setting("flush", 1), *(Setting(name, depth) for name in _BY_DEPTH for depth in DEPTHS)]
    if task.cuts_alike:
        return [*chosen, Setting("2bw", 1)]
    return chosen + [Setting(name, 1, depth) for name in ("2bw", "flush") for depth in DEPTHS]


def plan_runs(tasks: dict[str, Task]) -> Iterator[Run]:
    """Seed after seed, so that the whole picture is there early."""
    for seed, ((task, optimizer), rates) in itertools.product(SEEDS, RATES.items()):
        for setting, rate in itertools.product(settings(tasks[task]), rates):
            yield Run(task, optimizer, setting, rate, seed)


def train(task: Task, run: Run) -> Outcome:
    losses: list[float] = []

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in task.batches(run.seed):
            losses.append(0.0)
            yield batch

    def loss_fn(scores: Tensor, targets: Tensor) -> Tensor:
        loss = task.loss(scores, targets)
        if not math.isfinite(loss.item()):
            raise Diverged
        losses[-1] += loss.item() / run.setting.microbatches
        return loss

    model = task.make_model(run.seed)
    try:
        reference_run(task, model, run, data(), loss_fn)
    except Diverged:
        return Outcome(None, _points(losses[:-1]))
    held_out = task.judge(model)
    return Outcome(held_out if math.isfinite(held_out) else None, _points(losses))


def reference_run(task: Task, model: torch.nn.Sequential, run: Run, data: Any, loss_fn: Any) -> list[float]:
    """The losses of the minibatches."""
    model.train()
    return reference.run(
        model,
        pipedream.Plan.straight(NUM_LAYERS, run.setting.num_stages),
        data=data,
        loss_fn=loss_fn,
        optimizer=functools.partial(OPTIMIZERS[run.optimizer], lr=run.rate),
        schedule=run.setting.schedule,
        microbatches=run.setting.microbatches,
        seed=run.seed,
    ).losses


def _points(losses: list[float]) -> tuple[float, ...]:
    """Whole points only, to four digits."""
    size = NUM_MINIBATCHES_PER_POINT
    ends = range(size, len(losses) + 1, size)
    return tuple(float(f"{sum(losses[end - size : end]) / size:.4g}") for end in ends)


class Results:
    """Outcomes by run. With a log, a file with a line of JSON per run, an interrupted sweep can go on."""

    def __init__(self, log: Path | None = None) -> None:
        self._log = log
        self._outcomes: dict[Run, Outcome] = {}
        for line in log.read_text().splitlines() if log is not None and log.exists() else []:
            fields = json.loads(line)
            run = Run(**{**fields["run"], "setting": Setting(**fields["run"]["setting"])})
            self._outcomes[run] = Outcome(fields["held_out"], tuple(fields["losses"]))

    def __contains__(self, run: Run) -> bool:
        return run in self._outcomes

    def __getitem__(self, run: Run) -> Outcome:
        return self._outcomes[run]

    def add(self, run: Run, outcome: Outcome) -> None:
        self._outcomes[run] = outcome
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a") as file:
                file.write(json.dumps({"run": dataclasses.asdict(run), **dataclasses.asdict(outcome)}) + "\n")

    def save(self, path: Path, runs: Iterable[Run]) -> None:
        """One JSON object with one line per group of runs that differ only in their seed."""
        groups: dict[str, list[Outcome]] = {}
        for run in runs:
            fields = {**dataclasses.asdict(run), **dataclasses.asdict(run.setting)}
            del fields["setting"], fields["seed"]
            groups.setdefault(json.dumps(fields)[:-1], []).append(self[run])
        lines = [
            f'{group}, "held_out": {json.dumps([_rounded(outcome.held_out, 5) for outcome in outcomes])}, '
            f'"losses": {json.dumps([[_rounded(x, 3) for x in outcome.losses] for outcome in outcomes])}}}'
            for group, outcomes in groups.items()
        ]
        head = {
            "format": _FORMAT,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "minibatches_per_point": NUM_MINIBATCHES_PER_POINT,
            "seeds": SEEDS,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(head)[:-1] + ', "runs": [\n' + ",\n".join(lines) + "\n]}\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        """What save has written."""
        document = json.loads(path.read_text())
        if document["format"] != _FORMAT:
            raise SystemExit(f"{path} has format {document['format']!r}, not {_FORMAT!r}")
        results = cls()
        for group in document["runs"]:
            setting = Setting(group["schedule"], group["num_stages"], group["microbatches"])
            outcomes = zip(document["seeds"], group["held_out"], group["losses"], strict=True)
            for seed, held_out, losses in outcomes:
                run = Run(group["task"], group["optimizer"], setting, group["rate"], seed)
                results.add(run, Outcome(held_out, tuple(losses)))
        return results


def _rounded(value: float | None, num_digits: int) -> float | None:
    return None if value is None else float(f"{value:.{num_digits}g}")
