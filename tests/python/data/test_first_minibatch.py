"""Tests first_minibatch.py: a look at minibatch 0 changes nothing for the run."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipedream.data.first_minibatch import KeptMinibatch, PeekedData, first_of, looked_at
from torch.utils.data import DataLoader, TensorDataset


def _drawn() -> Iterator[float]:
    while True:
        yield torch.rand(()).item()


def test_an_iterator_goes_on_as_if_nobody_had_looked() -> None:
    torch.manual_seed(3)
    iterator = _drawn()
    expected = [next(iterator) for _ in range(3)]
    torch.manual_seed(3)
    peeked = PeekedData(_drawn())
    assert first_of(peeked) == expected[0]
    torch.rand(7)  # whoever works with the minibatch may draw numbers
    assert first_of(peeked) == expected[0]
    torch.rand(7)
    taken = iter(peeked)
    assert [next(taken) for _ in range(3)] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_is_looked_at_without_its_processes(num_workers: int) -> None:
    loader = DataLoader(
        TensorDataset(torch.arange(6)),
        batch_size=2,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        timeout=5 if num_workers else 0,
    )
    before = multiprocessing.active_children()  # the processes of the farm
    (first,) = first_of(loader)
    assert first.tolist() == [0, 1]
    assert multiprocessing.active_children() == before
    assert (loader.num_workers, loader._iterator) == (num_workers, None)


class _Counted:
    """Data that are different in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(range(10 * self.epoch, 10 * self.epoch + 4))

    def __len__(self) -> int:
        return 4


class _CountedDataset(_Counted, torch.utils.data.IterableDataset[int]):
    pass


class _CountedInside:
    """An iterable whose counter is an object of its own."""

    def __init__(self) -> None:
        self.counted = _Counted()

    def __iter__(self) -> Iterator[int]:
        return iter(self.counted)

    def __len__(self) -> int:
        return 4


class _CountedInsideDataset(_CountedInside, torch.utils.data.IterableDataset[int]):
    pass


@pytest.mark.parametrize(
    "data",
    [
        _Counted(),
        _CountedInside(),
        DataLoader(_CountedInsideDataset(), batch_size=None),
        DataLoader(range(50), batch_size=None, sampler=_CountedInside()),  # type: ignore[arg-type]
        DataLoader(_CountedDataset(), batch_size=None),
        DataLoader(range(50), batch_size=None, sampler=_Counted()),  # type: ignore[arg-type]
        DataLoader(range(50), batch_size=1, sampler=_Counted()),  # type: ignore[arg-type]
        DataLoader(range(50), batch_sampler=[[10]]),  # type: ignore[arg-type]
    ],
    ids=[
        "iterable",
        "inside an iterable",
        "inside a dataset",
        "inside a sampler",
        "dataset",
        "sampler",
        "sampler of batches",
        "list",
    ],
)
def test_data_that_count_their_epochs_are_in_the_first_one_afterwards(data: Iterable[Any]) -> None:
    assert int(first_of(data)) == int(first_of(data)) == 10
    assert int(next(iter(data))) == 10


def test_data_without_a_minibatch_are_refused() -> None:
    for data in ([], PeekedData(iter(())), DataLoader(TensorDataset(torch.ones(0)), batch_size=2)):
        with pytest.raises(ValueError, match="data yields no minibatch"):
            first_of(data)


class _OverQueue:
    """Data that give each minibatch once, although they are no iterator."""

    def __init__(self) -> None:
        self.queue: queue.Queue[int] = queue.Queue()
        for item in range(4):
            self.queue.put(item)

    def __iter__(self) -> Iterator[int]:
        while not self.queue.empty():
            yield self.queue.get()


class _OverQueueDataset(_OverQueue, torch.utils.data.IterableDataset[int]):
    pass


@pytest.mark.parametrize("is_loader", [False, True])
def test_what_gives_each_minibatch_once_loses_none_to_a_look(is_loader: bool) -> None:
    # A look must not consume the first minibatch of such data. Otherwise the training would begin with the
    # second.
    data: Iterable[int] = DataLoader(_OverQueueDataset(), batch_size=None) if is_loader else _OverQueue()
    looked = looked_at(data)
    assert looked_at(looked) is looked
    assert first_of(looked) == first_of(looked) == 0
    assert list(looked) == [0, 1, 2, 3]
    assert list(looked) == []  # the data themselves are used up, too


class _Shuffling:
    """Data that shuffle the positions of their samples in place. They count how often they were copied."""

    def __init__(self, indices: Any) -> None:
        self.indices, self.weights, self.num_copies = indices, torch.ones(3), 0
        self.address = self.weights.data_ptr()

    def __getstate__(self) -> dict[str, Any]:
        self.num_copies += 1
        return vars(self)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        assert self.weights.data_ptr() == self.address
        self.indices[0], self.indices[-1] = int(self.indices[-1]), int(self.indices[0])
        return iter([int(index) for index in self.indices])


def test_data_are_copied_once_for_the_first_look() -> None:
    data, kept = _Shuffling([1, 2, 3]), KeptMinibatch()
    assert first_of(looked_at(data, kept), kept) == 3
    assert data.num_copies == 1 and kept.copied is None
    assert first_of(data, kept) == 3


@pytest.mark.parametrize("is_sampler", [False, True])
@pytest.mark.parametrize("indices", [[1, 2, 3], np.array([1, 2, 3]), torch.tensor([1, 2, 3])], ids=type)
def test_positions_that_an_iteration_shuffles_are_copied_and_other_tensors_not(
    indices: Any, is_sampler: bool
) -> None:
    """A look at the first minibatch must not shuffle the data's own positions, nor copy a sampler's
    weights.
    """
    shuffling = _Shuffling(indices)
    data: Any = DataLoader(range(5), batch_size=None, sampler=shuffling) if is_sampler else shuffling  # type: ignore[arg-type]
    assert int(first_of(data)) == int(first_of(data)) == 3
    assert list(map(int, shuffling.indices)) == [1, 2, 3]


def test_an_open_file_is_read_from_its_first_line(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("one\ntwo\n")
    with (tmp_path / "lines").open() as file:
        looked = looked_at(file)
        assert first_of(looked) == "one\n"
        assert list(looked) == ["one\n", "two\n"]
