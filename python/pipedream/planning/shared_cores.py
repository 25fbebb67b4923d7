"""How much faster workers of one machine are while others wait. Pure; any thread; torch-free.

Every worker counts as having a core of its own. Durations are those of as many workers as the machine has
cores, all at work. The fewer workers are at work, the faster each one is, as caches and memory are theirs.

    workers at work     1             num_cores or more
    speed of each       alone_speed   1

Between these each other worker lengthens an item by the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipedream.common.document import check_number, check_whole

__all__ = ["SharedHost"]


@dataclass(frozen=True)
class SharedHost:
    """A machine, of which each has num_workers in the order of their ranks. Raises ValueError naming the
    field for less than one core or worker, and for workers that are slower alone than together."""

    num_workers: int
    num_cores: int
    alone_speed: float = 1.0

    def __post_init__(self) -> None:
        check_whole("num_workers", self.num_workers, at_least=1)
        check_whole("num_cores", self.num_cores, at_least=1)
        if check_number("alone_speed", self.alone_speed) < 1:
            raise ValueError(f"alone_speed is {self.alone_speed}: alone a worker is at least as fast, 1")

    def speed(self, num_at_work: int) -> float:
        """The speed of each of so many workers that are at work at once."""
        if num_at_work >= self.num_cores:
            return 1.0
        others_share = (num_at_work - 1) / (self.num_cores - 1)
        return self.alone_speed / (1 + (self.alone_speed - 1) * others_share)

    def speeds(self) -> list[float]:
        """The speeds of 1, 2, ... workers at work at once, up to as many as there are cores."""
        return [self.speed(1 + core) for core in range(self.num_cores)]

    @classmethod
    def measured(cls, num_workers: int, num_cores: int, times_alone: float) -> SharedHost:
        """times_alone: how many times as fast one of the workers is alone as beside all the others."""
        if num_cores == 1 or num_workers == 1:
            return cls(num_workers, num_cores)
        alone_speed = times_alone
        if num_workers < num_cores:
            alone_speed = 1 + (times_alone - 1) * (num_cores - 1) / (num_workers - 1)
        return cls(num_workers, num_cores, max(1.0, alone_speed))
