"""Validation reader: the validation minibatches at a stage that reads data, from the beginning every time.

Owned by the worker's compute thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pipedream import _core
from pipedream.data.stream import fingerprint
from pipedream.model.batches import parts_of
from pipedream.model.seeding import RngState, generators_kept, seed_all

__all__ = ["ValidationReader"]


class ValidationReader:
    """The validation minibatches of one evaluation after the other. They draw from generators that are seeded
    alike at every stage that reads; the process's own stay as they are."""

    def __init__(self, data: Iterable[Any], seed: int) -> None:
        self._data = data
        self._seed = seed
        self._generators: RngState | None = None
        self._batches: Iterator[Any] | None = None
        self._num_read = 0

    def begin(self, boundary: int) -> None:
        """The next evaluation is of the weights before this minibatch."""
        self.end()
        with generators_kept():
            seed_all(_core.derived_seed(self._seed, boundary))
            self._generators = RngState.capture()
        self._num_read = 0

    def next(self) -> tuple[Any, Any, int] | None:
        """(inputs, targets, fingerprint); None when there are no more."""
        assert self._generators is not None
        with generators_kept():
            self._generators.restore()
            if self._batches is None:
                self._batches = iter(self._data)
            batch = next(self._batches, None)
            self._generators = RngState.capture()
        if batch is None:
            if self._num_read == 0:
                raise ValueError("validation: data yielded nothing: give data that can be iterated again")
            return None
        inputs, targets = parts_of(batch, self._num_read)
        self._num_read += 1
        return inputs, targets, fingerprint(inputs, targets)

    def end(self) -> None:
        """Lets the data's iterator go, and with it the processes of a DataLoader."""
        self._batches = None
