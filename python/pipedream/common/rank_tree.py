"""Defines the tree of ranks through which weights and results are sent between rank 0 and the other ranks.

            0                  rank r sends to ranks k r + 1 ... k r + k, with k = NUM_CHILDREN_MAX.
      1  2 ... k               With up to k + 1 ranks, rank 0 sends to all others.
    k+1 ...

So no rank has more than k children, however many ranks there are. Each rank forwards everything for the ranks
below it, in the order of subtree_of(). Torch-free; pure.
"""

from __future__ import annotations

import itertools

__all__ = ["NUM_CHILDREN_MAX", "NUM_PIECES", "PIECE_BYTES", "children_of", "parent_of", "subtree_of"]

NUM_CHILDREN_MAX = 8
PIECE_BYTES = 1 << 20
"""Bytes of the largest piece in which weights and results are sent."""
NUM_PIECES = 4
"""A rank may have at most this many pieces that a neighbour in the tree has sent and it has not yet used."""


def parent_of(rank: int) -> int:
    """Returns the parent of a rank other than 0. It is a smaller rank, so ranks 0 to n - 1 are a tree for
    every n.
    """
    return (rank - 1) // NUM_CHILDREN_MAX


def children_of(rank: int, num_ranks: int) -> range:
    first = rank * NUM_CHILDREN_MAX + 1
    return range(min(first, num_ranks), min(first + NUM_CHILDREN_MAX, num_ranks))


def subtree_of(rank: int, num_ranks: int) -> list[int]:
    """Returns the rank and all ranks below it in the tree. Each rank comes before the ranks below it."""
    subtrees = (subtree_of(child, num_ranks) for child in children_of(rank, num_ranks))
    return [rank, *itertools.chain.from_iterable(subtrees)]
