"""Tests references.py: finds the objects that hold tensors, and refuses a loss that holds trained
parameters."""

from __future__ import annotations

import functools
from collections import deque, namedtuple
from types import SimpleNamespace
from typing import Any

import pipedream
import pytest
import torch
from pipedream import reference
from pipedream.model import references
from pipedream.model.references import Place, check_loss_fn, gradients_noticed, places_of
from torch import Tensor, nn

_Pair = namedtuple("_Pair", "weight other")


def _make_closure(held: Any) -> Any:
    return lambda: held


class _Slotted:
    __slots__ = ("empty", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


class _Keeps(nn.Module):
    """A layer that keeps another object besides its parameter."""

    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2, bias=False)
        self.kept = keep(self.lin.weight)


_KEEPERS = {
    "attribute": (lambda weight: SimpleNamespace(weight=weight), "0.kept.weight"),
    "slot": (_Slotted, "0.kept.weight"),
    "list": (lambda weight: [1, [weight]], "0.kept[1][0]"),
    "deque": (lambda weight: deque([weight]), "0.kept[0]"),
    "dict": (lambda weight: {"a": {"b": weight}}, "0.kept['a']['b']"),
    "tuple": (lambda weight: (None, [(weight, 2)]), "0.kept[1][0][0]"),
    "named tuple": (lambda weight: _Pair(weight, 2), "0.kept[0]"),
    "partial": (lambda weight: functools.partial(nn.functional.linear, weight=weight), "0.kept.weight"),
    "closure": (_make_closure, "0.kept.held"),
}


def _place(model: nn.Module, tensor: Tensor) -> Place:
    """Returns the place that holds the tensor besides the layer's own table of parameters."""
    (place,) = [p for p in places_of([("0", model)]) if p.tensor is tensor and p.path != "0.lin.weight"]
    return place


@pytest.mark.parametrize("kind", _KEEPERS)
def test_a_place_is_named_and_can_be_filled(kind: str) -> None:
    keep, path = _KEEPERS[kind]
    model = _Keeps(keep)
    old, new = model.lin.weight, nn.Parameter(torch.zeros(2, 2))
    place = _place(model, old)
    assert place.path == path
    place.container[place.key] = place.filled(lambda tensor: new if tensor is old else tensor)
    assert _place(model, new).path == path
    assert [p.path for p in places_of([("0", model)]) if p.tensor is old] == ["0.lin.weight"]
    assert type(place.filled(lambda tensor: new)) is type(place.held)


def test_what_is_in_a_set_or_a_key_is_found_and_cannot_be_filled() -> None:
    for keep in (lambda weight: {weight}, lambda weight: {weight: "decay"}):
        model = _Keeps(keep)
        assert _place(model, model.lin.weight).container is None


def test_an_unregistered_module_is_outside_and_its_table_a_place() -> None:
    model = _Keeps(lambda weight: [nn.Linear(2, 2, bias=False)])
    (inner,) = model.kept
    inner.weight = model.lin.weight
    place = _place(model, model.lin.weight)
    assert place.is_outside
    assert place.container is inner._parameters
    registered, *_ = places_of([("0", model)])
    assert not registered.is_outside


def test_cycles_end() -> None:
    model = _Keeps(lambda weight: [])
    model.kept += [model, model.kept, (model.kept,)]
    assert [place.path for place in places_of([("0", model)])] == ["0.lin.weight"]


class _NoLookups:
    """An object that raises an error when a missing attribute is looked up. Its slot has a private name."""

    __slots__ = ("__weight", "empty")

    def __init__(self, weight: Tensor) -> None:
        self.__weight = weight

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("asked for what it has not")


