"""Searches for the best plan by hill climbing, from given starts first and then from random plans.

The search is for scores that formulas cannot give, such as the simulator's. It confirms or improves the
formulas' optimum. Pure; any thread; needs no torch. The idea of searching by simulated cost is from FlexFlow
(MLSys'19).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pipedream.planning.plan import Stage

__all__ = ["FoundPlan", "OnPlan", "search"]

Stages = tuple[Stage, ...]
OnPlan = Callable[[int, int, float], None]
"""Called for every scored plan with the number of plans scored so far, the largest number that may be scored,
and the least score so far.
"""

_SEED = 0  # the same profile gives the same plan
_BETTER = 1 - 1e-9  # smaller differences count as rounding
_RESTARTS_MAX = 8


@dataclass(frozen=True)
class FoundPlan:
    stages: Stages
    score_ms: float
    start_ms: float
    """The score of the best start."""
    num_plans: int
    """Number of plans that were scored."""

    def to_dict(self) -> dict[str, Any]:
        return {"plans": self.num_plans, "formulas_ms": self.start_ms, "found_ms": self.score_ms}


def search(
    starts: Iterable[Stages],
    score: Callable[[Stages], float],
    *,
    num_layers: int,
    num_workers: int,
    straight: bool = False,
    plans_max: int = 400,
    allowed: Callable[[Stages], bool] = lambda stages: True,
    on_plan: OnPlan | None = None,
) -> FoundPlan:
    """Improves the three best starts, and then random plans, step by step. Returns the plan with the least
    score that it finds. Ties go to fewer workers, then to fewer stages.

    starts: at least one plan. score: function that returns a plan's milliseconds per minibatch. plans_max:
    the search stops when it has scored this many plans besides the starts, or one more. allowed: function
    that returns whether a plan keeps to further limits.
    """
    scores: dict[tuple[tuple[int, int], ...], float] = {}
    distinct = list(dict.fromkeys(starts))
    limit = len(distinct) + plans_max
    least_ms = math.inf

    def score_of(stages: Stages) -> float:
        nonlocal least_ms
        key = _key(stages)
        if key not in scores:
            scores[key] = score(stages)
            least_ms = min(least_ms, scores[key])
            if on_plan is not None:
                on_plan(len(scores), limit, least_ms)
        return scores[key]

    ordered = sorted(distinct, key=lambda stages: (score_of(stages), *_size(stages)))
    start_ms = score_of(ordered[0])
    generator = random.Random(_SEED)
    best = ordered[0]
    climbs = [ordered[0], *ordered[1:3]]
    climbs += [_random_plan(generator, num_layers, num_workers, straight) for _ in range(_RESTARTS_MAX)]
    for begin in climbs:
        if not allowed(begin):
            continue
        top = _climb(begin, score_of, num_workers, straight, allowed, lambda: len(scores) >= limit)
        if _is_better(top, best, score_of):
            best = top
        if len(scores) >= limit:
            break
    return FoundPlan(best, score_of(best), start_ms, len(scores))


def _climb(
    stages: Stages,
    score_of: Callable[[Stages], float],
    num_workers: int,
    straight: bool,
    allowed: Callable[[Stages], bool],
    is_over: Callable[[], bool],
) -> Stages:
    while True:
        best = stages
        for neighbour in _neighbours(stages, num_workers, straight):
            if is_over():
                return best
            if allowed(neighbour) and _is_better(neighbour, best, score_of):
                best = neighbour
        if best is stages:
            return stages
        stages = best


def _is_better(stages: Stages, other: Stages, score_of: Callable[[Stages], float]) -> bool:
    mine, theirs = score_of(stages), score_of(other)
    if mine < theirs * _BETTER:
        return True
    return mine * _BETTER <= theirs and _size(stages) < _size(other)


def _neighbours(stages: Stages, num_workers: int, straight: bool) -> Iterator[Stages]:
    """Yields plans that differ by one change: a boundary moved, a replica added, removed or given to a
    neighbour, two stages joined, or one stage split.
    """
    used = sum(stage.num_replicas for stage in stages)
    for index in range(len(stages) - 1):
        here, below = stages[index], stages[index + 1]
        for step in (-1, 1, -4, 4):
            cut = here.last_layer + step
            if here.first_layer <= cut < below.last_layer:
                yield _with(stages, index, replace(here, last_layer=cut), replace(below, first_layer=cut + 1))
        joined = 1 if straight else here.num_replicas + below.num_replicas
        yield (
            *stages[:index],
            Stage(here.first_layer, below.last_layer, joined),
            *stages[index + 2 :],
        )
        if not straight:
            for giver, taker in ((here, below), (below, here)):
                if giver.num_replicas > 1:
                    fewer = replace(giver, num_replicas=giver.num_replicas - 1)
                    more = replace(taker, num_replicas=taker.num_replicas + 1)
                    yield _with(stages, index, *((fewer, more) if giver is here else (more, fewer)))
    for index, stage in enumerate(stages):
        if not straight and used < num_workers:
            more = replace(stage, num_replicas=stage.num_replicas + 1)
            yield (*stages[:index], more, *stages[index + 1 :])
        if stage.num_replicas > 1:
            fewer = replace(stage, num_replicas=stage.num_replicas - 1)
            yield (*stages[:index], fewer, *stages[index + 1 :])
        if stage.num_layers > 1 and (used < num_workers or stage.num_replicas > 1):
            middle = (stage.first_layer + stage.last_layer) // 2
            replicas = max(1, stage.num_replicas - 1) if used >= num_workers else stage.num_replicas
            halves = Stage(stage.first_layer, middle, replicas), Stage(middle + 1, stage.last_layer)
            yield (*stages[:index], *halves, *stages[index + 1 :])


def _with(stages: Stages, index: int, here: Stage, below: Stage) -> Stages:
    return (*stages[:index], here, below, *stages[index + 2 :])


def _random_plan(generator: random.Random, num_layers: int, num_workers: int, straight: bool) -> Stages:
    num_stages = generator.randint(1, min(num_layers, num_workers))
    cuts = sorted(generator.sample(range(1, num_layers), num_stages - 1))
    replicas = [1] * num_stages
    if not straight:
        for _ in range(num_workers - num_stages):
            replicas[generator.randrange(num_stages)] += 1
    bounds = [0, *cuts, num_layers]
    return tuple(Stage(bounds[i], bounds[i + 1] - 1, replicas[i]) for i in range(num_stages))


def _size(stages: Stages) -> tuple[int, int]:
    return sum(stage.num_replicas for stage in stages), len(stages)


def _key(stages: Stages) -> tuple[tuple[int, int], ...]:
    return tuple((stage.last_layer, stage.num_replicas) for stage in stages)
