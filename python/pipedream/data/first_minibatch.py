"""Minibatch 0, looked at before the run takes it. Owned by the thread that calls run()."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pipedream.data.stream import without_processes
from pipedream.model.loader_generators import generators_of_loader_kept
from pipedream.model.seeding import RngState

__all__ = ["KeptMinibatch", "PeekedIterator", "first_of"]


class PeekedIterator:
    """An iterator whose first item may be looked at before it is taken. Each look, and the taking, leaves the
    generators as the iterator left them when it made the item."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator
        self._peeked: list[Any] = []
        self._generators: RngState | None = None

    def peek(self) -> Any | None:
        if self._generators is None:
            self._peeked = [item for item in [next(self.iterator, None)] if item is not None]
            self._generators = RngState.capture()
        self._generators.restore()
        return self._peeked[0] if self._peeked else None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._peeked:
            return next(self.iterator)
        assert self._generators is not None
        self._generators.restore()
        return self._peeked.pop()

    def __reduce__(self) -> Any:
        raise TypeError("an iterator stays with the caller")


@dataclass
class KeptMinibatch:
    """Minibatch 0 where it was read before the run, for the one who needs it again."""

    parts: tuple[Any, Any] | None = None
    """(inputs, targets)."""

    def take(self) -> tuple[Any, Any] | None:
        parts, self.parts = self.parts, None
        return parts


def first_of(data: Iterable[Any]) -> Any:
    """Of data that will be iterated again from the beginning; an iterator's by peek(). What data, a dataset
    or a sampler count in attributes when they are iterated (epochs) stays as it is, and so do generators
    that a DataLoader was given. Raises ValueError where there is no minibatch."""
    if isinstance(data, PeekedIterator):
        first = data.peek()
    elif isinstance(data, torch.utils.data.DataLoader):
        with generators_of_loader_kept(data):
            first = next(iter(_alone(data)), None)
    else:
        first = next(iter(_shallow_copy(data)), None)
    if first is None:
        raise ValueError("data yields no minibatch: check the dataset, batch_size and drop_last")
    return first


def _alone(loader: torch.utils.data.DataLoader[Any]) -> torch.utils.data.DataLoader[Any]:
    """The loader without processes, which would be started for one minibatch, and copies of its parts."""
    alone = copy.copy(without_processes(loader))
    assert isinstance(alone, torch.utils.data.DataLoader)
    alone.num_workers, alone.timeout = 0, 0
    for name in ("dataset", "sampler", "batch_sampler"):
        alone.__dict__[name] = _shallow_copy(getattr(loader, name))  # a loader refuses others once it is made
    if isinstance(alone.batch_sampler, torch.utils.data.BatchSampler):
        of_batches = alone.batch_sampler.sampler  # another one than the loader's where it was given
        is_loaders = of_batches is loader.sampler
        alone.batch_sampler.sampler = alone.sampler if is_loaders else _shallow_copy(of_batches)
    return alone


def _shallow_copy(data: Any) -> Any:
    """As it is where it cannot be copied, or is not changed by an iteration."""
    if data is None or isinstance(data, (list, tuple)):
        return data
    try:
        return copy.copy(data)
    except TypeError:
        return data
