"""Makes the study's runs, and keeps their outcomes in a log, from which an interrupted sweep continues.

A trial is one setting at one learning rate, run once per seed. Neighbouring rates differ by a factor of 2. If
the best rate is the lowest or the highest that was tried, the sweep also tries the next one in that
direction.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from simulator import Setting, Stack
from tasks import Characters, DeepCharacters, Digits, Task

_FORMAT = "pipedream.study/2"

SEEDS = (1, 2, 3)
DEEP_SEEDS = (1, 2)
FRESH_SEEDS = (101, 102, 103, 104, 105, 106, 107, 108)
MINIBATCHES_PER_POINT = 5
"""Losses are kept as means over this many minibatches."""
TIMES_AS_LONG = 3
_FACTORS = (0.5, 1.0, 2.0)

OPTIMIZERS = ("AdamW", "SGD, momentum 0.9", "Muon", "NAdamW (0.99)")
ACCEPTED_WITH = OPTIMIZERS[:3]
_START_RATES = {
    ("characters", "SGD, momentum 0.9"): 0.1,
    ("characters", "AdamW"): 0.004,
    ("characters", "NAdamW (0.99)"): 0.004,
    ("characters", "Muon"): 0.016,
    ("digits", "SGD, momentum 0.9"): 0.02,
    ("digits", "AdamW"): 0.002,
    ("characters, 16 layers", "AdamW"): 0.004,
    ("characters, 32 layers", "AdamW"): 0.002,
}

# Under these two schedules the task "characters" trains in the same way with any number of stages and
# microbatches. So one setting of each is enough.
FLUSH, TWO_BW = Setting("flush", 1, 1), Setting("2bw", 1, 1)
LONG_WITH_ALL = FLUSH, Setting("pipedream", 8, 8), Setting("pipedream", 8, 16)


@dataclass(frozen=True)
class Trial:
    task: str
    optimizer: str
    setting: Setting
    rate: float
    seeds: tuple[int, ...]
    num_minibatches: int


@dataclass(frozen=True)
class Outcome:
    held_out: tuple[float | None, ...]
    """The held-out loss by seed. None: the loss stopped being finite."""
    losses: tuple[float, ...]
    """Training losses. Each is a mean over MINIBATCHES_PER_POINT minibatches and all seeds. The tuple ends
    before the first mean that is not finite."""

    def mean(self, task: Task) -> float:
        """Returns the mean held-out loss. A run that failed counts with the loss of guessing."""
        values = [task.chance if v is None else min(v, task.chance) for v in self.held_out]
        return sum(values) / len(values)

    def num_failed(self, task: Task) -> int:
        return sum(value is None or value >= task.chance for value in self.held_out)


@functools.cache
def make_task(name: str) -> Task:
    if name == "digits":
        return Digits()
    return Characters() if name == "characters" else DeepCharacters(int(name.split()[1]))


class Results:
    """Outcomes by trial. The log is a file with a line of JSON per trial, so that an interrupted sweep can
    continue."""

    def __init__(self, log: Path | None = None, known: Results | None = None) -> None:
        self._log = log
        self._outcomes: dict[Trial, Outcome] = {} if known is None else dict(known._outcomes)
        for line in log.read_text().splitlines() if log is not None and log.exists() else []:
            self._read(json.loads(line))

    def __contains__(self, trial: Trial) -> bool:
        return trial in self._outcomes

    def __getitem__(self, trial: Trial) -> Outcome:
        return self._outcomes[trial]

    def rates(self, trial: Trial) -> dict[float, Outcome]:
        """Returns the outcomes of all trials that differ from this trial only in their rate, in order of the
        rates."""
        found = {
            each.rate: outcome
            for each, outcome in self._outcomes.items()
            if dataclasses.replace(each, rate=trial.rate) == trial
        }
        return dict(sorted(found.items()))

    def add(self, trial: Trial, outcome: Outcome) -> None:
        self._outcomes[trial] = outcome
        if self._log is not None:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a") as file:
                file.write(json.dumps(_fields(trial, outcome)) + "\n")

    def save(self, path: Path) -> None:
        """Writes a JSON object with one line per trial."""
        head = {
            "format": _FORMAT,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "minibatches_per_point": MINIBATCHES_PER_POINT,
        }
        lines = sorted(json.dumps(_fields(trial, outcome)) for trial, outcome in self._outcomes.items())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(head)[:-1] + ', "trials": [\n' + ",\n".join(lines) + "\n]}\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Reads a file that save() wrote."""
        document = json.loads(path.read_text())
        if document["format"] != _FORMAT:
            raise SystemExit(f"{path} has format {document['format']!r}, not {_FORMAT!r}")
        results = cls()
        for fields in document["trials"]:
            results._read(fields)
        return results

    def _read(self, fields: dict[str, Any]) -> None:
        outcome = Outcome(tuple(fields.pop("held_out")), tuple(fields.pop("losses")))
        setting = Setting(*(fields.pop(name) for name in ("schedule", "num_stages", "microbatches")))
        self._outcomes[Trial(setting=setting, **{**fields, "seeds": tuple(fields["seeds"])})] = outcome


