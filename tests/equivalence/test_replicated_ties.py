"""Tests that stages with replicas that share parameters give the oracle's numbers.

All uses in a minibatch read one version. A round is the minibatches of one update. In each round the owner,
the first stage that uses the parameter, makes one update with the gradients of all uses.
"""

from __future__ import annotations

import functools
from typing import Any

import pipedream
import pytest
import torch
from farm import Farm
from oracle import assert_equals_reference
from pipedream import reference
from pipedream.planning.plan import Plan, Stage
from torch import nn
from training import OPTIMIZERS, Training, assert_close_losses, assert_close_state

_PLANS = [(2, 1), (1, 2), (3, 1), (2, 2), (3, 2), (2, 1, 1), (1, 2, 1), (2, 1, 2)]
_NAMES = ["-".join(map(str, plan)) for plan in _PLANS]


def _training(case_name: str, replicas: tuple[int, ...], **how: Any) -> Training:
    return Training(case_name, len(replicas), replicas=replicas, **how)


@pytest.mark.parametrize("replicas", _PLANS, ids=_NAMES)
def test_a_tie_between_replicated_stages_gives_the_references_result(
    farm: Farm, replicas: tuple[int, ...]
) -> None:
    assert_equals_reference(farm, _training("tied_apart", replicas, num_minibatches=11))


@pytest.mark.parametrize("replicas", [(1, 2), (3, 2)], ids=["1-2", "3-2"])
@pytest.mark.parametrize("schedule", ["vertical_sync", "flush", "gpipe", "naive", "model_parallel"])
def test_other_schedules_give_the_references_result(
    farm: Farm, schedule: str, replicas: tuple[int, ...]
) -> None:
    assert_equals_reference(farm, _training("tied_apart", replicas, schedule=schedule, num_minibatches=9))


@pytest.mark.parametrize("num_minibatches", [1, 2, 5, 7, 12])
def test_short_rounds_and_their_end_give_the_references_result(farm: Farm, num_minibatches: int) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.5)  # Adam would hide a wrong divisor
    how: dict[str, Any] = {"num_minibatches": num_minibatches, "optimizer": sgd, "short_last": False}
    schedule = "flush" if num_minibatches % 2 == 0 else "pipedream"
    assert_equals_reference(farm, _training("tied_apart", (3, 2), schedule=schedule, **how))


@pytest.mark.parametrize(
    ("replicas", "how"),
    [
        ((2, 1, 2), {"sync": "ssp", "staleness": 1}),
        ((1, 2), {"sync": "ssp", "staleness": 2}),
        ((2, 1), {"sync": "allreduce"}),
        ((1, 2), {"sync": "allreduce"}),
        ((2, 1, 2), {"sync": "allreduce", "schedule": "flush"}),
        ((2, 1), {"schedule": "2bw", "microbatches": 6, "short_last": False}),
        ((1, 2), {"schedule": "gpipe", "microbatches": 2, "short_last": False}),
        ((2, 1), {"max_grad_norm": 0.02}),
        ((1, 2), {"max_grad_norm": 0.02}),
        ((2, 1, 2), {"max_grad_norm": 0.02, "schedule": "flush"}),
        ((2, 1), {"optimizer": functools.partial(torch.optim.Adafactor, lr=0.05)}),
        ((2, 1), {"optimizer": OPTIMIZERS["adam"]}),
        ((2, 1), {"recompute": True}),
        ((1, 2), {"dtype": torch.float32}),
    ],
    ids=lambda value: "-".join(map(str, value)),  # names a plan by its replicas, and options by their names
)
def test_what_else_replicas_may_have_gives_the_references_result(
    farm: Farm, replicas: tuple[int, ...], how: dict[str, Any]
) -> None:
    assert_equals_reference(farm, _training("tied_apart", replicas, **{"num_minibatches": 11} | how))


def test_native_optimizers_write_their_pieces_of_what_is_tied(farm: Farm) -> None:
    arguments = {"lr": 0.05, "momentum": 0.9}
    training = _training("tied_apart", (2, 1), optimizer=functools.partial(torch.optim.SGD, **arguments))
    assert_equals_reference(farm, training, native=functools.partial(pipedream.optim.SGD, **arguments))


class _Mix(nn.Module):
    """Uses a parameter of its own, and parameters of other layers."""

    def __init__(self, width: int, others: list[nn.Linear]) -> None:
        super().__init__()
        self.own = nn.Linear(width, width)
        self.others = nn.ModuleList(others)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.own(inputs)
        for other in self.others:
            output = output + torch.tanh(other(inputs))
        return output


def _crossed(width: int) -> nn.Sequential:
    """Returns a model in which stage 0 shares parameters with stages 1 and 2, and stage 1 with stage 2.

    So stage 0 is an owner, stage 1 an owner and a user, and stage 2 a user of two owners.
    """
    torch.manual_seed(0)
    first, second = _Mix(width, []), _Mix(width, [])
    second.others.append(first.own)
    return nn.Sequential(first, second, _Mix(width, [first.own, second.own])).double()


