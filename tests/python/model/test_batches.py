"""Tests batches.py: the arguments with which a model and a loss are called."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipedream.model.batches import Keywords, call_model, own_loss, parts_of
from torch import nn


def test_data_that_are_neither_pairs_nor_dicts_are_refused() -> None:
    assert parts_of([1, 2], 0) == (1, 2)
    for batch, message in (((1, 2, 3), "a tuple of 3"), (torch.zeros(2), "a Tensor"), ([1], "a list of 1")):
        with pytest.raises(TypeError, match=f"minibatch 4 of the data is {message}"):
            parts_of(batch, 4)
    with pytest.raises(TypeError, match="minibatch 4 of the data has the key 3"):
        parts_of({3: 1}, 4)


@dataclass
class _Batch:
    tokens: Any
    mask: Any = None


@pytest.mark.parametrize("batch", [{"tokens": 1, "mask": None}, UserDict(tokens=1, mask=None), _Batch(1)])
def test_a_dict_or_a_dataclass_is_what_the_model_takes_by_name(batch: Any) -> None:
    inputs, targets = parts_of(batch, 0)
    assert type(inputs) is Keywords
    assert inputs == {"tokens": 1, "mask": None}
    assert targets is inputs


class _Echo(nn.Module):
    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return arguments, keywords


def test_only_keywords_are_given_by_name() -> None:
    assert call_model(_Echo(), Keywords(a=1)) == ((), {"a": 1})
    assert call_model(_Echo(), {"a": 1}) == (({"a": 1},), {})
    assert call_model(_Echo(), (1, 2)) == (((1, 2),), {})


class _Pair(nn.Module):
    def forward(self, image: Any, text: Any, *, scale: int = 1) -> Any:
        return image, text, scale


class _One(nn.Module):
    def forward(self, pair: Any, mask: Any = None) -> Any:
        return pair, mask


def test_several_inputs_are_a_forwards_arguments_where_it_does_not_take_one() -> None:
    assert call_model(_Pair(), (1, 2)) == call_model(_Pair(), [1, 2]) == (1, 2, 1)
    assert call_model(_Pair(), {"text": 2, "image": 1, "scale": 3}) == (1, 2, 3)
    assert call_model(_One(), (1, 2)) == ((1, 2), None)
    assert call_model(_One(), {"mask": 1}) == ({"mask": 1}, None)


def test_a_models_own_loss_is_its_outputs_or_the_output_itself() -> None:
    loss = torch.ones(())
    for outputs in (loss, {"logits": 1, "loss": loss}, SimpleNamespace(loss=loss), (loss, 3)):
        assert own_loss(outputs, None) is loss
    for outputs in (torch.ones(2), {"logits": loss}, SimpleNamespace(loss=None), (), None):
        with pytest.raises(ValueError, match="has no scalar loss, and there is no loss_fn"):
            own_loss(outputs, None)


def test_of_several_scalars_that_are_trained_none_is_taken_for_the_loss() -> None:
    # If the first scalar were taken for the loss, a GAN's second loss would silently not be trained.
    first, second = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
    assert own_loss((first, torch.ones(()), torch.ones(3)), None) is first
    with pytest.raises(ValueError, match="is a tuple with 2 scalars, of which the first alone would be the "):
        own_loss((first, second), None)


class _Named(nn.Module):
    def forward(self, image: Any, *, scale: Any) -> Any:
        if scale is None:
            raise TypeError("of the model's own")
        return image


def test_entries_that_a_forward_does_not_take_are_told_with_a_remedy() -> None:
    assert call_model(_Named(), Keywords(image=1, scale=2)) == 1
    unknown = Keywords(image=1, scale=2, label=3)
    with pytest.raises(
        TypeError,
        match=r"^the entries of a minibatch \(image, scale, label\) are the arguments of _Named's forward by"
        r" name: got an unexpected keyword argument 'label'; yield pairs \(inputs, targets\), where",
    ):
        call_model(_Named(), unknown)
    with pytest.raises(TypeError, match="missing a required argument: 'scale'; yield pairs"):
        call_model(_Named(), Keywords(image=1))
    with pytest.raises(TypeError, match=r"^of the model's own$"):
        call_model(_Named(), Keywords(image=1, scale=None))
