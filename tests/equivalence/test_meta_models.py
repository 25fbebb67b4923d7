"""Tests run() with models on the meta device. Each worker makes the weights of its own stages. The run has
the numbers of a plain loop over the whole model.
"""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from models import straight_plan
from pipedream import Plan, RunResult, Stage
from pipedream.model.batches import call_model, own_loss, parts_of
from pipedream.splitting.cut_model import cut_model
from safetensors.torch import load_file
from torch import nn
from training import State, assert_close_losses, assert_close_state, state_of
from twins import TWINS

_SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
_NUM_MINIBATCHES = 4
_RELATIVE = 1e-9


def _model(name: str) -> nn.Module:
    with pipedream.parameters_on_meta():
        return TWINS[name].model()


def _plan(name: str, num_stages: int) -> Plan:
    twin = TWINS[name]
    num_layers = len(cut_model(_model(name), *parts_of(twin.data(1)[0], 0), twin.loss_fn).layer_names)
    ends = tuple(num_layers * stage // num_stages for stage in range(1, num_stages))
    return straight_plan(num_layers, ends)


def _train(name: str, plan: Plan, **options: Any) -> tuple[RunResult, set[str]]:
    """Trains. Also returns the names of the parameters that have values afterwards."""
    twin, model = TWINS[name], _model(name)
    loss_fn = None if twin.loss_fn is own_loss else twin.loss_fn
    options = {"data": twin.data(_NUM_MINIBATCHES), "optimizer": _SGD, "seed": 1, **options}
    result = pipedream.run(model, plan, loss_fn=loss_fn, schedule="flush", progress=False, **options)
    return result, {name for name, parameter in model.named_parameters() if not parameter.is_meta}


def _train_plainly(name: str, weights: Any = None) -> tuple[list[float], State]:
    twin, model = TWINS[name], _model(name)
    pipedream.materialise(model, weights, seed=1)
    optimizer = _SGD(model.parameters())
    losses = []
    for batch in twin.data(_NUM_MINIBATCHES):
        inputs, targets = parts_of(batch, 0)
        optimizer.zero_grad()
        loss = twin.loss_fn(call_model(model, inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        optimizer.step()
    return losses, state_of(model)


def _read(name: str, folder: Path) -> State:
    model = _model(name)
    pipedream.materialise(model, folder)
    return state_of(model)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("name", ["residual", "transformer"])
def test_stages_that_make_their_own_weights_train_as_the_whole_model_does(
    farm: Farm, name: str, num_stages: int, tmp_path: Path
) -> None:
    """One model has batch norm and skips. Another has weights tied across stages, and a buffer that is not in
    its state_dict.
    """
    outcomes = farm.results(_train, name, _plan(name, num_stages), num_ranks=num_stages, save=tmp_path)
    losses, state = _train_plainly(name)
    assert_close_losses(outcomes[0][0].losses, losses, _RELATIVE)
    assert_close_state(_read(name, tmp_path), state, _RELATIVE)
    held = [names for _, names in outcomes]
    every = {parameter for parameter, _ in _model(name).named_parameters()}
    assert set().union(*held) == every
    assert num_stages == 1 or all(names != every for names in held)


def test_a_run_goes_on_from_what_another_saved(farm: Farm, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    farm.results(_train, "unet", _plan("unet", 2), num_ranks=2, save=first)
    result, _ = farm.results(_train, "unet", _plan("unet", 3), num_ranks=3, weights=first, save=second)[0]
    losses, state = _train_plainly("unet", first)
    assert_close_losses(result.losses, losses, _RELATIVE)
    assert_close_state(_read("unet", second), state, _RELATIVE)


def test_replicas_save_one_stage_and_the_means_of_their_buffers(farm: Farm, tmp_path: Path) -> None:
    num_layers = _plan("residual", 1).num_layers
    plan = Plan((Stage(0, 6, num_replicas=2), Stage(7, num_layers - 1)), in_flight=(2, 1))
    farm.results(_train_replicated, plan, num_ranks=3, save=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model-buffers.safetensors",
        "model.safetensors.index.json",
    ]
    gathered = farm.results(_train_gathered, plan, num_ranks=3)[0]
    assert_close_state(_read("residual", tmp_path), gathered, _RELATIVE)


def test_a_stage_that_cannot_save_keeps_its_weights_where_the_error_says(farm: Farm, tmp_path: Path) -> None:
    # The folder has files of an earlier run, and stage 1 cannot write there. Without another place its
    # weights would be lost.
    saved, elsewhere = tmp_path / "saved", tmp_path / "elsewhere"
    saved.mkdir()
    elsewhere.mkdir()
    (saved / "model-00002-of-00002.safetensors.part").symlink_to("/dev/full")
    outcomes = farm.run(_train_with_temporary, elsewhere, num_ranks=2, save=saved)
    errors = {str(outcome.error) for outcome in outcomes}
    assert len(errors) == 1
    said = re.fullmatch(
        r"the trained weights of stage 1 could not be saved in .*saved \(.*No space left on device\):"
        r" they are in (.*); those of other stages are in (.*)",
        errors.pop(),
    )
    assert said
    (of_1,), (of_0,) = (list(Path(folder).iterdir()) for folder in said.groups())
    assert [path.name for path in saved.iterdir()] == [of_0.parent.name]
    _, state = _train_plainly("unet")
    kept = {**load_file(of_0), **load_file(of_1)}
    assert set(kept) == set(state)
    assert_close_state(kept, state, _RELATIVE)


def _train_with_temporary(temporary: Path, save: Path) -> None:
    tempfile.tempdir = str(temporary)
    try:
        _train("unet", _plan("unet", 2), save=save)
    finally:
        tempfile.tempdir = None


def _train_replicated(plan: Plan, **options: Any) -> None:
    _train("residual", plan, **options)


def _train_gathered(plan: Plan) -> State:
    """Trains an ordinary model, whose weights are the same, and returns its state."""
    twin, model = TWINS["residual"], _model("residual")
    pipedream.materialise(model, seed=1)
    pipedream.run(
        model,
        plan,
        data=twin.data(_NUM_MINIBATCHES),
        loss_fn=twin.loss_fn,
        optimizer=_SGD,
        schedule="flush",
        seed=1,
        progress=False,
    )
    return state_of(model)


def test_local_workers_do_the_same_and_the_callers_model_stays_on_meta(tmp_path: Path) -> None:
    result, held = _train("transformer", _plan("transformer", 2), save=tmp_path)
    losses, state = _train_plainly("transformer")
    assert_close_losses(result.losses, losses, _RELATIVE)
    assert_close_state(_read("transformer", tmp_path), state, _RELATIVE)
    assert held == set()


def _wide(width: int, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width, **options), nn.ReLU(), nn.Linear(width, width, **options))


def test_a_list_of_layers_is_made_by_its_stages_and_predicts_their_part_alone() -> None:
    with torch.device("meta"):
        model = _wide(64)
    result = pipedream.run(
        model,
        straight_plan(3, (2,)),
        data=[(torch.ones(4, 64), torch.zeros(4, 64))],
        loss_fn=nn.functional.mse_loss,
        optimizer=_SGD,
        gather="none",
        progress=False,
    )
    given = [terms["model as given"]["predicted"] for terms in result.memory]
    assert given == [4 * 65 * 64] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"the model is on the meta device, where trained weights have no place: give save=FOLDER"),
        ({"gather": "all"}, r"gather is 'all', and the model is on the meta device: the model stays there"),
        ({"weights": "nowhere"}, r"weights is 'nowhere': there is no such file or folder"),
    ],
)
def test_what_a_model_on_meta_cannot_have_is_said_at_once(options: dict[str, Any], message: str) -> None:
    with torch.device("meta"):
        model = _wide(2)
    data = [(torch.ones(4, 2), torch.zeros(4, 2))]
    with pytest.raises(ValueError, match=message):
        pipedream.run(
            model,
            straight_plan(3, (2,)),
            data=data,
            loss_fn=nn.functional.mse_loss,
            optimizer=_SGD,
            **options,
        )


def test_weights_are_for_a_model_on_meta() -> None:
    data = [(torch.ones(4, 2), torch.zeros(4, 2))]
    with pytest.raises(ValueError, match="weights is given, and the model has values"):
        pipedream.run(
            _wide(2),
            straight_plan(3, (2,)),
            data=data,
            loss_fn=nn.functional.mse_loss,
            optimizer=_SGD,
            weights=nn.init.ones_,
        )
