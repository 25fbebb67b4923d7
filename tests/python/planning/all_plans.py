"""Makes all possible plans, to which tests compare the result of an exact search."""

from __future__ import annotations

from collections.abc import Iterator

from pipedream.planning.plan import Stage

__all__ = ["enumerate_plans"]


def enumerate_plans(num_layers: int, num_workers: int, straight: bool = False) -> Iterator[tuple[Stage, ...]]:
    """Yields all plans on at most num_workers workers. straight: only those with one replica per stage."""

    def extend(first: int, left: int) -> Iterator[tuple[Stage, ...]]:
        if first == num_layers:
            yield ()
            return
        for last in range(first, num_layers):
            for replicas in range(1, (min(left, 1) if straight else left) + 1):
                for rest in extend(last + 1, left - replicas):
                    yield (Stage(first, last, replicas), *rest)

    yield from extend(0, num_workers)
