"""Tests initial_weights.py: where the values come from if a model was made on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pipedream
import pytest
import torch
from pipedream.model.initial_weights import check_weights, materialise, materialise_some, traceable
from pipedream.model.seeding import base_seed
from safetensors.torch import save_file
from torch import Tensor, nn
from twins import TWINS

State = dict[str, Tensor]


class _Scaled(nn.Module):
    """Sets its weights as models of Hugging Face do. The outer model sets the weights of its parts, some of
    them by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.last = nn.Linear(4, 4)
        self.last.weight = self.second[0].weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Sequential):
            nn.init.normal_(module.get_parameter("0.bias"), std=50.0)


class _Computed(nn.Module):
    """Has a buffer that only the constructor computes and no state_dict has, and a parameter that only the
    constructor sets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("frequencies", torch.arange(3.0), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))


def _on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def _made(make: Callable[[], nn.Module], *arguments: Any, **options: Any) -> State:
    model = _on_meta(make)
    materialise(model, *arguments, **options)
    return {name: value.clone() for name, value in model.state_dict().items()}


def _same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_seed_gives_the_same_values_and_another_seed_others() -> None:
    assert _same(_made(_Scaled, seed=1), _made(_Scaled, seed=1))
    assert not torch.equal(_made(_Scaled, seed=1)["first.weight"], _made(_Scaled, seed=2)["first.weight"])


def test_the_model_around_a_module_sets_its_weights_after_the_modules_own_function() -> None:
    state = _made(_Scaled, seed=1)
    assert torch.equal(state["first.bias"], torch.zeros(4))
    assert state["second.0.bias"].abs().max() > 10  # set by the Sequential, after the Linear has set it
    assert torch.equal(state["second.1.running_var"], torch.ones(4))
    assert int(state["second.1.num_batches_tracked"]) == 0


@pytest.mark.parametrize("make", [_Scaled, TWINS["residual"].model])
def test_a_tensor_gets_the_same_values_whatever_else_is_made(make: Callable[[], nn.Module]) -> None:
    """A stage of any plan starts with the values that the whole model would have."""
    whole = _made(make, seed=3)
    tensors = _on_meta(make)
    for name in dict([*tensors.named_parameters(), *tensors.named_buffers()]):
        model = _on_meta(make)
        materialise_some([("", model)], [name], None, base_seed(3))
        held = dict([*model.named_parameters(), *model.named_buffers()])
        assert [other for other, tensor in held.items() if not tensor.is_meta] == [name]
        assert torch.equal(held[name], whole[name]), name


def test_tied_parameters_stay_one_and_the_generators_as_they_were() -> None:
    model, before = _on_meta(_Scaled), torch.get_rng_state()
    weight = model.last.weight
    materialise(model, seed=1)
    assert model.last.weight is weight is model.second[0].weight
    assert torch.equal(torch.get_rng_state(), before)


def test_what_nothing_sets_is_refused_by_name() -> None:
    message = (
        r"'scale', 'frequencies', 'steps' is on the meta device, and reset_parameters\(\) or _init_weights"
    )
    with pytest.raises(ValueError, match=message):
        materialise(_on_meta(_Computed))


def _set_computed(module: nn.Module) -> None:
    assert isinstance(module, _Computed)
    module.frequencies = torch.arange(3.0)  # replaces the buffer by another object
    with torch.no_grad():
        module.scale.fill_(2.0)
        module.steps.zero_()


def test_a_function_sets_what_the_modules_own_leave() -> None:
    model = _on_meta(_Computed)
    materialise(model, _set_computed)
    assert torch.equal(model.frequencies, torch.arange(3.0))
    assert torch.equal(model.scale, torch.full((3,), 2.0))


def test_a_function_that_fails_is_named_with_its_module() -> None:
    def fail(module: nn.Module) -> None:
        raise RuntimeError("no such thing")

    with pytest.raises(ValueError, match=r"weights\(first\) raised RuntimeError: no such thing"):
        materialise(_on_meta(_Scaled), fail)


def test_parameters_alone_may_be_on_meta() -> None:
    with pipedream.parameters_on_meta():
        model = _Computed()
        scaled = _Scaled()
        loose = nn.Linear(2, 2)
    assert model.scale.is_meta and torch.equal(model.frequencies, torch.arange(3.0))
    assert scaled.last.weight is scaled.second[0].weight
    assert loose.weight.is_meta and not nn.Linear(2, 2).weight.is_meta


def test_one_parameter_in_two_places_is_one_on_meta() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(2))
            shared = nn.Parameter(torch.ones(2))
            self.two, self.three = shared, shared

    with pipedream.parameters_on_meta():
        model = Twice()
    assert model.two is model.three and model.two is not model.one


def _saved(folder: Path, state: State) -> Path:
    path = folder / "weights.safetensors"
    save_file({name: value.contiguous() for name, value in state.items()}, path)
    return path


def test_a_checkpoint_has_the_values_by_any_name_of_a_tied_parameter(tmp_path: Path) -> None:
    wanted = _made(_Scaled, seed=1)
    there = {name: value for name, value in wanted.items() if name != "second.0.weight"}
    path = _saved(tmp_path, {name: value.clone() for name, value in there.items()})
    assert _same(_made(_Scaled, path), wanted)
    assert _same(_made(_Scaled, tmp_path), wanted)


def test_a_checkpoint_fills_buffers_that_are_not_on_meta_too(tmp_path: Path) -> None:
    path = _saved(tmp_path, {"scale": torch.zeros(3), "steps": torch.tensor(7)})
    with pipedream.parameters_on_meta():
        model = _Computed()
    materialise(model, path)
    assert int(model.steps) == 7 and torch.equal(model.frequencies, torch.arange(3.0))


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    path = _saved(tmp_path, {"first.weight": torch.ones(4, 3)})
    with pytest.raises(ValueError, match=r"has no 'first.bias', .*which the model has: it is of another"):
        materialise(_on_meta(_Scaled), path)
    (tmp_path / "other").mkdir()
    other = _made(_Scaled, seed=1) | {"first.weight": torch.ones(3, 4)}
    path = _saved(tmp_path / "other", {name: value.clone() for name, value in other.items()})
    with pytest.raises(
        ValueError, match=r"has 'first.weight' of shape \(3, 4\), and the model has .* \(4, 3\)"
    ):
        materialise(_on_meta(_Scaled), path)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("nowhere", "weights is 'nowhere': there is no such file or folder"),
        (3, "weights is 3: give a function of a module, or the path"),
        (nn.Linear, "give a function of a module, or the path"),
    ],
)
def test_what_is_no_source_of_weights_is_refused(weights: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        check_weights(weights)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("nothing of the kind")
    with pytest.raises(ValueError, match="which is not readable as safetensors"):
        check_weights(tmp_path)


def test_a_model_with_values_is_not_given_others() -> None:
    with pytest.raises(ValueError, match="the model is not on the meta device"):
        materialise(nn.Linear(2, 2))


def test_a_traceable_model_runs_without_memory_for_its_parameters_and_is_on_meta_again() -> None:
    model = _on_meta(TWINS["residual"].model)
    inputs, _ = TWINS["residual"].data(1)[0]
    parameters = list(model.parameters())
    with traceable(model, None):
        assert torch.isfinite(model(inputs)).all()
        assert model.blocks[0].norm1.running_var.isfinite().all()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
