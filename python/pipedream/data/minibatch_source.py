"""Reads a run's minibatches at a stage that needs them. It looks ahead to find a minibatch that is larger
than planned.

    planned for 4 samples of length 16; stages of 2 and 1 replicas, so a group is 2 minibatches

    minibatch    0    1  |  2    3  |  4    5
    length       16   8  |  16   24 |  20   8

Minibatch 3 is larger. So the data end before its group (minibatches 2 and 3), until there is memory for
length 24.

All minibatches of a group are read before the first is handed out. A group begins and ends where the rounds
of all stages end. (A round is the work between two updates of a stage.) So no round is split if the data end
before a group. Without replicas a group is one minibatch. Every reader reads whole minibatches, so all
readers find the same larger minibatches. If the caller forwards the data, the caller looks ahead
(launch/forwarder.py). A source stays in use when memory is planned again. Owned by the worker's compute
thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pipedream.common.microbatches import Microbatches
from pipedream.data.stream import ForwardedData, LargerMinibatch, Minibatch, MinibatchStream, ReceivedStream
from pipedream.model.boundary import Boundary, map_tensors
from pipedream.planning.shapes import cover_sizes, larger_of, shapes_of_parts

__all__ = ["MinibatchSource", "exceeds", "in_own_memory", "larger_in"]


class MinibatchSource:
    """Hands out minibatches in order."""

    def __init__(self, stream: MinibatchStream, first_minibatch: int = 0) -> None:
        """first_minibatch: the number of the stream's first minibatch. A continued run does not start at 0
        again.
        """
        self.stream = stream  # go_on() replaces it
        self.first_minibatch = first_minibatch
        self.samples: list[int] = []
        """Number of samples of each minibatch that was read, starting with first_minibatch. The minibatches
        of other replicas are included. `epochs` has the epoch of each of them.
        """
        self.epochs: list[int] = []
        self.read_ns = 0
        """Nanoseconds spent in the data's own code, including waiting for a DataLoader's processes."""
        self.larger: LargerMinibatch | None = None
        """The minibatch that is larger than planned. The data end before its group until there is memory for
        it. None: no larger minibatch was found.
        """
        self._is_over = False
        self._ahead: _Ahead | None = None
        self._group_size = 1
        self._is_larger: Callable[[Any], bool] | None = None
        self._group: dict[int, Minibatch] = {}  # minibatches that were read and not handed out

    def look_ahead(self, is_larger: Callable[[Any], bool], group_size: int) -> None:
        """Makes the data end before a group with a minibatch that is larger than planned. The next call of
        look_ahead() continues with that group. is_larger: function of a minibatch's inputs that returns
        whether they are larger. group_size: minibatches in a group; the same in each call.
        """
        self._is_larger = is_larger
        self._group_size = group_size
        self.larger = None

    def go_on(self, stream: MinibatchStream, group_size: int) -> None:
        """Makes the source read from this stream from now on. The stream itself ends before a group with a
        larger minibatch.
        """
        self.stream = stream
        self._group_size = group_size
        self.larger = None

    @property
    def forwarded(self) -> ForwardedData | None:
        """The forwarded data that come next; None if this worker iterates its own data."""
        return self.stream.forwarded if isinstance(self.stream, ReceivedStream) else None

    @property
    def looks_ahead(self) -> bool:
        return self._is_larger is not None or self.stream.looks_ahead

    @property
    def num_minibatches(self) -> int:
        """Number of minibatches that were read so far. After fetch() has returned False it is the number of
        all minibatches, or of those before the group of a larger minibatch.
        """
        return self._num_read if self.larger is None else self.larger.first

    def epoch_of(self, minibatch: int) -> int:
        """Returns the epoch of a minibatch that was read."""
        return self.epochs[minibatch - self.first_minibatch]

    @property
    def _num_read(self) -> int:
        return self.first_minibatch + len(self.samples)

    def fetch(self, minibatch: int) -> bool:
        """Reads all minibatches up to `minibatch`, which this worker runs. Returns False if the data are over
        before it. Also returns False if the data end for now, until there is memory for a larger minibatch.
        """
        began_ns = time.perf_counter_ns()
        while self._num_read <= minibatch and not self._is_over and self.larger is None:
            self._read_group()
        self.read_ns += time.perf_counter_ns() - began_ns
        return minibatch < self.num_minibatches

    def read_ahead(self, look: Callable[[Minibatch], None] | None) -> None:
        """Reads a minibatch before fetch() needs it, while the worker has nothing else to do. It does nothing
        if the stream reuses its memory, or if reading would wait for another process. If the read fails,
        fetch() raises the error. look: called with the minibatch as soon as it is read.
        """
        early = not self.stream.may_reuse_memory and not self.stream.waits_for_others
        if early and self._ahead is None and not self._is_over:
            began_ns = time.perf_counter_ns()
            self._ahead = _Ahead(self.stream, look)
            self.read_ns += time.perf_counter_ns() - began_ns

    def take(self, minibatch: int) -> Minibatch:
        """Returns a minibatch that fetch() has found. It can be taken once."""
        return self._group.pop(minibatch)

    def _read_group(self) -> None:
        self._group.clear()
        copies = self._group_size > 1 and self.stream.may_reuse_memory
        for _ in range(self._group_size):
            ahead, self._ahead = self._ahead, None
            batch = self.stream.next() if ahead is None else ahead.take()
            if batch is None:
                self.larger = self.stream.larger
                self._is_over = self.larger is None  # do not ask again: the caller reports the end once
                break
            if copies:
                batch = in_own_memory(batch)
            self._group[self._num_read] = batch
            self.samples.append(1 if batch.num_samples is None else batch.num_samples)
            self.epochs.append(batch.epoch)
        self._look_at_group()

    def _look_at_group(self) -> None:
        is_larger = self._is_larger
        if is_larger is not None:
            self.larger = larger_in(self._group, lambda batch: is_larger(batch.inputs))


def larger_in(
    group: Mapping[int, Minibatch], is_larger: Callable[[Minibatch], bool]
) -> LargerMinibatch | None:
    """Returns the first larger minibatch of a group, with the largest shapes of all larger minibatches in the
    group. None if no minibatch is larger. group: minibatches by their numbers.
    """
    larger = {index: batch for index, batch in group.items() if is_larger(batch)}
    if not larger:
        return None
    index, batch = next(iter(larger.items()))
    of_each = (shapes_of_parts(batch.inputs, batch.targets) for batch in larger.values())
    shapes = functools.reduce(larger_of, of_each)
    return LargerMinibatch(min(group), index, batch.inputs, batch.targets, shapes)


class _Ahead:
    """A minibatch that was read before it was needed."""

    def __init__(self, stream: MinibatchStream, look: Callable[[Minibatch], None] | None) -> None:
        self._batch: Minibatch | None = None
        self._error: Exception | None = None
        try:
            self._batch = stream.next()
            if self._batch is not None and look is not None:
                look(self._batch)
        except Exception as error:
            self._error = error

    def take(self) -> Minibatch | None:
        """Returns the minibatch. Raises the stream's error. Call it once."""
        error, self._error = self._error, None  # the error's frames refer to this object
        if error is not None:
            raise error
        return self._batch


