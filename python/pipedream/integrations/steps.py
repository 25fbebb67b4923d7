"""Makes the minibatches of a transformers.Trainer. A step of the Trainer is a minibatch. Its microbatches are
gradient_accumulation_steps batches of the loader, or pieces of these batches.

    loader               b0 b1 | b2 b3 | b4         gradient_accumulation_steps=2, an epoch of 5 batches
    pieces_per_batch=1   b0 b1 | b2 b3 | b4         each batch is a microbatch
    pieces_per_batch=2   b0' b0'' b1' b1'' | ...    each batch is cut into two, for a plan with m = 4

The Trainer sums the losses of a step's batches. If the loss takes num_items_in_batch, each loss is divided by
the number of tokens in all batches, otherwise by the number of batches. Each microbatch carries its share of
that sum. Workers and the caller iterate Steps. Imports no transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from pipedream.common.microbatches import Microbatches
from pipedream.data.stream import num_minibatches_of, takes_epochs
from pipedream.model.batches import Keywords
from pipedream.model.microbatch import chunk, piece_sizes, samples_of

__all__ = ["HeldOut", "LossForm", "Steps", "share_of_loss"]

_LABELS, _NUM_ITEMS, _IGNORED = "labels", "num_items_in_batch", -100


@dataclass(frozen=True)
class LossForm:
    """How the Trainer computes its loss from a step's batches."""

    takes_labels: bool = False
    """Whether a function computes the loss from outputs and labels. Then the model does not get the
    labels."""
    counts_items: bool = False
    """Whether the Trainer counts the items in all batches of a step, and passes the count to the loss or the
    model. An item is a label that is not ignored, such as a token."""
    gives_items: bool = False
    """Whether the model gets the number of items."""
    divides_by_items: bool = False
    """Whether the loss is divided by the number of items. Then the losses of a batch's pieces add up to the
    batch's loss.
    """
    is_sum: bool | None = False
    """Whether the losses of a step's batches are summed. If it is False, the sum is divided by the number of
    batches. None means True if items were counted, otherwise False.
    """
    shifts_labels: bool = False
    items_dtype: torch.dtype = torch.float32
    """The dtype of the number of items."""
    label_names: tuple[str, ...] = ()
    """Names of the entries of a batch that compute_metrics gets as labels; empty for "labels" alone."""
    kept_input: str | None = None
    """The name of an input that compute_metrics needs; None if it needs no input."""

    def items_of(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Returns the number of items in a batch; None if it is unknown."""
        labels = batch.get("shift_labels", batch.get(_LABELS))
        if not isinstance(labels, Tensor) or labels.dim() == 0:
            return None
        if self.shifts_labels and "shift_labels" not in batch:
            labels = labels[..., 1:]
        return labels.ne(_IGNORED).sum()

    def items_of_all(self, batches: Iterable[Mapping[str, Any]]) -> Tensor | None:
        """Returns the number of items in these batches; None if the Trainer does not count items, or if a
        number is unknown."""
        if not self.counts_items:
            return None
        counts = [self.items_of(batch) for batch in batches]
        known = [count for count in counts if count is not None]
        return torch.stack(known).sum().to(self.items_dtype) if len(known) == len(counts) else None

    def parts(
        self, batch: Mapping[str, Any], weight: float, *, scale: float = 1.0, items: Tensor | None = None
    ) -> tuple[Keywords, dict[str, Any]]:
        """Returns (inputs, targets) of a microbatch. weight: the microbatch's share of the minibatch. scale:
        the factor by which the microbatch's loss is multiplied.
        """
        inputs = Keywords(batch)
        targets: dict[str, Any] = {
            "labels": inputs.get(_LABELS),
            "weight": torch.tensor(weight, dtype=torch.float64),
            "scale": torch.tensor(scale, dtype=torch.float64),
        }
        if self.takes_labels:
            inputs.pop(_LABELS, None)
        if items is not None:
            targets["items"] = items
            if self.gives_items:
                inputs[_NUM_ITEMS] = items
        if self.label_names:
            labels = [batch.get(name) for name in self.label_names]
            label_ids = labels[0] if len(labels) == 1 else tuple(labels)
            targets["label_ids"] = None if any(each is None for each in labels) else label_ids
        if self.kept_input is not None:
            targets["inputs"] = batch.get(self.kept_input)
        return inputs, targets


def share_of_loss(targets: Mapping[str, Any]) -> float:
    """Returns a microbatch's share of its minibatch. It is the weight_fn of the run."""
    return float(targets["weight"])


class Steps:
    """All minibatches of a training, through all epochs, in one iteration."""

    def __init__(
        self,
        loader: Iterable[Any],
        form: LossForm,
        *,
        num_steps: int,
        batches_per_step: int,
        pieces_per_batch: int = 1,
    ) -> None:
        """loader: yields an epoch's batches each time it is iterated. num_steps: the number of steps of the
        whole training."""
        self._loader = loader
        self._form = form
        self._num_steps = num_steps
        self._batches_per_step = batches_per_step
        self._pieces_per_batch = pieces_per_batch
        self._step, self._epoch, self._step_of_epoch = 0, 0, 0

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[Microbatches]:
        while self._step < self._num_steps:
            for each in takes_epochs(self._loader):  # the Trainer does this too, and shuffles depend on it
                each.set_epoch(self._epoch)
            batches = itertools.islice(self._loader, self._step_of_epoch * self._batches_per_step, None)
            while self._step < self._num_steps:
                of_step = [*itertools.islice(batches, self._batches_per_step)]
                if not of_step:
                    break
                if len(of_step) < self._batches_per_step and num_minibatches_of(self._loader, 1) is None:
                    raise ValueError(
                        f"train_dataset has no length and ended with {len(of_step)} of the"
                        f" {self._batches_per_step} batches of a step, whose gradients a Trainer adds to the"
                        " next epoch's: give it a length, or a multiple of so many batches"
                    )
                self._step += 1
                self._step_of_epoch += 1
                yield self.minibatch(of_step)
            else:
                return
            if self._step_of_epoch == 0:
                return  # an epoch without a batch
            self._epoch, self._step_of_epoch = self._epoch + 1, 0

    # The state is the position in the data. A run that continues from a checkpoint loads it.

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step, "epoch": self._epoch, "step_of_epoch": self._step_of_epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._step, self._epoch = state["step"], state["epoch"]
        self._step_of_epoch = state["step_of_epoch"]

    # A minibatch.

    def minibatch(self, batches: Sequence[Mapping[str, Any]]) -> Microbatches:
        form = self._form
        items = form.items_of_all(batches)
        pieces = [self._pieces_of(dict(batch)) for batch in batches]
        num_batches, num_pieces = len(batches), sum(map(len, pieces))
        is_sum = items is not None if form.is_sum is None else form.is_sum
        if items is not None and form.divides_by_items:
            scale = num_pieces if is_sum else num_pieces / num_batches
            return Microbatches(
                form.parts(piece, 1 / num_pieces, scale=scale, items=items)
                for piece, _ in itertools.chain(*pieces)
            )
        scale = num_batches if is_sum else 1
        return Microbatches(
            form.parts(piece, share / num_batches, scale=scale, items=items)
            for piece, share in itertools.chain(*pieces)
        )

    def _pieces_of(self, batch: dict[str, Any]) -> list[tuple[Mapping[str, Any], float]]:
        """Returns the pieces of a batch, each with its share of the batch's loss."""
        count = self._pieces_per_batch
        if count == 1:
            return [(batch, 1.0)]
        num_samples = samples_of(batch, batch)
        cut = chunk(batch, count, name="a batch", minibatch=self._step, num_samples=num_samples)
        found = [self._form.items_of(piece) for piece in cut]
        items = [float(each) for each in found if each is not None]
        if len(items) < len(cut) or sum(items) == 0:
            items = [float(size) for size in piece_sizes(num_samples, count)]
        return [(piece, each / sum(items)) for piece, each in zip(cut, items, strict=True)]


class HeldOut:
    """The batches of an evaluation, each weighted by its number of samples."""

    def __init__(self, loader: Iterable[Any], form: LossForm) -> None:
        self._loader = loader
        self._form = form

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            num_samples = samples_of(dict(batch), dict(batch)) or 1
            yield self._form.parts(batch, num_samples, items=self._form.items_of_all([batch]))


def joined(loader: DataLoader[Any], num_batches: int) -> list[Any]:
    """Returns the first two minibatches. Each is collated from the samples of num_batches batches of the
    loader. If samples have no indices, the function returns the loader's first two batches instead.
    """
    sampler = loader.batch_sampler
    if sampler is None or isinstance(loader.dataset, IterableDataset):
        return [dict(batch) for batch in itertools.islice(loader, 2)]
    indices = [*itertools.islice(sampler, 2 * num_batches)]
    groups = [indices[i : i + num_batches] for i in range(0, len(indices), num_batches)]
    collate: Callable[[list[Any]], Any] = loader.collate_fn
    return [dict(collate([loader.dataset[index] for index in itertools.chain(*group)])) for group in groups]
