"""Cuts a minibatch into microbatches, and computes the weight of each one. Pure; any thread."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pipedream.common.microbatches import Microbatches
from pipedream.model.boundary import map_tensors, replaced, tensors_of

__all__ = [
    "batch_size_of",
    "check_alike",
    "chunk",
    "counts_of",
    "filled_up",
    "lists_samples",
    "piece_sizes",
    "samples_of",
    "sizes_of",
    "weights",
]

# Values of these types are constants. Every microbatch gets the same one.
_CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)


def samples_of(inputs: Any, targets: Any) -> int | None:
    """Returns the number of samples of a minibatch; None if it is unknown.

    It is the size of dimension 0 of the first tensor that has dimensions, in the targets, or else in the
    inputs. A size of 1, which broadcasts, does not count if another tensor has another size. If the targets
    are a list with one entry per sample, the list's length counts. If there are no tensors, the length of any
    list with one entry per sample counts. For Microbatches it is the sum over their batches.
    """
    if isinstance(inputs, Microbatches) or isinstance(targets, Microbatches):
        return sum(sizes_of(inputs, targets, None, 1))
    if isinstance(targets, (list, tuple)) and targets is not inputs and _are_samples(targets, inputs):
        return len(targets)
    sizes = [tensor.size(0) for tensor in tensors_of((targets, inputs)) if tensor.dim() > 0]
    if not sizes:
        found = (*_sequences(targets), *_sequences(inputs))
        sizes = [len(sequence) for sequence in found if _has_entries_of_samples(sequence)]
    return next((size for size in sizes if size != 1), 1 if sizes else None)


def _are_samples(targets: Sequence[Any], inputs: Any) -> bool:
    """Whether the targets themselves are a list of samples."""
    if _has_entries_of_samples(targets):
        return True
    kinds = {type(entry) for entry in targets}
    if len(kinds) != 1 or not issubclass(kinds.pop(), (dict, torch.Tensor)) or hasattr(targets, "_fields"):
        return False
    # The entries of a list of dicts or tensors may be samples, or fields, such as (images, masks), which are
    # tensors over all samples. Fields have equal sizes in dimension 0, and samples may differ. If the targets
    # are a tuple, the inputs are not compared, because they may have fields of other sizes, such as a graph's
    # edges.
    is_pair = isinstance(inputs, (list, tuple)) and len(inputs) == len(targets)
    compared = targets if isinstance(targets, tuple) else (targets, inputs)
    return is_pair and len({tensor.shape[:1] for tensor in tensors_of(compared)} - {(1,)}) > 1


def _has_entries_of_samples(sequence: Sequence[Any]) -> bool:
    """Whether each entry must belong to one sample, because all entries are texts. In a list they may also be
    numbers or other constants.
    """
    kinds = {type(entry) for entry in sequence}
    if isinstance(sequence, list):
        return bool(kinds) and all(issubclass(kind, (type(None), *_CONSTANTS)) for kind in kinds)
    return len(kinds) == 1 and issubclass(kinds.pop(), (str, bytes))


def _sequences(value: Any) -> Iterator[Sequence[Any]]:
    """Yields the outermost lists, and the tuples around them."""
    if isinstance(value, list):
        yield value
    elif isinstance(value, (tuple, dict)):
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _sequences(item)


def lists_samples(value: Any, num_samples: int | None) -> bool:
    """Whether the value contains a list or tuple with one entry per sample."""
    return any(True for _ in _lists_of_samples(value, num_samples))


def _lists_of_samples(value: Any, num_samples: int | None) -> Iterator[Sequence[Any]]:
    if num_samples is None or isinstance(value, torch.Tensor):
        return iter(())
    return (found for found in _sequences(value) if _is_of_samples(found, num_samples))


def _is_of_samples(value: Any, num_samples: int) -> bool:
    """Whether the value is a list or tuple with one entry per sample. Fields, which are tensors over all
    samples, do not count.
    """
    if not isinstance(value, (list, tuple)) or len(value) != num_samples or hasattr(value, "_fields"):
        return False
    if _has_entries_of_samples(value):
        return True
    kinds = {type(entry) for entry in value}
    if isinstance(value, tuple) and (len(kinds) > 1 or kinds & {type(None), *_CONSTANTS}):
        return False  # in a tuple such entries are fields; in a list they may be samples
    sizes = {tensor.size(0) for tensor in tensors_of(value) if tensor.dim() > 0}
    return sizes not in ({num_samples}, {1, num_samples})


def batch_size_of(inputs: Any, targets: Any) -> int | None:
    """Returns the number of samples of a minibatch, for a profile: at least 1; None if it is unknown. If the
    inputs join their samples, as a batch of graphs joins all nodes, the number comes from the targets.
    """
    num_samples = samples_of(inputs, targets)
    return None if num_samples is None else max(1, num_samples)


def piece_sizes(num_samples: int | None, num_microbatches: int) -> list[int]:
    """Returns the number of samples of each piece, as torch.chunk cuts. num_samples None: 1 for each."""
    if num_samples is None:
        return [1] * num_microbatches
    if num_microbatches == 1:
        return [num_samples]
    size = max(-(-num_samples // num_microbatches), 1)
    return [min(size, num_samples - begin) for begin in range(0, num_samples, size)]


def sizes_of(inputs: Any, targets: Any, num_samples: int | None, num_microbatches: int) -> list[int]:
    """Returns the number of samples of each microbatch: the number in each batch of Microbatches, or the
    numbers into which torch.chunk cuts num_samples. A stage that reads only inputs passes None for the
    targets; a stage that reads only targets passes None for the inputs.
    """
    if not (isinstance(inputs, Microbatches) or isinstance(targets, Microbatches)):
        return piece_sizes(num_samples, num_microbatches)
    missing = [None] * len(inputs or targets)
    counts = map(samples_of, inputs or missing, targets or missing)
    return [1 if count is None else count for count in counts]


def filled_up(part: Microbatches, num_microbatches: int) -> Microbatches:
    """Returns num_microbatches microbatches: the given ones, followed by microbatches without samples, which
    have no weight.
    """
    missing = num_microbatches - len(part)
    empty = map_tensors(lambda tensor: tensor[:0] if tensor.dim() > 0 else tensor, part[0])
    return Microbatches([*part, *[empty] * missing])


def chunk(
    value: Any, num_microbatches: int, *, name: str, minibatch: int | str, num_samples: int | None = None
) -> list[Any]:
    """Cuts a nested value into microbatches, as views, in order; returns [value] for num_microbatches = 1.

    Dimension 0 of a tensor counts its samples. Tensors are cut with torch.chunk along dimension 0. Lists or
    tuples with one entry per sample are cut in the same way. Every piece gets three kinds of values whole:
    tensors without a dimension, tensors of size 1 in dimension 0 if other tensors have more (positions, masks
    of shape (1, T)), and constants.

    Like torch.chunk, this may return fewer pieces than num_microbatches: 5 samples in 4 microbatches give
    pieces of 2, 2 and 1. A value without samples is returned once for each piece into which num_samples
    samples would be cut. Microbatches are returned uncut.

    Raises ValueError if there are no samples, or if tensors have different numbers of samples. Raises
    TypeError for an object that hides its samples. name, minibatch: for these errors; `minibatch` is a
    number, or a text such as "0 at these sizes".
    """
    if isinstance(value, Microbatches):
        return [*value]
    if num_microbatches == 1:
        return [value]
    count = samples_of(value, None) if num_samples is None else num_samples
    lists = {id(found): found for found in _lists_of_samples(value, count)}
    rest = _without(value, lists)
    _check_constants(rest, name, minibatch)
    cut = {id(tensor): tensor for tensor in tensors_of(rest) if tensor.dim() > 0}
    if not cut and not lists:
        return [value] * len(piece_sizes(num_samples, num_microbatches))
    all_sizes = {int(tensor.shape[0]) for tensor in cut.values()}
    if lists:
        assert count is not None
        all_sizes.add(count)
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
    if sizes[0] == 0:
        raise ValueError(
            f"minibatch {minibatch}: no samples in {name}, which cannot be cut into microbatches="
            f"{num_microbatches}: leave it out, or use microbatches=1"
        )
    pieces: dict[int, Sequence[Any]] = {
        key: torch.chunk(tensor, num_microbatches)
        for key, tensor in cut.items()
        if tensor.shape[0] == sizes[0]
    }
    ends = list(itertools.accumulate(piece_sizes(sizes[0], num_microbatches)))
    for key, entries in lists.items():
        pieces[key] = [entries[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return [
        replaced(value, {key: parts[index] for key, parts in pieces.items()}) for index in range(len(ends))
    ]


def _without(value: Any, lists: dict[int, Sequence[Any]]) -> Any:
    if not lists:
        return value
    if id(value) in lists:
        return None
    if isinstance(value, (tuple, list)):
        return tuple(_without(item, lists) for item in value)
    return {key: _without(item, lists) for key, item in value.items()} if isinstance(value, dict) else value


def check_alike(inputs: Any, targets: Any, num_microbatches: int, *, minibatch: int | str) -> None:
    """Raises ValueError if inputs and targets would be cut into different numbers of pieces, or if there are
    more Microbatches than the run has microbatches.
    """
    given = targets if inputs is None else inputs
    if isinstance(given, Microbatches):
        if len(given) > num_microbatches:
            raise ValueError(
                f"minibatch {minibatch} is Microbatches of {len(given)} batches, more than microbatches="
                f"{num_microbatches}: give run as many microbatches, or yield fewer batches at once"
            )
        return
    if num_microbatches == 1:
        return
    count = samples_of(inputs, targets)
    counts = [count if lists_samples(part, count) else samples_of(part, None) for part in (inputs, targets)]
    made = [len(piece_sizes(count, num_microbatches)) for count in counts if count not in (None, 1)]
    if len(set(made)) > 1:
        raise ValueError(
            f"minibatch {minibatch} has inputs that make {made[0]} microbatches and targets that make"
            f" {made[1]}: give both one entry per sample in dimension 0, or use microbatches=1"
        )


def weights(counts: Sequence[float]) -> list[float]:
    """Returns each microbatch's share in the minibatch's loss and gradient. It is the microbatch's count (of
    samples, or from weight_fn) divided by the sum of all counts.
    """
    if len(counts) == 1:
        return [1.0]  # even if the count is 0
    total = sum(counts)
    return [count / total for count in counts]


def counts_of(weight_fn: Callable[[Any], Any], pieces: Sequence[Any], minibatch: int) -> list[float]:
    """Returns weight_fn's count for each microbatch. pieces: the microbatches' targets. If every count is 0,
    every count becomes 1, so that the sum of counts is not 0. Raises ValueError for a count that is negative
    or not finite.
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


def _check_constants(value: Any, name: str, minibatch: int | str) -> None:
    # An object is refused if map_tensors() does not reach its tensors, because every microbatch would get the
    # object with all of its samples.
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
