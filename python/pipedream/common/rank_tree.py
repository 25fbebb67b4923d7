"""The tree of ranks by which initial weights, final weights and results travel between rank 0 and the others.
No rank talks to more than NUM_CHILDREN_MAX ranks below it, however many there are.

            0                  rank r hands on to ranks k r + 1 ... k r + k, with k = NUM_CHILDREN_MAX;
      1  2 ... k               up to k + 1 ranks that is rank 0 to all others
    k+1 ...

Each rank passes on what is for those below it, in the order of subtree(). Torch-free; pure.
"""

from __future__ import annotations

import itertools

__all__ = ["NUM_CHILDREN_MAX", "NUM_PIECES", "PIECE_BYTES", "children_of", "parent_of", "subtree_of"]

NUM_CHILDREN_MAX = 8
PIECE_BYTES = 1 << 20
"""The largest piece in which weights and results travel."""
NUM_PIECES = 4
"""Pieces that a rank may have from each neighbour in the tree without having used them."""


def parent_of(rank: int) -> int:
    """Returns the parent of a rank that is not rank 0. It is smaller than the rank: the first n ranks are a
    tree."""
    return (rank - 1) // NUM_CHILDREN_MAX


def children_of(rank: int, num_ranks: int) -> range:
    first = rank * NUM_CHILDREN_MAX + 1
    return range(min(first, num_ranks), min(first + NUM_CHILDREN_MAX, num_ranks))


def subtree_of(rank: int, num_ranks: int) -> list[int]:
    """The rank and all below it, each before those below it."""
    subtrees = (subtree_of(child, num_ranks) for child in children_of(rank, num_ranks))
    return [rank, *itertools.chain.from_iterable(subtrees)]
