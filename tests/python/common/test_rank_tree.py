"""Tests rank_tree.py: which ranks pass on data from rank 0 and data to rank 0."""

from __future__ import annotations

import pytest
from pipedream.common import rank_tree
from pipedream.common.rank_tree import children_of, parent_of, subtree_of


@pytest.mark.parametrize("num_ranks", [1, 2, 9, 10, 73, 74, 1024])
def test_every_rank_is_below_rank_0_once_and_after_its_parent(num_ranks: int) -> None:
    order = subtree_of(0, num_ranks)
    assert sorted(order) == list(range(num_ranks))
    position = {rank: i for i, rank in enumerate(order)}
    for rank in range(1, num_ranks):
        assert rank in children_of(parent_of(rank), num_ranks)
        assert position[parent_of(rank)] < position[rank]
        assert parent_of(rank) < rank
    for rank in range(num_ranks):
        assert len(children_of(rank, num_ranks)) <= rank_tree.NUM_CHILDREN_MAX


def test_up_to_nine_ranks_all_others_are_rank_0s_own() -> None:
    assert list(children_of(0, 9)) == subtree_of(0, 9)[1:] == list(range(1, 9))
    assert [list(children_of(rank, 10)) for rank in (0, 1, 2)] == [list(range(1, 9)), [9], []]


def test_a_thousand_ranks_are_four_steps_away_at_most() -> None:
    def depth(rank: int) -> int:
        return 0 if rank == 0 else 1 + depth(parent_of(rank))

    assert max(map(depth, range(1024))) == 4
