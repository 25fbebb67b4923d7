"""Tests steps.py, which makes minibatches from a Trainer's batches. Their losses must add up as in a
Trainer.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from pipedream.integrations.steps import HeldOut, LossForm, Steps, joined, share_of_loss
from torch.utils.data import DataLoader, IterableDataset

_SIZES = ((2, 5), (2, 3), (2, 6), (2, 4), (1, 4))  # number and length of the texts in each batch of an epoch


def _batches() -> list[dict[str, torch.Tensor]]:
    """Returns batches in which some labels are ignored."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for size in _SIZES:
        labels = torch.randint(9, size, generator=generator)
        labels[0, : size[1] // 2] = -100
        found.append({"input_ids": torch.randint(9, size, generator=generator), "labels": labels})
    return found


def _steps(form: LossForm, *, num_steps: int = 7, pieces: int = 1) -> Steps:
    return Steps(_batches(), form, num_steps=num_steps, batches_per_step=2, pieces_per_batch=pieces)


def _values(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns numbers that stand for the losses of a batch's items. An item is a label that is not
    ignored."""
    chosen: torch.Tensor = batch["input_ids"][batch["labels"] != -100].double()
    return chosen


def _in_pairs(batches: list[Any]) -> list[list[Any]]:
    return [batches[index : index + 2] for index in range(0, len(batches), 2)]


def _loss(inputs: Any, targets: Any, form: LossForm) -> float:
    """Computes the loss as a model does: the mean over items, or the sum divided by num_items_in_batch."""
    values = _values({**inputs, "labels": targets["labels"]})
    own = inputs["num_items_in_batch"] if form.divides_by_items else len(values)
    return float(values.sum() / own * targets["scale"])


def test_a_step_has_its_batches_uncut_and_an_epoch_ends_with_fewer() -> None:
    steps = [*_steps(LossForm())]
    assert [len(step) for step in steps] == [2, 2, 1, 2, 2, 1, 2]
    shapes = [tuple(inputs["input_ids"].shape) for step in steps for inputs, _ in step]
    assert shapes == [*_SIZES, *_SIZES, *_SIZES[:2]]
    assert all(sum(map(share_of_loss, (t for _, t in step))) == pytest.approx(1.0) for step in steps)


class _Unsized(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(_batches())


def test_a_step_that_the_end_of_unsized_data_cuts_short_is_refused() -> None:
    # The Trainer keeps the gradients of the fifth batch and adds those of the next epoch's first step.
    loader = DataLoader(_Unsized(), batch_size=None)
    steps = iter(Steps(loader, LossForm(), num_steps=7, batches_per_step=2))
    assert [len(next(steps)) for _ in range(2)] == [2, 2]
    with pytest.raises(
        ValueError, match="train_dataset has no length and ended with 1 of the 2 batches of a"
    ):
        next(steps)


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("counts", [True, False])
def test_the_losses_of_a_step_add_up_as_a_trainers_do(pieces: int, divides: bool, counts: bool) -> None:
    divides = divides and counts
    form = LossForm(counts_items=counts, gives_items=counts, is_sum=counts, divides_by_items=divides)
    for step, batches in zip(_steps(form, pieces=pieces), _in_pairs(_batches()), strict=False):
        total = sum(share_of_loss(targets) * _loss(inputs, targets, form) for inputs, targets in step)
        values = [_values(batch) for batch in batches]
        if divides:  # the mean is over the items of all batches
            expected = float(torch.cat(values).mean())
        else:  # Each batch has its own mean. If items are counted, the Trainer adds the means up.
            means = [float(each.mean()) for each in values]
            expected = sum(means) if counts else sum(means) / len(means)
        assert total == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("is_sum", [True, False, None])
@pytest.mark.parametrize("counts", [True, False])
def test_losses_are_added_up_where_the_form_says_so(counts: bool, is_sum: bool | None, divides: bool) -> None:
    form = LossForm(counts_items=counts, is_sum=is_sum, divides_by_items=divides)
    (step, *_) = _steps(form, pieces=2)
    scale = sum(share_of_loss(targets) * float(targets["scale"]) for _, targets in step)
    adds_up = counts if is_sum is None else is_sum
    # If losses are divided by the items of the whole step, the losses of a batch's two pieces add up.
    pieces_of_batch = 2 if counts and divides else 1
    assert scale == pytest.approx(pieces_of_batch * (2 if adds_up else 1))


def test_a_training_goes_on_in_the_middle_of_an_epoch() -> None:
    whole = [*_steps(LossForm())]
    begun = _steps(LossForm())
    first = [*itertools.islice(begun, 5)]
    rest = _steps(LossForm())
    rest.load_state_dict(begun.state_dict())
    found = [*first, *rest]
    assert len(found) == len(whole) == len(rest)
    for step, expected in zip(found, whole, strict=True):
        for (inputs, _), (wanted, _) in zip(step, expected, strict=True):
            assert torch.equal(inputs["input_ids"], wanted["input_ids"])


def test_each_epoch_is_told_to_the_sampler() -> None:
    class Sampler:
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter([[self.epoch], [self.epoch]])

        def __len__(self) -> int:
            return 2

    loader = DataLoader(range(10), batch_sampler=Sampler(), collate_fn=lambda x: {"x": torch.tensor(x)})
    steps = Steps(loader, LossForm(), num_steps=5, batches_per_step=1)
    assert [int(step[0][0]["x"]) for step in steps] == [0, 0, 1, 1, 2]


def test_held_out_batches_count_by_their_samples() -> None:
    weights = [share_of_loss(targets) for _, targets in HeldOut(_batches(), LossForm())]
    assert weights == [size for size, _ in _SIZES]


def test_a_profiled_minibatch_is_collated_of_the_samples_of_all_its_batches() -> None:
    loader = DataLoader([{"x": torch.tensor(index)} for index in range(8)], batch_size=2, collate_fn=_stacked)
    assert [batch["x"].tolist() for batch in joined(loader, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


class _Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([{"x": torch.tensor(index)} for index in range(8)])


def test_samples_without_indices_are_profiled_in_the_batches_that_they_come_in() -> None:
    loader: DataLoader[Any] = DataLoader(_Stream(), batch_size=2, collate_fn=_stacked)
    assert [batch["x"].tolist() for batch in joined(loader, 2)] == [[0, 1], [2, 3]]


def _stacked(samples: list[Any]) -> Any:
    return {"x": torch.stack([sample["x"] for sample in samples])}
