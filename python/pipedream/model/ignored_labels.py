"""Detects labels of -100, which torch's losses leave out of their mean. With microbatches, each microbatch's
weight must then be the number of its remaining labels, not of its samples.

    look     the last stage's reader finds a minibatch whose microbatches have unequal shares of such labels
    judge    the stage tests whether its loss is a mean over the remaining labels: it computes the loss of one
             microbatch with changed labels

The test computes the loss f of one microbatch with only the labels of samples A, with only those of samples
B, and with both. |A| is the number of labels of A:

    mean over labels             f(A + B) = (|A| f(A) + |B| f(B)) / (|A| + |B|)
    mean over all positions      f(A + B) = f(A) + f(B)
    mean over samples' means     f(A + B) = (samples of A * f(A) + samples of B * f(B)) / samples

The test takes whole samples, so it also works for a decoder whose inputs are made from the labels. The loss
is a mean over labels if the first equation fits by far the best. Owned by the worker's compute thread.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipedream.common.microbatches import Microbatches
from pipedream.model.batches import Keywords
from pipedream.model.boundary import map_tensors

__all__ = ["IGNORED", "IgnoredLabels", "UnevenLabels", "with_other_labels"]

IGNORED = -100
"""The ignore_index of torch's losses."""

_DTYPES = (torch.int64, torch.int32, torch.int16)
_ROUNDING = 1e-7  # relative rounding error of a loss in float32
_LOOKS_ON_DEVICE = 8
"""How many times labels on a device are searched for -100. For labels on the host there is no limit."""


@dataclass(frozen=True)
class UnevenLabels:
    """Labels whose -100s are spread unevenly over the microbatches."""

    where: str
    """The Python expression that, after the name of the targets, gives the labels: "" or '["labels"]'."""
    valid: int
    """Some label other than -100."""
    is_uneven: tuple[bool, bool]
    """Whether the microbatches have unequal shares of labels: first if every label counts, second if each
    sample's first label does not count.
    """
    is_named: bool
    """Whether the targets are a batch with named entries."""

    def of(self, targets: Any) -> Tensor:
        return _label_tensors(targets)[self.where]

    def weight_fn(self, labels: Tensor, *, is_shifted: bool) -> str:
        name = "batch" if self.is_named else "targets"
        first = ""
        if is_shifted:
            first = "[:, 1:]" if labels.dim() == 2 else "[..., 1:]"
        return f"lambda {name}: ({name}{self.where}{first} != {IGNORED}).sum()"


class IgnoredLabels:
    """Remembers, for each labels tensor, whether the run's loss is a mean over its labels."""

    def __init__(self) -> None:
        self._is_shifted: dict[str, bool | None] = {}  # None: the loss is not a mean over these labels
        self._looks_on_device = 0

    def look(self, targets: Any, pieces: Sequence[Any], sizes: Sequence[int]) -> tuple[UnevenLabels, ...]:
        """Returns the uneven labels in a minibatch's targets. pieces: the targets of each microbatch. sizes:
        number of samples of each microbatch.
        """
        found = []
        together = _joined_labels(targets) if isinstance(targets, Microbatches) else _label_tensors(targets)
        for where, labels in together.items():
            if self._is_shifted.get(where, False) is None or not self._may_hold_ignored(labels):
                continue
            found_in = (_label_tensors(piece).get(where) for piece in pieces)
            of_pieces = [piece for piece in found_in if piece is not None]
            counts = [_valid_in(piece) for piece in of_pieces]
            num_valid, num_labels = sum(of_all for of_all, _ in counts), sum(p.numel() for p in of_pieces)
            if len(of_pieces) < len(pieces) or num_valid in (0, num_labels):
                continue
            is_uneven = (
                _is_uneven([of_all for of_all, _ in counts], sizes),
                _is_uneven([but_first for _, but_first in counts], sizes),
            )
            if any(is_uneven):
                valid = int(labels[labels != IGNORED][0])
                found.append(UnevenLabels(where, valid, is_uneven, type(pieces[0]) is Keywords))
        return tuple(found)

    def _may_hold_ignored(self, labels: Tensor) -> bool:
        if labels.numel() == 0:
            return False
        if labels.device.type == "cpu":
            return bool(_array(labels).min() <= IGNORED)
        self._looks_on_device += 1  # each look waits for the device
        return self._looks_on_device <= _LOOKS_ON_DEVICE and int(labels.min()) <= IGNORED

    def judge(
        self,
        uneven: UnevenLabels,
        labels: Tensor,
        loss_with: Callable[[Tensor], float],
        *,
        minibatch: int,
        num_microbatches: int,
    ) -> None:
        """Raises ValueError if the loss is a mean over these labels, and the microbatches have unequal shares
        of them. The loss is tested only once, with the first microbatch that has labels of -100.

        labels: the labels of a microbatch. loss_with: computes the microbatch's loss with other labels,
        possibly for twice as many samples.
        """
        if uneven.where not in self._is_shifted:
            if not bool((labels == IGNORED).any()):
                return  # the labels may also be inputs, where the test's -100 would be out of range
            self._is_shifted[uneven.where] = _shift_of_mean(labels, uneven.valid, loss_with)
        is_shifted = self._is_shifted[uneven.where]
        if is_shifted is None or not uneven.is_uneven[is_shifted]:
            return
        weight_fn = uneven.weight_fn(labels, is_shifted=is_shifted)
        raise ValueError(
            f"the labels of minibatch {minibatch} hold {IGNORED}, which the loss leaves out of its mean, and"
            f" its {num_microbatches} microbatches count by their samples: losses and gradients would not be"
            f" those of the whole minibatch; give run weight_fn={weight_fn}"
        )


