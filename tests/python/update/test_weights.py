"""Tests weights.py: versions in flat slots, bound without a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import CASES
from pipedream.budget.copy_streams import make_copy_streams
from pipedream.budget.resident_versions import ResidentVersions
from pipedream.splitting.splitter import split
from pipedream.update.weights import StageWeights, WeightVersions, split_tied
from stage_weights import slots_for, stage_of, versions_of
from torch import nn


def _fill(versions: WeightVersions, slot: int, value: float) -> None:
    with torch.no_grad():
        for leaf in versions.leaves(slot):
            leaf.fill_(value)


# Versions.


@pytest.mark.parametrize("case_name", CASES)
def test_version_0_has_the_initial_weights_and_gives_the_models_outputs(case_name: str) -> None:
    case = CASES[case_name]
    (inputs, _), *_ = case.data(1)
    model = case.model().eval()  # without dropout, and without changes of running statistics
    expected = model(inputs)
    stage = split(model, case.plan(1))[0]
    versions = versions_of(stage, 3)
    versions.bind(0)
    torch.testing.assert_close(stage(inputs), expected, rtol=0, atol=0)


def test_binding_copies_nothing_and_makes_modules_read_the_slot() -> None:
    layer = nn.Linear(2, 2)
    stage = stage_of(layer)
    versions = versions_of(stage, 2)
    for slot, value in ((0, 1.0), (1, 2.0)):
        _fill(versions, slot, value)
        versions.bind(slot)
        assert layer.weight is versions.leaves(slot)[0]
        assert layer(torch.ones(1, 2)).tolist() == [[3 * value, 3 * value]]
    versions.bind(0)
    assert layer.weight.tolist() == [[1.0, 1.0]] * 2


def test_a_recurrent_layer_and_tied_parameters_read_the_slot_at_all_their_places() -> None:
    lstm = nn.LSTM(3, 3, batch_first=True)
    embedding = nn.Embedding(5, 3)
    head = nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    stage = stage_of(embedding, lstm, head)
    versions = versions_of(stage, 2)
    _fill(versions, 1, 0.0)
    versions.bind(1)
    assert head.weight is embedding.weight
    outputs, _ = lstm(torch.ones(1, 2, 3))
    assert not outputs.any()  # all weights are zero, also in the LSTM's flat list
    assert len(versions.names) == len(set(versions.names)) == 5


def test_writing_one_slot_leaves_a_graph_of_another_valid_and_its_gradients_right() -> None:
    # Each leaf has a version counter of its own. Plain views of one tensor would share it, and this test
    # would fail.
    layer = nn.Linear(2, 1, bias=False)
    versions = versions_of(stage_of(layer), 2)
    _fill(versions, 0, 3.0)
    versions.bind(0)
    loss = layer(torch.ones(1, 2)).square().sum()
    _fill(versions, 1, 7.0)
    versions.bind(1)
    loss.backward()
    (gradient,) = versions.take_gradients(0)
    assert gradient is not None
    assert gradient.tolist() == [[2 * 6.0, 2 * 6.0]]
    assert versions.take_gradients(0) == [None]
    assert versions.leaves(1)[0].grad is None


def test_poison_makes_whoever_reads_the_slot_get_nan_and_nobody_else() -> None:
    layer = nn.Linear(2, 2)
    versions = versions_of(stage_of(layer), 2)
    _fill(versions, 0, 1.0)
    versions.poison(1)
    assert all(leaf.isnan().all() for leaf in versions.leaves(1))
    versions.bind(1)
    assert layer(torch.ones(1, 2)).isnan().all()
    versions.bind(0)
    assert not layer(torch.ones(1, 2)).isnan().any()


def test_a_copied_version_has_the_content_of_the_other() -> None:
    versions = versions_of(stage_of(nn.Linear(2, 2)), 3)
    _fill(versions, 1, 5.0)
    versions.copy_version(1, 2)
    assert all(bool((leaf == 5.0).all()) for leaf in versions.leaves(2))
    versions.copy_version(1, 1)
    assert all(bool((leaf == 5.0).all()) for leaf in versions.leaves(1))


def _leave_slot(versions: WeightVersions, slot: int, value: float) -> None:
    """Moves the weights out of their slot, as flatten_parameters() does on a GPU."""
    for leaf in versions.leaves(slot):
        leaf.data = torch.full_like(leaf, value)


def test_a_version_that_lies_outside_its_slot_is_copied_as_it_is() -> None:
    # A forward may move leaves out of their slot (flatten_parameters()), and an overflow in float16 may skip
    # the next step. The next version must then not have the values of an older one.
    versions = versions_of(stage_of(nn.Linear(2, 2)), 3)
    _leave_slot(versions, 0, 5.0)
    _leave_slot(versions, 2, 6.0)
    for slot in (1, 2):
        versions.copy_version(0, slot)
        assert all(bool((leaf == 5.0).all()) for leaf in versions.leaves(slot))


def test_a_version_outside_its_slot_is_poisoned_too() -> None:
    versions = versions_of(stage_of(nn.Linear(2, 2)), 2)
    _leave_slot(versions, 1, 5.0)
    versions.poison(1)
    assert all(leaf.isnan().all() for leaf in versions.leaves(1))


@pytest.mark.parametrize("update", ["copy", "write"])
def test_an_offloaded_version_that_was_written_outside_its_slot_comes_back_as_written(update: str) -> None:
    stage = stage_of(nn.Linear(2, 2))
    named = stage.trainable_parameters()
    resident = ResidentVersions(
        slots_for(named, 3), slots_for(named, 5), make_copy_streams(torch.device("cpu"))
    )
    versions = WeightVersions(stage, named, resident._device_slots, resident)
    versions.bind(0)
    _leave_slot(versions, 0, 5.0)
    for slot in range(1, 5):
        versions.begin_update(slot - 1, slot)
        if update == "copy":
            versions.copy_version(slot - 1, slot)
        else:
            _leave_slot(versions, slot, 5.0)
        versions.end_update(slot)
    versions.bind(1)  # version 1 had left the device, and comes back
    assert all(bool((leaf == 5.0).all()) for leaf in versions.leaves(1))


def test_restore_gives_the_modules_their_own_parameters_with_the_versions_values() -> None:
    layer = nn.Linear(2, 2)
    own = layer.weight
    versions = versions_of(stage_of(layer), 2)
    _fill(versions, 1, 4.0)
    versions.bind(0)
    versions.restore(1)
    assert layer.weight is own
    assert own.tolist() == [[4.0, 4.0]] * 2
    versions.bind(1)  # binds again, even if the slot is the one that was bound last
    assert layer.weight is versions.leaves(1)[0]


class _Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.kept: list[Any] = [self.lin.weight]


def test_what_a_layer_keeps_of_a_parameter_follows_the_bound_version() -> None:
    layer = _Keeps()
    own = layer.lin.weight
    versions = versions_of(stage_of(layer), 3)
    versions.bind(1)
    assert layer.kept[0] is layer.lin.weight is versions.leaves(1)[0]
    layer.kept.append(layer.lin.weight)  # a first forward may do this
    versions.follow_new_references()
    versions.bind(2)
    assert layer.kept[0] is layer.kept[1] is versions.leaves(2)[0]
    versions.restore(2)
    assert layer.kept[0] is layer.kept[1] is layer.lin.weight is own


def test_what_a_layer_put_in_the_place_of_a_parameter_stays() -> None:
    layer = _Keeps()
    versions = versions_of(stage_of(layer), 2)
    versions.bind(1)
    layer.kept[0] = "another"
    versions.bind(0)
    assert layer.kept == ["another"]
    layer.kept.clear()
    versions.bind(1)
    versions.restore(1)
    assert layer.kept == []


def test_a_gradient_that_went_to_another_version_than_was_read_is_told_at_the_end() -> None:
    layer = nn.Linear(2, 2)
    versions = versions_of(stage_of(layer), 2)
    versions.check_gradients_taken()
    versions.leaves(1)[1].sum().backward()
    versions.take_gradients(0)
    with pytest.raises(ValueError, match=r"a gradient of parameter '0\.bias' went to a weight version that"):
        versions.check_gradients_taken()


def test_leaves_keep_strides_and_marks_of_the_parameters() -> None:
    layer = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    layer.weight.no_weight_decay = True
    versions = versions_of(stage_of(layer), 2)
    for slot in range(2):
        assert versions.leaves(slot)[0].stride() == layer.weight.stride()
        assert versions.leaves(slot)[0].no_weight_decay  # type: ignore[attr-defined]


def test_tied_parameters_have_slots_of_their_own_in_the_order_of_the_ties() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 3)
    stage = stage_of(first, second)
    tied: list[Any] = [second.bias, first.weight]
    own_named, tied_named = split_tied(stage, tied)
    assert [name for name, _ in own_named] == ["0.bias", "1.weight"]
    assert [name for name, _ in tied_named] == ["1.bias", "0.weight"]
    weights = StageWeights(stage, slots_for(own_named, 2), {0: (tied, slots_for(tied_named, 3))})
    weights.bind(1, {0: 2})
    assert first.bias is weights.own.leaves(1)[0]
    assert second.bias is weights.tied[0].leaves(2)[0]
    assert weights.has_parameters
    assert not StageWeights(stage_of(nn.Tanh()), slots_for([], 1)).has_parameters


def test_what_is_tied_to_each_owner_has_versions_of_its_own() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False)
    stage = stage_of(first, second, nn.Linear(3, 1))
    (_, first_named), (_, second_named) = (split_tied(stage, [layer.weight]) for layer in (first, second))
    weights = StageWeights(
        stage,
        slots_for(split_tied(stage, [first.weight, second.weight])[0], 1),
        {0: ([first.weight], slots_for(first_named, 2)), 3: ([second.weight], slots_for(second_named, 4))},
    )
    weights.bind(0, {0: 1, 3: 2})
    assert first.weight is weights.tied[0].leaves(1)[0]
    assert second.weight is weights.tied[3].leaves(2)[0]


# The optimizer.