def _fields(trial: Trial, outcome: Outcome) -> dict[str, Any]:
    fields = dataclasses.asdict(trial)
    setting = fields.pop("setting")
    return {**fields, **setting, **dataclasses.asdict(outcome)}


class Sweep:
    """Makes all trials that the results do not have yet."""

    def __init__(self, results: Results) -> None:
        self.results = results

    def everything(self) -> None:
        """Makes all trials of the study, the most important first."""
        self._characters(8, OPTIMIZERS)
        self.acceptance()
        for optimizer in ACCEPTED_WITH:
            for setting in LONG_WITH_ALL:
                self.long(optimizer, setting)
        for num_stages in (4, 2):  # time_to_loss.py needs these
            self._characters(num_stages, OPTIMIZERS[:1])
            for setting in settings(num_stages):
                if setting.microbatches == 1 or setting.microbatches >= num_stages:
                    self.long(OPTIMIZERS[0], setting)
        for optimizer in OPTIMIZERS[:2]:
            for setting in digits_settings():
                self.rates("digits", optimizer, setting)
        self._characters(4, OPTIMIZERS[1:])
        for optimizer in OPTIMIZERS:
            for setting in settings(8):
                self.long(optimizer, setting)
        for depth in (16, 32):
            self.deep(depth)

    def _characters(self, num_stages: int, optimizers: Sequence[str]) -> None:
        for optimizer in optimizers:
            for setting in settings(num_stages):
                self.rates("characters", optimizer, setting)

    def rates(
        self, task_name: str, optimizer: str, setting: Setting, seeds: tuple[int, ...] = SEEDS
    ) -> Trial:
        """Tries rates until the best is neither the lowest nor the highest of them. Returns the best
        trial."""
        task = make_task(task_name)
        start = _START_RATES[task_name, optimizer]
        trial = Trial(task_name, optimizer, setting, start, seeds, task.num_minibatches)
        wanted = [start * factor for factor in _FACTORS]
        while True:
            self._make([dataclasses.replace(trial, rate=rate) for rate in wanted])
            found = self.results.rates(trial)
            best = min(found, key=lambda rate: found[rate].mean(task))
            if best == min(found):
                wanted = [best / 2]
            elif best == max(found):
                wanted = [best * 2]
            else:
                return dataclasses.replace(trial, rate=best)

    def acceptance(self) -> None:
        """Trains `pipedream` and `flush` with FRESH_SEEDS, both at the best rate of `flush`."""
        for optimizer in ACCEPTED_WITH:
            best = self.rates("characters", optimizer, FLUSH)
            for setting in (FLUSH, Setting("pipedream", 8, 8), Setting("pipedream", 8, 16)):
                self._make([dataclasses.replace(best, setting=setting, seeds=FRESH_SEEDS)])

    def deep(self, depth: int) -> None:
        """Searches the best rate for `flush` only, because these runs are long. The other settings are
        trained at this rate.
        """
        best = self.rates(f"characters, {depth} layers", "AdamW", FLUSH, DEEP_SEEDS)
        for setting in deep_settings(depth):
            self._make([dataclasses.replace(best, setting=setting)])

    def long(self, optimizer: str, setting: Setting) -> None:
        """Trains on TIMES_AS_LONG times as many minibatches, at the best rate."""
        best = self.rates("characters", optimizer, setting)
        self._make([dataclasses.replace(best, num_minibatches=TIMES_AS_LONG * best.num_minibatches)])

    def _make(self, trials: Sequence[Trial]) -> None:
        """Makes trials that differ only in their rate, at the same time."""
        missing = [trial for trial in trials if trial not in self.results]
        if not missing:
            return
        began_s, cpu_s = time.monotonic(), time.process_time()
        for trial, outcome in zip(missing, train(missing), strict=True):
            self.results.add(trial, outcome)
            held_out = " ".join("failed" if v is None else f"{v:.3f}" for v in outcome.held_out)
            told = f"{trial.task}, {trial.optimizer}, {trial.setting}, rate {trial.rate:g}: {held_out}"
            print(told, file=sys.stderr)
        took = f"{time.monotonic() - began_s:.0f} s, {time.process_time() - cpu_s:.0f} s of CPU"
        print(f"  {took}", file=sys.stderr, flush=True)