class _LoadsItsItems(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("the file is closed")


class _CannotBeIterated(list[Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("iterated")


@pytest.mark.parametrize(
    "keep",
    [_NoLookups, lambda weight: _LoadsItsItems(weight=weight), lambda weight: _CannotBeIterated([weight])],
)
def test_a_search_runs_none_of_the_users_code(keep: Any) -> None:
    model = _Keeps(keep)
    assert _place(model, model.lin.weight).path.startswith("0.kept")


def test_the_words_of_a_vocabulary_are_not_walked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    # A search through a dict of 200,000 words would take 5 s, and a run makes several searches.
    made = []
    monkeypatch.setattr(references, "Place", _noting(references.Place, made))
    words = [f"word {i}" for i in range(100)]
    for kept in (words, tuple(words), set(words), deque(words), dict(zip(words, range(100), strict=True))):
        made.clear()
        list(places_of([("0", _Keeps(lambda _, kept=kept: kept))]))
        assert 0 < len(made) < 50


def _noting(make: Any, calls: list[Any]) -> Any:
    def noting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return make(*args, **kwargs)

    return noting


def test_what_a_hook_of_torch_makes_anew_is_no_place() -> None:
    model = nn.utils.spectral_norm(nn.Linear(2, 2))
    found = [place.path for place in places_of([("0", model)])]
    assert sorted(found) == ["0.bias", "0.weight_orig", "0.weight_u", "0.weight_v"]


# A loss.


class _ModelLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets)


class _Penalty:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self(outputs, targets)


def _penalised(outputs: Tensor, targets: Tensor, model: nn.Module) -> Tensor:
    return nn.functional.mse_loss(outputs, targets)


def _closure_of(model: nn.Module) -> Any:
    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets) + sum(p.square().sum() for p in model.parameters())

    return loss_fn


_global_model = nn.Linear(2, 2)
_global_frozen = nn.Linear(2, 2).requires_grad_(False)


def _reads_a_global(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets) + sum(
        p.square().sum() for p in _global_model.parameters()
    )


def _reads_a_global_elsewhere(outputs: Tensor, targets: Tensor) -> Tensor:
    return _reads_a_global(outputs, targets)


def _reads_what_is_frozen(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(_global_frozen(outputs), targets)


def _has_an_attribute_of_that_name(outputs: Any, targets: Tensor) -> Tensor:
    loss: Tensor = outputs._global_model
    return loss


_CARRIERS = {
    "module": (_ModelLoss, "loss_fn.model.weight"),
    "object": (_Penalty, "loss_fn.model.weight"),
    "bound method": (lambda model: _Penalty(model).loss, "loss_fn.model.weight"),
    "partial": (lambda model: functools.partial(_penalised, model=model), "loss_fn.model.weight"),
    "positional": (
        lambda model: functools.partial(_penalised, None, None, model),
        "loss_fn.args[2].weight",
    ),
    "closure": (_closure_of, "loss_fn.model.weight"),
    "own": (lambda model: model, "loss_fn.weight"),
    "global": (lambda model: _reads_a_global, "loss_fn (the global _global_model).weight"),
    "global of another function": (
        lambda model: _reads_a_global_elsewhere,
        "(the global _global_model).weight",
    ),
}


@pytest.mark.parametrize("kind", _CARRIERS)
def test_a_loss_that_carries_something_to_train_is_refused_by_name(kind: str) -> None:
    make, path = _CARRIERS[kind]
    with pytest.raises(ValueError, match="optimizer's weight_decay") as caught:
        check_loss_fn(make(nn.Linear(2, 2)))
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.functional.cross_entropy,
        nn.CrossEntropyLoss(weight=torch.ones(3)),
        functools.partial(nn.functional.cross_entropy, weight=torch.ones(3)),
        _ModelLoss(_global_frozen),
        _reads_what_is_frozen,
        _has_an_attribute_of_that_name,
        lambda outputs, targets: outputs.sum(),
    ],
)
def test_a_loss_with_nothing_to_train_is_taken(loss_fn: Any) -> None:
    check_loss_fn(loss_fn)


def test_a_class_is_no_loss() -> None:
    # The class itself accepts two arguments, too. Without the check it would fail at the first minibatch,
    # with an unclear error of torch.
    with pytest.raises(
        TypeError, match=r"^loss_fn is the class MSELoss: make a loss of it, as MSELoss\(\) does$"
    ):
        check_loss_fn(nn.MSELoss)


def test_run_profile_and_reference_refuse_such_a_loss_before_anything_starts() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    data = [(torch.zeros(1, 2), torch.zeros(1, 2))]
    plan = pipedream.Plan.straight(1, 1)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    loss_fn = _Penalty(model)
    for start in (
        lambda: pipedream.run(model, plan, data=data, loss_fn=loss_fn, optimizer=optimizer),
        lambda: pipedream.profile(model, data, loss_fn),
        lambda: reference.run(model, plan, data=data, loss_fn=loss_fn, optimizer=optimizer),
    ):
        with pytest.raises(
            ValueError, match=r"^loss_fn carries the trainable tensor loss_fn\.model\.0\.weight"
        ):
            start()


# Gradients.


def test_a_gradient_that_arrives_where_nobody_trains_is_told_with_the_name() -> None:
    layer = nn.Linear(2, 2)
    with gradients_noticed({"3.weight": layer.weight}):
        layer.bias.sum().backward()
        with pytest.raises(ValueError, match=r"parameter '3\.weight' was used in a way"):
            layer(torch.ones(1, 2)).sum().backward()
    layer(torch.ones(1, 2)).sum().backward()
    assert not layer.weight._post_accumulate_grad_hooks
