"""Tests shards.py: each replica has its pieces of the parameters, and an optimizer keeps state for these
pieces only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipedream import optim
from pipedream.model.layers import flat_view
from pipedream.update.shards import ShardLayout, keep_pieces, piece_of, works_by_element
from pipedream.update.weights import weight_layout
from torch import nn


def _named(*shapes: tuple[int, ...]) -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    return [(f"p{index}", nn.Parameter(torch.randn(shape))) for index, shape in enumerate(shapes)]


def test_each_element_has_one_shard() -> None:
    named = _named((300, 7), (5,), (64, 64))
    layout = ShardLayout(named, 3, whole_tensors=False)
    owners = [torch.full((p.numel(),), -1) for _, p in named]
    for shard in range(3):
        for piece in layout.pieces_of(shard):
            part = owners[piece.parameter][piece.first : piece.first + piece.count]
            assert bool((part == -1).all())
            part.fill_(shard)
            assert piece.is_whole == (piece.count == named[piece.parameter][1].numel())
    assert all(bool((owner >= 0).all()) for owner in owners)


@pytest.mark.parametrize("whole_tensors", [False, True])
@pytest.mark.parametrize("num_spares", [1, 2, 3])
def test_a_shard_alone_has_its_pieces_one_behind_the_other(whole_tensors: bool, num_spares: int) -> None:
    named = _named((300, 7), (5,), (64, 64), (3, 3), (40, 40))
    layout = ShardLayout(named, 3, whole_tensors=whole_tensors, num_spares=num_spares)
    assert layout.num_shards == 3 + num_spares
    dealt = [0] * len(named)
    for shard in range(layout.num_shards):
        alone, pieces = layout.alone(shard), layout.pieces_of(shard)
        cut = [(f"piece {i}", nn.Parameter(piece_of(named[p.parameter][1], p))) for i, p in enumerate(pieces)]
        num_bytes, offsets = weight_layout(cut)
        chunks = alone.chunks_of(shard)
        assert num_bytes <= sum(chunk.num_bytes for chunk in chunks)
        for chunk, own in zip(layout.chunks_of(shard), chunks, strict=True):
            # The owner has memory for its shard only, and the other replicas have whole slots. Both must send
            # the same bytes for the chunk.
            assert own.num_bytes == chunk.num_bytes
            for piece, of_own in zip(chunk.pieces, own.pieces, strict=True):
                assert own.begin_bytes + of_own.begin_bytes == offsets[of_own.parameter]
                assert (of_own.begin_bytes, of_own.count) == (piece.begin_bytes, piece.count)
                dealt[piece.parameter] += piece.count
        assert [p.parameter for p in alone.pieces_of(shard)] == [*range(len(pieces))]
        assert alone.dtype_of(shard) == layout.dtype_of(shard)
    assert dealt == [p.numel() for _, p in named]


@pytest.mark.parametrize("whole_tensors", [False, True])
@pytest.mark.parametrize("shared", [[], [0], [1], [3], [1, 2], [0, 3], [0, 1, 2, 3]])
@pytest.mark.parametrize("num_tied", [0, 1])
def test_what_is_shared_is_in_no_chunk_and_updated_by_all(
    whole_tensors: bool, shared: list[int], num_tied: int
) -> None:
    named = _named((300, 7), (5,), (64, 64), (3, 3), (40, 40))
    layout = ShardLayout(named, 2, whole_tensors=whole_tensors, num_tied=num_tied, shared=shared)
    offsets = weight_layout(named)[1]
    tied_begin = offsets[4] if num_tied else 0
    dealt = [0] * len(named)
    for chunk in layout.chunks:
        for piece in chunk.pieces:
            dealt[piece.parameter] += piece.count
            assert piece.parameter not in shared
            # The pieces of a chunk lie as in the slot, because a replica that pulls the chunk copies its
            # bytes.
            is_tied = num_tied > 0 and piece.parameter == 4
            assert chunk.is_tied == is_tied
            begin = offsets[piece.parameter] + 4 * piece.first - (tied_begin if is_tied else 0)
            assert chunk.begin_bytes + piece.begin_bytes == begin
            assert begin + piece.num_bytes <= chunk.end_bytes
        for index in shared:
            end = offsets[index] + named[index][1].nbytes
            assert chunk.is_tied or chunk.end_bytes <= offsets[index] or chunk.begin_bytes >= end
    assert dealt == [0 if index in shared else p.numel() for index, (_, p) in enumerate(named)]
    for shard in range(2):
        pieces = layout.pieces_of(shard)
        assert [p.parameter for p in pieces if p.parameter in shared] == shared
        assert [(p.parameter, p.first) for p in pieces] == sorted((p.parameter, p.first) for p in pieces)


def test_whole_tensors_stay_whole() -> None:
    layout = ShardLayout(_named((300, 7), (5,), (64, 64)), 2, whole_tensors=True)
    assert all(piece.is_whole for shard in range(2) for piece in layout.pieces_of(shard))


_OPTIMIZERS: list[Callable[..., Any]] = [
    functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    functools.partial(torch.optim.Adam, lr=0.1),
    functools.partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    functools.partial(torch.optim.Rprop, lr=0.1),
    functools.partial(optim.AdamW, lr=0.1),
]


@pytest.mark.parametrize("factory", _OPTIMIZERS, ids=lambda factory: factory.func.__name__)
def test_the_pieces_of_all_shards_make_the_step_of_the_whole(factory: Callable[..., Any]) -> None:
    shapes = ((40, 9), (3,), (17, 5))
    whole = [p for _, p in _named(*shapes)]
    expected = factory(whole)
    assert works_by_element(expected)
    named = _named(*shapes)
    layout = ShardLayout(named, 2, whole_tensors=False)
    gradients = [[torch.randn(shape) for shape in shapes] for _ in range(3)]
    found = [torch.empty_like(p) for p in whole]
    for shard in range(2):
        masters = [nn.Parameter(p.detach().clone()) for _, p in named]
        optimizer = factory(masters)
        pieces = layout.pieces_of(shard)
        kept = keep_pieces(optimizer, masters, pieces)
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in kept]
        for step in gradients:
            for piece, parameter in zip(pieces, kept, strict=True):
                part = flat_view(step[piece.parameter])[piece.first : piece.first + piece.count]
                parameter.grad = part.view(parameter.shape).clone()
            optimizer.step()
        for piece, parameter in zip(pieces, kept, strict=True):
            target = flat_view(found[piece.parameter])[piece.first : piece.first + piece.count]
            target.copy_(parameter.detach().reshape(-1))
    for step in gradients:
        for parameter, gradient in zip(whole, step, strict=True):
            parameter.grad = gradient.clone()
        expected.step()
    assert all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))


def test_groups_keep_their_options_and_names_and_may_be_empty() -> None:
    named = _named((8, 8), (2,))
    masters = [p for _, p in named]
    groups = [
        {"params": [("p0", masters[0])], "weight_decay": 0.1},
        {"params": [("p1", masters[1])], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    pieces = ShardLayout(named, 2, whole_tensors=True).pieces_of(0)
    kept = keep_pieces(optimizer, masters, pieces)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["param_names"] for group in optimizer.param_groups] == [["p0"], []]
    assert optimizer.param_groups[0]["params"][0] is kept[0] is masters[0]


def test_what_is_not_known_to_work_by_element_gets_whole_tensors() -> None:
    class OfTheUser(torch.optim.SGD):
        pass

    parameter = nn.Parameter(torch.ones(2, 2))
    assert not works_by_element(OfTheUser([parameter], lr=0.1))
    assert not works_by_element(torch.optim.Adafactor([parameter]))
    hooked = torch.optim.SGD([parameter], lr=0.1)
    hooked.register_step_pre_hook(lambda *_: None)
    assert not works_by_element(hooked)
    assert works_by_element(None)
