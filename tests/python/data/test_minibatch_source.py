"""Tests minibatch_source.py: it gives minibatches in order, and ends before one that is larger than
planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from pipedream.data.minibatch_source import MinibatchSource, exceeds
from pipedream.data.stream import DataStream, Minibatch
from pipedream.model.batches import Keywords
from pipedream.model.boundary import Boundary


def _pair(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((size, 2), float(size)), torch.full((size,), -float(size))


def _source(sizes: Sequence[int], planned: int, group_size: int = 1) -> MinibatchSource:
    source = MinibatchSource(DataStream([_pair(size) for size in sizes], epochs=1))
    source.look_ahead(lambda inputs: len(inputs) > planned, group_size)
    return source


def _sizes(source: MinibatchSource, first: int) -> list[int]:
    """Returns the sizes of the minibatches from `first` on, up to the place at which the source ends for
    now."""
    found = []
    while source.fetch(first + len(found)):
        found.append(len(source.take(first + len(found)).inputs))
    return found


def test_the_data_end_before_a_larger_minibatch_and_go_on_with_it() -> None:
    source = _source([2, 3, 1, 5, 4, 3], planned=3)
    assert _sizes(source, 0) == [2, 3, 1]
    larger = source.larger
    assert larger is not None and (larger.first, larger.minibatch) == (3, 3)
    assert larger.shapes == {"inputs": (5, 2), "targets": (5,)}
    assert torch.equal(larger.inputs, _pair(5)[0]) and torch.equal(larger.targets, _pair(5)[1])
    assert source.num_minibatches == 3 and not source.fetch(3) and not source.fetch(9)
    source.look_ahead(lambda inputs: len(inputs) > 5, 1)
    assert source.larger is None
    assert _sizes(source, 3) == [5, 4, 3]
    assert source.num_minibatches == 6
    assert (source.samples, source.epochs) == ([2, 3, 1, 5, 4, 3], [0] * 6)


def test_a_group_that_has_a_larger_one_comes_after_the_end_as_a_whole() -> None:
    source = _source([2, 3, 1, 3, 4, 5, 2], planned=3, group_size=3)
    assert _sizes(source, 0) == [2, 3, 1]
    larger = source.larger
    assert larger is not None and (larger.first, larger.minibatch) == (3, 4)
    # The larger minibatch has 4 samples, and a later one of the group 5.
    assert larger.shapes == {"inputs": (5, 2), "targets": (5,)}
    source.look_ahead(lambda inputs: len(inputs) > 5, 3)
    assert _sizes(source, 3) == [3, 4, 5, 2]  # the last group is shorter


def test_each_dimension_of_all_larger_ones_counts() -> None:
    batches = [(torch.zeros(shape), torch.zeros(shape[0])) for shape in ((2, 9), (7, 3), (1, 1))]
    source = MinibatchSource(DataStream(batches, epochs=1))
    source.look_ahead(lambda inputs: inputs.numel() > 4, 3)
    assert not source.fetch(0)
    assert source.larger is not None
    assert source.larger.shapes == {"inputs": (7, 9), "targets": (7,)}


def test_a_replica_takes_its_own_and_finds_the_larger_one_of_another() -> None:
    source = _source([1, 1, 1, 1, 1, 4], planned=3, group_size=2)
    assert source.fetch(1) and len(source.take(1).inputs) == 1
    assert source.fetch(3) and len(source.take(3).inputs) == 1
    assert not source.fetch(5)
    assert source.num_minibatches == 4


def test_without_a_look_ahead_nothing_is_read_before_it_is_asked_for() -> None:
    read: list[int] = []

    def batches() -> Iterator[Any]:
        for size in (1, 9, 2):
            read.append(size)
            yield _pair(size)

    source = MinibatchSource(DataStream(batches(), epochs=1))
    assert not source.looks_ahead
    assert source.fetch(0) and read == [1]
    assert source.fetch(2) and read == [1, 9, 2]
    assert len(source.take(2).inputs) == 2


def test_a_group_lies_in_memory_of_its_own_where_the_data_use_theirs_again() -> None:
    memory = torch.zeros(2, 2)

    def batches() -> Iterator[Any]:
        for value in (1.0, 2.0, 3.0, 4.0):
            yield memory.fill_(value), memory

    source = MinibatchSource(DataStream(batches(), epochs=1))
    source.look_ahead(lambda inputs: False, 2)
    assert source.fetch(0)
    first, second = source.take(0), source.take(1)
    assert (float(first.inputs[0, 0]), float(second.targets[0, 0])) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (torch.zeros(4, 3), False),
        (torch.zeros(5, 1), True),
        (torch.zeros(3, 5), True),
        (torch.zeros(3, 4), True),  # as many elements as planned
        (torch.zeros(9, 3, dtype=torch.float64), False),  # differs from the plan in more than its size
        (torch.zeros(9, 3, 1), False),
        ((torch.zeros(9, 3),), False),
    ],
    ids=["as planned", "first dimension", "elements", "another shape", "dtype", "rank", "structure"],
)
def test_what_exceeds_differs_in_nothing_but_its_size(inputs: Any, expected: bool) -> None:
    assert exceeds(Boundary.of(torch.zeros(4, 3)), inputs) is expected


def test_any_of_several_inputs_may_exceed() -> None:
    planned = Boundary.of(Keywords(ids=torch.zeros(4, 3), mask=torch.zeros(1, 3), scale=2.0))
    larger = Keywords(ids=torch.zeros(4, 3), mask=torch.zeros(1, 4), scale=2.0)
    assert exceeds(planned, larger)
    assert not exceeds(planned, larger | {"scale": 3.0})


def test_of_several_kinds_one_is_not_exceeded_by_what_it_covers() -> None:
    """The plan has two kinds of minibatch: 4 texts of 64 words, and 16 texts of 16. A minibatch between them,
    such as 8 texts of 32, does not exceed the plan. One that mixes the kinds' tensors does.
    """

    def batch(num_texts: int, length: int) -> Keywords:
        return Keywords(ids=torch.zeros(num_texts, length), mask=torch.zeros(num_texts, 1))

    planned = Boundary.of(batch(4, 64)).or_as(Boundary.of(batch(16, 16)))
    assert not exceeds(planned, batch(4, 64))
    assert not exceeds(planned, batch(16, 16))
    assert not exceeds(planned, batch(8, 32))  # between the two kinds
    assert exceeds(planned, batch(8, 33))
    assert exceeds(planned, batch(16, 17))
    assert exceeds(planned, Keywords(ids=torch.zeros(4, 64), mask=torch.zeros(16, 1)))


def test_what_is_read_ahead_is_what_is_read() -> None:
    for group_size in (1, 2):
        data = [_pair(size) for size in (2, 4, 3)]
        source = MinibatchSource(DataStream(data, epochs=1))
        source.look_ahead(lambda inputs: False, group_size)
        for minibatch in range(3):
            source.read_ahead(None)
            source.read_ahead(None)  # reads at most one minibatch ahead
            assert source.fetch(minibatch)
            assert source.take(minibatch).inputs is data[minibatch][0]
        source.read_ahead(None)
        assert not source.fetch(3) and not source.fetch(3)
        source.read_ahead(None)
        assert (source.samples, source.num_minibatches) == ([2, 4, 3], 3)


def test_data_that_are_read_ahead_are_shown_at_once_and_raise_where_they_are_wanted() -> None:
    source = MinibatchSource(DataStream([_pair(2)], epochs=1))
    shown: list[Minibatch] = []
    source.read_ahead(shown.append)
    assert source.fetch(0)
    assert [source.take(0)] == shown

    def raising(batch: Minibatch) -> None:
        raise OSError("the disk is gone")

    source = MinibatchSource(DataStream([_pair(2)], epochs=1))
    source.read_ahead(raising)
    with pytest.raises(OSError, match="the disk is gone"):
        source.fetch(0)


def test_data_that_reuse_their_memory_or_come_from_others_are_not_read_ahead() -> None:
    def nobody_asks(batch: Minibatch) -> None:
        pytest.fail("asked")

    for name in ("may_reuse_memory", "waits_for_others"):
        stream = DataStream([_pair(2)], epochs=1)
        setattr(stream, name, True)
        source = MinibatchSource(stream)
        source.read_ahead(nobody_asks)
        assert source.fetch(0)
