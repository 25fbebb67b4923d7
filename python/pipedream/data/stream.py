"""Makes one stream of minibatches from the user's data. The stream is the same at every worker that reads it.

The first stage needs the inputs, the last stage the targets. Both iterate copies of the user's `data`, with
equally seeded global generators (seeding.py), and compare fingerprints. A minibatch that two workers read
differently is reported and not trained on. Owned by the worker's compute thread.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from pipedream.common.microbatches import Microbatches
from pipedream.model.batches import parts_of
from pipedream.model.boundary import TENSORS, Boundary, exportable, tensors_of
from pipedream.model.data_copies import generator_states, set_generators, state_bytes
from pipedream.model.microbatch import samples_of
from pipedream.model.seeding import RngState, RngStream
from pipedream.planning.shapes import Shapes

__all__ = [
    "FORWARDED",
    "NUM_COUNT_TENSORS",
    "DataStream",
    "ForwardedData",
    "LargerMinibatch",
    "Minibatch",
    "MinibatchStream",
    "ReceivedStream",
    "check_sizes",
    "describe_source",
    "epochs_of",
    "epochs_told",
    "fingerprint",
    "fingerprint_of",
    "forwarded_counts",
    "num_minibatches_of",
    "takes_epochs",
]

FORWARDED = "iterated by the caller and forwarded"

_log = logging.getLogger("pipedream")

_NUM_NOTED = 256  # the most recent positions that are kept; most groups that are read ahead are shorter

NUM_COUNT_TENSORS = 1
"""Number of additional tensors that are sent with a forwarded minibatch. forwarded_counts() makes them."""


class Minibatch(NamedTuple):
    """The data from which one weight update is computed; with replicas, an update may take several
    minibatches. A forwarded minibatch has only the parts that its stage needs.
    """

    inputs: Any
    targets: Any
    epoch: int
    num_samples: int | None
    """Number of samples, by microbatch.samples_of()."""
    fingerprint: int | None = None
    """The fingerprint, if it is known. The caller computes the fingerprint of a forwarded minibatch."""


@dataclass(frozen=True)
class LargerMinibatch:
    """The first minibatch that is larger than planned, and where the data end because of it. They end before
    its group, until memory has been planned for it. A group is the minibatches between two points at which
    the rounds of all stages end (minibatch_source.py).
    """

    first: int
    """The minibatch before which the data have ended. It is the first of the larger minibatch's group."""
    minibatch: int
    """The first minibatch of the group that is larger."""
    inputs: Any
    targets: Any
    shapes: Shapes
    """The largest size in each dimension, over all larger minibatches of the group."""


class MinibatchStream(Protocol):
    num_minibatches: int | None
    """Number of minibatches of all epochs, from the data's len(). None if the data have no len()."""
    may_reuse_memory: bool
    """Whether next() may overwrite the tensors of a minibatch that is still in flight."""
    waits_for_others: bool
    """Whether next() may wait for another process of the run."""
    source: str
    """The kind of data, for the result: "DataLoader with num_workers=2"."""
    looks_ahead: bool
    """Whether next() also returns None before a group with a minibatch that is larger than planned."""

    @property
    def larger(self) -> LargerMinibatch | None:
        """The reason why next() returned None although the data are not over; None if the data are over."""

    def peek(self) -> tuple[Any, Any]:
        """Returns (inputs, targets) of minibatch 0. Call it before next(). Raises ValueError if there is no
        minibatch.
        """

    def next(self) -> Minibatch | None:
        """Returns the next minibatch, through all epochs. Returns None after the last one and, if the stream
        looks ahead, before a group with a minibatch larger than planned."""


def fingerprint(inputs: Any, targets: Any) -> int:
    """Returns 64 bits that two workers compare to check that they read the same minibatch. They depend on the
    minibatch's tensors only.
    """
    tensors = tensors_of((inputs, targets))
    found = TENSORS.fingerprint(tensors)
    if found is None:
        tensors = [exportable(tensor.cpu()) for tensor in tensors]
        found = TENSORS.fingerprint(tensors)
    return _fingerprint_of_bytes(tensors) if found is None else found


