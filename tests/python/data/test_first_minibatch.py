"""first_minibatch.py: looking at minibatch 0 changes nothing for the run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from pipedream.data.first_minibatch import PeekedIterator, first_of
from torch.utils.data import DataLoader, TensorDataset


def _drawn() -> Iterator[float]:
    while True:
        yield torch.rand(()).item()


def test_an_iterator_goes_on_as_if_nobody_had_looked() -> None:
    torch.manual_seed(3)
    iterator = _drawn()
    expected = [next(iterator) for _ in range(3)]
    torch.manual_seed(3)
    peeked = PeekedIterator(_drawn())
    assert first_of(peeked) == expected[0]
    torch.rand(7)  # by whoever works with what was seen
    assert first_of(peeked) == expected[0]
    torch.rand(7)
    assert [next(peeked) for _ in range(3)] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_is_looked_at_without_its_processes(num_workers: int) -> None:
    loader = DataLoader(
        TensorDataset(torch.arange(6)),
        batch_size=2,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        timeout=5 if num_workers else 0,
    )
    before = multiprocessing.active_children()  # the farm's
    (first,) = first_of(loader)
    assert first.tolist() == [0, 1]
    assert multiprocessing.active_children() == before
    assert (loader.num_workers, loader._iterator) == (num_workers, None)


class _Counted:
    """Each epoch has other data."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(range(10 * self.epoch, 10 * self.epoch + 4))

    def __len__(self) -> int:
        return 4


class _CountedDataset(_Counted, torch.utils.data.IterableDataset[int]):
    pass


@pytest.mark.parametrize(
    "data",
    [
        _Counted(),
        DataLoader(_CountedDataset(), batch_size=None),
        DataLoader(range(50), batch_size=None, sampler=_Counted()),  # type: ignore[arg-type]
        DataLoader(range(50), batch_size=1, sampler=_Counted()),  # type: ignore[arg-type]
        DataLoader(range(50), batch_sampler=[[10]]),  # type: ignore[arg-type]
    ],
    ids=["iterable", "dataset", "sampler", "sampler of batches", "list"],
)
def test_data_that_count_their_epochs_are_in_the_first_one_afterwards(data: Iterable[Any]) -> None:
    assert int(first_of(data)) == int(first_of(data)) == 10
    assert int(next(iter(data))) == 10


def test_data_without_a_minibatch_are_refused() -> None:
    for data in ([], PeekedIterator(iter(())), DataLoader(TensorDataset(torch.ones(0)), batch_size=2)):
        with pytest.raises(ValueError, match="data yields no minibatch"):
            first_of(data)
