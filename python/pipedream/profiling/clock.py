"""Clocks of the profiler: spans of one minibatch, on the host or by a GPU's own events.

Owned by the thread that profiles; on a GPU a backward's spans end on the thread of autograd's that runs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

__all__ = ["Clock", "make_clock", "make_work_clock"]


def make_clock(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


def make_work_clock(device: torch.device) -> Clock:
    """A clock for comparisons: on a host with one thread it counts the time of this process alone, whatever
    else the machine does meanwhile."""
    if device.type == "cuda" or torch.get_num_threads() > 1:
        return make_clock(device)
    return HostClock(time.process_time)


class Clock:
    """Times spans of one minibatch, in order."""

    def start_minibatch(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def next(self) -> None:
        """The end of a span and the start of another."""
        self.stop()
        self.start()

    def finish_minibatch(self) -> list[float]:
        """Milliseconds of each span."""
        raise NotImplementedError


class HostClock(Clock):
    def __init__(self, now_s: Callable[[], float] | None = None) -> None:
        """now_s: the time; None: that of the machine."""
        self._now_s = now_s or time.perf_counter

    def start_minibatch(self) -> None:
        self._spans: list[float] = []

    def start(self) -> None:
        self._started = self._now_s()

    def stop(self) -> None:
        self._spans.append((self._now_s() - self._started) * 1e3)

    def finish_minibatch(self) -> list[float]:
        return self._spans


class CudaClock(Clock):
    """Events on the current stream, read after one synchronisation per minibatch: none between layers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start_minibatch(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        torch.cuda.synchronize(self._device)

    def start(self) -> None:
        self._started = self._record()

    def stop(self) -> None:
        self._spans.append((self._started, self._record()))

    def finish_minibatch(self) -> list[float]:
        torch.cuda.synchronize(self._device)
        return [started.elapsed_time(stopped) for started, stopped in self._spans]

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