def _fingerprint_of_bytes(tensors: list[torch.Tensor]) -> int:
    """Returns the fingerprint of tensors whose dtypes cannot be passed to the core. It is computed from their
    bytes.
    """
    found = TENSORS.fingerprint([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
    assert found is not None
    for tensor in tensors:
        found ^= zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    return found


def fingerprint_of(minibatch: Minibatch) -> int:
    """Returns the fingerprint that the minibatch has, or computes it if it has none."""
    if minibatch.fingerprint is not None:
        return minibatch.fingerprint
    return fingerprint(minibatch.inputs, minibatch.targets)


def epochs_of(
    data: Iterable[Any],
    epochs: int,
    *,
    first_epoch: int = 0,
    minibatch: int = 0,
    is_resumed: bool = False,
    on_epoch: Callable[[int, int], None] = lambda epoch, minibatch: None,
) -> Iterator[tuple[Any, Any, int]]:
    """Yields (inputs, targets, epoch) through all epochs, starting with first_epoch.

    minibatch: the number of the first minibatch. is_resumed: whether the data themselves continue in the
    middle of the first epoch. on_epoch: called with each epoch and the number of its first minibatch, before
    the data are iterated.

    Raises ValueError for an epoch without minibatches, and for data that yield Microbatches for some
    minibatches only.
    """
    is_in_pieces: bool | None = None
    for epoch in epochs_told(data, range(first_epoch, epochs)):
        first_of_epoch = minibatch
        on_epoch(epoch, minibatch)
        for batch in data:
            if is_in_pieces not in (None, isinstance(batch, Microbatches)):
                what = "no Microbatches" if is_in_pieces else "Microbatches"
                raise ValueError(
                    f"minibatch {minibatch} of the data is {what}, unlike those before it: yield all"
                    " minibatches as Microbatches, or none"
                )
            is_in_pieces = isinstance(batch, Microbatches)
            yield *parts_of(batch, minibatch), epoch
            minibatch += 1
        if minibatch == first_of_epoch and not (is_resumed and epoch == first_epoch):
            raise ValueError(
                f"data yielded nothing in epoch {epoch}: give data with at least one minibatch that can be"
                " iterated once per epoch, as a DataLoader or a list"
            )


def epochs_told(data: Iterable[Any], epochs: Iterable[int]) -> Iterator[int]:
    """Yields the epochs. Before each epoch but epoch 0, it calls set_epoch() of the data, their samplers and
    their dataset, as a plain loop would. Without these calls, torch's DistributedSampler gives every epoch
    the same order.

    The `epoch` that an object has when the run begins counts as epoch 0. It is set again at the end.
    """
    told = [(each, getattr(each, "epoch", None)) for each in takes_epochs(data)]
    has_told = False
    try:
        for epoch in epochs:
            for each, first in told if epoch > 0 else ():
                each.set_epoch(epoch + (first if isinstance(first, int) else 0))
                has_told = True
            yield epoch
    finally:
        for each, first in told if has_told else ():
            if isinstance(first, int):
                each.set_epoch(first)


def takes_epochs(data: Iterable[Any]) -> list[Any]:
    """Returns the data, their samplers and their dataset, as far as they have a set_epoch()."""
    batch_sampler = getattr(data, "batch_sampler", None)
    samplers = (batch_sampler, getattr(batch_sampler, "sampler", None), getattr(data, "sampler", None))
    parts = (data, *samplers, getattr(data, "dataset", None))
    return list({id(each): each for each in parts if callable(getattr(each, "set_epoch", None))}.values())


def num_minibatches_of(data: Iterable[Any], epochs: int) -> int | None:
    """Returns the number of minibatches of all epochs, by len(). None for data without a length, such as an
    iterable dataset's loader.
    """
    try:
        return epochs * len(data)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def check_sizes(data: Iterable[Any], num_microbatches: int) -> None:
    """Raises ValueError if all minibatches have fewer samples than the run has microbatches. It can tell this
    without reading for a list, and for a DataLoader with torch's own collate_fn.
    """
    if num_microbatches == 1:
        return
    sizes: list[int | None] = []
    if isinstance(data, (list, tuple)):
        sizes = [samples_of(*parts_of(batch, minibatch)) for minibatch, batch in enumerate(data)]
    elif (
        isinstance(data, torch.utils.data.DataLoader) and data.collate_fn is torch.utils.data.default_collate
    ):
        sizes = [data.batch_size]
    known = [size for size in sizes if size is not None]
    if known and len(known) == len(sizes) and max(known) < num_microbatches:
        raise ValueError(
            f"data has minibatches of {max(known)} samples, fewer than microbatches={num_microbatches}: use"
            " fewer microbatches or larger minibatches"
        )


def describe_source(data: Iterable[Any]) -> str:
    """Returns "DataLoader with num_workers=2" for a DataLoader, and the type's name for other data."""
    if isinstance(data, torch.utils.data.DataLoader):
        return f"DataLoader with num_workers={data.num_workers}"
    return type(data).__name__


def _keeps_own_state(data: Iterable[Any]) -> bool:
    """Whether the data can resume by themselves, like torchdata's StatefulDataLoader."""
    return hasattr(data, "state_dict") and hasattr(data, "load_state_dict")


def _collates(data: Iterable[Any]) -> bool:
    """Whether each minibatch certainly has new tensors, because torch's own collate_fn makes them. A user's
    collate_fn may fill the same memory again, even in a process of the DataLoader.
    """
    loader = torch.utils.data.DataLoader
    return (
        type(data) is loader
        and data.batch_size is not None
        and data.collate_fn is torch.utils.data.default_collate
    )


class _EpochStart(NamedTuple):
    """The states of the generators at the start of an epoch's iteration."""

    epoch: int
    first_minibatch: int
    generators: RngState
    of_loader: list[torch.Tensor]


class DataStream:
    """Iterates the user's data in this worker, through all epochs."""

    def __init__(
        self,
        data: Iterable[Any],
        *,
        epochs: int,
        generators: RngStream | None = None,
        notes_positions: bool = False,
        goes_to: tuple[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """generators: the stream of random numbers from which the data draw. None: the data draw from the
        process's generators. notes_positions: whether to record what position() needs. goes_to: a minibatch
        and its position(), to which go_on() goes.
        """
        self._data = data
        self._epochs = epochs
        self._notes_positions = notes_positions
        self._num_read = 0
        self._goes_to = goes_to
        self._state_before = None if goes_to is None else state_bytes(data)
        self._epoch_starts: deque[_EpochStart] = deque(maxlen=_NUM_NOTED)
        self._noted: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_NUM_NOTED)
        self.num_minibatches = num_minibatches_of(data, epochs)
        self.source = describe_source(data)
        is_in_memory = type(data) in (list, tuple)
        self.may_reuse_memory = not is_in_memory and not _collates(data)
        self.generators = None if is_in_memory else generators
        """The stream for torch's generators from which the data draw. None: the data draw from the process's
        generators, or draw nothing.
        """
        self.waits_for_others = False
        self.looks_ahead = False
        self.larger: LargerMinibatch | None = None
        self._batches = epochs_of(data, epochs, on_epoch=self._note_epoch)
        self._peeked: tuple[Any, Any, int] | None = None

    def peek(self) -> tuple[Any, Any]:
        self._peeked = self._next()
        assert self._peeked is not None  # epochs_of raises for an empty epoch
        return self._peeked[0], self._peeked[1]

    def next(self) -> Minibatch | None:
        batch = self._peeked if self._peeked is not None else self._next()
        self._peeked = None
        if batch is None:
            return None
        inputs, targets, epoch = batch
        return Minibatch(inputs, targets, epoch, samples_of(inputs, targets))

    def _next(self) -> tuple[Any, Any, int] | None:
        if self._notes_positions:
            self._note_position()
        self._num_read += 1
        if self.generators is None:
            return next(self._batches, None)
        with self.generators:
            return next(self._batches, None)

    # Positions, from which a resumed run continues.

    def position(self, minibatch: int) -> dict[str, Any]:
        """Returns the data's position before one of the most recent minibatches, for `goes_to`."""
        if self._notes_positions and minibatch >= self._num_read:  # the run ends before reading it
            self._note_position()
        start = next(s for s in reversed(self._epoch_starts) if s.first_minibatch <= minibatch)
        document = {
            "epoch": start.epoch,
            "epoch_began_at": start.first_minibatch,
            "generators": start.generators.to_document(),
            "of_loader": [state.numpy().tobytes().hex() for state in start.of_loader],
        }
        return document | dict(self._noted).get(minibatch, {})

    def _note_epoch(self, epoch: int, minibatch: int) -> None:
        resumed = None if self._goes_to is None else self._goes_to[1]
        if resumed is not None and resumed["epoch"] == epoch and resumed["epoch_began_at"] == minibatch:
            RngState.from_document(resumed["generators"]).restore()
            kept = [bytearray.fromhex(text) for text in resumed["of_loader"]]
            set_generators(self._data, [torch.frombuffer(state, dtype=torch.uint8) for state in kept])
        if self._notes_positions:
            states = generator_states(self._data)
            self._epoch_starts.append(_EpochStart(epoch, minibatch, RngState.capture(), states))

    def _note_position(self) -> None:
        noted: dict[str, Any] = {}
        if _keeps_own_state(self._data):
            noted["loader"] = self._data.state_dict()  # type: ignore[attr-defined]
            noted["epoch_of_loader"] = self._epoch_starts[-1].epoch if self._epoch_starts else 0
        if self.generators is None:  # the data draw from the process's generators, which others use, too
            noted["process"] = RngState.capture().to_document()
        if noted:
            self._noted.append((self._num_read, noted))

    def go_on(self, on_read: Callable[[int], None] = lambda num_read: None) -> None:
        """Makes the minibatch of `goes_to` the next one. on_read: called with the number of minibatches that
        were skipped so far.
        """
        assert self._goes_to is not None
        minibatch, position = self._goes_to
        if "loader" in position:
            self._data.load_state_dict(position["loader"])  # type: ignore[attr-defined]
            self._goes_to = None
            self._begin(position["epoch_of_loader"], minibatch, is_resumed=True)
        else:
            # If earlier epochs are not left out, the iteration that peek() has begun goes on.
            if 0 < position["epoch_began_at"] <= minibatch and self._may_leave_out_epochs():
                self._begin(position["epoch"], position["epoch_began_at"])
                if getattr(self._data, "persistent_workers", False):
                    _log.warning(
                        "data has persistent_workers: random numbers that its processes draw are not those of"
                        " a run without a break; to continue exactly, leave persistent_workers out"
                    )
            self._skip(minibatch, on_read)
        if "process" in position and self.generators is None and self._peeked is None:
            RngState.from_document(position["process"]).restore()

    def _may_leave_out_epochs(self) -> bool:
        """Whether an epoch of the data depends on nothing that earlier epochs change, except generators whose
        states are in a position. Compares the state of a DataLoader's dataset and samplers with that before
        peek(): a sampler may have a random generator of its own, or count its epochs.
        """
        if isinstance(self._data, torch.utils.data.DataLoader):
            return state_bytes(self._data) == self._state_before
        return isinstance(self._data, (list, tuple))

    def _begin(self, epoch: int, minibatch: int, *, is_resumed: bool = False) -> None:
        self._peeked = None
        self._num_read = minibatch
        self._batches = epochs_of(
            self._data,
            self._epochs,
            first_epoch=epoch,
            minibatch=minibatch,
            is_resumed=is_resumed,
            on_epoch=self._note_epoch,
        )

    def _skip(self, minibatch: int, on_read: Callable[[int], None]) -> None:
        while self._num_read - (self._peeked is not None) < minibatch:
            if self.next() is None:
                raise ValueError(
                    f"the checkpoint is at minibatch {minibatch}, and data has only {self._num_read - 1} in"
                    " all epochs: give the data and the epochs of the run that wrote it, or more epochs"
                )
            on_read(self._num_read)


@dataclass(frozen=True)
class ForwardedData:
    """Describes data that cannot be sent to the workers: the caller iterates and forwards them.

    first: minibatch 0, for the rehearsal. inputs, targets: the boundaries that later minibatches must fit.
    """

    first: tuple[Any, Any]
    inputs: Boundary
    targets: Boundary
    num_minibatches: int | None
    source: str
    kinds: tuple[Shapes, ...] = ()
    """The shapes for which the boundaries were made: one entry, or several if the plan has shapes_apart
    (Plan.fitting).
    """
    larger: LargerMinibatch | None = None
    """The larger minibatch for which these boundaries were made. None for the first boundaries of a run."""


class ReceivedStream:
    """Yields the minibatches that the caller's process reads and sends to this worker.

    receive_inputs, receive_targets: functions that return the next (tensors, fingerprint) of a channel, or
    None at the channel's end. Each is None if the stage does not read the channel, or if the channel is not
    open yet. read_larger: function that is called when a channel has ended. If the caller's data go on, it
    returns their description; they begin with the group of a minibatch that is larger than planned. It
    returns None if the data are over.
    """

    def __init__(
        self,
        data: ForwardedData,
        receive_inputs: Callable[[], tuple[list[torch.Tensor], int] | None] | None,
        receive_targets: Callable[[], tuple[list[torch.Tensor], int] | None] | None,
        read_larger: Callable[[], ForwardedData | None] = lambda: None,
    ) -> None:
        self.num_minibatches = data.num_minibatches
        self.source = f"{data.source}, {FORWARDED}"
        self.may_reuse_memory = False
        self.waits_for_others = True
        self.looks_ahead = True
        self.following: ForwardedData | None = None
        """The description of the data that follow, if this stream has ended before a larger minibatch."""
        self._read_larger = read_larger
        self._data = data
        self._sources = (
            (data.inputs, receive_inputs),
            (data.targets, receive_targets),
        )

    @property
    def forwarded(self) -> ForwardedData:
        """The data that come next."""
        return self._data if self.following is None else self.following

    @property
    def larger(self) -> LargerMinibatch | None:
        return None if self.following is None else self.following.larger

    def peek(self) -> tuple[Any, Any]:
        return self._data.first

    def next(self) -> Minibatch | None:
        values: list[Any] = []
        counts, taken = None, None
        for boundary, receive in self._sources:
            if receive is None:
                values.append(None)
                continue
            item = receive()
            if item is None:
                self.following = self._read_larger()
                return None
            (*tensors, counts), taken = item
            values.append(boundary.unflatten(boundary.received(tensors)))
        assert counts is not None  # the stage reads at least one channel
        epoch, num_samples, num_pieces = counts.tolist()
        if num_pieces > 0:
            values = [None if value is None else Microbatches(value[:num_pieces]) for value in values]
        return Minibatch(values[0], values[1], epoch, num_samples if num_samples >= 0 else None, taken)


def forwarded_counts(batch: Minibatch) -> torch.Tensor:
    """Returns the counts that are sent with the tensors of a forwarded minibatch."""
    num_pieces = len(batch.inputs) if isinstance(batch.inputs, Microbatches) else 0
    return torch.tensor([batch.epoch, -1 if batch.num_samples is None else batch.num_samples, num_pieces])
