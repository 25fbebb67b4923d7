"""Tests that asynchronous shards give the oracle's numbers. The oracle is told in which order each shard got
the gradients.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, ClassVar

import pipedream
import pytest
import torch
from farm import Farm
from oracle import assert_memory_as_predicted
from pipedream import RunResult, reference
from torch import nn
from training import (
    OPTIMIZERS,
    State,
    Training,
    assert_close_losses,
    assert_close_state,
    assert_equal_state,
    expected_versions,
    train_in_pipeline,
    weight_decay_by_name,
)

_PLANS = [(2, 1), (1, 2), (3, 1), (2, 2), (2, 1, 1), (1, 2, 1), (3, 2)]
_SGD = functools.partial(torch.optim.SGD, lr=0.05)


def _training(case_name: str, replicas: tuple[int, ...], **how: Any) -> Training:
    schedule = "data_parallel" if len(replicas) == 1 else "pipedream"
    return Training(case_name, len(replicas), replicas=replicas, sync="asp", schedule=schedule, **how)


def _check(result: RunResult, state: State, training: Training, **options: Any) -> None:
    model = training.model()
    with torch.random.fork_rng():
        expected = reference.run(
            model, training.plan, **training.options() | options, update_orders=result.update_orders
        )
    assert_close_losses(result.losses, expected.losses, 1e-9)
    assert_close_state(state, model.state_dict(), 1e-9)
    how: dict[str, Any] = {"schedule": training.schedule, "microbatches": training.microbatches}
    wanted = expected_versions(training.plan, len(result.losses), **how)
    assert result.versions == expected.versions == wanted
    assert_memory_as_predicted(result)
    _check_orders(result, training)


def _check_orders(result: RunResult, training: Training) -> None:
    """Asserts that each shard has each gradient once. Also asserts that a version that is read contains at
    least as many gradients as its number says.
    """
    num_minibatches = len(result.losses)
    for stage, orders in enumerate(result.update_orders):
        num_replicas = training.plan.stages[stage].num_replicas
        assert len(orders) == (num_replicas if num_replicas > 1 else 0)
        for order in orders:
            for replica in range(num_replicas):
                m = training.microbatches
                num_rounds = len(range(replica, num_minibatches * m, math.lcm(m, num_replicas)))
                assert order.replicas.count(replica) == num_rounds * len(order.parts)
        assert len(result.updates_read[stage]) == (num_minibatches if num_replicas > 1 else 0)
        for (version, _), (fewest, most) in zip(
            result.versions[stage], result.updates_read[stage], strict=False
        ):
            assert version <= fewest <= most <= max(num_minibatches, len(orders[0].replicas))


def _train(farm: Farm, training: Training, **options: Any) -> tuple[RunResult, State]:
    outcome: tuple[RunResult, State] = farm.results(
        train_in_pipeline, training, num_ranks=training.num_workers, **options
    )[0]
    return outcome


@pytest.mark.parametrize("replicas", _PLANS, ids=["-".join(map(str, plan)) for plan in _PLANS])
def test_a_plan_with_asynchronous_shards_gives_the_references_result(
    farm: Farm, replicas: tuple[int, ...]
) -> None:
    training = _training("cnn", replicas, num_minibatches=10)
    _check(*_train(farm, training), training)


def test_a_stage_without_anything_to_train_may_have_replicas(farm: Farm) -> None:
    training = _training("frozen", (2, 1), num_minibatches=5)
    _check(*_train(farm, training), training)


@pytest.mark.parametrize("num_minibatches", [1, 2, 8, 9])
def test_data_parallel_replicas_find_the_end_by_themselves(farm: Farm, num_minibatches: int) -> None:
    training = _training("mlp", (3,), num_minibatches=num_minibatches, optimizer=_SGD)
    _check(*_train(farm, training), training)


_HOW: dict[str, dict[str, Any]] = {
    "microbatches": {"microbatches": 3, "short_last": False},
    "microbatches of uneven shares": {"microbatches": 4},
    "adam": {"optimizer": OPTIMIZERS["adam"]},
    "by name": {"optimizer": weight_decay_by_name},
    "whole tensors": {"optimizer": functools.partial(torch.optim.Adafactor, lr=0.05)},
    "lr scheduler": {"lr_scheduler": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3)},
    "recompute": {"recompute": True},
    "epochs": {"epochs": 2, "num_minibatches": 5},
}


@pytest.mark.parametrize("name", _HOW)
def test_what_else_a_run_may_have_gives_the_references_result(farm: Farm, name: str) -> None:
    training = _training("mlp", (2, 1), **{"num_minibatches": 9, **_HOW[name]})
    _check(*_train(farm, training), training)


def test_native_optimizers_give_the_references_result(farm: Farm) -> None:
    arguments = {"lr": 0.01, "weight_decay": 0.1}
    optimizer = functools.partial(torch.optim.AdamW, **arguments)
    training = _training("mlp", (2, 1), num_minibatches=9, optimizer=optimizer)
    _check(*_train(farm, training, optimizer=functools.partial(pipedream.optim.AdamW, **arguments)), training)


def _large_case() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Returns a model of 2.3 MiB, so that each shard has two chunks, and its minibatches."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(600, 500), nn.Tanh(), nn.Linear(500, 3)).double()
    return model, [(torch.randn(2, 600).double(), torch.randn(2, 3).double()) for _ in range(9)]


def _train_large() -> tuple[RunResult, State]:
    model, data = _large_case()
    plan = pipedream.Plan((pipedream.planning.plan.Stage(0, 2, 2),))
    how: dict[str, Any] = {"sync": "asp", "schedule": "data_parallel", "seed": 1, "progress": False}
    options = {"data": data, "loss_fn": nn.functional.mse_loss, "optimizer": _SGD}
    return pipedream.run(model, plan, **options, **how), model.state_dict()


def test_chunks_of_a_shard_have_orders_of_their_own(farm: Farm) -> None:
    result, state = farm.results(_train_large, num_ranks=2)[0]
    assert [len(order.parts) for order in result.update_orders[0]] == [2, 2]
    model, data = _large_case()
    plan = pipedream.Plan((pipedream.planning.plan.Stage(0, 2, 2),))
    expected = reference.run(
        model,
        plan,
        data=data,
        loss_fn=nn.functional.mse_loss,
        optimizer=_SGD,
        sync="asp",
        schedule="data_parallel",
        seed=1,
        update_orders=result.update_orders,
    )
    assert_close_losses(result.losses, expected.losses, 1e-9)
    assert_close_state(state, model.state_dict(), 1e-9)


class _SeedRecordingSGD(torch.optim.SGD):
    """SGD that records the seed of torch's generator at each step."""

    seeds: ClassVar[set[int]] = set()

    def step(self, *arguments: Any, **options: Any) -> Any:
        self.seeds.add(torch.initial_seed())
        return super().step(*arguments, **options)


