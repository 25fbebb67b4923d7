"""The generators that a DataLoader shuffles by, where it was given one: as long as it is looked at they stay
as they are, and after a run the caller's are as if the caller had iterated it. Stateless; any thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pipedream.common.errors import afterwards

__all__ = ["generator_states", "generators_of_loader_kept", "set_generators"]


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