def exceeds(planned: Boundary, inputs: Any) -> bool:
    """Whether the inputs, or targets, fit the plan except that some dimension is larger. Every dimension
    counts, even if the number of elements is as planned, because a longer input may give larger activations.
    If the inputs are Microbatches and the plan is for a single microbatch, the result is whether any of them
    is larger.
    """
    if isinstance(inputs, Microbatches) and "microbatches" not in planned.structure:
        return any(exceeds(planned, each) for each in inputs)
    try:
        tensors = planned.flatten(inputs)
    except ValueError:  # the reader checks the inputs later and raises this
        return False
    pairs = list(zip(tensors, planned.tensors, strict=True))
    if any(tensor.dtype != spec.dtype or tensor.dim() != len(spec.shape) for tensor, spec in pairs):
        return False
    if all(tensor.shape == spec.shape for tensor, spec in pairs):
        return False
    # Several kinds of minibatches may be planned. The k-th shape of every tensor's spec belongs to the k-th
    # kind.
    kinds = zip(*((spec.shape, *spec.others) for spec in planned.tensors), strict=True)
    known = [[size for shape in kind for size in shape] for kind in kinds]
    return not cover_sizes(known, [size for tensor in tensors for size in tensor.shape])


def in_own_memory(batch: Minibatch) -> Minibatch:
    """Returns a copy of the minibatch. Its stream may overwrite the original with the next minibatch."""
    inputs = map_tensors(Tensor.clone, batch.inputs)
    targets = inputs if batch.targets is batch.inputs else map_tensors(Tensor.clone, batch.targets)
    return batch._replace(inputs=inputs, targets=targets)
