"""The minibatches of a run at a stage that reads them, with a look ahead for one that is larger than planned.

    planned for 4 x 16, 2-1 replicas    minibatch  0    1    2    3    4    5
                                        length     16   8  | 16   24 | 20   8
    3 is larger: the data end before 2, as if they were over, until there is memory for 4 x 24

A group is read before one of it is handed out: as many minibatches as lie between two places where all rounds
of all stages are over, one where no stage has replicas. So no round has a part before and a part after. Every
reader sees all minibatches whole, so all find the same; of what is forwarded the caller sees it
(launch/forwarder.py). Outlives what was
planned; owned by the worker's compute thread.
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
        """first_minibatch: the stream's first; runs that go on where another ended count on."""
        self.stream = stream  # go_on() changes it
        self.first_minibatch = first_minibatch
        self.samples: list[int] = []
        """Per minibatch that was read, from the first on, those of other replicas too; so is the epoch."""
        self.epochs: list[int] = []
        self.read_ns = 0
        """In the data's own code, the processes of a DataLoader waited for included."""
        self.larger: LargerMinibatch | None = None
        """The minibatch before which the data have ended for now, if they have."""
        self._is_over = False
        self._ahead: _Ahead | None = None
        self._group_size = 1
        self._is_larger: Callable[[Any], bool] | None = None
        self._group: dict[int, Minibatch] = {}  # of those that are read and not handed out

    def look_ahead(self, is_larger: Callable[[Any], bool], group_size: int) -> None:
        """Lets the data end before a group with a minibatch whose inputs is_larger() accepts. They go on with
        the minibatch before which they ended. group_size: the same each time."""
        self._is_larger = is_larger
        self._group_size = group_size
        self.larger = None

    def go_on(self, stream: MinibatchStream, group_size: int) -> None:
        """Takes minibatches from this stream from now on, which ends by itself before a group with a larger
        one."""
        self.stream = stream
        self._group_size = group_size
        self.larger = None

    @property
    def forwarded(self) -> ForwardedData | None:
        """The data that come next from the caller; None: they are this worker's own."""
        return self.stream.forwarded if isinstance(self.stream, ReceivedStream) else None

    @property
    def looks_ahead(self) -> bool:
        return self._is_larger is not None or self.stream.looks_ahead

    @property
    def num_minibatches(self) -> int:
        """Minibatches that were read so far: all there are, once fetch() has found none."""
        return self._num_read if self.larger is None else self.larger.first

    def epoch_of(self, minibatch: int) -> int:
        """The epoch of a minibatch that was read."""
        return self.epochs[minibatch - self.first_minibatch]

    @property
    def _num_read(self) -> int:
        return self.first_minibatch + len(self.samples)

    def fetch(self, minibatch: int) -> bool:
        """Reads up to this minibatch, whose code this runs; those before it are other replicas'. False:
        there is none, or not before there is more memory."""
        began_ns = time.perf_counter_ns()
        while self._num_read <= minibatch and not self._is_over and self.larger is None:
            self._read_group()
        self.read_ns += time.perf_counter_ns() - began_ns
        return minibatch < self.num_minibatches

    def read_ahead(self, look: Callable[[Minibatch], None] | None) -> None:
        """Takes a minibatch before fetch() wants it, while the worker has nothing else to do. Does so only if
        the stream does not reuse its memory and no other process is waited for. fetch() raises what this
        raises. look: gets the minibatch at once."""
        early = not self.stream.may_reuse_memory and not self.stream.waits_for_others
        if early and self._ahead is None and not self._is_over:
            began_ns = time.perf_counter_ns()
            self._ahead = _Ahead(self.stream, look)
            self.read_ns += time.perf_counter_ns() - began_ns

    def take(self, minibatch: int) -> Minibatch:
        """Returns the minibatch that fetch() has found; once."""
        return self._group.pop(minibatch)

    def _read_group(self) -> None:
        self._group.clear()
        copies = self._group_size > 1 and self.stream.may_reuse_memory
        for _ in range(self._group_size):
            ahead, self._ahead = self._ahead, None
            batch = self.stream.next() if ahead is None else ahead.take()
            if batch is None:
                self.larger = self.stream.larger
                self._is_over = self.larger is None  # not asked again: whoever forwards data says so once
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
    """None: none is. group: by index."""
    larger = {index: batch for index, batch in group.items() if is_larger(batch)}
    if not larger:
        return None
    index, batch = next(iter(larger.items()))
    of_each = (shapes_of_parts(batch.inputs, batch.targets) for batch in larger.values())
    shapes = functools.reduce(larger_of, of_each)
    return LargerMinibatch(min(group), index, batch.inputs, batch.targets, shapes)


class _Ahead:
    """A minibatch that the stream gave before it was wanted."""

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
        """Once; raises what the stream raised."""
        error, self._error = self._error, None  # whose frames hold this
        if error is not None:
            raise error
        return self._batch


def exceeds(planned: Boundary, inputs: Any) -> bool:
    """Whether these inputs, or targets, differ from what was planned, and by nothing but their size: by any
    dimension of any of them, as what a model makes of a longer one may be more where both have as many
    elements. One of Microbatches suffices, where the plan is of one of them."""
    if isinstance(inputs, Microbatches) and "microbatches" not in planned.structure:
        return any(exceeds(planned, each) for each in inputs)
    try:
        tensors = planned.flatten(inputs)
    except ValueError:  # told by whoever checks them
        return False
    pairs = list(zip(tensors, planned.tensors, strict=True))
    if any(tensor.dtype != spec.dtype or tensor.dim() != len(spec.shape) for tensor, spec in pairs):
        return False
    if all(tensor.shape == spec.shape for tensor, spec in pairs):
        return False
    # Of several kinds of minibatches the shapes of each are at one place.
    kinds = zip(*((spec.shape, *spec.others) for spec in planned.tensors), strict=True)
    known = [[size for shape in kind for size in shape] for kind in kinds]
    return not cover_sizes(known, [size for tensor in tensors for size in tensor.shape])


def in_own_memory(batch: Minibatch) -> Minibatch:
    """Copies the minibatch of a stream that may fill the same memory with the next one."""
    inputs = map_tensors(Tensor.clone, batch.inputs)
    targets = inputs if batch.targets is batch.inputs else map_tensors(Tensor.clone, batch.targets)
    return batch._replace(inputs=inputs, targets=targets)
