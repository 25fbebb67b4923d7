"""Measures bandwidth and latency between two workers over their channels, by the clock of one of them.

The worker with the clock is the leader, the other worker is the follower. The leader asks for one of three
measurements:

    leader                        follower
    request                --->
                           <---   ready
    (the leader's clock starts)
    a few bytes            --->                 latency: a round trip, repeated
                           <---   a few bytes
    all pieces             --->                 bandwidth to the follower
                           <---   a few bytes
    a few bytes            --->                 bandwidth from the follower
                           <---   all pieces

The time of a bandwidth measurement contains one round trip, which is subtracted. Runs on the compute thread.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from pipedream import _core

__all__ = [
    "ITEM_BYTES",
    "WORD_BYTES",
    "Figure",
    "PairChannels",
    "PairFigures",
    "follow",
    "lead",
    "pair_rounds",
    "sampled",
]

ITEM_BYTES = 1 << 20
WORD_BYTES = 16
"""Bytes of a request. A request is two int64: the kind of measurement, and its number of round trips or of
bytes."""

_LATENCY, _TO_FOLLOWER, _TO_LEADER, _END = range(4)
_ROUND_TRIPS = 20  # round trips in one latency sample
_SMALL_BYTES = 8
_FIRST_BYTES, _BYTES_MAX = 64 << 10, 256 << 20  # the fewest and the most bytes in one bandwidth sample
_GROWTH = 4  # the bytes grow by this factor until a sample takes long enough
# A bandwidth sample takes at least _SAMPLE_S seconds and the time of _TRIPS_MIN round trips, unless it has
# _BYTES_MAX bytes.
_SAMPLE_S = 0.03
_TRIPS_MIN = 10
_SAMPLES_MIN, _SAMPLES_WANTED = 3, 10
_ERROR_ENOUGH = 0.02
# Student's t, two-sided, 95 %, by the number of samples (degrees of freedom: one less). For more than 10
# samples the value for 10 is used, which is slightly too large.
_STUDENT_T = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def pair_rounds(num_workers: int) -> list[list[tuple[int, int]]]:
    """Returns all pairs (a, b) with a < b, in rounds. In a round each worker is in one pair at most, so the
    pairs of a round can measure at the same time. There are as few rounds as possible."""
    circle: list[int | None] = [*range(num_workers), *([None] if num_workers % 2 else [])]
    half = len(circle) // 2
    rounds = []
    for _ in range(len(circle) - 1):  # round robin: the first worker stays in its place, the others rotate
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append(sorted((min(a, b), max(a, b)) for a, b in met if a is not None and b is not None))
        circle.insert(1, circle.pop())
    return rounds


@dataclass(frozen=True)
class Figure:
    """A mean and its error. The error is half the width of the mean's 95 % confidence interval, divided by
    the mean."""

    mean: float
    error: float

    @classmethod
    def of(cls, samples: list[float]) -> Figure:
        """Makes the figure of these samples. There must be at least 3."""
        mean = statistics.fmean(samples)
        t = _STUDENT_T[min(len(samples), max(_STUDENT_T))]
        return cls(mean, t * statistics.stdev(samples) / math.sqrt(len(samples)) / mean)


@dataclass(frozen=True)
class PairFigures:
    """One pair's figures: seconds of a one-way trip, and seconds per byte in each direction."""

    latency_s: Figure
    to_follower_s_per_byte: Figure
    to_leader_s_per_byte: Figure


