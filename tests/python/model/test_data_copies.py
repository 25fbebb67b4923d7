"""Tests the functions of data_copies.py for the generators that a DataLoader was given."""

from __future__ import annotations

import pytest
import torch
from pipedream.data.first_minibatch import first_of
from pipedream.model.data_copies import (
    generator_states,
    generators_of_loader_kept,
    set_generators,
)
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

_DATASET = TensorDataset(torch.arange(8))


def _of_the_loader() -> DataLoader:  # type: ignore[type-arg]
    return DataLoader(_DATASET, 2, shuffle=True, generator=torch.Generator().manual_seed(3))


def _of_a_sampler() -> DataLoader:  # type: ignore[type-arg]
    sampler = RandomSampler(_DATASET, generator=torch.Generator().manual_seed(3))
    return DataLoader(_DATASET, 2, sampler=sampler)


def _of_a_sampler_of_batches() -> DataLoader:  # type: ignore[type-arg]
    sampler = RandomSampler(_DATASET, generator=torch.Generator().manual_seed(3))
    return DataLoader(_DATASET, batch_sampler=BatchSampler(sampler, 2, drop_last=False))


@pytest.mark.parametrize("make", [_of_the_loader, _of_a_sampler, _of_a_sampler_of_batches])
def test_an_epoch_that_was_looked_at_comes_again_and_a_copys_generators_can_be_taken_over(make) -> None:  # type: ignore[no-untyped-def]
    loader, copied = make(), make()
    assert len(generator_states(loader)) == 1
    with generators_of_loader_kept(loader):
        epoch = [batch[0].tolist() for batch in loader]
    assert first_of(loader)[0].tolist() == epoch[0]
    assert [batch[0].tolist() for batch in loader] == epoch
    set_generators(copied, generator_states(loader))
    assert [batch[0].tolist() for batch in copied] == [batch[0].tolist() for batch in loader] != epoch


def test_other_data_have_no_generators() -> None:
    assert generator_states([1, 2]) == generator_states(DataLoader(_DATASET)) == []
    set_generators([1, 2], [])