def _train_crossed(
    replicas: tuple[int, ...], width: int, how: dict[str, Any], *, by_reference: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _crossed(width)
    torch.manual_seed(1)
    data = [
        (torch.randn(3, width).double(), torch.randn(3, width).double())
        for _ in range(13 if width < 100 else 3)
    ]
    plan = Plan(tuple(Stage(stage, stage, count) for stage, count in enumerate(replicas)))
    options: dict[str, Any] = {
        "data": data,
        "loss_fn": nn.functional.mse_loss,
        "optimizer": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "seed": 1,
        **how,
    }
    run: Any = reference.run if by_reference else functools.partial(pipedream.run, progress=False)
    return run(model, plan, **options).losses, model.state_dict()


@pytest.mark.parametrize(
    ("replicas", "schedule"),
    [
        ((1, 2, 1), "pipedream"),
        ((2, 1, 2), "pipedream"),
        ((1, 3, 1), "pipedream"),
        ((1, 3, 1), "vertical_sync"),
        ((2, 1, 2), "flush"),
    ],
)
def test_stages_that_own_and_use_have_each_owners_rounds(
    farm: Farm, replicas: tuple[int, ...], schedule: str
) -> None:
    how = {"schedule": schedule}
    losses, state = farm.results(_train_crossed, replicas, 4, how, num_ranks=sum(replicas))[0]
    expected, expected_state = _train_crossed(replicas, 4, how, by_reference=True)
    assert_close_losses(losses, expected, 1e-9)
    assert_close_state(state, expected_state, 1e-9)


@pytest.mark.parametrize(
    "how",
    [{"max_grad_norm": 0.1}, {"optimizer": functools.partial(torch.optim.Adafactor, lr=0.01)}],
    ids=["clipped", "whole tensors"],
)
def test_what_is_tied_is_cut_into_several_chunks_of_each_shard(farm: Farm, how: dict[str, Any]) -> None:
    width = 800  # so that a layer has 5 MiB, which are several chunks of 1 MiB
    losses, state = farm.results(_train_crossed, (2, 1, 1), width, how, num_ranks=4)[0]
    expected, expected_state = _train_crossed((2, 1, 1), width, how, by_reference=True)
    assert_close_losses(losses, expected, 1e-9)
    assert_close_state(state, expected_state, 1e-9)


class _Sometimes(nn.Module):
    """Uses a parameter that another stage also uses, but only in minibatches of an even size."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.shared = shared

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.own(inputs)
        return output if inputs.shape[0] % 2 else output + inputs * self.shared


def _train_sometimes(by_reference: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    shared = nn.Parameter(torch.randn(4))
    model = nn.Sequential(_Sometimes(shared), _Sometimes(shared)).double()
    data = [(torch.randn(size, 4).double(), torch.randn(size, 4).double()) for size in (2, 2, 3, 3, 2, 3, 3)]
    run: Any = reference.run if by_reference else functools.partial(pipedream.run, progress=False)
    sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)
    how: dict[str, Any] = {"data": data, "loss_fn": nn.functional.mse_loss, "optimizer": sgd, "seed": 1}
    return run(model, Plan((Stage(0, 0, 2), Stage(1, 1, 1))), **how).losses, model.state_dict()


def test_an_optimizer_leaves_alone_what_is_tied_in_rounds_that_use_it_nowhere(farm: Farm) -> None:
    losses, state = farm.results(_train_sometimes, num_ranks=3)[0]
    expected, expected_state = _train_sometimes(by_reference=True)
    assert_close_losses(losses, expected, 1e-9)
    assert_close_state(state, expected_state, 1e-9)


def _refused() -> str:
    with pytest.raises(ValueError, match="sync_every") as caught:
        _train_crossed((2, 1, 1), 4, {"sync_every": 2})
    return str(caught.value)


def test_replicas_that_update_alone_share_with_as_many_of_another_stage(farm: Farm) -> None:
    messages = farm.results(_refused, num_ranks=4)
    assert messages[0] == (
        "sync_every is 2, and stages 0 and 1, of 2 and 1 replicas, share a parameter: each replica that"
        " updates alone has a value of its own; use a plan in which these stages have as many replicas, or"
        " leave sync_every out"
    )


@pytest.mark.parametrize(
    ("replicas", "how"),
    [
        ((2, 2), {"sync_every": 2}),
        ((2, 2), {"sync_every": 3, "schedule": "vertical_sync"}),
        ((1, 2), {"sync_every": 2}),
        ((1, 2), {"sync_every": 2, "schedule": "flush"}),
        ((2, 1, 2), {"sync_every": 2}),
        ((2, 1, 2), {"sync_every": 2, "schedule": "flush"}),
        ((2, 2), {"sync_every": 2, "schedule": "naive"}),
        ((2, 2), {"sync_every": 2, "schedule": "2bw", "microbatches": 4, "short_last": False}),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
# The last mean may belong to the last round, or be made after the run.
@pytest.mark.parametrize("num_minibatches", [8, 11])
def test_what_is_tied_is_kept_alike_with_the_rest_once_in_some_rounds(
    farm: Farm, replicas: tuple[int, ...], how: dict[str, Any], num_minibatches: int
) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    training = _training("tied_apart", replicas, num_minibatches=num_minibatches, optimizer=sgd, **how)
    assert_equals_reference(farm, training)


def test_a_stage_that_owns_and_uses_keeps_alike_what_it_owns(farm: Farm) -> None:
    how = {"sync_every": 2}
    losses, state = farm.results(_train_crossed, (2, 2, 2), 4, how, num_ranks=6)[0]
    expected, expected_state = _train_crossed((2, 2, 2), 4, how, by_reference=True)
    assert_close_losses(losses, expected, 1e-9)
    assert_close_state(state, expected_state, 1e-9)
