"""Copies of data, to look at while the run's own stay as they are: what a dataset or a sampler counts, what
a queue gives once, and generators. A DataLoader's generators stay as they are while it is looked at, and
after a run they are as if the caller had iterated it. Stateless; the thread that looks.
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
    "without_processes",
]

_ORDER_BYTES_MAX = 256 << 20
_INDICES = {torch.int64, torch.int32}


def copy_of(data: Iterable[Any]) -> Iterable[Any] | None:
    """Data that may be iterated instead. None: a copy may share with the data what an iteration takes away,
    as the place in an open file or the items of a queue."""
    if isinstance(data, (list, tuple)):
        return data
    if isinstance(data, DataLoader) and has_indices(data):
        return _copy_of_loader(data)
    try:
        return _sharing_copy(without_processes(data), {})  # type: ignore[no-any-return]
    except Exception:  # whatever a user's object raises
        return None


def has_indices(data: Iterable[Any]) -> bool:
    """Whether an iteration takes nothing away, and copy_of() always gives a copy."""
    is_loader = isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset)
    return is_loader or isinstance(data, (list, tuple))


def without_processes(data: Iterable[Any]) -> Iterable[Any]:
    """A DataLoader with persistent_workers that was iterated has its processes, which cannot be sent; a copy
    of it starts its own. Other data as they are."""
    if not isinstance(data, DataLoader) or data._iterator is None:
        return data
    loader = copy.copy(data)
    loader._iterator = None
    return loader


def _copy_of_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Its dataset's attributes are copied, and all of its samplers."""
    copied: Any = copy.copy(without_processes(loader))
    dataset = _shallow_copy(loader.dataset)
    parts = (loader.generator, loader.sampler, loader.batch_sampler)
    generator, sampler, batch_sampler = _copy_of_samplers(parts, {id(loader.dataset): dataset})
    # A loader refuses others once it is made.
    vars(copied).update(dataset=dataset, generator=generator, sampler=sampler, batch_sampler=batch_sampler)
    return copied  # type: ignore[no-any-return]


def _copy_of_samplers(parts: tuple[Any, Any, Any], shared: dict[int, Any]) -> tuple[Any, Any, Any]:
    """parts: the generator, the sampler, the batch sampler. shared: what stands for an object, by its id."""
    for copied in (_sharing_copy, copy.deepcopy):
        with contextlib.suppress(Exception):  # whatever a user's object raises
            return copied(parts, dict(shared))
    generator, sampler, batch_sampler = parts[0], *map(_shallow_copy, parts[1:])
    if isinstance(batch_sampler, BatchSampler):
        of_batches = batch_sampler.sampler  # another one than the loader's where it was given
        batch_sampler.sampler = sampler if of_batches is parts[1] else _shallow_copy(of_batches)
    return generator, sampler, batch_sampler


def _shallow_copy(data: Any) -> Any:
    """A copy, or the data themselves if they cannot be copied or no iteration changes them."""
    if data is None or isinstance(data, (list, tuple)):
        return data
    try:
        return copy.copy(data)
    except TypeError:
        return data


def _sharing_copy(value: Any, shared: dict[int, Any]) -> Any:
    """shared: what stands for an object in the copy, by its id."""
    content = io.BytesIO()
    pickler = _SharingPickler(content, shared)
    pickler.dump(value)
    content.seek(0)
    return _SharingUnpickler(content, pickler.shared).load()


class _SharingPickler(pickle.Pickler):
    """Copies what can be sent, but tensors and arrays, which an iteration reads."""

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
    """Whether it may be the positions of samples, which a sampler shuffles where they are."""
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


def generator_states(data: Iterable[Any]) -> list[Tensor]:
    """Returns the state of each generator; empty if the data are no DataLoader."""
    return [generator.get_state() for generator in _generators_of(data)]


def set_generators(data: Iterable[Any], states: Sequence[Tensor]) -> None:
    """states: generator_states() of these data, or of a copy; none where others have iterated them."""
    for generator, state in zip(_generators_of(data), states, strict=False):
        generator.set_state(state)


@contextlib.contextmanager
def generators_of_loader_kept(data: Iterable[Any]) -> Iterator[None]:
    """Inside the data may be iterated."""
    states = generator_states(data)
    with afterwards(lambda: set_generators(data, states)):
        yield


def _generators_of(data: Iterable[Any]) -> list[torch.Generator]:
    """Each once: a loader hands its own on to the sampler that it makes."""
    if not isinstance(data, torch.utils.data.DataLoader):
        return []
    parts = [data, data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None)]
    found = [getattr(part, "generator", None) for part in parts]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
