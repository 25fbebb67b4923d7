"""What the sweep found: the figures of the study's tables, from the runs of every rate and seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sweep import NUM_MINIBATCHES_PER_POINT, RATES, SEEDS, Outcome, Results, Run, Setting
from tasks import Task

# A run is stable if it ends this near to the best that its schedule reaches at any rate.
TOLERANCES = {"digits": 0.02, "characters": 0.1}

_NUM_SMOOTHED = 3  # points
_NUM_HALVINGS = 40


@dataclass(frozen=True)
class AtRate:
    """One setting at one rate, over the seeds."""

    rate: float
    held_out: tuple[float, ...]
    """One per seed; a run that failed counts as guessing."""
    num_failed: int
    """Runs whose loss stopped being finite, or that ended no better than guessing."""
    losses: tuple[float, ...]
    """Training loss, mean over the seeds; ends where the first run's does."""

    @property
    def mean(self) -> float:
        return sum(self.held_out) / len(self.held_out)

    @property
    def smooth_losses(self) -> tuple[float, ...]:
        """Each the mean of the last points of the losses up to it; the first points have none."""
        ends = range(_NUM_SMOOTHED, len(self.losses) + 1)
        return tuple(sum(self.losses[end - _NUM_SMOOTHED : end]) / _NUM_SMOOTHED for end in ends)

    def minibatches_to(self, loss: float) -> float:
        """Until the smooth training loss is this low; infinite if it never is."""
        for index, value in enumerate(self.smooth_losses):
            if value <= loss:
                return (index + _NUM_SMOOTHED) * NUM_MINIBATCHES_PER_POINT
        return math.inf


@dataclass(frozen=True)
class Finding:
    """One setting over all rates."""

    best: AtRate
    is_best_at_edge: bool
    """Of the sweep: a rate outside may be better."""
    lowest: AtRate
    """The rate with the lowest smooth training loss at the end."""
    largest_stable_rate: float
    minibatches_to_target: float
    """The fewest over all rates at which no run failed."""
    at_rates: tuple[AtRate, ...]


def collect(task: Task, optimizer: str, setting: Setting, results: Results) -> tuple[AtRate, ...]:
    """The setting at every rate of the sweep."""
    return tuple(
        _over_seeds(task, rate, [results[Run(task.name, optimizer, setting, rate, seed)] for seed in SEEDS])
        for rate in RATES[task.name, optimizer]
    )


def find(task: Task, at_rates: Sequence[AtRate], target_loss: float) -> Finding:
    best = best_of(task, at_rates)
    sign = 1 if task.higher_is_better else -1
    worst_stable = sign * best.mean - TOLERANCES[task.name]
    sound = [at for at in at_rates if at.num_failed == 0]
    stable = [at.rate for at in at_rates if min(sign * value for value in at.held_out) >= worst_stable]
    return Finding(
        best=best,
        is_best_at_edge=best.rate in (at_rates[0].rate, at_rates[-1].rate),
        lowest=min(sound, key=lambda at: at.smooth_losses[-1]),
        largest_stable_rate=max(stable, default=math.nan),
        minibatches_to_target=min(at.minibatches_to(target_loss) for at in sound),
        at_rates=tuple(at_rates),
    )


def best_of(task: Task, at_rates: Sequence[AtRate]) -> AtRate:
    """The rate with the best mean held-out result."""
    return (max if task.higher_is_better else min)(at_rates, key=lambda at: at.mean)


def target_loss(plain: AtRate) -> float:
    """The smooth training loss of plain training, at its best rate, after a third of the run."""
    return plain.smooth_losses[len(plain.losses) // 3 - _NUM_SMOOTHED]


def quadratic_limit(delay: int, momentum: float) -> float:
    """The rate times curvature below which SGD on a quadratic converges, its gradients `delay` updates old.

    w_{t+1} = w_t + momentum (w_t - w_{t-1}) - limit w_{t-delay} has all roots of its characteristic
    polynomial inside the unit circle. Without momentum that is 2 sin(pi / (4 delay + 2)).
    """
    low, high = 0.0, 2 * (1 + momentum)
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        polynomial = np.zeros(max(2, delay + 1) + 1)
        polynomial[:3] = 1, -1 - momentum, momentum
        polynomial[1 + delay] += middle
        if abs(np.roots(polynomial)).max() < 1:
            low = middle
        else:
            high = middle
    return low


def _over_seeds(task: Task, rate: float, outcomes: Sequence[Outcome]) -> AtRate:
    values = [task.chance if outcome.held_out is None else outcome.held_out for outcome in outcomes]
    kept = [max(v, task.chance) if task.higher_is_better else min(v, task.chance) for v in values]
    points = zip(*(outcome.losses for outcome in outcomes), strict=False)  # as long as the shortest
    return AtRate(
        rate=rate,
        held_out=tuple(kept),
        num_failed=sum(value == task.chance for value in kept),
        losses=tuple(sum(point) / len(point) for point in points),
    )
