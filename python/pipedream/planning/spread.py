"""By how much single work items are longer or shorter than their mean. Pure; any thread; needs no torch.

Where workers wait for each other that costs time, however even the means are: who is late once makes the
next one wait, and who is early gains nothing. Each worker draws from a deck of factors whose mean is 1, and
shuffles it anew when it is empty: always the same ones, and after every deck the means hold.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pipedream.common.document import check_list, check_number, check_object

__all__ = ["EVEN", "Spread"]

_DECK_SIZE = 20
_NEIGHBOURS = 10  # on each side, by whose mean an item is measured: the machine's slow changes are no spread


@dataclass(frozen=True)
class Spread:
    """Factors by what is done: FORWARD, BACKWARD, UPDATE. What is not named takes its mean."""

    factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def measured(cls, times: Mapping[str, Sequence[Sequence[float]]]) -> Spread:
        """Makes the spread from the times of items by what they do, in rows of like items in the order in
        which they were done."""
        return cls(
            {
                kind: deck
                for kind, rows in times.items()
                if (deck := _deck([factor for row in rows for factor in _factors(row)]))
            }
        )

    def shuffler(self) -> Callable[[int, str], list[float]]:
        """Gives the next deck of a worker and a kind. Each worker shuffles by a generator of its own."""
        randoms: dict[int, random.Random] = {}

        def shuffled(worker: int, kind: str) -> list[float]:
            if worker not in randoms:
                randoms[worker] = random.Random(worker)
            factors = self.factors[kind]
            return randoms[worker].sample(factors, len(factors))

        return shuffled

    def to_dict(self) -> dict[str, list[float]]:
        return {kind: list(factors) for kind, factors in self.factors.items()}

    @classmethod
    def from_dict(cls, name: str, value: object) -> Spread:
        """Raises ValueError naming the field."""
        factors = {}
        for kind, row in check_object(name, value).items():
            given = check_list(f"{name}.{kind}", row)
            factors[kind] = tuple(check_number(f"{name}.{kind}[{i}]", one) for i, one in enumerate(given))
        return cls(factors)


EVEN = Spread()
"""All items of a kind take their mean."""


def _factors(times: Sequence[float]) -> list[float]:
    factors = []
    for index, time in enumerate(times):
        mean = statistics.fmean(times[max(0, index - _NEIGHBOURS) : index + _NEIGHBOURS + 1])
        factors.append(time / mean if mean > 0 else 1.0)
    return factors


def _deck(factors: Sequence[float]) -> tuple[float, ...]:
    """Returns a few factors, of mean 1, that stand for all of them; none if there are too few."""
    if len(factors) < _DECK_SIZE:
        return ()
    ordered = sorted(factors)
    bounds = [index * len(ordered) // _DECK_SIZE for index in range(_DECK_SIZE + 1)]
    deck = [statistics.fmean(ordered[i:j]) for i, j in itertools.pairwise(bounds)]
    mean = statistics.fmean(deck)
    return tuple(factor / mean for factor in deck)