@dataclass(frozen=True)
class PairChannels:
    """One end of a pair: its core, its device, and the names of its four channels. Words carry requests and
    answers, pieces carry data; each has a channel in both directions."""

    core: _core.Worker
    words_out: str
    words_in: str
    pieces_out: str
    pieces_in: str
    device: torch.device

    def say(self, what: int, amount: int = 0) -> None:
        self.core.send_item(self.words_out, [to_dlpack(torch.tensor([what, amount]))])

    def hear(self) -> tuple[int, int]:
        what, amount = self._receive(self.words_in).tolist()
        return int(what), int(amount)

    def send_small(self) -> None:
        self.send_bytes(_SMALL_BYTES)

    def send_bytes(self, num_bytes: int) -> None:
        piece = torch.zeros(min(num_bytes, ITEM_BYTES), dtype=torch.uint8, device=self.device)
        for begin in range(0, num_bytes, ITEM_BYTES):
            self.core.send_item(self.pieces_out, [to_dlpack(piece[: num_bytes - begin])])

    def receive_bytes(self, num_bytes: int) -> None:
        """Receives num_bytes bytes, and returns when all have arrived."""
        while num_bytes > 0:
            num_bytes -= self._receive(self.pieces_in).numel()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _receive(self, channel: str) -> Tensor:
        item = self.core.receive_item(channel)
        assert item is not None  # receive_item() waits without a time-out
        (capsule,) = item.take_tensors()
        return from_dlpack(capsule)


def lead(channels: PairChannels, seconds: float) -> PairFigures:
    """Measures latency and bandwidth together with the other worker, which calls follow().

    Takes samples of each figure for `seconds`, but at least 3. A figure takes less time if it has 10 samples
    and its error is at most 2 %."""

    def timed(what: int, amount: int) -> float:
        channels.say(what, amount)
        channels.hear()
        began_s = time.perf_counter()
        if what == _LATENCY:
            for _ in range(amount):
                channels.send_small()
                channels.receive_bytes(_SMALL_BYTES)
        elif what == _TO_FOLLOWER:
            channels.send_bytes(amount)
            channels.receive_bytes(_SMALL_BYTES)
        else:
            channels.send_small()
            channels.receive_bytes(amount)
        return time.perf_counter() - began_s

    timed(_LATENCY, _ROUND_TRIPS)  # warm-up: the first use of a channel is slow
    round_trip = sampled(lambda: timed(_LATENCY, _ROUND_TRIPS) / _ROUND_TRIPS, seconds)

    def per_byte(what: int) -> Figure:
        num_bytes = _FIRST_BYTES
        long_s = max(_SAMPLE_S, _TRIPS_MIN * round_trip.mean)
        while timed(what, num_bytes) < long_s and num_bytes < _BYTES_MAX:
            num_bytes *= _GROWTH

        def sample() -> float:
            took_s = timed(what, num_bytes)
            # The round trip of this sample may have been shorter than the mean round trip. So at most half of
            # the sample's time is subtracted.
            return max(took_s - round_trip.mean, took_s / 2) / num_bytes

        return sampled(sample, seconds)

    figures = PairFigures(
        Figure(round_trip.mean / 2, round_trip.error), per_byte(_TO_FOLLOWER), per_byte(_TO_LEADER)
    )
    channels.say(_END)
    channels.core.wait_until_sent(channels.words_out)
    return figures


def follow(channels: PairChannels) -> None:
    """Answers the leader's requests until the leader has measured everything."""
    while True:
        what, amount = channels.hear()
        if what == _END:
            return
        channels.say(what)
        if what == _LATENCY:
            for _ in range(amount):
                channels.receive_bytes(_SMALL_BYTES)
                channels.send_small()
        elif what == _TO_FOLLOWER:
            channels.receive_bytes(amount)
            channels.send_small()
        else:
            channels.receive_bytes(_SMALL_BYTES)
            channels.send_bytes(amount)


def sampled(
    sample: Callable[[], float], seconds: float, now_s: Callable[[], float] = time.monotonic
) -> Figure:
    """Returns the mean of at least 3 samples. Stops after `seconds`, or earlier if there are 10 samples and
    the mean's error is at most 2 %."""
    ends_s = now_s() + seconds
    samples: list[float] = []
    while True:
        samples.append(sample())
        if len(samples) < _SAMPLES_MIN:
            continue
        figure = Figure.of(samples)
        if now_s() >= ends_s or (len(samples) >= _SAMPLES_WANTED and figure.error <= _ERROR_ENOUGH):
            return figure
