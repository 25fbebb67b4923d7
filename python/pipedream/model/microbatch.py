"""Microbatches: how a minibatch is cut, and what each piece counts. Pure; any thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipedream.model.boundary import map_tensors, tensors_of

__all__ = [
    "batch_size_of",
    "check_alike",
    "check_enough",
    "chunk",
    "counts_of",
    "piece_sizes",
    "samples_of",
    "weights",
]

# What every piece may share as it is.
_CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)


def samples_of(inputs: Any, targets: Any) -> int | None:
    """Samples of a minibatch: the size of dimension 0 of the first tensor that has one, of the targets or,
    where they have none, of the inputs. None: neither has any. A size of 1, which broadcasts, tells nothing
    where another tensor has more."""
    sizes = [tensor.size(0) for tensor in tensors_of((targets, inputs)) if tensor.dim() > 0]
    return next((size for size in sizes if size != 1), 1 if sizes else None)


def batch_size_of(inputs: Any, targets: Any) -> int | None:
    """Of a profile: as a run counts samples, at least 1. Where inputs are joined (words of bags, nodes of
    graphs) the targets tell."""
    num_samples = samples_of(inputs, targets)
    return None if num_samples is None else max(1, num_samples)


def piece_sizes(num_samples: int | None, num_microbatches: int) -> list[int]:
    """Samples of each piece that torch.chunk makes; one each where there are no samples."""
    if num_samples is None:
        return [1] * num_microbatches
    if num_microbatches == 1:
        return [num_samples]
    size = max(-(-num_samples // num_microbatches), 1)
    return [min(size, num_samples - begin) for begin in range(0, num_samples, size)]


def chunk(
    value: Any, num_microbatches: int, *, name: str, minibatch: int | str, num_samples: int | None = None
) -> list[Any]:
    """The microbatches of a nested value, as views, in order; [value] itself for num_microbatches = 1.

    Every tensor with a dimension is cut with torch.chunk along dimension 0, its samples; other tensors,
    those that have 1 there where others have more (positions, masks of a shape (1, T)) and constants go to
    every piece. As torch.chunk does, it may give fewer pieces than asked for (5 samples in 4: 2, 2, 1); a
    value without samples is repeated for each piece of the minibatch's num_samples.

    Raises ValueError, naming `name` and minibatch (its number, or more: "0 at these sizes"), for fewer
    samples than microbatches and for tensors that disagree in their number of samples; TypeError for an
    object that hides its samples.
    """
    if num_microbatches == 1:
        return [value]
    _check_constants(value, name, minibatch)
    cut = {id(tensor): tensor for tensor in tensors_of(value) if tensor.dim() > 0}
    if not cut:
        return [value] * len(piece_sizes(num_samples, num_microbatches))
    all_sizes = {int(tensor.shape[0]) for tensor in cut.values()}
    sizes = sorted(all_sizes - {1} or all_sizes)
    if sizes == [1] and num_samples not in (None, 1):
        return [value] * len(piece_sizes(num_samples, num_microbatches))
    if len(sizes) > 1:
        raise ValueError(
            f"minibatch {minibatch}: the tensors of {name} have {' and '.join(map(str, sizes))} samples "
            f"(sizes of dimension 0), so they cannot be cut into {num_microbatches} microbatches: give "
            f"each of them the samples in dimension 0, or 1 where all microbatches share it, or use "
            f"microbatches=1"
        )
    check_enough(sizes[0], num_microbatches, name=name, minibatch=minibatch)
    pieces = {
        key: torch.chunk(tensor, num_microbatches)
        for key, tensor in cut.items()
        if tensor.shape[0] == sizes[0]
    }
    num_pieces = len(next(iter(pieces.values())))
    return [_piece(value, pieces, index) for index in range(num_pieces)]


def check_enough(num_samples: int | None, num_microbatches: int, *, name: str, minibatch: int | str) -> None:
    """Raises ValueError for fewer samples than microbatches; None are no samples at all."""
    if num_samples is not None and num_samples < num_microbatches:
        raise ValueError(
            f"minibatch {minibatch}: {num_samples} samples in {name}, fewer than microbatches="
            f"{num_microbatches}: use fewer microbatches or larger minibatches (a DataLoader drops a short "
            f"last one with drop_last=True)"
        )


def check_alike(inputs: Any, targets: Any, num_microbatches: int, *, minibatch: int | str) -> None:
    """Raises ValueError for inputs and targets, both with samples, that make different numbers of pieces."""
    if num_microbatches == 1:
        return
    counts = [samples_of(inputs, None), samples_of(None, targets)]
    made = [len(piece_sizes(count, num_microbatches)) for count in counts if count not in (None, 1)]
    if len(set(made)) > 1:
        raise ValueError(
            f"minibatch {minibatch} has inputs that make {made[0]} microbatches and targets that make"
            f" {made[1]}: give both one entry per sample in dimension 0, or use microbatches=1"
        )


def weights(counts: Sequence[float]) -> list[float]:
    """The share of each microbatch in its minibatch's loss and gradient: its samples, or what else it counts,
    over those of all."""
    if len(counts) == 1:
        return [1.0]  # also of an empty minibatch
    total = sum(counts)
    return [count / total for count in counts]


def counts_of(weight_fn: Callable[[Any], Any], pieces: Sequence[Any], minibatch: int) -> list[float]:
    """What the user says that each microbatch counts; pieces: their targets. Where none counts anything all
    count alike, so that the loss is what loss_fn makes of nothing. Raises ValueError for what is no count.
    """
    counts = []
    for piece in pieces:
        count = float(weight_fn(piece))
        if not 0 <= count < math.inf:
            raise ValueError(
                f"weight_fn gives {count} for a microbatch of minibatch {minibatch}: it must give what the"
                " microbatch counts, 0 or more, for example its valid tokens"
            )
        counts.append(count)
    return counts if any(counts) else [1.0] * len(counts)


def _piece(value: Any, pieces: dict[int, tuple[torch.Tensor, ...]], index: int) -> Any:
    return map_tensors(lambda tensor: pieces[id(tensor)][index] if id(tensor) in pieces else tensor, value)


def _check_constants(value: Any, name: str, minibatch: int | str) -> None:
    # An object that map_tensors does not look into would go to every microbatch with all its samples.
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, (tuple, list)):
        items = list(value)
    elif value is None or isinstance(value, (torch.Tensor, *_CONSTANTS)):
        return
    else:
        raise TypeError(
            f"minibatch {minibatch}: a {type(value).__name__} in {name} cannot be cut into microbatches: "
            f"give tensors in tuples, lists and dicts, or use microbatches=1"
        )
    for item in items:
        _check_constants(item, name, minibatch)
