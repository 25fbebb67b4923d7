"""Tests the meter, which times workers in pairs. It ends sampling when the mean of a pair is known well
enough.
"""

from __future__ import annotations

import itertools

import pytest
from pipedream.links.link_meter import Figure, pair_rounds, sampled


@pytest.mark.parametrize("num_workers", range(2, 18))
def test_rounds_have_every_pair_once_and_no_worker_twice_at_a_time(num_workers: int) -> None:
    rounds = pair_rounds(num_workers)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    pairs = [pair for pairs in rounds for pair in pairs]
    assert sorted(pairs) == list(itertools.combinations(range(num_workers), 2))
    assert len(rounds) == num_workers - 1 + num_workers % 2


def test_a_figure_is_a_mean_with_its_interval() -> None:
    figure = Figure.of([1.0, 2.0, 3.0])
    assert figure.mean == 2.0
    assert figure.error == pytest.approx(4.303 / 3**0.5 / 2)
    assert Figure.of([5.0] * 40) == Figure(5.0, 0.0)


def test_sampling_ends_where_the_mean_is_known() -> None:
    taken = itertools.count()
    figure = sampled(lambda: 1.0 + 0.001 * (next(taken) % 2), seconds=1e9)
    assert next(taken) == 10
    assert figure.error < 0.02


def test_sampling_of_what_varies_ends_at_its_time() -> None:
    taken, clock = itertools.count(), itertools.count()
    figure = sampled(lambda: 1.0 + next(taken) % 2, seconds=20.0, now_s=lambda: float(next(clock)))
    # The clock is read before the first sample, and after every later sample except the second.
    assert next(taken) == 22
    assert figure.error > 0.02


def test_sampling_takes_three_samples_however_long_they_are() -> None:
    taken, clock = itertools.count(), itertools.count(0, 1000)
    sampled(lambda: float(1 + next(taken)), seconds=1.0, now_s=lambda: float(next(clock)))
    assert next(taken) == 3