def _seeds_at_steps(training: Training) -> int:
    _SeedRecordingSGD.seeds.clear()
    train_in_pipeline(training)
    return len(_SeedRecordingSGD.seeds)


def test_steps_of_asynchronous_shards_do_not_seed_the_generators_that_data_and_forwards_draw_from(
    farm: Farm,
) -> None:
    optimizer = functools.partial(_SeedRecordingSGD, lr=0.05)
    training = _training("mlp", (2,), num_minibatches=8, optimizer=optimizer)
    assert farm.results(_seeds_at_steps, training, num_ranks=2) == [1, 1]
    assert min(farm.results(_seeds_at_steps, replace(training, sync="bsp"), num_ranks=2)) > 1


def test_all_replicas_have_the_same_weights_in_the_end(farm: Farm) -> None:
    training = _training("mlp", (3,), num_minibatches=10)
    outcomes = farm.results(train_in_pipeline, training, num_ranks=3, gather="none")
    for _, state in outcomes[1:]:
        assert_equal_state(state, outcomes[0][1])


def test_local_workers_have_asynchronous_shards() -> None:
    training = _training("mlp", (2, 1), num_minibatches=12)
    _check(*train_in_pipeline(training), training)


def test_a_plan_without_replicas_is_what_it_is_with_bsp(farm: Farm) -> None:
    training = Training("mlp", 2, sync="asp")
    result, state = _train(farm, training)
    expected, expected_state = _train(farm, replace(training, sync="bsp"))
    assert result.losses == expected.losses
    assert_equal_state(state, expected_state)
    assert result.updates_read == [[], []]
