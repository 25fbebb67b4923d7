"""Makes a covering array: few rows of options in which every pair of values of two options occurs at least
once. Most faults need only two options together. A matrix of all combinations would have each pair hundreds
of times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

__all__ = ["Row", "covering_rows", "pairs_of", "parametrize_pairs"]

Row = dict[str, Any]
_Pair = frozenset[tuple[str, int]]


def covering_rows(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], given: Iterable[Row] = ()
) -> list[Row]:
    """Returns rows that contain every pair of values which an allowed row can contain. Each call returns the
    same rows.

        factors: maps each option to its values.
        allowed: returns whether a row is allowed. It is also called with partial rows. If it refuses a
            partial row, it must refuse all rows that contain it.
        given: partial rows. Each becomes one row, whose other values are chosen for new pairs.

    The choice is greedy. The next value is the one with the most new pairs. Among equal ones it is the one
    that was used least.
    """
    chooser = _Chooser(factors, allowed)
    rows = [chooser.complete(dict(row)) for row in given]
    for pair in sorted(chooser.open_pairs, key=sorted):
        if pair not in chooser.open_pairs:
            continue
        seed = {name: factors[name][position] for name, position in pair}
        if allowed(seed):
            rows.append(chooser.complete(seed))
    return rows


def parametrize_pairs(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by a few rows that contain every pair of the factors' values, instead of all
    combinations.
    """
    rows = [tuple(row.values()) for row in covering_rows(factors, lambda row: True)]
    ids = ["-".join(str(value).removeprefix("torch.") for value in row) for row in rows]
    return pytest.mark.parametrize(tuple(factors), rows, ids=ids)


def pairs_of(factors: Mapping[str, Sequence[Any]], row: Row) -> set[_Pair]:
    """Returns the pairs of a row. A value is named by its position among its factor's values."""
    places = [(name, factors[name].index(value)) for name, value in row.items()]
    return {frozenset(pair) for pair in itertools.combinations(places, 2)}


class _Chooser:
    def __init__(self, factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> None:
        self._factors = factors
        self._allowed = allowed
        self._uses = {(name, i): 0 for name, values in factors.items() for i in range(len(values))}
        self.open_pairs: set[_Pair] = {
            frozenset(pair)
            for pair in itertools.combinations(self._uses, 2)
            if len({name for name, _ in pair}) == 2
        }

    def complete(self, row: Row) -> Row:
        """Completes the row with a value for every factor, and marks its pairs as covered."""
        row = self._filled(row)
        for name, values in self._factors.items():
            self._uses[name, values.index(row[name])] += 1
        self.open_pairs -= pairs_of(self._factors, row)
        return {name: row[name] for name in self._factors}

    def _filled(self, row: Row) -> Row:
        left = [name for name in self._factors if name not in row]
        if not left:
            return row
        # The factor with the most values comes first, because it has the most pairs.
        name = max(left, key=lambda each: len(self._factors[each]))
        for value in sorted(self._factors[name], key=lambda value: self._worth(row, name, value)):
            longer = row | {name: value}
            if self._allowed(longer):
                try:
                    return self._filled(longer)
                except LookupError:
                    continue
        raise LookupError(f"no row with {row} is allowed")

    def _worth(self, row: Row, name: str, value: Any) -> tuple[int, int, int]:
        position = self._factors[name].index(value)
        new = sum(
            frozenset({(name, position), (other, self._factors[other].index(chosen))}) in self.open_pairs
            for other, chosen in row.items()
        )
        return -new, self._uses[name, position], position
