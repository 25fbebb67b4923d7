"""Computes the time of one work item, which is one forward, backward or update. The time depends on the
number of microbatches, is longer after the worker has waited, and varies at random.

Waking: a core that has idled finds neither the code nor the data of its next item in its caches, and its
clock may have slowed down. The first item of each kind after a wait pays for that. Some of the cost arises at
once, some grows over milliseconds. So the cost is a sum of terms. Each term grows with the wait until the
wait reaches the term's after_ms.

Spread: single items take longer or shorter than their mean. That costs time where workers wait for each
other: a late worker delays the next one, and an early one gains nothing. So each simulated worker multiplies
an item's mean time by a factor from its deck, a list of 20 measured factors whose mean is 1. It shuffles the
deck whenever it has used all factors, so over whole decks the mean time is right.

The values never change once built; any thread; needs no torch.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "COUNTED_MAX",
    "EVEN",
    "WORK_KINDS",
    "CutCost",
    "ItemCost",
    "Spread",
    "Waking",
    "measured_spread",
    "microbatch_counts",
    "shuffler",
    "waking_share",
]

WORK_KINDS = ("FORWARD", "BACKWARD", "UPDATE")
"""Opcodes of the items that are timed."""
COUNTED_MAX = 32
"""The most microbatches that a profile times."""


def microbatch_counts(batch_size: int | None, most: int = COUNTED_MAX) -> list[int]:
    """Returns the numbers of microbatches to try and to time: powers of two up to `most` and to batch_size.
    torch.chunk may make fewer pieces of batch_size samples: of 5 samples for 4 microbatches it makes 3. Then
    the power is replaced by the number of pieces. batch_size None: any number of samples.
    """
    powers = [1 << exponent for exponent in range(most.bit_length())]
    if batch_size is None:
        return powers
    return sorted({-(-batch_size // -(-batch_size // m)) for m in powers if m <= batch_size})


class CutCost(NamedTuple):
    """The times of one kind of work item (a forward or a backward) in a minibatch that is cut into
    num_microbatches: of the item of the first microbatch, and of the item of each later one.
    """

    num_microbatches: int
    first_ms: float
    later_ms: float


@dataclass(frozen=True)
class ItemCost:
    """Milliseconds of one work item if a minibatch has m microbatches.

    The first microbatch takes first_ms + minibatch_ms / m. Each later one takes later_ms + minibatch_ms / m.
    Both are straight lines in 1 / m.

    measured: the times measured for some m, in ascending order of m. They take precedence over the lines.
    Between two measured m, the time is interpolated in 1 / m. Above the largest, the time keeps its distance
    from the line. For m = 1 the time is always on the line.

    Raises ValueError unless the measured m ascend, from 2 or more.
    """

    first_ms: float = 0.0
    later_ms: float = 0.0
    minibatch_ms: float = 0.0
    measured: tuple[CutCost, ...] = ()

    def __post_init__(self) -> None:
        counts = [row.num_microbatches for row in self.measured]
        if counts != sorted({*counts} - {0, 1}):
            raise ValueError(f"measured has num_microbatches {counts}: give ascending numbers, from 2 on")

    @classmethod
    def of_pieces(cls, whole_ms: float, pieces_ms: Mapping[int, tuple[float, float]]) -> ItemCost:
        """Makes the cost from measured times. whole_ms: the time of a whole minibatch. pieces_ms: for each
        number of microbatches, the times of the first microbatch and of a later one.
        """
        if not pieces_ms:
            return cls(whole_ms, whole_ms)
        most = max(pieces_ms)
        first_ms, later_ms = pieces_ms[most]
        minibatch_ms = (whole_ms - first_ms) * most / (most - 1)
        minibatch_ms = min(max(minibatch_ms, 0.0), whole_ms)
        return cls(
            whole_ms - minibatch_ms,
            max(0.0, later_ms - minibatch_ms / most),
            minibatch_ms,
            tuple(CutCost(m, *times) for m, times in sorted(pieces_ms.items())),
        )

    def first(self, num_microbatches: int) -> float:
        return self._of(num_microbatches).first_ms

    def later(self, num_microbatches: int) -> float:
        return self._of(num_microbatches).later_ms

    def plus(self, other: ItemCost) -> ItemCost:
        counts = sorted({row.num_microbatches for row in (*self.measured, *other.measured)})
        return ItemCost(
            self.first_ms + other.first_ms,
            self.later_ms + other.later_ms,
            self.minibatch_ms + other.minibatch_ms,
            tuple(CutCost(m, self.first(m) + other.first(m), self.later(m) + other.later(m)) for m in counts),
        )

    def scaled(self, factor: float) -> ItemCost:
        return ItemCost(
            self.first_ms * factor,
            self.later_ms * factor,
            self.minibatch_ms * factor,
            tuple(
                CutCost(m, first_ms * factor, later_ms * factor) for m, first_ms, later_ms in self.measured
            ),
        )

    def growing(self, factor: float) -> ItemCost:
        """Returns the cost with minibatch_ms, the part that grows with the samples, multiplied by
        `factor`.
        """
        more_ms = self.minibatch_ms * (factor - 1)
        return ItemCost(
            self.first_ms,
            self.later_ms,
            self.minibatch_ms * factor,
            tuple(
                CutCost(m, max(0.0, first_ms + more_ms / m), max(0.0, later_ms + more_ms / m))
                for m, first_ms, later_ms in self.measured
            ),
        )

    @classmethod
    def mean(cls, costs: Sequence[ItemCost]) -> ItemCost:
        total = costs[0]
        for cost in costs[1:]:
            total = total.plus(cost)
        return total.scaled(1 / len(costs))

    def _of(self, num_microbatches: int) -> CutCost:
        points = (self._on_line(1), *self.measured)
        for fewer, more in itertools.pairwise(points):
            if num_microbatches <= more.num_microbatches:
                gone = 1 / fewer.num_microbatches - 1 / num_microbatches
                share = gone / (1 / fewer.num_microbatches - 1 / more.num_microbatches)
                return CutCost(
                    num_microbatches,
                    fewer.first_ms + share * (more.first_ms - fewer.first_ms),
                    fewer.later_ms + share * (more.later_ms - fewer.later_ms),
                )
        last, line = points[-1], self._on_line(num_microbatches)
        last_on_line = self._on_line(last.num_microbatches)
        return CutCost(
            num_microbatches,
            max(0.0, line.first_ms + (last.first_ms - last_on_line.first_ms)),
            max(0.0, line.later_ms + (last.later_ms - last_on_line.later_ms)),
        )

    def _on_line(self, num_microbatches: int) -> CutCost:
        of_samples_ms = self.minibatch_ms / num_microbatches
        return CutCost(num_microbatches, self.first_ms + of_samples_ms, self.later_ms + of_samples_ms)


@dataclass(frozen=True)
class Waking:
    """One term of the cost of waking. An item pays all of it if the worker has waited after_ms or more since
    its last item of the same kind. After a shorter wait the item pays a proportional part.
    """

    after_ms: float = 0.0
    shares: Mapping[str, float] = field(default_factory=dict)
    """The cost for each kind of item, as a share of that item's time for a whole minibatch. The item of a
    microbatch pays the same milliseconds.
    """

    def __post_init__(self) -> None:
        for kind in self.shares:
            if kind not in WORK_KINDS:
                raise ValueError(f"shares has {kind!r}: known are {', '.join(WORK_KINDS)}")

    def part(self, waited_ms: float) -> float:
        """Returns the share of the cost that an item pays after waiting for waited_ms, 0 to 1."""
        return min(1.0, waited_ms / self.after_ms) if self.after_ms > 0 else 0.0


def waking_share(wakings: Iterable[Waking], kind: str, waited_ms: float) -> float:
    """Returns what an item pays for waking after a wait of waited_ms: the sum of the terms, as a share of the
    item's time for a whole minibatch.
    """
    return sum(waking.shares.get(kind, 0.0) * waking.part(waited_ms) for waking in wakings)


_DECK_SIZE = 20
# An item is compared with the mean of 10 items on each side, so that slow drifts do not count.
_NEIGHBOURS = 10

Spread = Mapping[str, tuple[float, ...]]
"""The deck of factors for each kind of item (FORWARD, BACKWARD, UPDATE). An item takes its mean time
multiplied by a factor. Items of a kind without a deck take their mean time.
"""

EVEN: Spread = {}
"""The spread in which every item takes the mean of its kind."""


def measured_spread(times: Mapping[str, Sequence[Sequence[float]]]) -> Spread:
    """Makes the decks from measured times. times: for each kind of item, rows of times. A row has the times
    of items that do the same work, in the order in which they ran.
    """
    return {
        kind: deck
        for kind, rows in times.items()
        if (deck := _deck([factor for row in rows for factor in _factors(row)]))
    }


def shuffler(spread: Spread) -> Callable[[int, str], list[float]]:
    """Returns a function (worker, kind of item) -> the worker's next deck of factors, shuffled. Each worker
    has a random generator of its own, so that the order in which workers ask does not matter.
    """
    randoms: dict[int, random.Random] = {}

    def shuffled(worker: int, kind: str) -> list[float]:
        if worker not in randoms:
            randoms[worker] = random.Random(worker)
        factors = spread[kind]
        return randoms[worker].sample(factors, len(factors))

    return shuffled


def _factors(times: Sequence[float]) -> list[float]:
    factors = []
    for index, time in enumerate(times):
        mean = statistics.fmean(times[max(0, index - _NEIGHBOURS) : index + _NEIGHBOURS + 1])
        factors.append(time / mean if mean > 0 else 1.0)
    return factors


def _deck(factors: Sequence[float]) -> tuple[float, ...]:
    """Returns a deck of _DECK_SIZE factors with mean 1: means of equal parts of the sorted factors. Returns
    an empty deck if fewer factors are given.
    """
    if len(factors) < _DECK_SIZE:
        return ()
    ordered = sorted(factors)
    bounds = [index * len(ordered) // _DECK_SIZE for index in range(_DECK_SIZE + 1)]
    deck = [statistics.fmean(ordered[i:j]) for i, j in itertools.pairwise(bounds)]
    mean = statistics.fmean(deck)
    return tuple(factor / mean for factor in deck)
