"""Tests the stream of minibatches that a worker reads."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pipedream.data.stream import (
    DataStream,
    check_sizes,
    describe_source,
    epochs_of,
    fingerprint,
    num_minibatches_of,
)
from pipedream.model.data_copies import without_processes
from pipedream.model.seeding import RngStream
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset


class _Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(2), torch.zeros(2)), (torch.ones(2), torch.ones(2))])


def test_data_whose_length_is_not_implemented_have_none() -> None:
    class WithoutLength:
        def __len__(self) -> int:
            raise NotImplementedError

        def __iter__(self) -> Iterator[int]:
            yield 0

    assert num_minibatches_of(WithoutLength(), 1) is None


def test_a_loader_over_an_iterable_dataset_has_no_length_and_is_read() -> None:
    loader = DataLoader(_Endless(), batch_size=None)
    assert num_minibatches_of(loader, 2) is None
    stream = DataStream(loader, epochs=2)
    epochs = []
    while (minibatch := stream.next()) is not None:
        epochs.append(minibatch.epoch)
    assert epochs == [0, 0, 1, 1]


def test_peek_gives_the_minibatch_that_next_gives_again() -> None:
    stream = DataStream([(torch.ones(2), torch.zeros(2))], epochs=1)
    assert stream.peek()[0] is stream.next().inputs  # type: ignore[union-attr]
    assert stream.next() is None


def test_an_epoch_without_a_minibatch_is_refused() -> None:
    with pytest.raises(ValueError, match="data yielded nothing in epoch 0"):
        DataStream([], epochs=1).peek()


@pytest.mark.parametrize(
    "other",
    [torch.arange(6.0).flip(0), torch.arange(6.0).reshape(2, 3), torch.arange(6.0).double()],
    ids=["order", "shape", "dtype"],
)
def test_fingerprints_of_different_data_differ(other: torch.Tensor) -> None:
    targets = torch.zeros(1)
    assert fingerprint(torch.arange(6.0), targets) == fingerprint(torch.arange(6.0), targets)
    assert fingerprint(torch.arange(6.0), targets) != fingerprint(other, targets)
    assert fingerprint(torch.arange(6.0), targets) != fingerprint(torch.arange(6.0), targets + 1)


@pytest.mark.parametrize("size", [3, 300])
def test_fingerprints_are_of_the_values_wherever_they_lie(size: int) -> None:
    targets = torch.zeros(1)
    values = torch.randn(size, 4, dtype=torch.complex64)
    views = [values[::2], values.t(), values.conj(), values.conj().imag, values[:0], values.real]
    for view in views:
        copy = torch.tensor(view.tolist(), dtype=view.dtype).reshape(view.shape)
        assert fingerprint(view, targets) == fingerprint(copy, targets)


@pytest.mark.parametrize("size", [4, 768])
def test_fingerprints_differ_in_one_element_and_in_the_order_of_samples(size: int) -> None:
    inputs, targets = torch.randn(8, size), torch.arange(8)
    mark = fingerprint(inputs, targets)
    changed = inputs.clone()
    changed[3, -1] += 1
    assert fingerprint(changed, targets) != mark
    swapped = torch.tensor([0, 1, 5, 3, 4, 2, 6, 7])
    assert fingerprint(inputs[swapped], targets) != mark
    assert fingerprint(inputs, targets[swapped]) != mark


def test_a_source_is_named_for_the_result() -> None:
    loader = DataLoader(_Endless(), batch_size=None, num_workers=2)
    sources = [describe_source(data) for data in (loader, [], iter(batch for batch in []))]
    assert sources == ["DataLoader with num_workers=2", "list", "generator"]


def test_a_loader_that_has_its_processes_is_sent_without_them() -> None:
    loader = _loader(num_workers=1, persistent_workers=True)
    first = next(iter(loader))
    with pytest.raises(NotImplementedError):
        pickle.dumps(loader)
    iterator = loader._iterator
    sent = pickle.loads(pickle.dumps(without_processes(loader)))
    assert loader._iterator is iterator
    assert sent.persistent_workers and torch.equal(next(iter(sent))[0], first[0])
    plain = _loader()
    assert without_processes(plain) is plain


def _loader(num_samples: int = 10, **how: Any) -> DataLoader[Any]:
    samples = torch.ones(num_samples, 2)
    return DataLoader(TensorDataset(samples, samples), **{"batch_size": 4, **how})


def _as_they_are(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(8, len(samples)), torch.ones(8)


@pytest.mark.parametrize(
    "data",
    [
        _loader(),
        _loader(8),
        _loader(drop_last=True, num_samples=9),
        _loader(9, collate_fn=_as_they_are),
        _loader(9, sampler=SubsetRandomSampler(range(8))),
        DataLoader(_Endless(), batch_size=2),
        DataLoader(_Endless(), batch_size=None),
        [(torch.ones(2, 3), torch.ones(2)), (torch.ones(3, 3), torch.ones(3))],
        [(torch.ones(()), torch.ones(()))],
    ],
)
def test_sizes_that_are_enough_or_unknown_pass(data: Any) -> None:
    check_sizes(data, 2)


def test_minibatches_that_are_all_too_small_for_their_microbatches_are_refused_before_any_is_read() -> None:
    check_sizes(_loader(9), 4)  # 9 samples make two minibatches of 4 and a short one
    with pytest.raises(ValueError, match="minibatches of 4 samples, fewer than microbatches=5"):
        check_sizes(_loader(9), 5)
    pairs = [(torch.ones(4, 3), torch.ones(4)), (torch.ones(1, 3), torch.ones(1))]
    check_sizes(pairs, 4)
    with pytest.raises(ValueError, match="minibatches of 4 samples, fewer than microbatches=5"):
        check_sizes(pairs, 5)


class _Counted(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([float(index), torch.rand(()).item()]), torch.tensor(index)


class _Stateful:
    """Data that save and restore their own position, as torchdata's loader does."""

    def __init__(self) -> None:
        self.given, self.started_at = 0, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        begin, self.started_at = self.started_at, 0
        for index in range(begin, 5):
            self.given = index + 1
            yield torch.tensor([float(index)]), torch.tensor(index)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.started_at = self.given = state["given"]


