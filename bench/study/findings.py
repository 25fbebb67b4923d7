"""Evaluates the sweep's results: finds the best learning rate of each setting, counts the minibatches until a
loss is reached, and compares settings with `flush`, seed by seed."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from simulator import Setting
from sweep import (
    DEEP_SEEDS,
    FLUSH,
    FRESH_SEEDS,
    MINIBATCHES_PER_POINT,
    SEEDS,
    TIMES_AS_LONG,
    Outcome,
    Results,
    Trial,
    make_task,
)
from tasks import DeepCharacters

_NUM_SMOOTHED = 12  # points of a loss curve


@dataclass(frozen=True)
class Finding:
    """The outcomes of one setting at all learning rates that were tried."""

    trial: Trial
    """The trial at the rate with the least mean held-out loss."""
    best: Outcome
    is_best_at_edge: bool
    """Whether the best rate is the lowest or the highest that was tried. If so, a rate beyond it may be
    better."""
    by_rate: dict[float, Outcome]

    @property
    def held_out(self) -> float:
        return self.best.mean(make_task(self.trial.task))

    def minibatches_to(self, loss: float) -> float:
        """Returns the number of minibatches until the smooth training loss is at most `loss`: the fewest over
        all rates at which no run failed, or infinity if no rate reaches the loss.
        """
        task = make_task(self.trial.task)
        sound = [outcome for outcome in self.by_rate.values() if outcome.num_failed(task) == 0]
        return min((minibatches_to(smooth(outcome.losses), loss) for outcome in sound), default=math.inf)


@dataclass(frozen=True)
class Paired:
    """For each seed, the difference between a setting's held-out loss and that of `flush` at the same
    rate.
    """

    rate: float
    differences: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.differences)

    @property
    def standard_error(self) -> float:
        return statistics.stdev(self.differences) / math.sqrt(len(self.differences))


def find(results: Results, task_name: str, optimizer: str, setting: Setting) -> Finding | None:
    """Returns the outcomes of this setting, or None if the results have no trials of it."""
    task = make_task(task_name)
    seeds = DEEP_SEEDS if isinstance(task, DeepCharacters) else SEEDS
    trial = Trial(task_name, optimizer, setting, 0.0, seeds, task.num_minibatches)
    by_rate = results.rates(trial)
    if not by_rate:
        return None
    best = min(by_rate, key=lambda rate: by_rate[rate].mean(task))
    is_edge = best in (min(by_rate), max(by_rate))
    return Finding(dataclasses.replace(trial, rate=best), by_rate[best], is_edge, by_rate)


def find_long(results: Results, optimizer: str, setting: Setting) -> Finding | None:
    """Returns the outcome of the longer runs of the task "characters", at the rate that was best in the
    shorter runs. Returns None if the results lack one of the two."""
    found = find(results, "characters", optimizer, setting)
    if found is None:
        return None
    count = TIMES_AS_LONG * found.trial.num_minibatches
    trial = dataclasses.replace(found.trial, num_minibatches=count)
    if trial not in results:
        return None
    return Finding(trial, results[trial], False, {trial.rate: results[trial]})


def target_loss(plain: Finding, share: float) -> float:
    """Returns the smooth training loss of plain training, at its best rate, after this share of its run."""
    return smooth(plain.best.losses)[round(len(plain.best.losses) * share) - _NUM_SMOOTHED]


def smooth(losses: Sequence[float]) -> list[float]:
    """Returns means over _NUM_SMOOTHED neighbouring points. The first mean ends at point number
    _NUM_SMOOTHED.
    """
    ends = range(_NUM_SMOOTHED, len(losses) + 1)
    return [sum(losses[end - _NUM_SMOOTHED : end]) / _NUM_SMOOTHED for end in ends]


def minibatches_of(smooth_losses: Sequence[float]) -> list[int]:
    """Returns the number of minibatches that each smooth loss belongs to."""
    return [(index + _NUM_SMOOTHED) * MINIBATCHES_PER_POINT for index in range(len(smooth_losses))]


def minibatches_to(smooth_losses: Sequence[float], loss: float) -> float:
    """Returns the number of minibatches until the smooth loss is at most `loss`, or infinity if it
    never is.
    """
    reached = zip(minibatches_of(smooth_losses), smooth_losses, strict=True)
    return next((count for count, value in reached if value <= loss), math.inf)


def paired(results: Results, optimizer: str, setting: Setting) -> Paired | None:
    """Compares the setting with `flush` over FRESH_SEEDS, at the best rate of `flush`. Returns None if the
    results lack one of the two."""
    plain = find(results, "characters", optimizer, FLUSH)
    if plain is None:
        return None
    of_flush = dataclasses.replace(plain.trial, seeds=FRESH_SEEDS)
    trial = dataclasses.replace(of_flush, setting=setting)
    if trial not in results or of_flush not in results:
        return None
    chance = make_task("characters").chance
    pairs = zip(results[trial].held_out, results[of_flush].held_out, strict=True)
    differences = tuple((chance if a is None else a) - (chance if b is None else b) for a, b in pairs)
    return Paired(trial.rate, differences)
