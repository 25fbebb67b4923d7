"""Minibatches cut into microbatches for the stages that read data: the first, the last, or both; and the
validation minibatches there, from the beginning every time.

Owned by the worker's compute thread.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipedream import _core
from pipedream.common.microbatches import Microbatches
from pipedream.data.minibatch_source import MinibatchSource
from pipedream.data.stream import Minibatch, fingerprint, fingerprint_of
from pipedream.model.batches import parts_of
from pipedream.model.ignored_labels import IgnoredLabels, UnevenLabels
from pipedream.model.microbatch import check_alike, chunk, counts_of, sizes_of, weights
from pipedream.model.seeding import RngState, generators_kept, seed_all

__all__ = ["BatchReader", "ForwardedValidation", "Microbatch", "ValidationReader"]

_POLL_S = 0.001


@dataclass(slots=True)
class Microbatch:
    """The data of one forward."""

    inputs: Any = None
    targets: Any = None
    fingerprint: int = 0
    """The fingerprint of the whole minibatch; both ends of the pipeline compare it."""
    weight: float = 1.0
    """Share of the minibatch's loss."""
    is_empty: bool = False
    """torch.chunk made fewer pieces than microbatches. It counts nothing."""
    uneven_labels: tuple[UnevenLabels, ...] = ()
    """Labels of -100, by which the microbatches of the minibatch may count otherwise than by samples."""


_NOTHING_EARLY: tuple[Minibatch | None, list[Microbatch]] = (None, [])
_HANDED_OUT = Microbatch()  # whoever has one keeps its tensors no longer than it must