def _make_data(kind: str) -> Any:
    if kind == "list":
        return [(torch.tensor([float(index)]), torch.tensor(index)) for index in range(6)]
    if kind == "stateful":
        return _Stateful()
    if kind == "loader that counts its epochs":
        return DataLoader(_Counted(), batch_size=2, sampler=_CountsEpochs())
    if kind == "loader with draws of its own":
        return DataLoader(_Draws(), batch_size=2)
    if kind == "loader of persistent processes":
        numbers = TensorDataset(torch.arange(6.0), torch.arange(6))
        return DataLoader(numbers, batch_size=2, shuffle=True, num_workers=1, persistent_workers=True)
    own = torch.Generator().manual_seed(3) if kind == "loader of its own generator" else None
    loader = torch.utils.data.DataLoader(_Counted(), batch_size=2, shuffle=True, generator=own)
    return _Once(loader) if kind == "any" else loader


class _Once:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class _CountsEpochs(torch.utils.data.Sampler[int]):
    """Gives each epoch another order without a call of set_epoch()."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(6, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class _Draws(_Counted):
    def __init__(self) -> None:
        self.random = random.Random(1)

    def __getitem__(self, index: int) -> Any:
        inputs, targets = super().__getitem__(index)
        return inputs + self.random.random(), targets


def _rest(stream: DataStream) -> list[Any]:
    found = []
    while (batch := stream.next()) is not None:
        found.append((batch.inputs.tolist(), batch.targets.tolist(), batch.epoch))
    return found


@pytest.mark.parametrize("is_shared", [False, True], ids=["own generators", "the process's"])
@pytest.mark.parametrize(
    "kind",
    [
        *("list", "loader", "loader of its own generator", "any", "stateful"),
        *("loader that counts its epochs", "loader with draws of its own", "loader of persistent processes"),
    ],
)
@pytest.mark.parametrize("minibatch", [0, 1, 3, 5, 6])
def test_a_stream_goes_to_a_position_and_gives_the_same_from_there(
    kind: str, minibatch: int, is_shared: bool
) -> None:
    def make(goes_to: Any = None) -> DataStream:
        torch.manual_seed(1)
        generators = None if is_shared else RngStream(7)
        return DataStream(
            _make_data(kind), epochs=3, generators=generators, notes_positions=True, goes_to=goes_to
        )

    whole = make()
    for _ in range(minibatch):
        whole.next()
        if is_shared:
            torch.rand(3)  # draws random numbers, as the model does
    ahead = whole.next()
    position = whole.position(minibatch)
    assert ahead is not None
    expected = [(ahead.inputs.tolist(), ahead.targets.tolist(), ahead.epoch), *_rest(whole)]
    resumed = make((minibatch, position))
    resumed.peek()
    resumed.go_on()
    assert _rest(resumed) == expected


def test_a_stream_that_is_over_before_the_position_is_refused() -> None:
    data = [(torch.zeros(1), torch.zeros(1))] * 2
    stream = DataStream(data, epochs=2, notes_positions=True)
    stream.next()
    position = stream.position(0)
    with pytest.raises(ValueError, match="the checkpoint is at minibatch 5, and data has only 4 in all"):
        DataStream(data, epochs=2, goes_to=(5, position)).go_on()


class _ByEpoch(torch.utils.data.Sampler[int]):
    """Shuffles by the number of the epoch alone, as torch's DistributedSampler does."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(len(self), generator=generator).tolist())


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("first", [0, 5])
def test_a_sampler_is_told_of_every_epoch_and_has_its_own_afterwards(
    batch_size: int | None, first: int
) -> None:
    numbers = TensorDataset(torch.arange(6), torch.arange(6))
    sampler = _ByEpoch(first)
    loader = DataLoader(numbers, batch_size=batch_size, sampler=sampler)
    read = [(epoch, inputs.flatten().tolist()) for inputs, _, epoch in epochs_of(loader, 3)]
    for epoch in range(3):
        found = [number for of_epoch, inputs in read if of_epoch == epoch for number in inputs]
        assert found == list(_ByEpoch(first + epoch))
    assert sampler.epoch == first
    resumed = [inputs.flatten().tolist() for inputs, _, epoch in epochs_of(loader, 3, first_epoch=2)]
    assert resumed == [inputs for epoch, inputs in read if epoch == 2]
