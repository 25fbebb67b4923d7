"""Measures how long each layer takes for one microbatch, if a minibatch is cut into m pieces. A small piece
takes longer than 1/m of the minibatch.

Each round times the whole minibatch and, for every m, all of its m pieces. If time is short, there is only
one round, and it times only one piece for every m. The result is the median over the rounds. On a host with
one thread the process's own CPU time is measured, because a busy machine interrupts long spans more often
than short ones.

A minibatch in more pieces cannot take less time than in fewer pieces. If the measured times say so, the
reason is noise. Then neighbouring m get the mean of their times. Runs in the thread that profiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipedream.model.microbatch import check_alike, chunk, samples_of
from pipedream.planning.item_cost import microbatch_counts
from pipedream.planning.layer_profile import MicrobatchTimes
from pipedream.profiling.timed_passes import Clock, TimedPasses

__all__ = ["microbatch_times", "product_ms_per_replica"]

_ROUNDS_MAX = 5

_Pieces = Sequence[tuple[Any, Any]]  # (inputs, targets) of each piece
_Times = tuple[list[float], list[float]]  # milliseconds of each layer's forward and backward


def microbatch_times(
    passes: TimedPasses,
    inputs: Any,
    targets: Any,
    clock: Clock,
    *,
    whole_ms: float,
    rounds: int,
    seconds: float | None,
) -> list[tuple[MicrobatchTimes, ...]] | None:
    """Returns times of microbatches by layer, or None if the samples of a minibatch cannot be counted.

    inputs, targets: a minibatch on the device. whole_ms: the profile's time of all layers together. rounds:
    the largest number of rounds; at most five are run. If the model refuses a piece, as batch norm refuses a
    single sample, larger m are not tried. If the seconds do not suffice, one piece of each size is still
    timed once. This takes about as long as three minibatches.
    """
    count = samples_of(inputs, targets)
    if not count:
        return None
    began_s, counts = time.perf_counter(), microbatch_counts(count)
    pieces_max = None
    if seconds is not None and 2e-3 * len(counts) * whole_ms > seconds:
        pieces_max, rounds = 1, 1
    pieces: dict[int, _Pieces] = {1: [(inputs, targets)]}
    for m in counts[1:]:
        try:
            cut = _cut(inputs, targets, m, count)[:pieces_max]
            for piece in cut:  # the first run of a size also pays for allocation and the choice of kernels
                passes.run(0, piece[0], piece[1], clock)
        except Exception:
            break  # a run with so many microbatches would fail in the same way
        pieces[m] = cut
    measured: dict[int, list[_Times]] = {m: [] for m in pieces}
    for number in range(min(rounds, _ROUNDS_MAX)):
        if number > 0 and seconds is not None and time.perf_counter() >= began_s + seconds:
            break
        for m, of_m in pieces.items():
            times = _sum([passes.run(0, piece[0], piece[1], clock) for piece in of_m])
            measured[m].append(_scaled(times, m / len(of_m)))
    medians = {m: _medians(of_m) for m, of_m in measured.items()}
    sums_ms = {m: sum(forward) + sum(backward) for m, (forward, backward) in medians.items()}
    factors = _rising(sums_ms, whole_ms)
    return [
        tuple(
            MicrobatchTimes(m, factors[m] * forward[layer] / m, factors[m] * backward[layer] / m)
            for m, (forward, backward) in medians.items()
            if m > 1
        )
        for layer in range(len(passes.layer_names))
    ]


def _cut(inputs: Any, targets: Any, m: int, count: int) -> _Pieces:
    check_alike(inputs, targets, m, minibatch=0)
    parts = (("the inputs", inputs), ("the targets", targets))
    cut = [chunk(part, m, name=name, minibatch=0, num_samples=count) for name, part in parts]
    return [*zip(*cut, strict=True)]


def _sum(runs: Sequence[_Times]) -> _Times:
    forward, backward = zip(*runs, strict=True)
    return [*map(sum, zip(*forward, strict=True))], [*map(sum, zip(*backward, strict=True))]


def _scaled(times: _Times, factor: float) -> _Times:
    forward, backward = times
    return [factor * ms for ms in forward], [factor * ms for ms in backward]


def _medians(runs: Sequence[_Times]) -> _Times:
    forward, backward = zip(*runs, strict=True)
    return (
        [*map(statistics.median, zip(*forward, strict=True))],
        [*map(statistics.median, zip(*backward, strict=True))],
    )


def _rising(sums_ms: Mapping[int, float], whole_ms: float) -> dict[int, float]:
    """Returns for each m the factor by which measured times of m pieces are multiplied. The corrected sums
    over all layers start at whole_ms and never fall as m rises. They are the nearest such sequence by least
    squares.
    """
    blocks: list[tuple[float, int]] = []  # mean, and how many m have it
    for sum_ms in sums_ms.values():
        mean, size = sum_ms, 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        blocks.append((mean, size))
    means = [mean for mean, size in blocks for _ in range(size)]
    measure = whole_ms / means[0] if means[0] else 1.0
    pairs = zip(sums_ms.items(), means, strict=True)
    return {m: measure * mean / sum_ms if sum_ms else measure for (m, sum_ms), mean in pairs}


_MANY = 4  # rows of this many replicas are timed
_NUM_TRIES = 3  # the fastest of these counts


def product_ms_per_replica(weight: torch.Tensor, num_rows: int, clock: Clock) -> float:
    """Returns the milliseconds that one more replica adds to the product of a weight's two factors. num_rows:
    the rows that each replica adds to the factors.
    """
    num_outputs, num_inputs = weight.shape

    def least_ms(times: int) -> float:
        gradients = weight.new_ones(times * num_rows, num_outputs)
        inputs = weight.new_ones(times * num_rows, num_inputs)
        clock.start_minibatch()
        for _ in range(_NUM_TRIES):
            clock.start()
            torch.mm(gradients.t(), inputs)
            clock.stop()
        return min(clock.finish_minibatch())

    with torch.no_grad():
        return max(0.0, least_ms(_MANY) - least_ms(1)) / (_MANY - 1)