class BatchReader:
    """Hands out microbatches in order."""

    def __init__(
        self,
        source: MinibatchSource,
        num_microbatches: int,
        *,
        is_first: bool,
        is_last: bool,
        check_inputs: Callable[[Any, int], None],
        weight_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        """check_inputs: (inputs, minibatch); raises ValueError for what the pipeline was not planned for.
        weight_fn: (targets) -> what a microbatch counts in its minibatch; None: its samples."""
        self.source = source
        """Asked for a minibatch before it is read."""
        self._num_microbatches = num_microbatches
        self._is_first = is_first
        self._is_last = is_last
        self._is_compared = not (is_first and is_last)  # with a single stage nobody else reads the data
        self._check_inputs = check_inputs
        self._weight_fn = weight_fn
        self.ignored_labels = IgnoredLabels()
        self._pieces: list[Microbatch] = []
        self._minibatch = -1  # of these
        self._early = _NOTHING_EARLY

    def read_ahead(self) -> None:
        """Takes and cuts the next minibatch, where that is allowed, while the worker has nothing else to
        do."""
        # weight_fn is the user's code, which read() runs for a minibatch that is being trained on.
        self.source.read_ahead(self._open_early if self._weight_fn is None else None)

    def read(self, minibatch: int, microbatch: int) -> Microbatch:
        """A microbatch of the minibatch that was fetched. Raises ValueError for data that cannot be cut."""
        if minibatch != self._minibatch:
            self._minibatch = minibatch
            batch, (early, pieces) = self.source.take(minibatch), self._early
            self._pieces = pieces if batch is early else self._open(minibatch, batch)
            self._early = _NOTHING_EARLY
        if microbatch >= len(self._pieces):
            return Microbatch(weight=0.0, is_empty=True)
        piece = self._pieces[microbatch]
        self._pieces[microbatch] = _HANDED_OUT
        return piece

    def _open_early(self, batch: Minibatch) -> None:
        with contextlib.suppress(ValueError, TypeError):  # read() says so, and of which minibatch
            self._early = batch, self._open(-1, batch)

    def _open(self, minibatch: int, batch: Minibatch) -> list[Microbatch]:
        fingerprint = fingerprint_of(batch) if self._is_compared else 0
        inputs = batch.inputs if self._is_first else None
        targets = batch.targets if self._is_last else None
        in_pieces = isinstance(batch.inputs, Microbatches) or isinstance(batch.targets, Microbatches)
        if self._num_microbatches == 1 and not in_pieces:
            pieces = [Microbatch(inputs, targets, fingerprint)]
        else:
            pieces = self._cut(minibatch, batch, inputs, targets, fingerprint)
        if self._is_first:
            for each in batch.inputs if in_pieces else [batch.inputs]:
                self._check_inputs(each, minibatch)
        return pieces

    def _cut(
        self, minibatch: int, batch: Minibatch, inputs: Any, targets: Any, fingerprint: int
    ) -> list[Microbatch]:
        m = self._num_microbatches
        cut = functools.partial(chunk, num_microbatches=m, minibatch=minibatch, num_samples=batch.num_samples)
        sizes = sizes_of(batch.inputs, batch.targets, batch.num_samples, m)
        absent = [None] * len(sizes)  # what this stage does not read
        cut_inputs = absent if inputs is None else cut(inputs, name="the inputs")
        cut_targets = absent if targets is None else cut(targets, name="the targets")
        # At every stage that reads: others would find another fingerprint. Of what is forwarded the caller.
        check_alike(batch.inputs, batch.targets, m, minibatch=minibatch)
        counts: list[float] = [*sizes]
        uneven: tuple[UnevenLabels, ...] = ()
        if self._is_last and self._weight_fn is not None:
            counts = counts_of(self._weight_fn, cut_targets[: len(sizes)], minibatch)
        elif self._is_last:
            uneven = self.ignored_labels.look(targets, cut_targets[: len(sizes)], sizes)
        shares = weights(counts)
        return [
            Microbatch(cut_inputs[index], cut_targets[index], fingerprint, share, uneven_labels=uneven)
            for index, share in enumerate(shares)
        ]


@dataclass(frozen=True)
class ForwardedValidation:
    """Validation data that cannot be sent to local workers: the caller iterates them and hands them over in
    files, a few at a time (launch/forwarder.py).

        reader   N.wanted                     the evaluation before minibatch N begins
        caller   N-for-RANK-0, -1, ...        a minibatch each, None at the end

    Each side removes the files of the other that it has seen.

    The caller ends the run, and the reader with it, if the data fail.
    """

    folder: Path
    """Of these files alone, in that of the run."""
    first: tuple[Any, Any]
    """The first minibatch, for which memory is planned."""
    rank: int = 0
    """The reader's."""

    def __iter__(self) -> Iterator[Any]:
        yield self.first

    def batches(self, boundary: int) -> Iterator[Any]:
        self.wanted_file(boundary).touch()
        for number in itertools.count():
            path = self.file(boundary, self.rank, number)
            while not path.exists():
                time.sleep(_POLL_S)
            batch = pickle.loads(path.read_bytes())
            path.unlink()
            if batch is None:
                return
            yield batch

    def wanted_file(self, boundary: int) -> Path:
        return self.folder / f"{boundary}.wanted"

    def file(self, boundary: int, rank: int, number: int) -> Path:
        return self.folder / f"{boundary}-for-{rank}-{number}"


class ValidationReader:
    """The validation minibatches of one evaluation after the other. They draw from generators that are seeded
    alike at every stage that reads; the process's own stay as they are."""

    def __init__(self, data: Iterable[Any], seed: int) -> None:
        self._data = data
        self._seed = seed
        self._generators: RngState | None = None
        self._batches: Iterator[Any] | None = None
        self._num_read = 0
        self._boundary = 0

    def begin(self, boundary: int) -> None:
        """The next evaluation is of the weights before this minibatch."""
        self.end()
        self._boundary = boundary
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
                if isinstance(self._data, ForwardedValidation):
                    self._batches = self._data.batches(self._boundary)
                else:
                    self._batches = iter(self._data)
            batch = next(self._batches, None)
            self._generators = RngState.capture()
        if batch is None:
            if self._num_read == 0:
                raise ValueError("validation: data yielded nothing: give data that can be iterated again")
            return None
        if isinstance(batch, Microbatches):
            raise ValueError("validation: data yielded Microbatches: give batches, which are not cut here")
        inputs, targets = parts_of(batch, self._num_read)
        self._num_read += 1
        return inputs, targets, fingerprint(inputs, targets)

    def end(self) -> None:
        """Lets the data's iterator go, and with it the processes of a DataLoader."""
        self._batches = None
