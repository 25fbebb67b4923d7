"""Tests run() with models whose later minibatches call other modules than the first minibatch."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from networks import bart_with_layer_drop
from pipedream import RunResult, reference
from pipedream.model.batches import call_model, own_loss, parts_of
from pipedream.planning.plan import Plan
from pipedream.splitting.cut_model import CutModel, cut_model
from torch import nn
from training import State, assert_close_losses, assert_close_state, state_of, train_module_plainly
from twins import CHANGING, cross_entropy

_SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
_NUM_MINIBATCHES = 12
_RELATIVE = 1e-9


def _data(name: str) -> list[Any]:
    """Returns minibatches of equal size, because the microbatches of a short one would be too small for a
    batch norm."""
    return CHANGING[name].data(_NUM_MINIBATCHES + 1)[:-1]


def _cut(name: str) -> CutModel:
    twin = CHANGING[name]
    return cut_model(twin.model(), *parts_of(_data(name)[0], 0), cross_entropy)


def _plan(name: str, *cuts: str) -> Plan:
    num_stages = len(cuts) + 1
    return replace(Plan.straight(num_stages, num_stages), cuts=_cut(name).at(cuts).chosen)


def _train(name: str, plan: Plan, **options: Any) -> tuple[RunResult, State]:
    twin = CHANGING[name]
    model = twin.model()
    result = pipedream.run(
        model,
        plan,
        data=_data(name),
        loss_fn=cross_entropy,
        optimizer=_SGD,
        seed=1,
        progress=False,
        **options,
    )
    return result, model.state_dict()


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("sparse", ("blocks.0",)),
        ("sparse", ("first", "blocks.1")),
        ("layer_dropped", ("encoder",)),
        ("layer_dropped", ("encoder.layers.2", "decoder.layers.2")),  # every minibatch calls these layers
        ("self_skipping", ("blocks.1", "blocks.3")),
    ],
)
def test_what_a_later_minibatch_calls_or_leaves_out_within_a_stage_trains_as_in_a_plain_loop(
    farm: Farm, name: str, cuts: tuple[str, ...]
) -> None:
    """Parameters of a module that the first minibatch does not call must not become NaN."""
    result, state = farm.results(_train, name, _plan(name, *cuts), num_ranks=len(cuts) + 1, schedule="flush")[
        0
    ]
    model = CHANGING[name].model()
    losses = train_module_plainly(model, _data(name), cross_entropy, _SGD)
    assert_close_losses(result.losses, losses, _RELATIVE)
    assert_close_state(state, state_of(model), _RELATIVE)


@pytest.mark.parametrize(
    "options",
    [{"schedule": "pipedream"}, {"schedule": "gpipe", "microbatches": 3, "recompute": True}],
    ids=str,
)
@pytest.mark.parametrize(("name", "cut"), [("sparse", "blocks.0"), ("layer_dropped", "decoder.layers.2")])
def test_any_schedule_trains_them_as_the_oracle_does(
    farm: Farm, name: str, cut: str, options: dict[str, Any]
) -> None:
    plan, twin = _plan(name, cut), CHANGING[name]
    result, state = farm.results(_train, name, plan, num_ranks=2, **options)[0]
    model, data = twin.model(), _data(name)
    with torch.random.fork_rng():
        oracle = reference.run(
            model, plan, data=data, loss_fn=cross_entropy, optimizer=_SGD, seed=1, **options
        )
    assert_close_losses(result.losses, oracle.losses, _RELATIVE)
    assert_close_state(state, state_of(model), _RELATIVE)


def _train_bart(plan: Plan) -> tuple[RunResult, State]:
    model, data = bart_with_layer_drop()
    result = pipedream.run(model, plan, data=data, optimizer=_SGD, seed=1, schedule="flush", progress=False)
    return result, model.state_dict()


@pytest.mark.parametrize(
    "cuts",
    [
        ("model.encoder",),
        ("model.encoder.layers.1", "model.decoder.layers.1"),  # every minibatch calls these layers
        ("model.encoder.layernorm_embedding", "model.decoder.layernorm_embedding"),
    ],
    ids=str,
)
def test_bart_with_layer_drop_trains_as_in_a_plain_loop(farm: Farm, cuts: tuple[str, ...]) -> None:
    pytest.importorskip("transformers")
    model, data = bart_with_layer_drop()
    num_calls = [_layers_called(model, batch) for batch in data]
    assert min(num_calls) < num_calls[0] < max(num_calls)
    num_stages = len(cuts) + 1
    plan = replace(Plan.straight(num_stages, num_stages), cuts=cuts)
    result, state = farm.results(_train_bart, plan, num_ranks=num_stages)[0]
    losses = train_module_plainly(model, data, own_loss, _SGD)
    assert_close_losses(result.losses, losses, _RELATIVE)
    # The gradient of an attention's key bias is only rounding error, so this bias is not compared.
    expected = {name: tensor for name, tensor in state_of(model).items() if "k_proj.bias" not in name}
    assert_close_state({name: state[name] for name in expected}, expected, _RELATIVE)


def _layers_called(model: nn.Module, batch: Any) -> int:
    called: list[str] = []
    hooks = [
        module.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, module in model.named_modules()
        if type(module).__name__.endswith("coderLayer")
    ]
    call_model(model, parts_of(batch, 0)[0])
    for hook in hooks:
        hook.remove()
    return len(called)