def with_other_labels(value: Any, labels: Tensor, others: Tensor) -> Any:
    """Returns a copy of inputs or targets in which `others` replace `labels` everywhere. If `others` have
    twice as many samples, the copy has every sample twice.
    """
    ratio = len(others) // len(labels)

    def replaced(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        is_labels = tensor.dtype == labels.dtype and tensor.shape == labels.shape
        if is_labels and torch.equal(tensor.to(labels.device), labels):
            return others.to(tensor.device)
        if ratio > 1 and tensor.dim() > 0 and len(tensor) == len(labels):
            return torch.cat([tensor] * ratio)
        return tensor.clone()

    return map_tensors(replaced, value)


def _label_tensors(targets: Any, where: str = "") -> dict[str, Tensor]:
    """Returns the targets' integer tensors: expression, as in UnevenLabels.where -> tensor."""
    if isinstance(targets, Tensor):
        return {where: targets} if targets.dtype in _DTYPES and targets.dim() > 0 else {}
    entries: Mapping[Any, Any] = {}
    if isinstance(targets, Mapping):
        entries = targets
    elif isinstance(targets, (tuple, list)):
        entries = dict(enumerate(targets))
    found: dict[str, Tensor] = {}
    for key, entry in entries.items():
        quoted = f'"{key}"' if isinstance(key, str) else repr(key)
        found |= _label_tensors(entry, f"{where}[{quoted}]")
    return found


def _joined_labels(batches: Microbatches) -> dict[str, Tensor]:
    of_each = [_label_tensors(batch) for batch in batches]
    found = {where: [labels[where] for labels in of_each if where in labels] for where in of_each[0]}
    return {where: torch.cat([labels.flatten() for labels in each]) for where, each in found.items()}


def _array(labels: Tensor) -> Any:
    """Returns the labels as a numpy array; they must be on the host. Numpy counts several times as fast as
    torch.
    """
    return labels.detach().as_subclass(Tensor).numpy()


def _valid_in(labels: Tensor) -> tuple[int, int]:
    """Returns the number of labels other than -100, and that number without the first label of each
    sample.
    """
    is_valid = _array(labels.cpu()) != IGNORED
    num_valid = int(np.count_nonzero(is_valid))
    return num_valid, num_valid - (int(np.count_nonzero(is_valid[..., 0])) if labels.dim() > 1 else 0)


def _is_uneven(counts: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether the pieces' shares of the counts differ from their shares of the samples."""
    total, num_samples = sum(counts), sum(sizes)
    return any(count * num_samples != size * total for count, size in zip(counts, sizes, strict=False))


def _shift_of_mean(labels: Tensor, valid: int, loss_with: Callable[[Tensor], float]) -> bool | None:
    """Tests whether the loss is a mean over labels. Returns whether the mean leaves out the first label of
    each sample. None: the loss is no mean over labels, or the test is inconclusive.
    """
    if len(labels) == 1:
        labels = torch.cat([labels, labels])
    full = labels.masked_fill(labels == IGNORED, valid)
    half = len(full) // 2
    is_a, is_b = (torch.zeros_like(full, dtype=torch.bool) for _ in range(2))
    is_a[:half] = True
    is_b[half:] = True
    if full.dim() > 1:  # keep few labels of B, so that its share of labels differs from its share of samples
        is_b[..., : 3 * full.shape[-1] // 4] = False
    with contextlib.suppress(Exception):  # if the loss fails, the forward itself will raise the error
        loss = loss_with(full.masked_fill(~(is_a | is_b), IGNORED))
        of_a, of_b = (loss_with(full.masked_fill(~chosen, IGNORED)) for chosen in (is_a, is_b))
        is_shifted = False
        if full.dim() > 1 and full.shape[-1] > 1:
            without_first = full.masked_fill(~(is_a | is_b), IGNORED)
            without_first[..., 0] = IGNORED
            is_shifted = math.isclose(loss_with(without_first), loss, rel_tol=10 * _ROUNDING)
        first = 1 if is_shifted else 0
        num_a, num_b = (
            int(chosen[..., first:].sum()) if full.dim() > 1 else int(chosen.sum()) for chosen in (is_a, is_b)
        )
        wanted = _mean(num_a, of_a, num_b, of_b)
        others = [of_a + of_b]
        if full.dim() > 1:
            others.append(_mean(half, of_a, len(full) - half, of_b))
        error = abs(loss - wanted)
        if all(abs(loss - other) > 10 * (error + _ROUNDING * abs(loss)) for other in others):
            return is_shifted
    return None


def _mean(num_a: int, of_a: float, num_b: int, of_b: float) -> float:
    return (num_a * of_a + num_b * of_b) / (num_a + num_b)