def settings(num_stages: int) -> list[Setting]:
    """Returns the settings with which the task "characters" is trained."""
    cut = [num_stages, 2 * num_stages, num_stages // 2]
    chosen = [Setting(name, num_stages, m) for m in cut for name in ("pipedream", "unstashed")]
    return [FLUSH, *(s for s in chosen if s.microbatches > 1), TWO_BW, Setting("pipedream", num_stages, 1)]


def digits_settings() -> list[Setting]:
    """Returns the settings with which the task "digits" is trained. `flush` has each number of microbatches,
    because batch norm sees each microbatch by itself.
    """
    return [
        *(Setting(name, 8, m) for m in (8, 16) for name in ("flush", "pipedream", "unstashed")),
        Setting("2bw", 8, 8),
        *(Setting(name, 8, 1) for name in ("flush", "pipedream")),
    ]


def deep_settings(depth: int) -> list[Setting]:
    return [
        FLUSH,
        Setting("pipedream", depth, depth),
        Setting("pipedream", depth, 2 * depth),
        Setting("unstashed", depth, depth),
        TWO_BW,
    ]


def train(trials: Sequence[Trial]) -> list[Outcome]:
    """Trains trials that differ only in their rate. Returns their outcomes in the same order."""
    first = trials[0]
    task = make_task(first.task)
    seeds = [seed for trial in trials for seed in trial.seeds]
    rates = [trial.rate for trial in trials for _ in trial.seeds]
    stack = Stack([task.make_model(seed) for seed in seeds], rates, first.setting, first.optimizer, task.loss)
    by_seed = {seed: task.batches(seed, first.num_minibatches) for seed in first.seeds}
    points, losses = [], torch.zeros(len(seeds))
    for minibatch in range(first.num_minibatches):
        batches = [by_seed[seed][minibatch] for seed in seeds]
        inputs, targets = (torch.stack(tensors) for tensors in zip(*batches, strict=True))
        losses += stack.train(inputs, targets) / MINIBATCHES_PER_POINT
        if (minibatch + 1) % MINIBATCHES_PER_POINT == 0:
            points.append(losses)
            losses = torch.zeros(len(seeds))
    held_out = stack.evaluate(task.judge)
    curves = torch.stack(points, dim=1)  # has the shape (runs, points)
    count = len(first.seeds)
    return [
        Outcome(
            tuple(_finite(value, 5) for value in held_out[begin : begin + count]),
            tuple(_while_finite(curves[begin : begin + count].mean(0).tolist())),
        )
        for begin in range(0, len(seeds), count)
    ]


def _while_finite(points: Iterable[float]) -> Iterator[float]:
    for point in points:
        rounded = _finite(point, 4)
        if rounded is None:
            return
        yield rounded


def _finite(value: float, num_digits: int) -> float | None:
    return float(f"{value:.{num_digits}g}") if math.isfinite(value) else None
