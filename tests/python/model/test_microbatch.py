"""Tests microbatch.py: all tensors of a minibatch are cut alike, into the pieces that torch.chunk makes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from pipedream.model.microbatch import check_alike, chunk, counts_of, piece_sizes, samples_of, weights
from torch import Tensor


def _chunk(value: Any, num_microbatches: int) -> list[Any]:
    return chunk(value, num_microbatches, name="inputs", minibatch=3)


def test_a_single_microbatch_is_the_value_itself() -> None:
    for value in (torch.zeros(3), (torch.zeros(2), torch.zeros(5)), object(), torch.zeros(0)):
        (piece,) = _chunk(value, 1)
        assert piece is value


@given(num_samples=st.integers(1, 40), num_microbatches=st.integers(1, 40))
def test_pieces_are_torch_chunks_in_order_and_weigh_their_samples(
    num_samples: int, num_microbatches: int
) -> None:
    assume(num_samples >= num_microbatches)
    value = torch.arange(2 * num_samples).view(num_samples, 2)
    pieces = _chunk(value, num_microbatches)
    assert len(pieces) <= num_microbatches
    for piece, expected in zip(pieces, torch.chunk(value, num_microbatches), strict=True):
        assert torch.equal(piece, expected)
    assert piece_sizes(num_samples, num_microbatches) == [len(piece) for piece in pieces]
    shares = weights([len(piece) for piece in pieces])
    assert shares == pytest.approx([len(piece) / num_samples for piece in pieces])
    assert sum(shares) == pytest.approx(1)


def test_fewer_pieces_than_asked_for_where_torch_makes_fewer() -> None:
    assert [len(piece) for piece in _chunk(torch.zeros(5), 4)] == [2, 2, 1]
    assert [len(piece) for piece in _chunk(torch.zeros(3, 7), 4)] == [1, 1, 1]


def test_every_tensor_of_a_nested_value_is_cut_and_the_rest_goes_to_each_piece() -> None:
    scale, shared = torch.tensor(0.5), torch.arange(4)
    value = {"x": (shared, [shared, torch.arange(12).view(4, 3)]), "scale": scale, "flag": True, "no": None}
    first, second = _chunk(value, 2)
    for piece, begin in ((first, 0), (second, 2)):
        assert piece.keys() == value.keys()
        once, (twice, matrix) = piece["x"]
        assert once.tolist() == [begin, begin + 1]
        assert twice is once
        assert torch.equal(matrix, torch.arange(12).view(4, 3)[begin : begin + 2])
        assert piece["scale"] is scale
        assert piece["flag"] is True
        assert piece["no"] is None


def test_pieces_share_the_values_memory() -> None:
    value = torch.zeros(4)
    for piece in _chunk(value, 2):
        piece.add_(1)
    assert value.tolist() == [1, 1, 1, 1]


def test_a_value_without_samples_goes_to_every_microbatch() -> None:
    assert _chunk((None, 3), 4) == [(None, 3)] * 4
    assert chunk(None, 4, name="targets", minibatch=3, num_samples=5) == [None] * 3


def test_what_broadcasts_over_the_samples_goes_whole_to_every_microbatch() -> None:
    positions, tokens, targets = torch.arange(3)[None], torch.arange(12).view(4, 3), torch.ones(1, 4, 4)
    pieces = chunk({"positions": positions, "tokens": tokens}, 2, name="the inputs", minibatch=0)
    assert [piece["positions"] is positions for piece in pieces] == [True, True]
    assert [piece["tokens"].tolist() for piece in pieces] == [tokens[:2].tolist(), tokens[2:].tolist()]
    assert samples_of((positions, tokens), targets) == 4
    shared = chunk(targets, 2, name="the targets", minibatch=0, num_samples=4)
    assert [piece is targets for piece in shared] == [True, True]
    check_alike(tokens, targets, 2, minibatch=0)
    assert samples_of(positions, targets) == 1


def test_samples_are_those_of_the_targets_or_else_of_the_inputs() -> None:
    three, scalar = torch.zeros(3, 7), torch.tensor(1.0)
    assert samples_of(torch.zeros(2), {"a": [scalar, three]}) == 3
    assert samples_of((scalar, three), scalar) == samples_of(three, None) == 3
    assert samples_of(scalar, 1.0) is None
    assert piece_sizes(None, 4) == [1] * 4
    assert piece_sizes(5, 1) == [5]


def test_inputs_and_targets_must_make_as_many_pieces() -> None:
    five, ten, scalar = torch.zeros(5), torch.zeros(10, 2), torch.tensor(1.0)
    for inputs, targets in ((five, five), (five, torch.zeros(6)), (five, scalar), (None, ten), (None, None)):
        check_alike(inputs, targets, 4, minibatch=3)
    check_alike(five, torch.zeros(2), 1, minibatch=3)
    with pytest.raises(ValueError, match=r"minibatch 3 has inputs that make 3 .* targets that make 4"):
        check_alike(five, ten, 4, minibatch=3)


class _Batch:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (torch.zeros(0), ValueError, "minibatch 3: no samples in inputs, which cannot be cut into micro"),
        (
            (torch.zeros(8), [torch.zeros(9)]),
            ValueError,
            "minibatch 3: the tensors of inputs have 8 and 9 samples .* microbatches=1",
        ),
        ([_Batch(torch.zeros(8))], TypeError, "minibatch 3: a _Batch in inputs cannot be cut"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        _chunk(value, 4)
    assert "\n" not in str(caught.value)


def test_a_single_microbatch_weighs_one_also_without_samples() -> None:
    assert weights([5]) == weights([0]) == [1.0]


def test_where_nothing_counts_all_count_alike() -> None:
    assert counts_of(lambda targets: 0, [1, 2, 3], 0) == [1.0, 1.0, 1.0]
    assert counts_of(torch.tensor, [0, 2, 3], 0) == [0.0, 2.0, 3.0]


@pytest.mark.parametrize("count", [-1, math.inf, math.nan])
def test_what_is_no_count_is_refused_naming_the_minibatch(count: float) -> None:
    with pytest.raises(ValueError, match=f"weight_fn gives {float(count)} for a microbatch of minibatch 5"):
        counts_of(lambda targets: count, [None, None], 5)


def _halves(value: Any, num_samples: int | None = None) -> list[Any]:
    return chunk(value, 2, name="the inputs", minibatch=0, num_samples=num_samples)


_IMAGES = [torch.zeros(3, 4 + width, 4) for width in range(4)]
_BOXES = [{"boxes": torch.zeros(count, 4), "labels": torch.zeros(count)} for count in (2, 0, 4, 1)]


@pytest.mark.parametrize(
    "value",
    [
        ["a", "b", "c", "d"],
        ("a", "b", "c", "d"),
        [1, 2, 3, 4],
        [[1], [2, 3], [], [4, 5, 6]],
        _IMAGES,
        tuple(_IMAGES),
        [torch.zeros(1, 2, 2)] * 4,
        [torch.zeros(length) for length in (4, 1, 3, 4)],
        _BOXES,
        tuple(_BOXES),
        [object() for _ in range(4)],
    ],
    ids=[
        "texts",
        "tuple",
        "numbers",
        "ragged",
        "images",
        "image tuple",
        "grey",
        "lengths",
        "boxes",
        "box tuple",
        "objects",
    ],
)
def test_a_list_with_an_entry_per_sample_is_cut(value: Any) -> None:
    """The list must not go whole to every microbatch, nor be cut along the channels of its images. Its
    entries would then be paired with other samples."""
    assert _halves(value, 4) == [value[:2], value[2:]]
    (first, _), (second, _) = _halves((value, torch.zeros(4)), 4)
    assert (first, second) == (value[:2], value[2:])


def test_lists_of_fields_and_of_constants_are_no_samples() -> None:
    fields = [torch.arange(4), torch.arange(8).view(4, 2)]
    first, second = _halves([*fields, "mode", (8, 8), [1, 2, 3]], 4)
    assert [part.tolist() for part in first[:2]] == [[0, 1], [[0, 1], [2, 3]]]
    assert first[2:] == second[2:] == ["mode", (8, 8), [1, 2, 3]]
    records = ({"a": torch.arange(2)}, {"b": torch.arange(2)})
    assert [part["b"].tolist() for _, part in _halves(records, 2)] == [[0], [1]]
    assert _halves({"size": (8, 8), "x": torch.zeros(2)}, 2)[0]["size"] == (8, 8)


def test_a_tuple_of_numbers_goes_whole_and_a_list_as_long_as_the_batch_does_not() -> None:
    labels, scales = torch.arange(4), (0.1, 0.2, 0.3, 0.4)
    as_tuple, as_list = (
        chunk((labels, given), 2, name="the targets", minibatch=0) for given in (scales, [*scales])
    )
    assert [given for _, given in as_tuple] == [scales, scales]
    assert [given for _, given in as_list] == [[0.1, 0.2], [0.3, 0.4]]


@pytest.mark.parametrize(
    ("inputs", "targets", "num_samples"),
    [
        (_IMAGES, _BOXES, 4),
        (tuple(_IMAGES), tuple(_BOXES), 4),
        (_IMAGES, [image[0] for image in _IMAGES], 4),
        (_IMAGES, [3, 1, 2, 0], 4),
        (["a", "b", "c"], None, 3),
        ((torch.zeros(8, 3), torch.zeros(2, 20)), (torch.zeros(8), torch.zeros(8)), 8),
        ([torch.zeros(8, 2), torch.zeros(8)], None, 8),
        ([torch.zeros(8, 2), torch.zeros(8)], [torch.zeros(8), torch.zeros(8)], 8),
        (torch.zeros(8), ({"a": torch.zeros(8)}, {"b": torch.zeros(8)}), 8),
        ({"x": torch.zeros(8), "names": ["a", "b"]}, None, 8),
    ],
)
def test_lists_tell_the_number_of_samples_where_tensors_do_not(
    inputs: Any, targets: Any, num_samples: int
) -> None:
    assert samples_of(inputs, targets) == num_samples


def test_a_list_of_samples_beside_tensors_of_others_is_refused() -> None:
    with pytest.raises(ValueError, match="have 4 and 8 samples"):
        _halves((["a", "b", "c", "d"], torch.zeros(8)), 4)
