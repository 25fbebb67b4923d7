"""Reads minibatches, and cuts them into microbatches, at the stages that need data: the first, the last, or
both. Validation minibatches are also read here, from the beginning for each evaluation.

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
    """The fingerprint of the whole minibatch. The first and the last stage compare their fingerprints."""
    weight: float = 1.0
    """Share of the minibatch's loss."""
    is_empty: bool = False
    """Whether the microbatch has no samples, because the minibatch has fewer pieces than microbatches."""
    uneven_labels: tuple[UnevenLabels, ...] = ()
    """Labels of -100 that the microbatches have in unequal shares. The weights of the microbatches may then
    have to be numbers of labels instead of samples.
    """


_NOTHING_EARLY: tuple[Minibatch | None, list[Microbatch]] = (None, [])
_HANDED_OUT = Microbatch()  # replaces a microbatch that was handed out, so that its tensors can be freed


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
        """check_inputs: function of (inputs, minibatch) that raises ValueError for inputs for which the
        pipeline was not planned. weight_fn: function of a microbatch's targets that returns the microbatch's
        weight. None: the weight is the number of samples.
        """
        self.source = source
        """The source of the minibatches. Call its fetch() before read() of a minibatch."""
        self._num_microbatches = num_microbatches
        self._is_first = is_first
        self._is_last = is_last
        self._is_compared = not (is_first and is_last)  # a single stage has no other to compare with
        self._check_inputs = check_inputs
        self._weight_fn = weight_fn
        self.ignored_labels = IgnoredLabels()
        self._pieces: list[Microbatch] = []
        self._minibatch = -1  # the minibatch of these pieces
        self._early = _NOTHING_EARLY

    def read_ahead(self) -> None:
        """Reads and cuts the next minibatch, if that is allowed, while the worker has nothing else to do."""
        # weight_fn is user code. It must run only when the minibatch is trained, in read().
        self.source.read_ahead(self._open_early if self._weight_fn is None else None)

    def read(self, minibatch: int, microbatch: int) -> Microbatch:
        """Returns a microbatch of the minibatch that was fetched; an empty one if the minibatch has fewer
        pieces. Raises ValueError or TypeError if the data cannot be cut.
        """
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
        with contextlib.suppress(ValueError, TypeError):  # read() will raise it, with the minibatch's number
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
        absent = [None] * len(sizes)  # stands for inputs or targets that this stage does not read
        cut_inputs = absent if inputs is None else cut(inputs, name="the inputs")
        cut_targets = absent if targets is None else cut(targets, name="the targets")
        # Every stage that reads data makes this check. If only one stage failed, another stage would report
        # different fingerprints instead. Data that the caller forwards are checked by the caller.
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
    """Validation data that cannot be pickled for local workers. The caller iterates the data and writes the
    minibatches to files, a few at a time (launch/forwarder.py).

        reader   writes N.wanted               when the evaluation before minibatch N begins
        caller   writes N-for-RANK-0, -1, ...  one minibatch each, and None at the end

    Each side removes the other side's files after reading them. If the data raise an error, the caller ends
    the run and so the reader.
    """

    folder: Path
    """The folder for these files, inside the run's folder."""
    first: tuple[Any, Any]
    """The first minibatch, for which memory is planned."""
    rank: int = 0
    """The reader's rank."""

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
    """Reads the validation minibatches, evaluation after evaluation. The data draw from generators that have
    the same seed at every stage that reads. The process's own generators keep their state.
    """

    def __init__(self, data: Iterable[Any], seed: int) -> None:
        self._data = data
        self._seed = seed
        self._generators: RngState | None = None
        self._batches: Iterator[Any] | None = None
        self._num_read = 0
        self._boundary = 0

    def begin(self, boundary: int) -> None:
        """Begins the evaluation of the weights before minibatch `boundary`."""
        self.end()
        self._boundary = boundary
        with generators_kept():
            seed_all(_core.derived_seed(self._seed, boundary))
            self._generators = RngState.capture()
        self._num_read = 0

    def next(self) -> tuple[Any, Any, int] | None:
        """Returns (inputs, targets, fingerprint); None after the last minibatch. Raises ValueError if there
        is no minibatch at all, or if the data yield Microbatches.
        """
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
        """Drops the data's iterator, which ends the processes of a DataLoader."""
        self._batches = None
