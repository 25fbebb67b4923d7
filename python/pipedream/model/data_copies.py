"""Makes copies of data. A copy can be read before the run without using anything of the data up: counters of
a dataset or sampler, entries of a queue, random numbers of a generator.

After a run the generators of a DataLoader are in the state that they would have if the caller had iterated
the loader. Stateless; used on the thread that reads the copy.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from pipedream.common.errors import afterwards

__all__ = [
    "copy_of",
    "generator_states",
    "generators_of_loader_kept",
    "has_indices",
    "set_generators",
    "state_bytes",
    "without_processes",
]

_ORDER_BYTES_MAX = 256 << 20
_INDICES = {torch.int64, torch.int32}


def copy_of(data: Iterable[Any]) -> Iterable[Any] | None:
    """Returns a copy of the data to iterate; a list or tuple is returned itself. Returns None for data that
    cannot be pickled. An example is an open file, whose position a copy would share.
    """
    if isinstance(data, (list, tuple)):
        return data
    if isinstance(data, DataLoader) and has_indices(data):
        return _copy_of_loader(data)
    try:
        return _sharing_copy(without_processes(data), {})  # type: ignore[no-any-return]
    except Exception:  # a user's object may raise anything
        return None


def has_indices(data: Iterable[Any]) -> bool:
    """Whether the data are read by index. Then copy_of() always returns data to iterate."""
    is_loader = isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset)
    return is_loader or isinstance(data, (list, tuple))


def without_processes(data: Iterable[Any]) -> Iterable[Any]:
    """Returns a copy of a DataLoader without its worker processes. Returns any other data unchanged. A loader
    with persistent_workers keeps its processes after an iteration, and processes cannot be pickled. The copy
    starts processes of its own.
    """
    if not isinstance(data, DataLoader) or data._iterator is None:
        return data
    loader = copy.copy(data)
    loader._iterator = None
    return loader


def _copy_of_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Copies a loader, the attributes of its dataset, and its samplers."""
    copied: Any = copy.copy(without_processes(loader))
    dataset = _shallow_copy(loader.dataset)
    parts = (loader.generator, loader.sampler, loader.batch_sampler)
    generator, sampler, batch_sampler = _copy_of_samplers(parts, {id(loader.dataset): dataset})
    # They are set in vars(), because a DataLoader refuses to change these attributes once it is made.
    vars(copied).update(dataset=dataset, generator=generator, sampler=sampler, batch_sampler=batch_sampler)
    return copied  # type: ignore[no-any-return]


def _copy_of_samplers(parts: tuple[Any, Any, Any], shared: dict[int, Any]) -> tuple[Any, Any, Any]:
    """Copies `parts`: a loader's generator, sampler and batch sampler. shared: objects to use in the copy, by
    the id of the object that each replaces.
    """
    for copied in (_sharing_copy, copy.deepcopy):
        with contextlib.suppress(Exception):  # a user's object may raise anything
            return copied(parts, dict(shared))
    generator, sampler, batch_sampler = parts[0], *map(_shallow_copy, parts[1:])
    if isinstance(batch_sampler, BatchSampler):
        of_batches = batch_sampler.sampler  # another sampler than the loader's, if the user gave this one
        batch_sampler.sampler = sampler if of_batches is parts[1] else _shallow_copy(of_batches)
    return generator, sampler, batch_sampler


def _shallow_copy(data: Any) -> Any:
    """Returns a shallow copy. Returns the data themselves if they cannot be copied, or if iterating them
    changes nothing.
    """
    if data is None or isinstance(data, (list, tuple)):
        return data
    try:
        return copy.copy(data)
    except TypeError:
        return data


def _sharing_copy(value: Any, shared: dict[int, Any]) -> Any:
    """Copies a value. shared: objects to use in the copy, by the id of the object that each replaces."""
    content = io.BytesIO()
    pickler = _SharingPickler(content, shared)
    pickler.dump(value)
    content.seek(0)
    return _SharingUnpickler(content, pickler.shared).load()


class _SharingPickler(pickle.Pickler):
    """Copies everything that can be pickled. Tensors and arrays are shared with the original, because
    iterating only reads them. Those that may be an order of samples are copied.
    """

    def __init__(self, content: io.BytesIO, stand_ins: dict[int, Any]) -> None:
        super().__init__(content, protocol=pickle.HIGHEST_PROTOCOL)
        self._stand_ins = stand_ins
        self.shared: list[Any] = []

    def reducer_override(self, value: Any) -> Any:
        if id(value) in self._stand_ins:
            self.shared.append(self._stand_ins[id(value)])
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            self.shared.append(copy.deepcopy(value) if _may_be_an_order(value) else value)
        else:
            return NotImplemented
        return _shared, (len(self.shared) - 1,)


def _may_be_an_order(value: torch.Tensor | np.ndarray[Any, Any]) -> bool:
    """Whether the value may be an order of samples, which a sampler shuffles in place."""
    if isinstance(value, np.memmap) or value.ndim != 1 or value.nbytes > _ORDER_BYTES_MAX:
        return False
    return value.dtype in _INDICES if isinstance(value, torch.Tensor) else value.dtype.kind in "iu"


class _SharingUnpickler(pickle.Unpickler):
    def __init__(self, content: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(content)
        self._shared = shared

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) == (_shared.__module__, _shared.__name__):
            return self._shared.__getitem__
        return super().find_class(module, name)


def _shared(index: int) -> Any:
    raise NotImplementedError(f"{index} is known to the unpickler alone")


def state_bytes(data: Iterable[Any]) -> bytes | None:
    """Returns bytes that are equal before and after an iteration if it changes neither the dataset of a
    DataLoader nor its samplers. torch's own samplers do not count, and generator_states() has their
    generators. None if the data are no DataLoader, or if a part cannot be pickled.
    """
    if not isinstance(data, DataLoader):
        return None
    samplers = [data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None)]
    own = [each for each in samplers if not type(each).__module__.startswith("torch.utils.data")]
    content = io.BytesIO()
    try:
        _StatePickler(content).dump((data.dataset, own))
    except Exception:  # a user's object may raise anything
        return None
    return content.getvalue()


class _StatePickler(pickle.Pickler):
    """Leaves out the elements of tensors and arrays, except for those that may be an order."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, np.ndarray)) and not _may_be_an_order(value):
            return str, (str(tuple(value.shape)),)
        return NotImplemented


def generator_states(data: Iterable[Any]) -> list[Tensor]:
    """Returns the state of each generator; empty if the data are no DataLoader."""
    return [generator.get_state() for generator in _generators_of(data)]


def set_generators(data: Iterable[Any], states: Sequence[Tensor]) -> None:
    """Sets the states of the data's generators. states: what generator_states() returned for these data or a
    copy of them. An empty list leaves the generators as they are.
    """
    for generator, state in zip(_generators_of(data), states, strict=False):
        generator.set_state(state)


@contextlib.contextmanager
def generators_of_loader_kept(data: Iterable[Any]) -> Iterator[None]:
    """A context in which the data may be iterated. At its end a DataLoader's generators get their former
    states.
    """
    states = generator_states(data)
    with afterwards(lambda: set_generators(data, states)):
        yield


def _generators_of(data: Iterable[Any]) -> list[torch.Generator]:
    """Returns the generators of a loader and its samplers, each once. A loader and the sampler that it makes
    share one generator.
    """
    if not isinstance(data, torch.utils.data.DataLoader):
        return []
    parts = [data, data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None)]
    found = [getattr(part, "generator", None) for part in parts]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
