"""Tests that adapters (LoRA) of a frozen model train with the plain loop's numbers. Nothing is kept or sent
for frozen weights.

peft's own adapters are among the networks of test_real_networks.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from models import straight_plan
from oracle import assert_memory_as_predicted
from pipedream import Plan, RunResult
from pipedream.budget.memory import (
    GRADIENTS,
    MODEL,
    OPTIMIZER_STATE,
    TORCH_OPTIMIZER_STATE,
    WEIGHT_VERSIONS,
)
from pipedream.model.batches import parts_of
from pipedream.splitting.cut_model import cut_model
from torch import Tensor, nn
from training import State, assert_close_losses, assert_close_state, is_rank_0, state_of
from twins import TWINS, cross_entropy

_NUM_MINIBATCHES = 6
_ADAMW = functools.partial(pipedream.optim.AdamW, lr=0.02)
_RELATIVE = 1e-9  # allows for another order of float64 additions
_TWIN = TWINS["transformer"]  # its head is tied to its embedding, and it has three blocks


class LoRA(nn.Module):
    """A frozen linear layer, to whose output two small trained layers in a row are added (Hu et al.,
    ICLR'22).
    """

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def _adapted(first_block: int) -> nn.Module:
    """Returns the model of _TWIN, a small transformer, with LoRA adapters in its blocks from first_block on.
    Only the adapters are trained."""
    model = _TWIN.model()
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for block in list(model.blocks)[first_block:]:  # type: ignore[arg-type]
            block.mlp[0], block.mlp[2] = LoRA(block.mlp[0]), LoRA(block.mlp[2])
    return model


def _plan(first_block: int) -> Plan:
    """Returns a plan of two stages. The second one begins with the last block."""
    batch = _TWIN.data(1)[0]
    names = cut_model(_adapted(first_block), *parts_of(batch, 0), cross_entropy).layer_names
    cut = next(index for index, name in enumerate(names) if name.startswith("blocks.2"))
    return straight_plan(len(names), (cut,))


def _train(first_block: int, plan: Plan, **options: Any) -> tuple[RunResult, State]:
    model = _adapted(first_block)
    if not is_rank_0():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    given = {"data": _TWIN.data(_NUM_MINIBATCHES), "optimizer": _ADAMW, "schedule": "flush", **options}
    result = pipedream.run(model, plan, loss_fn=cross_entropy, progress=False, seed=1, **given)
    return result, model.state_dict()


def _train_plainly(first_block: int) -> tuple[list[float], State]:
    model = _adapted(first_block)
    optimizer = _ADAMW([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses = []
    for inputs, targets in _TWIN.data(_NUM_MINIBATCHES):
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses, state_of(model)


def _trained_bytes(first_block: int, of_stage: str) -> int:
    """Returns the bytes of the adapters in the blocks whose numbers are in of_stage."""
    return sum(
        parameter.nbytes
        for name, parameter in _adapted(first_block).named_parameters()
        if parameter.requires_grad and name.split(".")[1] in of_stage
    )


def _predicted(result: RunResult, rank: int, term: str) -> int:
    found = [figures["predicted"] or 0 for name, figures in result.memory[rank].items() if term in name]
    return sum(found)


@pytest.mark.parametrize("first_block", [0, 2])
def test_adapters_train_as_in_a_plain_loop(farm: Farm, first_block: int) -> None:
    result, state = farm.results(_train, first_block, _plan(first_block), num_ranks=2)[0]
    losses, expected = _train_plainly(first_block)
    assert_close_losses(result.losses, losses, _RELATIVE)
    assert_close_state(state, expected, _RELATIVE)
    assert_memory_as_predicted(result)


def test_versions_gradients_and_state_are_of_the_adapters_alone(farm: Farm) -> None:
    result, _ = farm.results(_train, 0, _plan(0), num_ranks=2, schedule="pipedream")[0]
    for rank, blocks in enumerate(("01", "2")):
        trained = _trained_bytes(0, blocks)
        assert trained > 0
        assert _predicted(result, rank, WEIGHT_VERSIONS) == (2, 1)[rank] * trained
        assert _predicted(result, rank, OPTIMIZER_STATE) == 2 * trained
        assert _predicted(result, rank, GRADIENTS) == trained


def test_the_planner_counts_frozen_weights_as_a_run_does(farm: Farm) -> None:
    model = _adapted(2)
    frozen = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    profile = pipedream.profile(model, _TWIN.data(4), cross_entropy, minibatches=2, check=False)
    assert profile.frozen_bytes == frozen
    assert "that are not trained" in str(profile)
    assert pipedream.Profile.from_dict(profile.to_dict()) == profile
    unknown = replace(profile, layers=tuple(replace(layer, frozen_bytes=0) for layer in profile.layers))
    cut = _plan(2).stages[0].last_layer
    with_frozen, without = (
        pipedream.partition(one, 2, 1e9, memory="1GiB", boundaries=[cut], replicas=[1, 1]).predicted
        for one in (profile, unknown)
    )
    result, _ = farm.results(_train, 2, _plan(2), num_ranks=2, schedule="pipedream")[0]
    for rank in range(2):
        counted = with_frozen["stage_memory_bytes"][rank] - without["stage_memory_bytes"][rank]
        others = sum(tensor.nbytes for tensor in model.buffers()) + profile.parameter_bytes
        assert counted == frozen == _predicted(result, rank, MODEL) - others


def test_a_frozen_stage_keeps_and_is_sent_nothing_for_a_backward(farm: Farm) -> None:
    trained, _ = farm.results(_train, 0, _plan(0), num_ranks=2, schedule="pipedream")[0]
    result, _ = farm.results(_train, 2, _plan(2), num_ranks=2, schedule="pipedream")[0]
    for term in (WEIGHT_VERSIONS, OPTIMIZER_STATE, TORCH_OPTIMIZER_STATE, GRADIENTS):
        assert _predicted(result, 0, term) == 0, term
    bytes_of = {
        made: {channel.name: channel.placed_bytes for channel in run.channels}
        for made, run in (("trained", trained), ("frozen", result))
    }
    name = "gradients of stage 1 to stage 0"
    assert bytes_of["trained"][name] > 1000 * _NUM_MINIBATCHES
    assert bytes_of["frozen"][name] <= 8 * _NUM_MINIBATCHES
    forward = "activations of stage 0 to stage 1"
    assert bytes_of["frozen"][forward] == bytes_of["trained"][forward]
