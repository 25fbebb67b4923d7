"""Tests batch_reader.py: a stage reads the inputs, the targets, or both of a stream's microbatches."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pipedream import Microbatches
from pipedream.data import minibatch_source
from pipedream.data.batch_reader import BatchReader, Microbatch
from pipedream.data.minibatch_source import MinibatchSource
from pipedream.data.stream import DataStream, Minibatch, fingerprint

_FIRST = {"is_first": True, "is_last": False}
_LAST = {"is_first": False, "is_last": True}
_ALONE = {"is_first": True, "is_last": True}


def _pair(size: int, value: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((size, 2), value), torch.full((size,), -value)


def _reader(data: list[Any], num_microbatches: int, *, epochs: int = 1, **place: bool) -> BatchReader:
    stream = DataStream(data, epochs=epochs)
    return BatchReader(
        MinibatchSource(stream), num_microbatches, check_inputs=lambda inputs, minibatch: None, **place
    )


def _read_all(reader: BatchReader, minibatch: int, num_microbatches: int) -> list[Microbatch]:
    assert reader.source.fetch(reader.source.num_minibatches)
    return [reader.read(minibatch, microbatch) for microbatch in range(num_microbatches)]


def test_the_first_stage_gets_inputs_and_the_last_targets_with_their_share_of_the_loss() -> None:
    inputs, targets = _pair(5)
    data = [(inputs, targets)]
    first = _read_all(_reader(data, 4, **_FIRST), 0, 4)
    last = _read_all(_reader(data, 4, **_LAST), 0, 4)
    assert [len(piece.inputs) for piece in first[:3]] == [2, 2, 1]
    assert [len(piece.targets) for piece in last[:3]] == [2, 2, 1]
    assert [piece.weight for piece in last[:3]] == [0.4, 0.4, 0.2]
    assert all(piece.targets is None for piece in first)
    assert all(piece.inputs is None for piece in last)
    # torch.chunk makes 3 pieces of 5 samples, so the fourth microbatch is empty.
    assert [piece.is_empty for piece in first] == [piece.is_empty for piece in last] == [False] * 3 + [True]


@pytest.mark.parametrize("place", [_FIRST, _LAST, _ALONE], ids=["first", "last", "alone"])
def test_given_microbatches_are_read_whole_by_each_stage(place: dict[str, bool]) -> None:
    sizes = [2, 2, 1, 1]  # torch.chunk would cut 6 samples into 3 pieces
    pieces = _read_all(_reader([Microbatches(map(_pair, sizes))], 4, **place), 0, 4)
    for read, part in ((place["is_first"], "inputs"), (place["is_last"], "targets")):
        found = [getattr(piece, part) for piece in pieces]
        assert [len(each) for each in found] == sizes if read else found == [None] * 4
    assert [piece.weight for piece in pieces] == [size / 6 for size in sizes]
    assert not any(piece.is_empty for piece in pieces)


def test_both_ends_take_the_same_fingerprint_of_the_same_minibatch_and_another_of_another() -> None:
    data, others = [_pair(4)], [_pair(4, 2.0)]
    fingerprints = {
        (who, which): {piece.fingerprint for piece in _read_all(_reader(given, 2, **place), 0, 2)}
        for who, place in (("first", _FIRST), ("last", _LAST))
        for which, given in (("data", data), ("others", others))
    }
    assert fingerprints["first", "data"] == fingerprints["last", "data"] == {fingerprint(*data[0])}
    assert fingerprints["first", "others"] == fingerprints["last", "others"]
    assert fingerprints["last", "others"] != fingerprints["last", "data"]


def test_the_fingerprint_that_the_caller_took_is_not_taken_again() -> None:
    class Received:
        num_minibatches: int | None = 1
        draws = may_reuse_memory = waits_for_others = False

        def next(self) -> Minibatch:
            return Minibatch(None, torch.zeros(4), 3, 4, fingerprint=(1 << 63) | 77)

        def peek(self) -> Any:
            raise AssertionError

    reader = BatchReader(MinibatchSource(Received()), 2, check_inputs=lambda inputs, minibatch: None, **_LAST)
    assert [piece.fingerprint for piece in _read_all(reader, 0, 2)] == [(1 << 63) | 77] * 2
    assert (reader.source.samples, reader.source.epochs) == ([4], [3])


@pytest.mark.parametrize("targets", [None, 1.0, torch.tensor(1.0)], ids=["none", "float", "scalar"])
def test_targets_without_samples_go_to_every_piece_of_the_inputs_and_weigh_theirs(targets: Any) -> None:
    data = [(torch.zeros(5, 2), targets)]
    first = _read_all(_reader(data, 4, **_FIRST), 0, 4)
    reader = _reader(data, 4, **_LAST)
    last = _read_all(reader, 0, 4)
    assert [piece.fingerprint for piece in first] == [piece.fingerprint for piece in last]
    assert all(piece.targets is targets for piece in last[:3])
    assert [piece.weight for piece in last[:3]] == [0.4, 0.4, 0.2]
    assert last[3].is_empty
    assert reader.source.samples == [5]


def test_a_minibatch_in_one_piece_needs_no_samples_in_dimension_0() -> None:
    for inputs, targets, samples in (
        (torch.zeros(5, 2), torch.zeros(2, 5), 2),
        (torch.zeros(5, 2), torch.zeros(()), 5),
        (torch.zeros(()), torch.zeros(()), 1),
        ((torch.zeros(5, 2), torch.zeros(3)), {"a": torch.zeros(4), "b": torch.zeros(6)}, 4),
    ):
        (first,) = _read_all(_reader([(inputs, targets)], 1, **_FIRST), 0, 1)
        reader = _reader([(inputs, targets)], 1, **_LAST)
        (last,) = _read_all(reader, 0, 1)
        assert first.inputs is inputs
        assert last.targets is targets
        assert first.fingerprint == last.fingerprint and not first.is_empty
        assert last.weight == 1.0
        assert reader.source.samples == [samples]


def test_a_single_stage_gets_both_and_takes_no_fingerprint() -> None:
    (piece,) = _read_all(_reader([_pair(3)], 1, **_ALONE), 0, 1)
    assert (len(piece.inputs), len(piece.targets), piece.fingerprint, piece.weight) == (3, 3, 0, 1.0)


def test_a_minibatch_in_one_piece_is_passed_on_as_it_is() -> None:
    inputs, targets = _pair(3)
    (piece,) = _read_all(_reader([(inputs, targets)], 1, **_ALONE), 0, 1)
    assert piece.inputs is inputs
    assert piece.targets is targets


def test_what_was_read_is_not_kept() -> None:
    reader = _reader([_pair(4)], 2, **_ALONE)
    pieces = _read_all(reader, 0, 2)
    again = reader.read(0, 1)
    assert again.inputs is None and again.targets is None
    inputs = weakref.ref(pieces[0].inputs)
    del pieces
    assert inputs() is None


def test_samples_and_epochs_are_counted_at_both_ends() -> None:
    data = [_pair(4), _pair(2)]
    reader = _reader(data, 2, epochs=2, **_LAST)
    for minibatch in range(4):
        _read_all(reader, minibatch, 2)
    assert (reader.source.samples, reader.source.epochs) == ([4, 2, 4, 2], [0, 0, 1, 1])
    assert not reader.source.fetch(reader.source.num_minibatches)
    first = _reader(data, 2, **_FIRST)
    _read_all(first, 0, 2)
    assert (first.source.samples, first.source.epochs) == ([4], [0])


def test_inputs_are_checked_whole_and_before_any_is_handed_out() -> None:
    seen: list[tuple[int, int]] = []

    def check(inputs: torch.Tensor, minibatch: int) -> None:
        seen.append((len(inputs), minibatch))
        raise ValueError("larger than planned")

    reader = BatchReader(MinibatchSource(DataStream([_pair(6)], epochs=1)), 3, check_inputs=check, **_FIRST)
    assert reader.source.fetch(reader.source.num_minibatches)
    assert seen == []  # fetch() runs the user's data code, whose errors are reported in another way
    with pytest.raises(ValueError, match="larger than planned"):
        reader.read(0, 0)
    assert seen == [(6, 0)]


@pytest.mark.parametrize(
    ("pair", "place", "message"),
    [
        (_pair(0), _FIRST, "minibatch 4: no samples in the inputs, which cannot be cut"),
        (_pair(0), _LAST, "minibatch 4: no samples in the targets, which cannot be cut"),
        *(
            (
                (torch.zeros(6, 1), torch.zeros(4)),
                place,
                "minibatch 4 has inputs that make 3 microbatches and targets that make 2: give both",
            )
            for place in (_FIRST, _LAST, _ALONE)
        ),
    ],
)
def test_data_that_cannot_be_cut_are_refused_in_one_line(pair: Any, place: Any, message: str) -> None:
    reader = _reader([*[_pair(3)] * 4, pair], 3, **place)
    assert reader.source.fetch(4)
    with pytest.raises(ValueError, match=message) as caught:
        reader.read(4, 0)
    assert "\n" not in str(caught.value)


def test_the_time_in_the_datas_own_code_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 0

    class _Clock:
        def perf_counter_ns(self) -> int:
            return now_ns

    def batches() -> Iterator[Any]:
        nonlocal now_ns
        for seconds in (1, 2):
            now_ns += seconds
            yield _pair(2)

    monkeypatch.setattr(minibatch_source, "time", _Clock())
    stream = DataStream(batches(), epochs=1)
    reader = BatchReader(MinibatchSource(stream), 1, check_inputs=lambda inputs, minibatch: None, **_FIRST)
    _read_all(reader, 0, 1)
    assert reader.source.read_ns == 1
    _read_all(reader, 1, 1)
    assert reader.source.read_ns == 3


def test_microbatches_count_what_the_user_says() -> None:
    targets = torch.tensor([7, 7, 7, -1, -1, -1])
    stream = DataStream([(torch.zeros(6), targets)], epochs=1)

    def valid(of: torch.Tensor) -> torch.Tensor:
        return (of >= 0).sum()

    reader = BatchReader(
        MinibatchSource(stream), 3, check_inputs=lambda inputs, minibatch: None, weight_fn=valid, **_LAST
    )
    assert [piece.weight for piece in _read_all(reader, 0, 3)] == [2 / 3, 1 / 3, 0.0]


def test_only_the_last_stage_asks_what_a_microbatch_counts() -> None:
    def nobody_asks(of: Any) -> int:
        pytest.fail("asked")

    stream = DataStream([_pair(6)], epochs=1)
    reader = BatchReader(
        MinibatchSource(stream),
        3,
        check_inputs=lambda inputs, minibatch: None,
        weight_fn=nobody_asks,
        **_FIRST,
    )
    assert [piece.weight for piece in _read_all(reader, 0, 3)] == [pytest.approx(1 / 3)] * 3


def test_a_replica_reads_its_own_minibatches_and_counts_the_others() -> None:
    data = [_pair(size, float(size)) for size in (1, 2, 3, 4, 5)]
    reader = _reader(data, 1, **_ALONE)
    assert reader.source.fetch(1)
    assert torch.equal(reader.read(1, 0).inputs, data[1][0])
    assert reader.source.fetch(4)
    assert torch.equal(reader.read(4, 0).inputs, data[4][0])
    assert reader.source.samples == [1, 2, 3, 4, 5]
    assert not reader.source.fetch(7)
    assert reader.source.num_minibatches == 5


def test_what_is_read_ahead_is_what_is_read() -> None:
    data = [_pair(4, float(value)) for value in range(3)]
    plain, ahead = _reader(data, 2, **_FIRST), _reader(data, 2, **_FIRST)
    for minibatch in range(3):
        ahead.read_ahead()
        for one, other in zip(_read_all(plain, minibatch, 2), _read_all(ahead, minibatch, 2), strict=True):
            assert one.inputs.data_ptr() == other.inputs.data_ptr()
            assert (one.fingerprint, one.weight) == (other.fingerprint, other.weight)


def test_what_is_wrong_with_data_that_are_read_ahead_is_said_where_they_are_read() -> None:
    def check(inputs: Any, minibatch: int) -> None:
        if len(inputs) == 3:
            raise ValueError(f"minibatch {minibatch} is odd")

    stream = DataStream([_pair(2), _pair(3), _pair(4)], epochs=1)
    reader = BatchReader(MinibatchSource(stream), 1, check_inputs=check, **_FIRST)
    for minibatch in range(3):
        reader.read_ahead()
        assert reader.source.fetch(minibatch)
        if minibatch == 1:
            with pytest.raises(ValueError, match="minibatch 1 is odd"):
                reader.read(minibatch, 0)
        else:
            assert len(reader.read(minibatch, 0).inputs) == minibatch + 2


def test_a_replica_that_reads_ahead_has_its_own_minibatches() -> None:
    data = [_pair(size, float(size)) for size in (1, 2, 3, 4)]
    reader = _reader(data, 1, **_FIRST)
    for minibatch in (1, 3):
        reader.read_ahead()  # another replica's
        assert reader.source.fetch(minibatch)
        assert torch.equal(reader.read(minibatch, 0).inputs, data[minibatch][0])
